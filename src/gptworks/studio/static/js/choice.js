// The run and checkpoint that all parts show, the pickers of a run and a checkpoint, and names of new runs.

import { count, figure } from "./format.js";
import { inTab } from "./store.js";
import { html, useLayoutEffect, useRef, useState } from "./ui.js";

const STORED = "gptworks-choice"; // key in the tab's storage
const listeners = new Set();
let chosen = restored();

function restored() {
  try {
    const { model = null, checkpoint = null } = JSON.parse(inTab.get(STORED)) ?? {};
    return { model, checkpoint };
  } catch {
    return { model: null, checkpoint: null };
  }
}

/** Choose a run in all parts, at its best checkpoint unless one is given. */
export function chooseRun({ model, checkpoint = null }) {
  if (model === chosen.model && checkpoint === chosen.checkpoint) return;
  chosen = { model, checkpoint };
  inTab.set(STORED, JSON.stringify(chosen));
  for (const listener of listeners) listener(chosen);
}

/** The last choice, even if its run is not listed: { model, checkpoint }. What was not chosen is null. */
export function lastChosen() {
  return chosen;
}

/** The last choice, for a component, which is drawn again when the choice changes. */
export function useChosen() {
  const [, draw] = useState(chosen);
  useLayoutEffect(() => (listeners.add(draw), () => listeners.delete(draw)), []);
  return chosen;
}

/**
 * The chosen run; the newest that can be used if none is chosen or the chosen one is not listed. A part that is not
 * shown keeps its run, so that it sends no requests.
 */
export function useRun(models, shown) {
  const found = useChosen();
  const kept = useRef(null);
  if (shown || !kept.current)
    kept.current = models.some((model) => model.id === found.model)
      ? found
      : { model: models.find((model) => !model.problem)?.id ?? null, checkpoint: null };
  return kept.current;
}

/** The step of the chosen checkpoint, if the run has it. */
export function stepOf(models, { model, checkpoint }) {
  const checkpoints = models.find((one) => one.id === model)?.checkpoints ?? [];
  const which = checkpoint ?? "best";
  return checkpoints.find((one) => one.step === which || one[which] === true)?.step;
}

const NOTES = { running: " (training)", killed: " (killed)" };

export function RunChoice({ models, chosen, choose, name }) {
  const model = models.find((one) => one.id === chosen.model);
  return html`<span class="choice">
      <select class="field" aria-label=${name} title=${chosen.model ?? ""} value=${chosen.model ?? ""}
        onChange=${({ target }) => choose({ model: target.value, checkpoint: null })}>
        ${!model && html`<option value="">No model</option>`}
        ${models.map(
          (one) => html`<option key=${one.id} value=${one.id} disabled=${Boolean(one.problem)}
          title=${one.problem ?? ""}>${one.id}${one.problem ? " (cannot be used)" : (NOTES[one.state] ?? "")}</option>`,
        )}
      </select></span>
    ${model?.problem && html`<span class="problem" role="alert">${model.problem}</span>`}`;
}

/** The checkpoints as options, the newest first. */
export function stepOptions(checkpoints = []) {
  return [...checkpoints]
    .reverse()
    .map(
      ({ step, loss }) =>
        html`<option key=${step} value=${step}>step ${count(step)}${
          loss != null ? `, validation loss ${figure(loss)}` : ""
        }</option>`,
    );
}

export function CheckpointChoice({ models, chosen, choose, of }) {
  const checkpoints = models.find((one) => one.id === chosen.model)?.checkpoints ?? [];
  if (!checkpoints.length) return null;
  const { checkpoint } = chosen;
  const gone = Number.isInteger(checkpoint) && !checkpoints.some(({ step }) => step === checkpoint);
  const which = (name) => {
    const found = checkpoints.find((one) => one[name]);
    return html`<option value=${name}>${name}${found ? ` (step ${count(found.step)})` : ""}</option>`;
  };
  const point = ({ target: { value } }) =>
    choose({ model: chosen.model, checkpoint: /^\d+$/.test(value) ? Number(value) : value });
  return html`<span class="choice">
    <select class="field" aria-label=${`Checkpoint of ${of}`} value=${checkpoint ?? "best"} onChange=${point}>
      ${which("best")}${which("last")}
      ${gone && html`<option value=${checkpoint}>step ${count(checkpoint)} (gone)</option>`}
      ${stepOptions(checkpoints)}
    </select></span>`;
}

export function ModelChoice({ name, of = name.toLowerCase(), ...props }) {
  return html`<${RunChoice} name=${name} ...${props} /><${CheckpointChoice} of=${of} ...${props} />`;
}

/** A name for a new run: `name` with hyphens in place of forbidden characters, and with a number if a run has it. */
export function freeName(name, models) {
  const taken = new Set(models.map((model) => model.id));
  const clean =
    name
      .replace(/[^A-Za-z0-9._-]/g, "-")
      .replace(/^[^A-Za-z0-9]+/, "")
      .slice(0, 90) || "run";
  const base = clean.replace(/-\d+$/, "");
  let n = 2;
  if (!taken.has(clean)) return clean;
  while (taken.has(`${base}-${n}`)) n += 1;
  return `${base}-${n}`;
}

/** The content of a part that has no run to show. */
export function NoRun({ children }) {
  return html`<section class="card no-run">
    <h1>There is no run here yet</h1>
    <p>Make one from a folder of texts, or train one with <code>gptworks train</code>; it appears by itself.</p>
    ${children}
    <a class="button primary" href="#/home">Make a model from a folder</a>
  </section>`;
}
