// The part About: the model's figures, its card and its recipe, as the run states them.

import { bytes, count } from "../../../studio/static/js/format.js";
import { html } from "../../../studio/static/js/ui.js";

export function about({ facts, card, recipe }) {
  const figures = [
    ["Parameters", count(facts.parameters)],
    ["Weights", `${facts.weights}, ${bytes(facts.bytes)}`],
    ["Layers", count(facts.layers)],
    ["Width", count(facts.width)],
    ["Heads", facts.heads],
    ["Vocabulary", `${count(facts.vocabulary)} tokens`],
    ["Context", `${count(facts.context)} tokens`],
    ["Step", count(facts.step)],
  ];
  return function Part() {
    return html`<div class="about-file"><h1>${facts.name}</h1>
      <p>The whole model is in this file. It computes in this page; nothing is sent anywhere.</p>
      <div class="card"><h2>The model</h2>
        <dl>${figures.map(
          ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class="number">${value}</dd></div>`,
        )}
        </dl></div>
      ${
        card && html`<div class="card"><h2>Model card</h2><pre tabindex="0" aria-label="Model card">${card}</pre></div>`
      }
      <div class="card"><h2>Recipe</h2><pre tabindex="0" aria-label="Recipe">${recipe}</pre></div></div>`;
  };
}
