// The occurrences of a phrase in a run's training or validation text.

import { count } from "../format.js";
import { html, useState } from "../ui.js";
import { useAsked } from "./asked.js";

const AROUND = 32; // tokens shown before a place, in its document

export function Search({ chosen, about, at, move, open }) {
  const [typed, type] = useState("");
  const [phrase, ask] = useState("");
  const { split } = at;
  const { found, problem, busy } = useAsked("search", phrase ? { ...chosen, split, phrase } : null);
  const submit = (event) => (event.preventDefault(), ask(typed));
  return html`<section class="card" aria-label="Search" aria-busy=${String(busy)}>
    <form class="toolbar" onSubmit=${submit}>
      <label>Split <select class="field" value=${split}
        onChange=${({ target }) => move({ split: target.value, document: 0, first: 0 })}>
        ${Object.keys(about.splits).map(
          (name) => html`<option key=${name} value=${name}>${name}</option>`,
        )}</select></label>
      <label>Phrase <input class="field phrase" value=${typed} maxlength="4096" spellcheck="false"
        onInput=${({ target }) => type(target.value)} /></label>
      <button class="button small" disabled=${!typed}>Find</button>
      ${busy && html`<span class="quiet">Searching …</span>`}
    </form>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${
      phrase &&
      found &&
      html`<p class="number" role="status">
        ${count(found.n)} ${found.n === 1 ? "place" : "places"} in ${count(found.n_tokens)} tokens${
          found.by_text ? "" : ", as complete tokens: this tokenizer does not preserve the text"
        }${found.hits.length < found.n ? `; ${count(found.hits.length)} of them:` : ""}</p>
      <ol class="hits">${found.hits.map(
        (hit) => html`<li key=${hit.position}>
        <button class="button small number"
          onClick=${() => open("documents", { split, document: hit.document, first: Math.max(0, hit.first - AROUND) })}>
          Document ${count(hit.document + 1)}, token ${count(hit.first + 1)}</button>
        <bdi class="text hit">${hit.before}<mark>${hit.text}</mark>${hit.after}</bdi></li>`,
      )}</ol>`
    }</section>`;
}
