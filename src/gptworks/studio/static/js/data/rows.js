// Rows of training data as the model sees them: a window, or the batch of a step; on request coloured by loss.

import { CheckpointChoice, chooseRun } from "../choice.js";
import { count, figure } from "../format.js";
import { LossLegend } from "../read/text.js";
import { html } from "../ui.js";
import { Place, TokenPages, useAsked } from "./asked.js";
import { Tokens } from "./tokens.js";

const SHOWN = 1024;
const SAMPLES = 8;

export function Windows({ models, chosen, about, at, move }) {
  const { window, epoch, first, loss } = at;
  const answer = useAsked("window", { ...chosen, window, epoch, first, loss, n: SHOWN });
  return html`<section class="card" aria-label="Windows" aria-busy=${String(answer.busy)}>
    <p class="quiet">
      What the model reads at once, up to ${count(about.context)} tokens, and the last token that it predicts.</p>
    <div class="toolbar">
      <${Place} name="Window" value=${window} set=${(to) => move({ window: to, first: 0 })} max=${about.n_windows - 1}
        of=${`of ${count(about.n_windows)}`} />
      <${Place} name="Epoch" value=${epoch} set=${(to) => move({ epoch: to })} />
    </div>
    <${Rows} ...${{ models, chosen, answer, at, move }} /></section>`;
}

export function Step({ models, chosen, about, at, move }) {
  const { step, sample, first, loss } = at;
  const answer = useAsked(
    "step",
    about.n_steps ? { ...chosen, step, sample, first, loss, n: SHOWN, n_samples: SAMPLES } : null,
  );
  const { found } = answer;
  if (!about.n_steps) return html`<p class="notice">The run has done no step yet.</p>`;
  return html`<section class="card" aria-label="A step" aria-busy=${String(answer.busy)}>
    <p class="quiet">The batch that the step trained on.</p>
    <div class="toolbar">
      <${Place} name="Step" value=${step} set=${(to) => move({ step: to, sample: 0, first: 0 })} min=${1} first=${0}
        max=${about.n_steps}
        of=${`of ${count(about.n_steps)}`} />
      ${
        found &&
        html`<${Place} name="Sample" value=${sample} set=${(to) => move({ sample: to, first: 0 })}
          max=${found.n_samples - 1}
        by=${found.n_shown} of=${`of ${count(found.n_samples)}`} />`
      }
    </div>
    ${found?.skipped && html`<p>This step was skipped: its gradients were not applied.</p>`}
    <${Rows} ...${{ models, chosen, answer, at, move }} /></section>`;
}

function Rows({ models, chosen, answer: { found, problem, busy }, at, move }) {
  const rows = found?.rows.map((row) => ({ ...row, title: title(row) }));
  const coloured = at.loss && found?.rows.some((row) => row.tokens.some((token) => token.nats != null));
  return html`<div class="toolbar">
      <button class="button small" aria-pressed=${String(at.loss)} onClick=${() => move({ loss: !at.loss })}>
        Colour by loss</button>
      ${at.loss && html`<${CheckpointChoice} models=${models} chosen=${chosen} choose=${chooseRun} of="run" />`}
      ${busy && html`<span class="quiet">Reading …</span>`}
      ${coloured && html`<${LossLegend} />`}
      ${
        at.loss &&
        found?.loss != null &&
        html`<span class="number" role="status">${figure(found.loss)} nats for each learned token
        that is shown, at step ${count(found.checkpoint)}</span>`
      }
    </div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${
      rows &&
      html`<${TokenPages} first=${at.first} n=${found.n} total=${Math.max(...rows.map((row) => row.n_tokens))}
        set=${(to) => move({ first: to })} />
      <${Tokens} rows=${rows} first=${found.first} />`
    }`;
}

function title(row) {
  return [
    row.sample != null && `Sample ${count(row.sample + 1)}`,
    row.sample != null && `window ${count(row.window + 1)} of epoch ${count(row.epoch + 1)}`,
    row.answer,
    `${count(row.n_tokens)} tokens`,
    `${count(row.n_learned)} learned`,
    row.padding > 0 && `${count(row.padding)} of padding`,
  ]
    .filter(Boolean)
    .join(" · ");
}
