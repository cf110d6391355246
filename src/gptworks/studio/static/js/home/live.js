// A run that was started here: its progress in words, its newest samples, and links to the other parts.

import { get } from "../api.js";
import { count, percent, rate } from "../format.js";
import { addressOf } from "../shell.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { time } from "./found.js";

const EVERY_MS = 1500;
const MOST_LOOKS = 20; // most refreshes of the list of runs after the run's end, until the list has its checkpoint

/** `one`: the process; `model`: the run in the list of runs, if listed; `started`: the run that was started last. */
export function Live({ one, model, act, readOnly, hide, refresh, shown, started }) {
  const [found, setFound] = useState(null);
  const [looks, setLooks] = useState(0);
  const { run, code } = one;
  const ended = one.running === false;
  const card = useRef(null);
  const canTalk = Boolean(model && !model.problem);
  useEffect(() => {
    if (started === run) card.current.scrollIntoView({ block: "nearest" });
  }, []);
  useEffect(() => {
    if (!shown) return undefined;
    let timer;
    const look = async () => {
      try {
        setFound(await get(`studio/home/run?${new URLSearchParams({ run })}`));
      } catch {
        // the frame reports a lost server
      }
      timer = ended ? 0 : setTimeout(look, EVERY_MS);
    };
    look();
    return () => clearTimeout(timer);
  }, [run, shown, ended]);
  useEffect(() => {
    if (!shown || canTalk || code || looks >= MOST_LOOKS) return undefined;
    const timer = setTimeout(() => (refresh(), ended && setLooks(looks + 1)), EVERY_MS);
    return () => clearTimeout(timer);
  }, [shown, canTalk, code, looks, ended, model]);
  const link = (key, words, primary) =>
    html`<a class=${primary ? "button primary" : "button"} href=${addressOf(key, run)}>${words}</a>`;
  return html`<section class="card home-live" ref=${card} aria-label=${`Training of ${run}`}>
    <div class="toolbar"><h2>${run}</h2><span class="fill"></span>
      ${
        ended
          ? html`<button class="button small" onClick=${hide}>Hide</button>`
          : !readOnly &&
            html`<button class="button small" disabled=${one.stopping}
              onClick=${() => act("stop", { run })}>Stop</button>`
      }</div>
    ${
      found?.share != null &&
      html`<progress max="1" value=${found.share} aria-label=${`How much of ${run} is trained`} />`
    }
    <p role="status" class=${code ? "problem" : null}>${words(one, found)}</p>
    ${found?.loss != null && html`<p class="quiet">${learned(found)}</p>`}
    ${
      canTalk &&
      html`<div class="toolbar">${link("play", ended ? "Talk to it" : "Talk to it already", ended)}
        ${link("runs", "Curves")} ${ended && link("read", "Look inside it")}</div>`
    }
    ${
      found?.samples.length > 0 &&
      html`<h3>${`What it writes after step ${count(found.samples[0].step)}`}</h3>
      ${found.samples.map(
        ({ prompt, text }, i) => html`<p class="home-sample" key=${i} tabindex="0" role="group"
          aria-label=${`Sample ${i + 1} of ${run}`}><b>${prompt}</b>${text}</p>`,
      )}`
    }
    ${
      one.lines.length > 0 &&
      html`<details open=${Boolean(code)}><summary>What the program prints</summary>
        <pre class="home-recipe" tabindex="0" aria-label="Last lines">${one.lines.join("\n")}</pre></details>`
    }
  </section>`;
}

function words(one, found) {
  const step = found?.step ?? 0;
  const steps = `${count(step)}${found?.steps ? ` of ${count(found.steps)}` : ""} steps`;
  if (one.code) return `It ended with exit code ${one.code}: the last lines say why.`;
  if (one.running === false) return `It has ended, after ${steps}.`;
  if (one.stopping) return "It is stopping: it ends its step and saves a checkpoint.";
  if (!step) return "It prepares: it reads the texts, makes a tokenizer, and counts the tokens.";
  const left = found.seconds_left == null ? "" : `, about ${time(found.seconds_left / 60)} left`;
  return `It trains: ${steps}${found.share == null ? "" : `, ${percent(found.share)} done`}${left}.`;
}

function learned({ loss, first_loss: first, unit }) {
  if (unit !== "nats per token") return `Its loss is ${rate(loss)}, and was ${rate(first)} at first (${unit}).`;
  const among = (nats) => rate(Math.exp(nats));
  return (
    `To guess the next token, it hesitates as if between ${among(loss)} equally likely ones; ` +
    `at first, between ${among(first)}.`
  );
}
