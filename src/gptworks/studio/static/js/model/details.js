// A part's description, its costs and its tensors.

import { count, percent } from "../format.js";
import { html, Scrolls } from "../ui.js";

const MOST_BUTTONS = 8;
const dims = (shape) => shape.map(count).join(" × ");

export function PartDetails({ sheet, part, tensor, choose }) {
  const repeats = part.place === "attention" || part.place === "mlp";
  return html`<section class="card" aria-labelledby="model-chosen">
    <h2 id="model-chosen" aria-live="polite">${part.name}${
      repeats && html` <span class="quiet">of layer ${count(sheet.layer)}</span>`
    }</h2>
    <p>${part.words} <cite class="quiet">${part.source}</cite></p>
    <p class="quiet number">What leaves it: ${part.shape}</p>
    ${
      part.figures.length > 0 &&
      html`<${Scrolls} class="model-scrolls" name="What the part takes"><table class="number">
      <thead><tr><td></td>${
        repeats && html`<th scope="col">this layer</th>`
      }<th scope="col">${repeats ? "all layers" : "in all"}</th>
        <th scope="col">of the model</th></tr></thead>
      <tbody>${part.figures.map(
        (row) => html`<tr key=${row.key} data-key=${row.key}><th scope="row">${row.name}</th>
        ${
          repeats && html`<td title=${exact(row.layer)}>${row.layer_text}</td>`
        }<td title=${exact(row.all)}>${row.all_text}</td>
        <td>${percent(row.share)}</td></tr>`,
      )}</tbody></table><//>`
    }
    ${part.tensors.length > 0 && html`<${Tensors} part=${part} tensor=${tensor} choose=${choose} />`}
    ${!part.tensors.length && html`<p class="quiet">It has no weights.</p>`}
  </section>`;
}

const exact = (n) => n.toLocaleString("en-US", { maximumFractionDigits: 3 });

function Tensors({ part, tensor, choose }) {
  const about = (one) => `${dims(one.shape)} · ${one.stored}, ${one.stored_text}`;
  if (part.tensors.length > MOST_BUTTONS) {
    return html`<label class="model-tensor">
      Tensor <select class="field" value=${tensor} onChange=${(event) => choose(event.target.value)}>
      ${part.tensors.map(
        (one) => html`<option key=${one.name} value=${one.name}>${one.name}, ${about(one)}</option>`,
      )}</select></label>`;
  }
  return html`<ul class="model-tensors" aria-label="Tensors">${part.tensors.map(
    (one) => html`<li key=${one.name}>
    <button class="button small mono" aria-pressed=${String(one.name === tensor)} onClick=${() => choose(one.name)}>
      ${one.name}</button>
    <span class="quiet number">
      ${about(one)} · ${count(one.parameters)} parameters${
        part.tied ? ", counted with the token embedding" : ""
      }</span></li>`,
  )}</ul>`;
}
