// Step 6: one token is drawn.

import { count, percent } from "../../../../studio/static/js/format.js";
import { html, useEffect, useMemo, useRef, useState } from "../../../../studio/static/js/ui.js";
import { NEUTRAL, Sampler } from "../sampling.js";
import { nameOf } from "./reading.js";
import { Bar, Facts, Name, Slider, Try } from "./parts.js";

const SHOWN = 10;
const MANY = 50; // draws of one click
const MOST_KEPT = 50; // largest top-k of the slider

const LETTERLESS = "This token has no letters of its own, so it cannot be added.";
const FULL = "The text is as long as these pictures can hold: shorten it to go on.";

export function SamplingStep({ model, reading, defaults, setText, busy }) {
  const [temperature, setTemperature] = useState(Math.min(2, defaults.temperature));
  const [top_k, setTopK] = useState(Math.min(MOST_KEPT, defaults.top_k));
  const [drawn, setDrawn] = useState([]); // ids, the last one last
  const logits = useMemo(() => reading.trace.logits(reading.length - 1), [reading]);
  const seed = useRef(1);
  const settings = { ...NEUTRAL, temperature, top_k };
  const { after } = useMemo(
    () => new Sampler({ ...settings, seed: 0 }, reading.ids, []).sample(logits, SHOWN),
    [logits, temperature, top_k],
  );
  const before = reading.chances(reading.length - 1);
  useEffect(() => setDrawn([]), [logits, temperature, top_k]);
  const draw = (n) => {
    const sampler = new Sampler({ ...settings, seed: seed.current++ }, reading.ids, []);
    setDrawn((was) => [...was, ...Array.from({ length: n }, () => sampler.sample(logits, 0).id)]);
  };
  const last = drawn.at(-1);
  const times = (id) => drawn.filter((one) => one === id).length;
  const rows = after.top.map(({ id, logprob }) => ({ id, chance: Math.exp(logprob) }));
  const elsewhere = drawn.length - rows.reduce((sum, { id }) => sum + times(id), 0);
  const said = model.tokenizer.decode(reading.ids);
  const piece = last == null ? "" : model.tokenizer.decode([...reading.ids, last]).slice(said.length);
  const refusal = !piece || piece.includes("\uFFFD") ? LETTERLESS : reading.n_tokens > reading.length ? FULL : null;
  const adds = last != null && !refusal && !busy;
  return html`<p>Now one token is drawn, as from a lottery drum: the likelier a token, the more tickets it has. ${""}
      The <b>temperature</b> makes the draw careful (low) or wild (high). <b>Top-k</b> leaves only the k likeliest
      tokens in the drum.</p>
    <div class="ex-picture">
      <p class="ex-large">${reading.length > 3 && "… "}<${Name}>${reading.names.slice(-3).join("")}<//> ${" "}
        <span class="ex-drawn" key=${drawn.length} role="status">${
          last == null ? "?" : html`<bdi class="spelling">${nameOf(model, last)}</bdi>`
        }</span></p>
      <div class="ex-sliders">
        <${Slider} name="Temperature" value=${temperature} set=${setTemperature} max=${2} step=${0.05}
          text=${(x) => (x === 0 ? "0, always the likeliest" : String(Number(x.toFixed(2))))} />
        <${Slider} name="Top-k" value=${top_k} set=${setTopK} max=${Math.min(MOST_KEPT, logits.length)}
          text=${(k) => (k === 1 ? "only the likeliest" : k ? `the ${k} likeliest` : "off, all tokens")} />
      </div>
      <div class="ex-buttons">
        <button class="button primary" type="button" onClick=${() => draw(1)}>Draw one</button>
        <button class="button" type="button" onClick=${() => draw(MANY)}>Draw ${MANY}</button>
        <button class="button" type="button" aria-disabled=${String(!adds)}
          onClick=${() => adds && setText(reading.text + piece)}>Add it to the text</button></div>
      <ul class="ex-draws">${rows.map(
        ({ id, chance }) => html`<li key=${id} class=${id === last ? "chosen" : ""}>
          <bdi class="spelling">${nameOf(model, id)}</bdi>
          <span class="ex-both"><${Bar} share=${chance} /><${Bar} class="before" share=${before[id]} /></span>
          <b class="number">${percent(chance)}</b>
          <span class="number">${drawn.length ? `${times(id)} ×` : ""}</span></li>`,
      )}</ul>
      <p class="ex-caption">Thick: the chance in the drum. Thin: the chance by the model, before these settings.${
        drawn.length
          ? ` ${count(drawn.length)} ${drawn.length === 1 ? "draw" : "draws"}${
              elsewhere ? `, ${elsewhere} of them of other tokens` : ""
            }.`
          : ""
      }${last != null && refusal && ` ${refusal}`}</p></div>
    <${Facts} of=${[
      `In Play, this model writes with temperature ${defaults.temperature}${
        defaults.top_k ? ` and top-k ${defaults.top_k}` : ""
      }, unless you change it.`,
      "Draw, add, read again, draw again: this is how a model writes a text, one token at a time.",
    ]} />
    <${Try}>Set the temperature to 0 and draw ${MANY}. What happens? Then set it to 2. Which setting would
      you use for a poem, and which for a sum?<//>`;
}
