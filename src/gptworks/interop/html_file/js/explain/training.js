// Step 7: how the model came to its numbers.

import { count, figure, percent, rate } from "../../../../studio/static/js/format.js";
import { html, useState } from "../../../../studio/static/js/ui.js";
import { lossShade } from "../../../../studio/static/js/read/text.js";
import { Facts, Name, Slider, Tokens, Try, decimal } from "./parts.js";

const WORDS = [
  [0.7, "It expected this."],
  [1.6, "It was hardly surprised."],
  [3, "It was a little surprised."],
  [4.6, "It was surprised."],
  [6.9, "It was very surprised."],
  [Infinity, "It did not expect this at all."],
];

export function TrainingStep({ how, model, reading, at, choose }) {
  const loss = reading.loss(at);
  const { meanLoss } = reading;
  return html`<p>Training begins with random numbers, so the model knows nothing. It reads text and guesses each next
      token. If the right one had a small chance, the <b>loss</b> is large: think of it as surprise. Then its ${""}
      ${how.parameters ? html`<b>${count(how.parameters)} numbers</b>` : "numbers"} are changed a tiny bit, so that it
      would be less surprised next time.</p>
    <div class="ex-picture">
      <${Tokens} ...${{ reading, at, choose }} name="How surprised it was by each token"
        shade=${(t) => lossShade(reading.loss(t))}
        below=${(t) => (t ? decimal(reading.loss(t)) : "–")} />
      <p class="ex-answer" role="status">${
        loss == null
          ? html`<${Name}>${reading.names[at]}<//> is the first token: nothing comes before it, so it is not guessed.`
          : html`The model gave <${Name}>${reading.names[at]}<//> a chance of ${" "}
              <b class="number">${percent(Math.exp(-loss))}</b>: loss <b class="number">${decimal(loss)}</b>.
              ${` ${WORDS.find(([bound]) => loss <= bound)[1]}`}`
      }</p>
      ${
        meanLoss != null &&
        html`<p class="ex-caption">Average loss of your text: <b class="number">${decimal(meanLoss)}</b>, as if each
          time it had to guess among <b class="number">${rate(Math.exp(meanLoss))}</b> tokens, all of the same chance.
          If it guessed blindly among all its tokens, the loss would be ${""}
          <b class="number">${decimal(Math.log(model.engine.vocabulary))}</b>.</p>`
      }
      ${how.losses?.length > 1 && html`<${Curve} rows=${how.losses} />`}</div>
    <${Facts} of=${[
      how.imported && "It was trained elsewhere; this page does not know how.",
      !how.imported && how.began && `It did not begin at random, but with the numbers of ${how.began}.`,
      !how.imported &&
        how.tokens > 0 &&
        `${how.began ? "Since then it has read" : "It read"} ${count(how.tokens)} tokens` +
          (how.step ? ` in ${count(how.step)} steps` : "") +
          (how.seconds > 0 ? `, which took ${duration(how.seconds)}${how.device ? ` (${how.device})` : ""}` : "") +
          ".",
      KEPT[how.kept],
      how.steps > how.step &&
        `Its training went on to step ${count(how.steps)}; this page has step ${count(how.step)}.`,
      how.loss != null &&
        PREDICTS.includes(how.objective) &&
        `On text that was kept from it, its loss is ${figure(how.loss)}: as if it guessed among ` +
          `${rate(Math.exp(how.loss))} tokens.`,
      OBJECTIVES[how.objective],
      model.chat && "It is made for conversations. Here it reads your text as a plain text.",
    ]} />
    <${Try}>Write a text that the model finds easy, and one that it finds hard. What would you have to train it on to
      make the hard one easy?<//>`;
}

const PREDICTS = ["next_token", "instruction"]; // objectives whose loss is the loss of the next token
const OBJECTIVES = {
  instruction: "It was tuned on conversations: only the answers counted.",
  distillation: "It learned from a larger model: it had to give the same chances as that one.",
  preference: "It was tuned with pairs of answers, a better and a worse one: the better one had to become likelier.",
  odds_ratio: "It was tuned with pairs of answers, a better and a worse one: the better one had to become likelier.",
  reward: "It wrote answers itself, and those that got more points had to become likelier.",
};

const KEPT = {
  adapter: "Most of its own numbers were kept: a small addition to them was trained (LoRA). This page has their sums.",
  freeze: "A part of its numbers was kept as it was.",
};

function duration(seconds) {
  if (seconds < 2) return "less than two seconds";
  if (seconds < 150) return `${Math.round(seconds)} seconds`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} minutes`;
  return `${Number((seconds / 3600).toPrecision(2))} hours`;
}

const WIDE = 600;
const HIGH = 220;

/** A curve of the loss during training, with a slider that shows the loss at a step. */
function Curve({ rows }) {
  const [i, setI] = useState(rows.length - 1);
  const values = rows.flatMap(([, train, held]) => [train, held]).filter((value) => value != null);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const last = rows.at(-1)[0];
  const first = rows[0][0];
  const x = (step) => 8 + ((step - first) / (last - first || 1)) * (WIDE - 16);
  const y = (value) => 10 + ((most - value) / (most - least || 1)) * (HIGH - 20);
  const series = [1, 2].map((k) => rows.filter((row) => row[k] != null).map((row) => [row[0], row[k]]));
  const whole = series[1].length > 1 ? series[1] : series[0];
  if (whole.length < 2) return null;
  const path = (points) =>
    points.map(([step, value], k) => `${k ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const [step, train, held] = rows[i];
  const said = [
    train != null && `loss ${figure(train)} on what it read`,
    held != null && `${figure(held)} on text kept from it`,
  ];
  const where = whole === series[1] ? "on text kept from it " : "";
  const ends = [whole[0], whole.at(-1)].map((row) => `${figure(row[1])} at step ${count(row[0])}`);
  return html`<figure class="ex-curve">
    <figcaption>Its loss ${where}while it learned, from ${ends.join(" to ")}</figcaption>
    <div class="ex-axis"><div class="number" aria-hidden="true"><span>${figure(most)}</span>
        <span>${figure(least)}</span></div>
      <svg viewBox=${`0 0 ${WIDE} ${HIGH}`} preserveAspectRatio="none" role="img"
        aria-label="The loss through training">
      <path class="train" d=${path(series[0])} /><path class="held" d=${path(series[1])} />
      <line class="now" x1=${x(step)} x2=${x(step)} y1="0" y2=${HIGH} /></svg>
      <div class="number" aria-hidden="true"><span>step ${count(first)}</span>
        <span>step ${count(last)}</span></div></div>
    <${Slider} name="Step" value=${i} set=${setI} max=${rows.length - 1}
      text=${(k) => count(rows[k][0])} />
    <p class="ex-caption" role="status"><span class="ex-above">on what it read</span> · ${""}
      <span class="ex-below">on text kept from it</span>. At step ${count(step)}: ${""}
      ${said.filter(Boolean).join(", ")}.</p></figure>`;
}
