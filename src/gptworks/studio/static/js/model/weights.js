// A tensor's weights at one checkpoint or at two: histogram, moments, singular values, and the elements of a vector.

import { post } from "../api.js";
import { count, figure, percent } from "../format.js";
import { html, Scrolls, useEffect, useState } from "../ui.js";
import { Plot } from "./plot.js";

const PAUSE_MS = 120;

export function Weights({ model, step, against, name, shape }) {
  const body = { model, checkpoint: step, against: against === step ? null : against, tensor: name };
  const weights = useAnswer("studio/model/weights", body, true);
  const spectrum = useAnswer("studio/model/spectrum", body, shape.length === 2 && Boolean(weights.answer));
  return html`<section class="card" aria-labelledby="weights-title"
    aria-busy=${String(!weights.answer && !weights.problem)}>
    <h2 id="weights-title">Weights</h2>
    <p class="quiet mono">${name}</p>
    ${weights.problem && html`<p class="problem" role="alert">${weights.problem}</p>`}
    ${!weights.answer && !weights.problem && html`<p class="quiet" role="status">Reading the weights …</p>`}
    ${
      weights.answer &&
      html`<${Moments} answer=${weights.answer} /><${Histogram} answer=${weights.answer} />
        <${Values} answer=${weights.answer} />`
    }
    ${spectrum.problem && html`<p class="quiet" role="status">No singular values: ${spectrum.problem}</p>`}
    ${
      shape.length === 2 &&
      weights.answer &&
      !spectrum.answer &&
      !spectrum.problem &&
      html`<p class="quiet" role="status">Computing singular values …</p>`
    }
    ${spectrum.answer && html`<${Spectrum} answer=${spectrum.answer} />`}
  </section>`;
}

/** The server's answer to the current request. A new request, or removing the component, ends the server's work. */
function useAnswer(path, body, wanted) {
  const [found, setFound] = useState({});
  const key = JSON.stringify(body);
  useEffect(() => {
    if (!wanted) return undefined;
    const asked = new AbortController();
    const timer = setTimeout(
      () =>
        post(path, body, { signal: asked.signal }).then(
          (answer) => setFound({ key, answer }),
          (error) => error.name === "AbortError" || setFound({ key, problem: error.message }),
        ),
      PAUSE_MS,
    );
    return () => (clearTimeout(timer), asked.abort());
  }, [key, wanted]);
  return found.key === key ? found : {};
}

const nameOf = (one) => `step ${count(one.step)}`;

const STORED = { fp32: "fp32", bf16: "bf16", fp16: "fp16", int8: "int8, shown unpacked", int4: "int4, shown unpacked" };
const ROWS = [
  ["mean", ({ moments }) => figure(moments.mean)],
  ["standard deviation", ({ moments }) => figure(moments.std)],
  ["least", ({ moments }) => figure(moments.least)],
  ["most", ({ moments }) => figure(moments.most)],
  ["zeros", ({ moments }) => percent(moments.zero)],
  ["not finite", ({ moments }) => percent(moments.not_finite)],
  ["stored as", (one) => `${STORED[one.stored]}${one.adapted ? ", its adapter added" : ""}`],
];

function Moments({ answer }) {
  const all = answer.checkpoints;
  return html`<${Scrolls} class="model-scrolls" name="Moments"><table class="number">
      <thead><tr><td></td>${all.map((one) => html`<th key=${one.step} scope="col">${nameOf(one)}</th>`)}</tr></thead>
      <tbody>${ROWS.map(
        ([name, of]) =>
          html`<tr key=${name}><th scope="row">${name}</th>${all.map(
            (one) => html`<td key=${one.step}>${of(one)}</td>`,
          )}</tr>`,
      )}</tbody>
    </table><//>
    ${
      all.length > 1 &&
      html`<p class="model-change">${
        answer.relative_change == null
          ? `Its norm at step ${count(all[1].step)} is zero or not finite, so that the change is not measured by it.`
          : `The norm of the difference is ${figure(answer.relative_change)} times the norm at step ${count(
              all[1].step,
            )}.`
      }</p>`
    }`;
}

function Histogram({ answer }) {
  const [log, setLog] = useState(false);
  const { edges, checkpoints } = answer;
  if (!edges.length) return html`<p>None of the weights is finite.</p>`;
  const read = (i) =>
    `weights from ${figure(edges[i])} to ${figure(edges[i + 1])}: ${checkpoints
      .map((one) => `${count(one.counts[i])}${checkpoints.length > 1 ? ` at ${nameOf(one)}` : ""}`)
      .join(", ")}`;
  return html`<${Plot} title="Histogram" shape="bars" log=${log} read=${read}
    ends=${[figure(edges[0]), figure(edges.at(-1))]}
    series=${checkpoints.map((one) => ({ name: nameOf(one), values: one.counts }))}>
    <${Log} log=${log} setLog=${setLog} what="histogram" /><//>`;
}

function Values({ answer }) {
  const { checkpoints } = answer;
  if (!checkpoints[0].values) return null;
  const at = (one) => (checkpoints.length > 1 ? ` at ${nameOf(one)}` : "");
  const read = (i) => `element ${count(i)}: ${checkpoints.map((one) => figure(one.values[i]) + at(one)).join(", ")}`;
  return html`<${Plot} title="Values by channel" read=${read} ends=${["0", count(checkpoints[0].values.length - 1)]}
    series=${checkpoints.map((one) => ({ name: nameOf(one), values: one.values }))} />`;
}

function Spectrum({ answer }) {
  const [log, setLog] = useState(true);
  const { checkpoints } = answer;
  const read = (i) =>
    `singular value ${count(i + 1)}: ${checkpoints
      .map((one) => `${figure(one.values[i])} of the largest${checkpoints.length > 1 ? ` at ${nameOf(one)}` : ""}`)
      .join(", ")}`;
  return html`<${Plot} title="Singular values" log=${log} read=${read}
    ends=${["1", count(checkpoints[0].values.length)]}
      series=${checkpoints.map((one) => ({ name: nameOf(one), values: one.values }))}>
      <${Log} log=${log} setLog=${setLog} what="spectrum" /><//>
    <${Scrolls} class="model-scrolls" name="Ranks"><table class="number">
      <thead><tr><td></td>${checkpoints.map(
        (one) => html`<th key=${one.step} scope="col">${nameOf(one)}</th>`,
      )}</tr></thead>
      <tbody>${[
        ["largest singular value", "largest"],
        ["stable rank", "stable_rank"],
        ["effective rank", "effective_rank"],
      ].map(
        ([name, key]) => html`
        <tr key=${key}><th scope="row">${name}</th>${checkpoints.map(
          (one) => html`<td key=${one.step}>${figure(one[key])}</td>`,
        )}</tr>`,
      )}</tbody></table><//>
    <p class="quiet">
      Each value over the largest: how far the matrix stretches its strongest direction, and the others beside it. They
      are the
      roots of the eigenvalues of the matrix times its transpose, in float64; what is below a millionth of the largest
      may be rounding.
      The stable rank is the sum of their squares over the largest square; the effective rank is e to the entropy of
      their shares. Both say
      over how many directions the matrix spreads.</p>`;
}

function Log({ log, setLog, what }) {
  return html`<label class="check"><input type="checkbox" aria-label=${`Logarithmic ${what}`} checked=${log}
    onChange=${(event) => setLog(event.target.checked)} /> Logarithmic</label>`;
}
