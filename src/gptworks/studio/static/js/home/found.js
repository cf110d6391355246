// What was found in a folder: the files by kind, passages, and what the drafted run costs.

import { bytes, count, rate, short } from "../format.js";
import { html } from "../ui.js";

/** `started`: whether a run has the draft's name. */
export function Cost({ drafting, start, busy, started }) {
  const { draft, name } = drafting;
  const figures = {
    "Size of the model": `${short(draft.parameters)} parameters, ${bytes(draft.weights_bytes)}`,
    Time: `about ${time(draft.minutes)}, at ${rate(draft.rate)} tokens a second measured on ${draft.device}`,
    Training: `reads ${count(draft.tokens)} tokens: the text ${rounded(draft.epochs)} times`,
    Disk: draft.disk_bytes == null ? "unknown" : `at most ${bytes(draft.disk_bytes)}, for checkpoints and tokens`,
    Memory: `${bytes(draft.memory_bytes)} at the peak, of ${bytes(draft.free_bytes)} free`,
  };
  return html`<section class="card home-wide" aria-label="What it will cost">
    <h2>What it will cost</h2>
    <dl class="home-cost">${Object.entries(figures).map(
      ([what, figure]) => html`<div key=${what}><dt>${what}</dt><dd class="number">${figure}</dd></div>`,
    )}</dl>
    <div class="toolbar">
      ${
        started
          ? html`<span class="quiet">${name} is started: its card is above.</span>`
          : html`<button class="button primary" disabled=${busy} onClick=${start}>Start training ${name}</button>
            <span class="quiet">It can be stopped at any time, and resumed.</span>`
      }</div>
    <details><summary>The recipe, with the reason for each setting</summary>
      <pre class="home-recipe" tabindex="0" aria-label="Recipe">${draft.text}</pre></details>
  </section>`;
}

export function Found({ texts, folder }) {
  const more = texts.n_kinds - texts.kinds.length;
  return html`<section class="card home-found" aria-label="What was found">
    <h2>What was found</h2>
    <p>${`${count(texts.n_read)} of ${count(texts.n_files)} files in ${folder} are read: `}${bytes(
      texts.n_bytes,
    )} of text.</p>
    <div class="home-scroll" tabindex="0" role="group" aria-label="Files by kind"><table>
      <thead><tr><th scope="col">kind</th>${["read", "skipped", "text"].map(
        (name) => html`<th key=${name} scope="col" class="home-number">${name}</th>`,
      )}<th scope="col">how, or why not</th></tr></thead>
      <tbody>${texts.kinds.map(
        (kind) => html`<tr key=${kind.kind}><th scope="row">${kind.kind || "no ending"}</th>
          <td class="home-number">${count(kind.n_read)}</td><td class="home-number">${count(kind.n_skipped)}</td>
          <td class="home-number">${kind.n_bytes ? bytes(kind.n_bytes) : ""}</td>
          <td>${[...kind.notes, ...kind.reasons].map((words) => html`<p key=${words}>${words}</p>`)}
            ${kind.n_more > 0 && html`<p class="quiet">and ${count(kind.n_more)} more reasons</p>`}</td></tr>`,
      )}</tbody></table></div>
    ${
      more > 0 &&
      html`<p class="quiet">
      And ${count(more)} kinds more: <code>gptworks init --look</code> lists all.</p>`
    }
    ${
      texts.n_left_out > 0 &&
      html`<details><summary>${`Left out, in whole or in part: ${count(texts.n_left_out)}`}</summary>
        <ul class="home-left-out" tabindex="0" aria-label="What is left out">${texts.left_out.map(
          (line) => html`<li key=${line}>${line}</li>`,
        )}</ul>
        ${
          texts.n_left_out > texts.left_out.length &&
          html`<p class="quiet">The first ${count(texts.left_out.length)} are listed.</p>`
        }</details>`
    }
  </section>`;
}

export function Passages({ passages }) {
  return html`<section class="card home-passages" aria-label="Passages">
    <h2>Passages, as the model will read them</h2>
    ${passages.map(
      ({ file, text }, i) => html`<figure key=${i}><figcaption class="quiet">${file}</figcaption>
        <pre tabindex="0" aria-label=${`Passage of ${file}`}>${text}</pre></figure>`,
    )}
  </section>`;
}

/** A duration in words, with two significant digits. */
export function time(minutes) {
  if (minutes < 2) return `${rounded(60 * minutes)} seconds`;
  return minutes < 120 ? `${rounded(minutes)} minutes` : `${rounded(minutes / 60)} hours`;
}

/** An estimate in two significant digits. */
function rounded(x) {
  return x < 10 ? String(Number(x.toPrecision(2))) : count(Number(x.toPrecision(2)));
}
