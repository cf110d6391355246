// A run, and one of its checkpoints.

import { count, figure } from "./format.js";
import { html, useLayoutEffect } from "./ui.js";

/** Choose the run in the address before anything is drawn, so that no other run appears for a moment. */
export function useLinked(route, models, choose) {
  const linked = route.join("/");
  useLayoutEffect(() => {
    if (models.some((model) => model.id === linked)) choose({ model: linked, checkpoint: null });
  }, [linked]);
}

export function RunChoice({ models, chosen, choose, name }) {
  return html`<span class="choice">
    <select class="field" aria-label=${name} value=${chosen.model ?? ""}
      onChange=${(event) => choose({ model: event.target.value, checkpoint: null })}>
        ${!models.some((one) => one.id === chosen.model) && html`<option value="">No model</option>`}
        ${models.map(
          (one) => html`<option key=${one.id} value=${one.id} disabled=${Boolean(one.problem)}
          title=${one.problem ?? ""}>${one.id}${one.problem ? " (cannot be used)" : ""}</option>`,
        )}
      </select></span>`;
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

export function ModelChoice({ models, chosen, choose, name }) {
  const model = models.find((one) => one.id === chosen.model);
  const point = ({ target: { value } }) =>
    choose({ ...chosen, checkpoint: /^\d+$/.test(value) ? Number(value) : value });
  return html`<${RunChoice} ...${{ models, chosen, choose, name }} />
    <span class="choice">
      <select class="field" aria-label=${`Checkpoint of ${name.toLowerCase()}`} value=${chosen.checkpoint ?? "best"}
        onChange=${point}>
        <option value="best">best</option><option value="last">last</option>
        ${stepOptions(model?.checkpoints)}
      </select></span>`;
}

/** A name for a new run: `name`, with a number if a run has it. */
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
