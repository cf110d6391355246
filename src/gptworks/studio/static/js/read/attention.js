// The attention of each head when it predicts the chosen token: a heat map of heads by tokens.

import { count, percent, visible } from "../format.js";
import { html, useEffect, useRef, useState, useTheme } from "../ui.js";

const ROW = 12;
const LEGEND = [0.01, 0.1, 0.3, 1];

/** The weights of all heads, decoded; `of` returns the weights of one head. */
export function headsOf({ shape: [n_layers, n_heads, n_keys], data }, first) {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const values = new Float32Array(bytes.buffer);
  const of = (row) => ({
    row,
    first,
    name: `block ${Math.floor(row / n_heads)} head ${row % n_heads}`,
    values: values.subarray(row * n_keys, (row + 1) * n_keys),
  });
  return { n_heads, n_keys, n_rows: n_layers * n_heads, first, of };
}

/** The opacity of a weight; the square root keeps small weights visible. */
const strength = (weight) => Math.sqrt(weight);

export function Attention({ heads, tokens, look }) {
  const { n_heads, n_keys, n_rows, first } = heads;
  const canvas = useRef(null);
  const [at, setAt] = useState({ row: n_rows - 1, key: n_keys - 1 });
  const theme = useTheme();
  const weight = (row, key) => heads.of(row).values[key];
  useEffect(() => {
    const element = canvas.current;
    const sharp = devicePixelRatio || 1;
    const width = element.clientWidth;
    element.width = Math.max(1, Math.round(width * sharp));
    element.height = Math.round(n_rows * ROW * sharp);
    const context = element.getContext("2d");
    const colours = getComputedStyle(element);
    context.scale(sharp, sharp);
    const cell = width / n_keys;
    for (let row = 0; row < n_rows; row++) {
      const { values } = heads.of(row);
      context.fillStyle = colours.getPropertyValue("--accent");
      for (let key = 0; key < n_keys; key++) {
        context.globalAlpha = strength(values[key]);
        context.fillRect(key * cell, row * ROW, Math.max(1, cell - (cell > 3 ? 0.5 : 0)), ROW - 1);
      }
      context.globalAlpha = 1;
      if (row % n_heads === 0 && row) {
        context.fillStyle = colours.getPropertyValue("--edge");
        context.fillRect(0, row * ROW - 1, width, 1);
      }
    }
    context.strokeStyle = colours.getPropertyValue("--ink");
    context.lineWidth = 1.5;
    context.strokeRect(at.key * cell, at.row * ROW, Math.max(2, cell), ROW - 1);
  }, [heads, at, theme]);
  const cellOf = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const clamp = (x, n) => Math.max(0, Math.min(n - 1, Math.floor(x)));
    return {
      row: clamp((event.clientY - box.top) / ROW, n_rows),
      key: clamp(((event.clientX - box.left) / box.width) * n_keys, n_keys),
    };
  };
  const keys = (event) => {
    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[
      event.key
    ] ?? [0, 0];
    if (down || right) {
      event.preventDefault();
      setAt({ row: (at.row + down + n_rows) % n_rows, key: (at.key + right + n_keys) % n_keys });
    } else if (event.key === "Enter") look(at.row);
  };
  return html`<section class="card" aria-labelledby="attention-title">
    <h3 id="attention-title">Where each head looks</h3>
    <p class="quiet">
      One line for each head, the first block at the top; one column for ${
        n_keys === 1 ? "the token" : `each of the ${count(n_keys)} tokens`
      } before. Click a line to underline in the text what its head looks at.</p>
    <div class="map" tabindex="0" role="group"
      aria-label="Attention by head and token; the arrow keys move, Enter underlines"
        onKeyDown=${keys} onPointerMove=${(event) => event.target === canvas.current && setAt(cellOf(event))}
        onClick=${(event) => event.target === canvas.current && look(cellOf(event).row)}>
      <canvas ref=${canvas} style=${{ height: `${n_rows * ROW}px` }} role="img"
        aria-label="Heat map of attention"></canvas></div>
    <p class="number" role="status">${heads.of(at.row).name}: <b>${percent(weight(at.row, at.key))}</b> on ${""}
      <bdi class="spelling">${visible(tokens[first + at.key].spelling)}</bdi> <span class="quiet">
        token ${count(first + at.key + 1)}</span></p>
    <p class="ramp quiet" role="img" aria-label="Darker is more">${LEGEND.map(
      (one) => html`<span key=${one}>
      <span class="swatch" style=${{ opacity: strength(one) }}></span>${percent(one)}</span>`,
    )}</p></section>`;
}
