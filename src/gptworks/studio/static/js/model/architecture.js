// The architecture from token ids to logits, with one block in full.

import { count, percent } from "../format.js";
import { cx, html, stepped, useRef } from "../ui.js";

const BLOCK = { attention: "Attention", mlp: "MLP" };

export function Architecture({ sheet, chosen, choose, setLayer }) {
  const list = useRef(null);
  const at = (place) => sheet.parts.filter((part) => part.place === place);
  const walk = (event) => {
    if (!event.target.matches(".arch-step")) return;
    const keys = { ArrowDown: "ArrowRight", ArrowUp: "ArrowLeft" };
    const { ctrlKey, metaKey, altKey } = event;
    const like = { key: keys[event.key] ?? event.key, ctrlKey, metaKey, altKey };
    const shown = [...list.current.querySelectorAll(".arch-step")].filter((one) => one.checkVisibility());
    const next = stepped(like, shown, event.target);
    if (!next) return;
    event.preventDefault();
    next.focus();
  };
  const steps = (parts) =>
    html`<ol class="arch-steps">${parts.map(
      (part) => html`<li key=${part.key} class=${part.key}>
    <${Step} part=${part} chosen=${part.key === chosen} choose=${choose} /></li>`,
    )}</ol>`;
  const group = (place) => html`<section class="arch-group" aria-label=${BLOCK[place]}>
    <p class="quiet">${at(place).some((part) => part.key === "experts") ? "Mixture of experts" : BLOCK[place]}${
      place === "mlp" && sheet.parallel ? ", parallel to attention: both read the input of the block" : ""
    }</p>
    ${steps(at(place))}
    <p class="arch-add quiet"><span aria-hidden="true">⊕</span> added to the residual stream</p></section>`;
  return html`<section class="card arch" aria-labelledby="arch-title" ref=${list} onKeyDown=${walk}>
    <h2 id="arch-title">Architecture</h2>
    <p class="quiet">Choose a part. B sequences of T tokens; weights are outputs × inputs.</p>
    <p class="arch-end">token ids <span class="quiet number">B × T</span></p>
    ${steps(at("input"))}
    <details class="arch-block" open>
      <summary>${count(sheet.n_layers)} × block <span class="quiet number">
        ${percent(sheet.block_share)} of the parameters</span></summary>
      <label class="arch-layer">
        Layer <select class="field" value=${sheet.layer} onChange=${(event) => setLayer(Number(event.target.value))}>
        ${Array.from({ length: sheet.n_layers }, (_, i) => html`<option key=${i} value=${i}>${i}</option>`)}</select>
        <span class="quiet">
          ${sheet.window ? `sees the last ${count(sheet.window)} tokens` : "sees all tokens before"}</span></label>
      ${group("attention")}${group("mlp")}
    </details>
    ${steps(at("output"))}
    <p class="arch-end">logits of the next token</p>
  </section>`;
}

function Step({ part, chosen, choose }) {
  return html`<button class=${cx("arch-step", `kind-${part.kind}`)} aria-pressed=${String(chosen)}
    onClick=${() => choose(part.key)}>
    <span>${part.name}</span>
    ${part.weights && html`<span class="quiet number">${part.weights}</span>`}
    ${
      part.share > 0 &&
      html`<span class="arch-share number" title="Share of the parameters, of all layers together">
        ${percent(part.share)}
      <span class="hidden-text">of the parameters</span></span>`
    }</button>`;
}
