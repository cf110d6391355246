// Components that several steps of the walk share: tokens to choose from, choices, pictures of numbers, boxes of text.

import { cx, html, useEffect, useRef, useTheme } from "../../../../studio/static/js/ui.js";

/**
 * The text's tokens, of which one is chosen. `below(t)`: the text below token t; `shade(t)`: the token's strength, 0 to
 * 1, or a class of the stylesheet; `off(t)`: whether the token is dimmed.
 */
export function Tokens({ reading, at, choose, name, below, shade, off }) {
  return html`<div class="ex-tokens" role="radiogroup" aria-label=${name}>${reading.names.map((token, t) => {
    const strength = shade?.(t);
    const said = below?.(t);
    return html`<label key=${t} class=${cx("ex-token", t === at && "chosen", off?.(t) && "off")}
      style=${typeof strength === "number" ? { "--strength": `${100 * strength}%` } : null}>
      <input type="radio" name="ex-token" checked=${t === at} onChange=${() => choose(t)} />
      <bdi class=${cx("spelling", typeof strength === "string" && `t ${strength}`)}>${token}</bdi>
      ${said != null && html`<span class="number">${said}</span>`}</label>`;
  })}</div>`;
}

/** A choice of one option; `options` are [value, content]. */
export function Choice({ name, options, value, choose, ...more }) {
  return html`<div class=${cx("ex-choice", more.class)} role="radiogroup" aria-label=${name}>${options.map(
    ([one, content]) => html`<label key=${one} class=${cx("ex-option", one === value && "chosen")}>
      <input type="radio" name=${name} checked=${one === value} onChange=${() => choose(one)} />${content}</label>`,
  )}</div>`;
}

export function Slider({ name, value, set, min = 0, max, step = 1, text = String }) {
  return html`<label class="ex-slider"><span>${name}: <b class="number">${text(value)}</b></span>
    <input type="range" ...${{ min, max, step, value }} aria-valuetext=${text(value)}
      onInput=${(event) => set(Number(event.target.value))} /></label>`;
}

/** A slider for the layer; nothing if there is only one layer. The slider shows numbers from 1, `value` is from 0. */
export function Layer({ n, value, set }) {
  if (n < 2) return null;
  return html`<${Slider} name="Layer" value=${value + 1} set=${(layer) => set(layer - 1)} min=${1} max=${n}
    text=${(layer) => `${layer} of ${n}`} />`;
}

/** Short sentences on this model; empty ones are left out. */
export function Facts({ of }) {
  const said = of.filter(Boolean);
  if (!said.length) return null;
  return html`<div class="ex-facts"><h3>In this model</h3><ul>${said.map((one) => html`<li key=${one}>${one}</li>`)}
    </ul></div>`;
}

export function Try({ children }) {
  return html`<div class="ex-try"><h3>Try it</h3><p>${children}</p></div>`;
}

/** A token in a sentence. */
export function Name({ children }) {
  return html`<bdi class="ex-name">${children}</bdi>`;
}

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.trim().slice(i, i + 2), 16));

/**
 * Numbers as coloured cells, `columns` in a row: blue above 0, orange below. The size `most` has the full colour.
 * `over(index)` is called when the pointer is over a cell, `over(null)` outside; `pick(index)` when a cell is clicked.
 */
export function Heat({ values, columns, most, label, over, pick, ...more }) {
  const canvas = useRef(null);
  const theme = useTheme();
  const rows = Math.ceil(values.length / columns);
  useEffect(() => {
    const element = canvas.current;
    element.width = columns;
    element.height = rows;
    const styles = getComputedStyle(element);
    const [above, below] = ["--series-0", "--series-1"].map((name) => rgb(styles.getPropertyValue(name)));
    const image = new ImageData(columns, rows);
    for (let i = 0; i < values.length; i++) {
      const strength = Math.sqrt(Math.min(1, Math.abs(values[i]) / (most || 1)));
      image.data.set([...(values[i] < 0 ? below : above), Math.round(255 * strength)], 4 * i);
    }
    element.getContext("2d").putImageData(image, 0, 0);
  }, [values, columns, most, theme]);
  const cell = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const index = row * columns + column;
    return column >= 0 && column < columns && index >= 0 && index < values.length ? index : null;
  };
  return html`<canvas class=${cx("ex-heat", more.class)} ref=${canvas}
    ...${label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" }}
    onPointerMove=${over && ((event) => over(cell(event)))} onPointerLeave=${over && (() => over(null))}
    onClick=${pick && ((event) => cell(event) != null && pick(cell(event)))}></canvas>`;
}

/** Return the largest absolute value of a list. */
export function largestOf(values) {
  let most = 0;
  for (const value of values) if (Math.abs(value) > most) most = Math.abs(value);
  return most;
}

/** A bar from the left that fills `share` (0 to 1) of its width. */
export function Bar({ share, ...more }) {
  return html`<span class=${cx("ex-bar", more.class)} aria-hidden="true"><span style=${{
    width: `${100 * Math.min(1, Math.max(0, share))}%`,
  }}></span></span>`;
}

/** 3.14159 → 3.14, −0.5 → −0.50, −0.001 → 0.00 */
export const decimal = (x, digits = 2) => (Number(x.toFixed(digits)) + 0).toFixed(digits).replace("-", "−");
