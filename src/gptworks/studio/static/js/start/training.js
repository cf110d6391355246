// The training runs: their last lines, and a button that stops them.

import { get } from "../api.js";
import { html, useEffect, useState } from "../ui.js";

const EVERY_MS = 1500;
const ENDED_LINES = 5; // of a run that ended well: its result and the next commands

/** `card`: the component that shows a run, which also gets `more`. */
export function Training({ state, shown, act, readOnly, card = Process, ...more }) {
  const [found, setFound] = useState([]);
  const [hidden, hide] = useState(new Set());
  const running = state.models.filter((model) => model.state === "running").map((model) => model.id);
  const asked = running
    .slice(0, 32)
    .map((id) => `run=${encodeURIComponent(id)}`)
    .join("&");
  useEffect(() => {
    if (!shown) return undefined;
    let timer;
    const look = async () => {
      try {
        setFound((await get(`studio/start/processes?${asked}`)).processes);
      } catch {
        // the frame reports a lost server
      }
      timer = setTimeout(look, EVERY_MS);
    };
    look();
    return () => clearTimeout(timer);
  }, [shown, asked]);
  const rows = found
    .filter((one) => one.running !== null || running.includes(one.run))
    .filter((one) => !hidden.has(`${one.run} ${one.code}`))
    .reverse();
  return rows.map(
    (one) => html`<${card} key=${one.run} ...${{ one, act, readOnly, shown, ...more }}
      model=${state.models.find((model) => model.id === one.run)}
      hide=${() => hide(new Set([...hidden, `${one.run} ${one.code}`]))} />`,
  );
}

function Process({ one, act, readOnly, model, hide }) {
  const ended = one.running === false;
  const lines = one.code === 0 ? one.lines.slice(-ENDED_LINES) : one.lines;
  const words = ended
    ? one.code === 0
      ? "ended"
      : `ended with exit code ${one.code}`
    : one.stopping
      ? "stopping: it saves a checkpoint"
      : "training";
  return html`<section class="card start-process" aria-label=${`${one.run}, ${words}`}>
    <div class="toolbar"><h2>${one.run}</h2>
      <span class=${one.code ? "problem" : "quiet"} role="status">${words}</span><span class="fill"></span>
      ${model && html`<a href=${`#/runs/${one.run.split("/").map(encodeURIComponent).join("/")}`}>Curves</a>`}
      ${
        ended
          ? html`<button class="button small" onClick=${hide}>Hide</button>`
          : !readOnly &&
            html`<button class="button small" disabled=${one.stopping}
          onClick=${() => act("stop", { run: one.run }, `${one.run} is asked to stop.`)}>Stop</button>`
      }</div>
    ${
      lines.length > 0
        ? html`<pre class="start-console" tabindex="0" aria-label="Last lines">${lines.join("\n")}</pre>`
        : one.running && html`<p class="quiet start-about">It begins; its first lines follow.</p>`
    }
  </section>`;
}
