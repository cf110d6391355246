// Step 5: a score for each token of the vocabulary.

import { count, percent } from "../../../../studio/static/js/format.js";
import { html, useMemo, useState } from "../../../../studio/static/js/ui.js";
import { argmax, largest, softmax } from "../sampling.js";
import { nameOf } from "./reading.js";
import { Bar, Choice, Facts, Name, Tokens, Try, decimal } from "./parts.js";

const CANDIDATES = 8;
const PARTS = 10;

export function LogitsStep({ how, model, reading, at, choose }) {
  const [picked, pick] = useState(null); // a candidate
  const logits = useMemo(() => reading.trace.logits(at), [reading, at]);
  const chances = reading.chances(at);
  const candidates = useMemo(() => largest(logits, CANDIDATES), [logits]);
  const id = candidates.includes(picked) ? picked : candidates[0];
  const next = reading.ids[at + 1];
  return html`<p>After the last layer, the model gives every token that it knows a score: how well would it fit next?
      This score is the <b>logit</b>. Then <b>softmax</b> turns the scores into percentages, which together make
      100 %. This is all that a model ever does: it says how likely each next token is.</p>
    <div class="ex-picture">
      <${Tokens} ...${{ reading, at, choose }} name="After which token?" off=${(t) => t > at} />
      <div class="ex-beside"><div>
        <h3>What comes after <${Name}>${reading.names[at]}<//>?</h3>
        <${Choice} class="ex-list" name="Next token" value=${id} choose=${pick} options=${candidates.map((one) => [
          one,
          html`<bdi class="spelling">${nameOf(model, one)}</bdi>
            <span class="number quiet">${decimal(logits[one])}</span><${Bar} share=${chances[one]} />
            <b class="number">${percent(chances[one])}</b>`,
        ])} />
        <p class="ex-caption">The ${candidates.length} likeliest of ${count(logits.length)} tokens: the
          score, then the chance.${
            next != null && html` In your text came <${Name}>${reading.names[at + 1]}<//>: ${percent(chances[next])}.`
          }</p></div>
        <div><h3>Who votes for <${Name}>${nameOf(model, id)}<//>?</h3>
          <${Votes} ...${{ reading, at, id }} cap=${how.model.logit_softcap} /></div></div>
      <h3>The best guess, layer by layer</h3>
      <${Ladder} ...${{ how, model, reading, at, id }} /></div>
    <${Facts} of=${[
      how.model.tie_embeddings === true &&
        "The scores come from the table of step 2, used the other way round: which token's list is most like this one?",
      how.model.tie_embeddings === false &&
        "The scores come from a second table, with a list for each token: which is most like the list that " +
          "arrives here?",
      `${count(logits.length)} scores, for each place of the text.`,
    ]} />
    <${Try}>Choose the tokens of your text one by one. Where is the model sure, with more than 90 %? Where does
      it have no idea? Why there?<//>`;
}

/** A list of the numbers that parts add to a token's logit. */
function Votes({ reading, at, id, cap }) {
  const parts = useMemo(() => reading.trace.parts(at, id), [reading, at, id]);
  const sorted = [...parts].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const shown = sorted.slice(0, sorted.length > PARTS + 1 ? PARTS : undefined);
  const rest = sorted.slice(shown.length);
  if (rest.length)
    shown.push({ name: `the other ${rest.length} together`, value: rest.reduce((sum, one) => sum + one.value, 0) });
  const most = Math.max(...shown.map(({ value }) => Math.abs(value))) || 1;
  const sum = parts.reduce((total, { value }) => total + value, 0);
  return html`<ul class="ex-votes">${shown.map(
    ({ name, layer, value }) => html`<li key=${`${layer} ${name}`}>
      <span>${layer == null ? name : `layer ${layer + 1} ${name}`}</span>
      <span class="ex-diverging" aria-hidden="true"><span class=${value < 0 ? "less" : "more"}
        style=${{ width: `${(50 * Math.abs(value)) / most}%` }}></span></span>
      <span class="number">${signed(value)}</span></li>`,
  )}</ul>
  <p class="ex-caption">Each part of the model adds to the score or takes from it. Together: ${" "}
    <b class="number">${signed(sum)}</b>, ${cap ? "which the model caps to" : ""} the score in the list.</p>`;
}

const signed = (x) => `${x < 0 ? "−" : "+"}${decimal(Math.abs(x))}`;

/** A list of the model's guesses if it stopped after each layer. */
function Ladder({ how, model, reading, at, id }) {
  const stops = useMemo(
    () =>
      Array.from({ length: how.model.n_layers + 1 }, (_, i) => {
        const chances = softmax(reading.trace.lens(2 * i, at));
        const best = argmax(chances);
        return { best, chance: chances[best], wanted: chances[id] };
      }),
    [reading, at, id],
  );
  return html`<ol class="ex-ladder">${stops.map(
    (
      { best, chance, wanted },
      i,
    ) => html`<li key=${i}><span class="quiet">${i ? `after layer ${i}` : "at the start"}</span>
      <bdi class="spelling">${nameOf(model, best)}</bdi><span class="number">${percent(chance)}</span>
      <${Bar} share=${wanted} /></li>`,
  )}</ol>
  <p class="ex-caption">What the model would say if it stopped there. The bar: the chance of ${" "}
    <${Name}>${nameOf(model, id)}<//>.</p>`;
}
