// One text, cut by two tokenizers.

import { chooseRun, RunChoice } from "../choice.js";
import { count, figure } from "../format.js";
import { html, useState } from "../ui.js";
import { useAsked } from "./asked.js";
import { Tokens } from "./tokens.js";

export function Tokenizers({ models, chosen }) {
  const [other, setOther] = useState(null); // the second run; the first is the run of all parts
  const second = other ?? (models.find((model) => model.id !== chosen.model && !model.problem) ?? models[0]).id;
  const names = [chosen.model, second];
  const [text, setText] = useState("The quick brown fox jumps over the lazy dog.");
  const { found: answer, problem, busy } = useAsked("tokenize", text ? { models: names, text } : null);
  const found = answer && text ? answer.found : [];
  return html`<section class="card" aria-label="Two tokenizers" aria-busy=${String(busy)}>
    <textarea class="field" rows="4" maxlength="100000" aria-label="Text to cut" value=${text}
      onInput=${({ target }) => setText(target.value)}></textarea>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <div class="tokenizers">${names.map(
      (name, i) => html`<section key=${i} aria-label=${`Tokenizer ${i + 1}`}>
      <${RunChoice} models=${models} chosen=${{ model: name }} name=${`Run of tokenizer ${i + 1}`}
        choose=${i ? ({ model }) => setOther(model) : chooseRun} />
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
