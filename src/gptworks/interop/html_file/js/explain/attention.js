// Step 3: each token looks back at those before it.

import { count, percent } from "../../../../studio/static/js/format.js";
import { cx, html, useMemo, useState } from "../../../../studio/static/js/ui.js";
import { argmax } from "../sampling.js";
import { Choice, Facts, Heat, Layer, Name, Try } from "./parts.js";

const LEAST_DRAWN = 0.05; // least weight of a line from a token that is not chosen
const MOST_SAID = 0.4; // least mean attention with which a head gets a description
const LONG = 24; // number of tokens above which the lines of text are closer

export function AttentionStep({ how, model, reading, at, choose }) {
  const { n_layers, n_heads, n_kv_heads, window, window_pattern, position, rope_pattern } = how.model;
  const striking = useMemo(() => mostStriking(reading, at, n_layers, n_heads), []);
  const [layer, setLayer] = useState(striking.layer);
  const [head, setHead] = useState(striking.head);
  const heads = useMemo(
    () =>
      Array.from({ length: n_heads }, (_, h) => ({
        does: habit(reading, layer, h),
        map: reading.trace.attention(layer).subarray(h * reading.length ** 2, (h + 1) * reading.length ** 2),
      })),
    [reading, layer],
  );
  const weights = reading.attention(layer, head, at);
  const first = argmax(weights);
  const n_windowed = window ? cycled(n_layers, window_pattern).filter((one) => one === "window").length : 0;
  const n_turned = cycled(n_layers, rope_pattern ?? ["rope"]).filter((one) => one === "rope").length;
  // If every layer has a window, each further layer extends the reach, through tokens that have looked further back.
  const reach = Math.min(model.about.context, n_windowed === n_layers ? n_layers * (window - 1) + 1 : Infinity);
  const here = window && window_pattern[layer % window_pattern.length] === "window" && window;
  return html`<p>A word alone means little. So each token looks back at the tokens before it, and at itself, and takes
      something from each: this is <b>attention</b>. All lines from one token together make 100 %. Each ${""}
      <b>head</b> looks in its own way.</p>
    <div class="ex-picture">
      <${Layer} n=${n_layers} value=${layer} set=${setLayer} />
      <div class="ex-beside ex-lines-beside"><div>
        <${Lines} ...${{ reading, layer, head, at, choose }} />
        <p class="ex-answer" role="status">Layer ${layer + 1}, head ${head + 1}: ${""}
          <${Name}>${reading.names[at]}<//> looks most at ${
            first === at ? "itself" : html`<${Name}>${reading.names[first]}<//>`
          }, with <b class="number">${percent(weights[first])}</b> of its attention.</p></div>
        <div><h3>Choose a head of layer ${layer + 1}</h3>
          <${Choice} class="ex-heads" name="Head" value=${head} choose=${setHead} options=${heads.map(
            ({ map, does }, h) => [
              h,
              html`<${Heat} values=${map} columns=${reading.length} most=${1} />
              <span>${h + 1}<small>${does}</small></span>`,
            ],
          )} />
          <p class="ex-caption">Each square is a head: a row for each token, a column for each token that it looks
            at. The words below it say where the head mostly looks in your text.</p></div></div></div>
    <${Facts} of=${[
      `${several(n_layers, "layer")} with ${several(n_heads, "head")} each, ` +
        `${count(n_layers * n_heads)} heads in all. Explain counts them from 1, Read and Model from 0.`,
      n_kv_heads < n_heads &&
        `To save memory, ${n_kv_heads === 1 ? "all" : `every ${n_heads / n_kv_heads}`} heads of a layer share ` +
          "what they know of the tokens before (keys and values).",
      position === "rope" &&
        `A head can tell near from far: its numbers are turned by an angle that grows with the token's place (RoPE)${
          n_turned < n_layers ? `, in ${n_turned} of the layers` : ""
        }.`,
      n_windowed === n_layers
        ? `Every layer sees only the last ${count(window)} tokens.`
        : n_windowed > 0 &&
          `${several(n_windowed, "layer")} of ${n_layers} ${n_windowed === 1 ? "sees" : "see"} only the last ` +
            `${count(window)} tokens${here ? ", and this is one of them" : "; this one sees all"}.`,
      `It can look back over at most ${count(reach)} tokens. What came before is forgotten.`,
    ]} />
    <${Try}>Change the last word: which head looks elsewhere? Then find a head that always looks at the token
      before.<//>`;
}

const several = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;
const cycled = (n, pattern) => Array.from({ length: n }, (_, i) => pattern[i % pattern.length]);

/** The tokens on both sides, and lines from each token to the tokens that it looks at. */
function Lines({ reading, layer, head, at, choose }) {
  const n = reading.length;
  const weights = reading.attention(layer, head, at);
  const path = (t, s) => `M0 ${t + 0.5}C50 ${t + 0.5} 50 ${s + 0.5} 100 ${s + 0.5}`;
  const others = [];
  for (let t = 0; t < n; t++) {
    if (t === at) continue;
    reading.attention(layer, head, t).forEach((weight, s) => {
      if (weight >= LEAST_DRAWN) others.push(html`<path key=${t * n + s} d=${path(t, s)} opacity=${0.22 * weight} />`);
    });
  }
  return html`<div class=${cx("ex-lines", n > LONG && "long")} style=${{ "--n": n }}>
    <div role="radiogroup" aria-label="This token">
      ${reading.names.map(
        (name, t) => html`<label key=${t} class=${cx("ex-line", t === at && "chosen")}>
      <input type="radio" name="ex-token" checked=${t === at} onChange=${() => choose(t)} />
      <bdi class="spelling">${name}</bdi></label>`,
      )}</div>
    <svg viewBox=${`0 0 100 ${n}`} preserveAspectRatio="none" aria-hidden="true">
      <g class="others">${others}</g>
      <g>${Array.from(
        weights,
        (weight, s) =>
          weight > 0.001 &&
          html`<path key=${s} d=${path(at, s)} opacity=${0.25 + 0.75 * weight}
          style=${{ strokeWidth: `${0.06 + 0.55 * weight}em` }} />`,
      )}</g></svg>
    <ol aria-label="looks at">${reading.names.map(
      (
        name,
        s,
      ) => html`<li key=${s} class=${cx("ex-line", s > at && "off")} style=${{ "--strength": `${100 * weights[s]}%` }}>
        <bdi class="spelling">${name}</bdi><span class="number">${s > at ? "" : percent(weights[s])}</span></li>`,
    )}</ol></div>`;
}

/** Return the head with the largest weight on one earlier token, except the first. It is shown at the beginning. */
function mostStriking(reading, at, n_layers, n_heads) {
  let found = { layer: 0, head: 0, weight: 0 };
  for (let layer = 0; layer < n_layers; layer++) {
    for (let head = 0; head < n_heads; head++) {
      const weight = Math.max(0, ...reading.attention(layer, head, at).subarray(1, at));
      if (weight > found.weight) found = { layer, head, weight };
    }
  }
  return found;
}

/** Return a description of the tokens that a head mostly looks at in this text. */
function habit(reading, layer, head) {
  const { length, ids } = reading;
  const mean = (place, from = 1) => {
    let [sum, n] = [0, 0];
    for (let t = from; t < length; t++) {
      const s = place(t);
      if (s == null) continue;
      sum += reading.attention(layer, head, t)[s];
      n += 1;
    }
    return n > 1 ? sum / n : 0;
  };
  const found = [
    ["itself", mean((t) => t)],
    ["the one before", mean((t) => t - 1)],
    ["the first", mean(() => 0, 2)],
    [
      "what followed this token earlier",
      mean((t) => {
        const earlier = ids.lastIndexOf(ids[t], t - 1);
        return earlier < 0 || earlier + 1 >= t ? null : earlier + 1;
      }),
    ],
  ];
  const [name, share] = found.reduce((best, one) => (one[1] > best[1] ? one : best));
  return share >= MOST_SAID ? name : "spread out";
}
