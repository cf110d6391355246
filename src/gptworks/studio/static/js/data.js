// The part Data: a run's documents, training windows and batches; search; figures; and two tokenizers compared.

import { useAsked } from "./data/asked.js";
import { Documents } from "./data/documents.js";
import { Figures } from "./data/figures.js";
import { Step, Windows } from "./data/rows.js";
import { Search } from "./data/search.js";
import { Tokenizers } from "./data/tokenizers.js";
import { count } from "./format.js";
import { chooseRun, NoRun, RunChoice, useRun } from "./choice.js";
import { html, useState } from "./ui.js";

const VIEWS = {
  documents: "Documents",
  windows: "Windows",
  step: "A step",
  search: "Search",
  figures: "Figures",
  tokenizers: "Two tokenizers",
};
const START = { split: "train", document: 0, first: 0, window: 0, epoch: 0, step: 1, sample: 0, loss: false };

export function Part({ state, shown }) {
  const models = state.models;
  const usable = models.filter((model) => !model.problem);
  const chosen = useRun(models, shown);
  const [view, setView] = useState("documents");
  const [held, hold] = useState({ at: START }); // the place in a run's data
  const at = held.model === chosen.model ? held.at : START;
  const { found: about, problem } = useAsked("about", view !== "tokenizers" && chosen.model ? chosen : null);
  const move = (changes) => hold({ model: chosen.model, at: { ...at, ...changes } });
  const open = (key, place) => (move(place), setView(key));
  if (!usable.length) return html`<${NoRun} />`;
  const View = { documents: Documents, windows: Windows, step: Step, search: Search, figures: Figures }[view];
  return html`<div class="cards data">
    <h1 class="hidden-text">Data</h1>
    <section class="card" aria-label="What to show">
      <div class="switch data-views" role="group" aria-label="Show">
        ${Object.entries(VIEWS).map(
          ([key, name]) => html`<button key=${key} class="button small"
          aria-pressed=${String(view === key)} onClick=${() => setView(key)}>${name}</button>`,
        )}
      </div>
      ${
        View &&
        html`<div class="toolbar">
          <${RunChoice} models=${models} chosen=${chosen} choose=${chooseRun} name="Run" /></div>
        ${
          about &&
          html`<p class="quiet facts number">${Object.entries(about.splits)
            .map(
              ([name, { n_documents, n_tokens, text_bytes }]) =>
                `${name}: ${count(n_documents)} ${n_documents === 1 ? "document" : "documents"}, ` +
                `${count(n_tokens)} tokens, ${count(text_bytes)} bytes`,
            )
            .join(" · ")}</p>`
        }
        ${problem && html`<p class="problem" role="alert">${problem}</p>`}`
      }
    </section>
    ${
      View &&
      about &&
      html`<${View} key=${`${chosen.model}/${view}`} ...${{ models, chosen, about, at, move, open }} />`
    }
    ${!View && html`<${Tokenizers} models=${models} chosen=${chosen} />`}
  </div>`;
}
