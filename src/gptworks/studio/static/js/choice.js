// A run and one of its checkpoints.

import { count, figure } from "./format.js";
import { html } from "./ui.js";

export function ModelChoice({ models, chosen, choose, name }) {
  const model = models.find((one) => one.id === chosen.model);
  const point = ({ target: { value } }) => choose({ ...chosen, checkpoint: /^\d+$/.test(value) ? Number(value) : value });
  return html`<span class="choice"><select class="field" aria-label=${name} value=${chosen.model ?? ""} onChange=${(event) => choose({ model: event.target.value, checkpoint: null })}>
        ${!model && html`<option value="">No model</option>`}
        ${models.map((one) => html`<option key=${one.id} value=${one.id} disabled=${Boolean(one.problem)}
          title=${one.problem ?? ""}>${one.id}${one.problem ? " (cannot be used)" : ""}</option>`)}
      </select></span>
    <span class="choice"><select class="field" aria-label=${`Checkpoint of ${name.toLowerCase()}`} value=${chosen.checkpoint ?? "best"} onChange=${point}>
        <option value="best">best</option><option value="last">last</option>
        ${[...(model?.checkpoints ?? [])].reverse().map(({ step, loss }) => html`<option key=${step} value=${step}>step ${
          count(step)}${loss != null ? `, loss ${figure(loss)}` : ""}</option>`)}
      </select></span>`;
}
