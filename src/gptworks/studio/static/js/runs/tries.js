// The results of `gptworks try` for the tries whose runs are listed.

import { count } from "../format.js";
import { html } from "../ui.js";
import { useAnswer } from "./findings.js";

const STATES = { running: "running", decided: "decided", open: "open" };

export function Tries({ rows, choose }) {
  const version = rows.map((row) => `${row.id} ${row.state}`).join("\n");
  const { answer, problem } = useAnswer(rows.length ? "studio/tries" : null, version, 500);
  if (!problem && !answer?.tries.length) return null;
  return html`<section class="card" aria-label="Tries">
    <h2>Tries</h2>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${answer?.tries.map(
      (one) => html`<article key=${one.id} aria-label=${one.id}>
      <p><b>${one.id}</b> <span class="quiet">${one.problem ? "cannot be read" : STATES[one.state]}</span></p>
      ${one.problem && html`<p class="problem">${one.problem}</p>`}
      ${
        !one.problem &&
        html`<p><code>${one.changes.join(" ")}</code> <span class="quiet number">
          ${count(one.pairs)} of at most ${count(one.most_pairs)} pairs of ${count(one.steps)} steps</span></p>
      <ul class="notes">${one.lines.map((line) => html`<li key=${line}>${line}</li>`)}</ul>`
      }
      <p><button class="button small" onClick=${() => choose(one.runs)}>Draw its runs <span class="hidden-text">
        of ${one.id}</span></button>
        ${one.page && html` <span class="quiet">Its page: <code>${one.page}</code></span>`}</p>
    </article>`,
    )}
    ${answer?.left_out > 0 && html`<p class="quiet">${count(answer.left_out)} more are not listed.</p>`}
  </section>`;
}
