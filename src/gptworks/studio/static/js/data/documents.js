// The documents of a run's training and validation data.

import { count } from "../format.js";
import { html } from "../ui.js";
import { Place, TokenPages, useAsked } from "./asked.js";
import { Tokens } from "./tokens.js";

const SHOWN = 1024;

export function Documents({ chosen, about, at, move }) {
  const { split, document, first } = at;
  const { found, problem, busy } = useAsked("document", { ...chosen, split, document, first, n: SHOWN });
  const n = about.splits[split]?.n_documents ?? 0;
  return html`<section class="card" aria-label="Documents" aria-busy=${String(busy)}>
    <div class="toolbar">
      <label>Split <select class="field" value=${split}
        onChange=${({ target }) => move({ split: target.value, document: 0, first: 0 })}>
        ${Object.keys(about.splits).map(
          (name) => html`<option key=${name} value=${name}>${name}</option>`,
        )}</select></label>
      <${Place} name="Document" value=${document} set=${(to) => move({ document: to, first: 0 })}
        max=${Math.max(0, n - 1)}
        of=${`of ${count(n)}`} />
    </div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${
      found &&
      html`<p class="facts number">
        ${count(found.n_tokens)} tokens${found.n_bytes != null ? ` · ${count(found.n_bytes)} bytes` : ""}</p>
      <${TokenPages} first=${first} n=${SHOWN} total=${found.n_tokens} set=${(to) => move({ first: to })} />
      <${Tokens} rows=${[{ tokens: found.tokens }]} first=${found.first} />`
    }</section>`;
}
