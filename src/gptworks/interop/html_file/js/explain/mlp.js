// Step 4: each token is worked on alone, by neurons.

import { count, percent } from "../../../../studio/static/js/format.js";
import { html, useMemo, useState } from "../../../../studio/static/js/ui.js";
import { argmax, softmax } from "../sampling.js";
import { nameOf } from "./reading.js";
import { Choice, Facts, Heat, Layer, Name, Tokens, Try, decimal, largestOf } from "./parts.js";

const STRONGEST = 8;
const GATED = (name) => `Each neuron has a gate: a second number, which opens or closes it (${name}).`;
const LETS = "A neuron lets a large number pass and holds a negative one back, almost to 0 (GELU).";
const ACTIVATIONS = {
  gelu: LETS,
  gelu_tanh: LETS,
  relu2: "A neuron turns a negative number into 0, so that it is silent, and squares a positive one (squared ReLU).",
  swiglu: GATED("SwiGLU"),
  geglu: GATED("GEGLU"),
  geglu_tanh: GATED("GEGLU"),
};
const WHERE = { after: "After", both: "Before and after" };
const NORMS = { layernorm: "LayerNorm", rmsnorm: "RMSNorm" };

export function MlpStep({ how, model, reading, at, choose }) {
  const { n_layers, d_ff, mlp, norm, norm_placement, parallel_residual: parallel } = how.model;
  const [layer, setLayer] = useState(0);
  const [picked, pick] = useState(null); // a neuron
  const neurons = useMemo(() => reading.trace.neurons(layer), [reading, layer]);
  const row = reading.row(neurons, at);
  const strongest = useMemo(
    () =>
      Array.from(row.keys())
        .sort((a, b) => Math.abs(row[b]) - Math.abs(row[a]))
        .slice(0, STRONGEST),
    [row],
  );
  const neuron = picked ?? strongest[0];
  const most = Math.max(...reading.names.map((_, t) => Math.abs(reading.row(neurons, t)[neuron]))) || 1;
  const silent = row.filter((value) => value === 0).length;
  const lowest = Math.min(...row);
  const [before, after] = useMemo(
    () => [2 * layer + 1, 2 * layer + 2].map((i) => best(model, reading.trace.lens(i, at))),
    [reading, layer, at],
  );
  const columns = Math.ceil(Math.sqrt(3 * row.length));
  return html`<p>${parallel ? "At the same time" : "Next"}, each token is worked on alone, by ${""}
      <b>${count(row.length)} neurons</b>. A neuron <b>fires</b> when it finds what it has learned to look for. Then it
      adds its own numbers to the token's list. This part is called the <b>MLP</b>.</p>
    <div class="ex-picture">
      <${Layer} n=${n_layers} value=${layer} set=${(one) => (setLayer(one), pick(null))} />
      <${Tokens} ...${{ reading, at, choose }} name="Tokens, and how the neuron fires for each"
        below=${(t) => decimal(reading.row(neurons, t)[neuron])}
        shade=${(t) => Math.abs(reading.row(neurons, t)[neuron]) / most} />
      <p class="ex-caption">Below each token: how neuron <b class="number">${neuron + 1}</b> fires for it.</p>
      <div class="ex-beside"><div>
        <${Heat} class="ex-neurons" values=${row} columns=${columns} most=${largestOf(row)} pick=${pick}
          label=${`The ${row.length} neurons of layer ${layer + 1} for this token`} />
        <p class="ex-caption">All ${count(row.length)} neurons for <${Name}>${reading.names[at]}<//>: ${""}
          <span class="ex-above">above 0</span>${
            lowest < 0 && html`, <span class="ex-below">below 0</span>, which pushes the other way`
          }. Click one.${silent > 0 && ` ${percent(silent / row.length)} of them are silent: exactly 0.`}</p></div>
        <div><h3>The neurons that fire most</h3>
          <${Choice} class="ex-list" name="Neuron" value=${neuron} choose=${pick} options=${strongest.map((one) => [
            one,
            html`<span>neuron ${one + 1}</span><b class="number">${decimal(row[one])}</b>`,
          ])} />
          <p class="ex-answer" role="status">If the model had to guess the next token without this MLP: ${""}
            <${Name}>${before.name}<//> <span class="number">(${percent(before.chance)})</span>. With it: ${""}
            <${Name}>${after.name}<//> <span class="number">(${percent(after.chance)})</span>.</p></div></div></div>
    <${Facts} of=${[
      ACTIVATIONS[mlp],
      d_ff && `${count(n_layers)} × ${count(d_ff)} = ${count(n_layers * d_ff)} neurons in all.`,
      parallel
        ? "In this model, attention and MLP of a layer work at the same time, on the same numbers."
        : n_layers > 1 && `Attention, then MLP: this is one layer. There are ${count(n_layers)}, one after the other.`,
      NORMS[norm] &&
        `${WHERE[norm_placement] ?? "Before"} each of these parts, the numbers are brought to a common size ` +
          `(${NORMS[norm]}).`,
    ]} />
    <${Try}>Choose the neuron that fires most. For which other tokens does it fire? Add a word to your text that
      might wake it too.<//>`;
}

function best(model, logits) {
  const chances = softmax(logits);
  const id = argmax(chances);
  return { name: nameOf(model, id), chance: chances[id] };
}
