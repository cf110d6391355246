// The part Model: a run's architecture, its parts with their costs, and its weights at a checkpoint.

import { hasRuns, post } from "./api.js";
import { count } from "./format.js";
import { html, useEffect, useState } from "./ui.js";
import { Architecture } from "./model/architecture.js";
import { PartDetails } from "./model/details.js";
import { Weights } from "./model/weights.js";
import { chooseRun, ModelChoice, NoRun, stepOptions, useRun } from "./choice.js";

const usable = (models) => models.filter((model) => !model.problem);

export function Part({ state, shown }) {
  const models = state.models;
  const current = useRun(models, shown);
  const [held, hold] = useState({}); // of a run: the layer, and the compared checkpoint
  const { layer = 0, against = null } = held.model === current.model ? held : {};
  const keep = (more) => hold({ model: current.model, layer, against, ...more });
  const [key, setKey] = useState("token_embedding");
  const [tensor, setTensor] = useState({});
  const { sheet, problem } = useSheet(current, layer);
  if (!usable(models).length) return html`<${NoRun} />`;
  const part = sheet && (sheet.parts.find((one) => one.key === key) ?? sheet.parts[0]);
  const name = part && (part.tensors.find((one) => shortName(one.name) === tensor[part.key]) ?? part.tensors[0])?.name;
  const steps = models.find((model) => model.id === current.model)?.checkpoints ?? [];
  return html`<div class="cards model-part">
    <h1 class="hidden-text">Model</h1>
    <div class="card toolbar">
      <${ModelChoice} models=${models} chosen=${current} choose=${chooseRun} name="Model" />
      ${
        hasRuns &&
        html`<label class="check"><input type="checkbox" checked=${against != null} disabled=${!steps.length}
        onChange=${(event) => keep({ against: event.target.checked ? steps[0].step : null })} /> Compare with</label>`
      }
      ${
        against != null &&
        html`<select class="field" aria-label="Compared checkpoint" value=${against}
        onChange=${(event) => keep({ against: Number(event.target.value) })}>${stepOptions(steps)}</select>`
      }
    </div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${!sheet && !problem && html`<p class="quiet" role="status">Reading the architecture …</p>`}
    ${
      sheet &&
      html`
      <p class="model-summary number"><bdi>${sheet.name}</bdi>, step ${count(sheet.step)}: ${sheet.summary}<br />
        <span class="quiet">${sheet.traits}</span></p>
      <div class="model-sides">
        <${Architecture} sheet=${sheet} chosen=${part.key} choose=${setKey} setLayer=${(layer) => keep({ layer })} />
        <div class="model-details">
          <${PartDetails} sheet=${sheet} part=${part} tensor=${name}
            choose=${(one) => setTensor({ ...tensor, [part.key]: shortName(one) })} />
          ${
            name &&
            hasRuns &&
            html`<${Weights} model=${sheet.model} step=${sheet.step} against=${against} name=${name}
            shape=${part.tensors.find((one) => one.name === name).shape} />`
          }
        </div>
      </div>
      <div class="model-sides even"><${Totals} facts=${sheet.facts} /><${Settings} settings=${sheet.settings} /></div>`
    }
  </div>`;
}

/** A tensor's name without its layer: the same in all layers. */
const shortName = (name) => name.replace(/^blocks\.\d+\./, "");

/** The sheet for the chosen model, checkpoint and layer. The previous sheet stays until the new one comes. */
function useSheet({ model, checkpoint }, layer) {
  const [found, setFound] = useState({ sheet: null, problem: null });
  useEffect(() => {
    if (!model) return undefined;
    const asked = new AbortController();
    post("studio/model/sheet", { model, checkpoint, layer }, { signal: asked.signal }).then(
      (sheet) => setFound({ sheet, problem: null }),
      (error) => error.name === "AbortError" || setFound({ sheet: null, problem: error.message }),
    );
    return () => asked.abort();
  }, [model, checkpoint, layer]);
  return found;
}

function Totals({ facts }) {
  return html`<section class="card" aria-labelledby="model-totals">
    <h2 id="model-totals">Total</h2>
    <dl class="model-facts number">${facts.map(
      ({ name, text }) => html`<div key=${name}><dt>${name}</dt><dd>${text}</dd></div>`,
    )}</dl>
  </section>`;
}

function Settings({ settings }) {
  const [changed, rest] = [settings.filter((one) => !one.is_default), settings.filter((one) => one.is_default)];
  const list = (some) =>
    html`<dl class="model-facts number">${some.map(
      ({ name, value }) => html`<div key=${name}><dt><code>${name}</code></dt>
      <dd>${value == null ? "null" : typeof value === "object" ? JSON.stringify(value) : String(value)}</dd></div>`,
    )}</dl>`;
  return html`<section class="card" aria-labelledby="model-settings">
    <h2 id="model-settings">The recipe's model section</h2>
    ${list(changed)}
    <details><summary>${count(rest.length)} settings with their defaults</summary>${list(rest)}</details>
  </section>`;
}
