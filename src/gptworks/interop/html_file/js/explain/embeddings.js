// Step 2: each token becomes a list of numbers.

import { count } from "../../../../studio/static/js/format.js";
import { html, useMemo, useState } from "../../../../studio/static/js/ui.js";
import { Facts, Heat, Name, Tokens, Try, decimal, largestOf } from "./parts.js";

const SHOWN = 96; // number of a token's numbers shown
const ROWS = 16;

export function EmbeddingsStep({ how, reading, at, choose }) {
  const [over, setOver] = useState(null);
  const stream = useMemo(() => reading.trace.stream(0), [reading]);
  const most = useMemo(() => largestOf(stream), [stream]);
  const row = reading.row(stream, at);
  const n = Math.min(SHOWN, row.length);
  const alike = reading.names.map((_, t) => cosine(row, reading.row(stream, t)));
  const from = Math.max(0, Math.min(at - ROWS / 2, reading.length - ROWS));
  const rows = Array.from({ length: Math.min(ROWS, reading.length) }, (_, i) => from + i);
  const { position, bigram_vocab_size: n_pairs } = how.model;
  const best = alike.reduce(
    (found, one, t) =>
      t !== at && reading.ids[t] !== reading.ids[at] && (found < 0 || one > alike[found]) ? t : found,
    -1,
  );
  return html`<p>The model looks up each token in a large table and finds a list of ${""}
      <b>${count(row.length)} numbers</b>, its <b>embedding</b>. ${
        position === "learned" &&
        "A second list, for the token's place in the text, is added, so that the order counts. "
      }${
        n_pairs > 0 && "A list for the pair of this token and the one before it is added. "
      }Tokens that are used in the same way often get similar lists. So far, this is all that the model knows about
      your text.</p>
    <div class="ex-picture">
      <${Tokens} ...${{ reading, at, choose }} name="Choose a token to compare" below=${(t) => decimal(alike[t])}
        shade=${(t) => Math.max(0, alike[t])} />
      <p class="ex-caption">Below each token: how similar its list is to that of <${Name}>${reading.names[at]}<//>. 1 is
        the same direction, 0 is nothing in common, −1 is the opposite.${
          best >= 0 && html` Most similar here: <${Name}>${reading.names[best]}<//>.`
        }</p>
      <div class="ex-strips" aria-hidden="true">${rows.map(
        (t) => html`<div key=${t} class=${t === at ? "chosen" : ""} onClick=${() => choose(t)}>
          <bdi class="spelling">${reading.names[t]}</bdi>
          <${Heat} values=${reading.row(stream, t).subarray(0, n)} columns=${n} most=${most}
            over=${(i) => setOver(i == null ? null : [t, i])} /></div>`,
      )}</div>
      <p class="ex-caption number">${
        over
          ? html`Number ${over[1] + 1} of <${Name}>${reading.names[over[0]]}<//>: ${" "}
              <b>${decimal(reading.row(stream, over[0])[over[1]], 3)}</b>`
          : html`${row.length > n ? `The first ${n} of the ${count(row.length)}` : `All ${n}`} numbers of each token:
              ${" "}<span class="ex-above">above 0</span>, <span class="ex-below">below 0</span>; the stronger the
              colour, the farther from 0.`
      }</p></div>
    <${Facts} of=${[
      `The table has ${count(reading.model.engine.vocabulary)} lists of ${count(row.length)} numbers. ` +
        "Training found them all.",
      position === "learned" && "Each place in the text has a list of its own, which is added to that of the token.",
      n_pairs > 0 && `Its table of pairs has ${count(n_pairs)} lists; some pairs have to share one.`,
      position === "rope" && "These lists do not say where a token stands. That comes in step 3.",
      position === "none" &&
        "Nothing tells this model the place of a token. It can only use that each token sees those before it.",
      how.model.embedding_scale > 0 &&
        how.model.embedding_scale !== 1 &&
        `The numbers are multiplied by ${Number(how.model.embedding_scale.toPrecision(3))} before they are used.`,
    ]} />
    <${Try}>Write the same word twice. Are its two lists the same? ${
      position === "learned" || n_pairs > 0 ? "If not, why?" : "Does the model know at this point which one came first?"
    }<//>`;
}

/** Return the cosine of the angle between two lists of numbers. */
function cosine(a, b) {
  let [ab, aa, bb] = [0, 0, 0];
  for (let i = 0; i < a.length; i++) {
    ab += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return ab / (Math.sqrt(aa * bb) || 1);
}
