// Through time: the same text under each checkpoint of the run.

import { stream } from "../api.js";
import { count, figure, percent, visible } from "../format.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { Writes } from "./writes.js";

const WIDE = 600;
const HIGH = 140;
const MOST_KEPT = 8;
const kept = new Map(); // the latest answers, as long as the page is open

/** A text's loss at the run's checkpoints: `found`, an earlier answer or null, and `look`, which requests it. */
export function useSteps(body, answer) {
  const key = [body.model, ...answer.tokens.map(({ id }) => id)].join();
  // { steps, points: [{ step, nats, loss }], learned, threshold }
  const [found, setFound] = useState(kept.get(key) ?? null);
  const [problem, setProblem] = useState(null);
  const [work, setWork] = useState(null);
  const asked = useRef(null);
  useEffect(() => () => asked.current?.abort(), []);
  const look = async () => {
    const { signal } = (asked.current = new AbortController());
    setWork(asked.current);
    setProblem(null);
    let made = { steps: [], points: [], learned: null };
    try {
      for await (const event of stream("studio/read/checkpoints", body, { signal })) {
        if (event.type === "error") throw new Error(event.message);
        if (event.type === "start") made = { ...made, steps: event.steps };
        if (event.type === "checkpoint") made = { ...made, points: [...made.points, event] };
        if (event.type === "end") made = { ...made, learned: event.learned, threshold: event.threshold };
        setFound(made);
        kept.delete(key);
        kept.set(key, made);
        if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
      }
    } catch (error) {
      if (error.name !== "AbortError") setProblem(error.message);
    }
    setWork(null);
  };
  return { found, problem, work, look };
}

/** The step of a run's last checkpoint. */
export const newestOf = (model) => Math.max(...(model?.checkpoints ?? []).map(({ step }) => step));

/** `newest`: the step of the run's last checkpoint, which may be beyond those that were read; `writing`:
    whether the text that a checkpoint writes is shown without a click. */
export function Steps({
  through: { found, problem, work, look },
  body,
  answer,
  index,
  steps,
  setSteps,
  context,
  newest,
  writing = false,
}) {
  const points = found?.points ?? [];
  const at = steps ? points.findIndex((point) => point.step === steps.step) : points.length - 1;
  const whole = found && points.length === found.steps.length && found.steps.at(-1) === newest;
  return html`<section class="card steps" aria-labelledby="steps-title">
    <h2 id="steps-title">Through the checkpoints</h2>
    ${
      !points.length &&
      html`<p><button class="button" disabled=${Boolean(work)} onClick=${look}>${
        work ? "Reading …" : "Read the text at each checkpoint"
      }</button></p>`
    }
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${
      work &&
      found &&
      html`<p class="quiet" role="status">${count(points.length)} of ${count(found.steps.length)} checkpoints
      <button class="button small" onClick=${() => work.abort()}>Stop</button></p>`
    }
    ${
      !work &&
      points.length > 0 &&
      !whole &&
      html`<p class="quiet">Not all checkpoints were read. <button class="button small"
      onClick=${look}>Read them all</button></p>`
    }
    ${
      points.length > 0 &&
      html`<label class="slide">Checkpoint
        <input type="range" min="0" max=${points.length - 1} step="1" value=${at}
          aria-valuetext=${`step ${points[at].step}`}
          onInput=${(event) => setSteps(points[Number(event.target.value)])} /></label>
      <p class="number" role="status">Step <b>${count(points[at].step)}</b>: ${figure(points[at].loss)} nats per token${
        index != null &&
        points[at].nats[index] != null &&
        html`; <bdi class="spelling">${visible(answer.tokens[index].spelling)}</bdi> ${percent(
          Math.exp(-points[at].nats[index]),
        )}`
      }
        ${
          steps &&
          html` <button class="button small" onClick=${() => setSteps(null)}>
            Show step ${count(answer.step)} again</button>`
        }</p>
      <div class="curves">
        <${Curve} points=${points.map(({ step, loss }) => [step, loss])} at=${at}
          name="Loss of the text, nats per token"
          text=${figure} />
        ${
          index != null &&
          html`<${Curve} points=${points.map(({ step, nats }) => [step, Math.exp(-(nats[index] ?? Infinity))])} at=${at}
            most=${1}
          name=${`Probability of ${visible(answer.tokens[index].spelling)}`} text=${percent} />`
        }</div>
      ${
        !work &&
        found.learned &&
        index != null &&
        html`<p>${
          found.learned[index] == null
            ? `At the last checkpoint its probability is below ${percent(found.threshold)}: it is not learned.`
            : `Learned at step ${count(found.learned[index])}: from there on its probability stays at ${percent(
                found.threshold,
              )} or more.`
        }</p>`
      }
      <${Writes} ...${{ body, answer, index, context, writing }} step=${points[at].step} />`
    }
  </section>`;
}

function Curve({ points, at, name, most, text }) {
  const top = most ?? Math.max(...points.map(([, value]) => value), 1e-9);
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const x = (step) => (last > first ? ((step - first) / (last - first)) * (WIDE - 20) + 10 : WIDE / 2);
  const y = (value) => HIGH - 12 - (value / top) * (HIGH - 24);
  const path = points
    .map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`)
    .join("");
  const said = points.map(([step, value]) => `step ${step}: ${text(value)}`).join(", ");
  return html`<figure><figcaption class="quiet">${name}: ${text(points[0][1])} → ${text(points.at(-1)[1])}</figcaption>
    <svg viewBox=${`0 0 ${WIDE} ${HIGH}`} role="img" aria-label=${`${name}: ${said}`}>
      <line class="axis" x1="0" x2=${WIDE} y1=${HIGH - 12} y2=${HIGH - 12} /><path class="curve" d=${path} />
      ${points.map(
        ([step, value], i) => html`<circle key=${step} class=${i === at ? "now" : ""} cx=${x(step)} cy=${y(value)}
        r=${i === at ? 6 : 3.5}><title>${`step ${step}: ${text(value)}`}</title></circle>`,
      )}</svg></figure>`;
}
