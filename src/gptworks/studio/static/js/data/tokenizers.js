// One text, cut by two tokenizers.

import { count, figure } from "../format.js";
import { html, useState } from "../ui.js";
import { useAsked } from "./asked.js";
import { Tokens } from "./tokens.js";

export function Tokenizers({ models }) {
  const [names, setNames] = useState([models[0].id, (models[1] ?? models[0]).id]);
  const [text, setText] = useState("The quick brown fox jumps over the lazy dog.");
  const { found: answer, problem, busy } = useAsked("tokenize", text ? { models: names, text } : null);
  const found = answer && text ? answer.found : [];
  return html`<section class="card" aria-label="Two tokenizers" aria-busy=${String(busy)}>
    <textarea class="field" rows="4" maxlength="100000" aria-label="Text to cut" value=${text}
      onInput=${({ target }) => setText(target.value)}></textarea>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <div class="tokenizers">${names.map(
      (name, i) => html`<section key=${i} aria-label=${`Tokenizer ${i + 1}`}>
      <select class="field" aria-label=${`Run of tokenizer ${i + 1}`} value=${name}
          onChange=${({ target }) => setNames(names.map((was, k) => (k === i ? target.value : was)))}>
        ${models.map((model) => html`<option key=${model.id} value=${model.id}>${model.id}</option>`)}</select>
      ${
        found[i] &&
        html`<p class="facts number">
          ${count(found[i].n_tokens)} tokens · ${figure(found[i].bytes_per_token)} bytes per token ·
          vocabulary ${count(found[i].vocab_size)}</p>
        ${!found[i].round_trips && html`<p class="problem">Its tokens do not give the text back.</p>`}
        <${Tokens} rows=${[{ tokens: found[i].tokens }]} first=${0} />`
      }
    </section>`,
    )}</div></section>`;
}
