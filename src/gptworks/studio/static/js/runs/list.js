// The runs: search, order, and which of them are drawn.

import { count } from "../format.js";
import { addressOf } from "../shell.js";
import { cx, html, memo, Name, useCallback, useMemo, useState } from "../ui.js";
import { PARENT } from "./chart.js";

const MOST_SHOWN = 400;
const NAMES = new Intl.Collator("en", { numeric: true });
const ORDERS = {
  newest: ["Newest", newest],
  name: ["Name", (a, b) => NAMES.compare(a.id, b.id)],
  best: ["Best loss", (a, b) => lossOf(a.best) - lossOf(b.best)],
  last: ["Last loss", (a, b) => lossOf(a.last) - lossOf(b.last)],
  step: ["Steps", (a, b) => b.step - a.step],
};

/** Compare two runs for sorting, the newest first. */
export function newest(a, b) {
  return b.started - a.started || NAMES.compare(a.id, b.id);
}

function lossOf(evaluation) {
  return typeof evaluation?.loss === "number" ? evaluation.loss : Infinity;
}

/** A loss as `gptworks compare` prints it. */
export function loss(value) {
  return typeof value === "number" ? value.toFixed(4) : (value ?? "–");
}

export const RunList = memo(({ rows, leftOut, chosen, selected, styles, faint, choose, select, parts, stop }) => {
  const [search, setSearch] = useState("");
  const [order, setOrder] = useState("newest");
  const found = useMemo(() => {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) =>
      words.every((word) => `${row.id} ${row.recipe ?? ""} ${row.state}`.toLowerCase().includes(word));
    return rows.filter(fits).sort(ORDERS[order][1]);
  }, [rows, search, order]);
  const reading = rows.filter((row) => !row.whole).length;
  const toggle = useCallback(
    (id) => choose((was) => (was.includes(id) ? was.filter((one) => one !== id) : [...was, id])),
    [choose],
  );
  return html`<section class="card runs-list" aria-label="List of runs">
    <div class="runs-tools">
      <label><span class="hidden-text">Search runs</span>
        <input class="field" type="search" placeholder="Search name, recipe, state"
        value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>
      <label><span class="hidden-text">Order of the runs</span><select class="field" value=${order}
        onChange=${(event) => setOrder(event.target.value)}>${Object.entries(ORDERS).map(
          ([key, [name]]) => html`
        <option key=${key} value=${key}>${name}</option>`,
        )}</select></label>
      <button class="button small" onClick=${() => choose(found.slice(0, 256).map((row) => row.id))}>All shown</button>
      <button class="button small" onClick=${() => choose([])}>None</button>
    </div>
    <p class="quiet" role="status">${count(found.length)} of ${count(rows.length)} runs, ${count(chosen.length)} drawn${
      reading > 0 && `, ${count(reading)} still being read`
    }</p>
    <${LeftOut} reasons=${leftOut} />
    <div class="runs-rows" tabindex="0" role="group" aria-label="Runs to draw">
      ${found.slice(0, MOST_SHOWN).map(
        (row) => html`<${Row} key=${row.id} row=${row} style=${styles.get(row.id)}
          isFaint=${faint.some((one) => one.id === row.id)} isSelected=${row.id === selected}
        ...${{ toggle, select, parts, stop }} />`,
      )}
      ${
        found.length > MOST_SHOWN &&
        html`<p class="quiet">${count(found.length - MOST_SHOWN)} more: search for them.</p>`
      }
    </div>
  </section>`;
});

/** The number of runs that are not read, and the reason for each. */
export function LeftOut({ reasons }) {
  const found = Object.entries(reasons);
  if (!found.length) return null;
  return html`<details class="left-out"><summary>
    ${count(found.length)} ${found.length > 1 ? "runs are" : "run is"} left out</summary>
    <ul>${found
      .slice(0, MOST_SHOWN)
      .map(
        ([id, reason]) => html`<li key=${id}><b>${id}</b> <span class="quiet">${reason}</span></li>`,
      )}</ul></details>`;
}

/** Links to a run in the other parts. */
const LEADS = {
  play: "Play",
  read: "Read",
  time: "Through time",
  data: "Data",
  model: "Model",
  start: "Fork or resume",
};

/** A run in the list. The checkbox draws its curves; the name selects the run in all parts. The selected run has links
 * to the other parts. */
const Row = memo(({ row, style, isFaint, isSelected, toggle, select, parts, stop }) => {
  const state = row.problem ? "cannot be read" : !row.whole ? "reading…" : row.state;
  return html`<div class=${cx("run", style && "chosen", isSelected && "selected")}
      onClick=${(event) => event.target.closest("input, button, a") || select(row.id)}>
    <input type="checkbox" aria-label=${`Draw ${row.id}`} checked=${Boolean(style)} onChange=${() => toggle(row.id)} />
    <${Line} style=${style ?? (isFaint && PARENT)} />
    <button class="name" aria-pressed=${String(isSelected)} onClick=${() => select(row.id)}>
      <${Name} text=${row.id} /></button>
    <span class=${cx("state", `is-${row.problem ? "problem" : row.state}`)}>${state}</span>
    <span class="facts quiet number">step ${count(row.step)}${
      row.best && html` · best ${loss(row.best.loss)} · last ${loss(row.last.loss)}`
    }${
      !row.best && row.train_loss != null && ` · loss ${loss(row.train_loss)}`
    }${row.recipe && row.recipe !== row.id && ` · ${row.recipe}`}</span>
    ${
      row.origin &&
      html`<span class="facts quiet">forked from ${row.origin.run} at step ${count(row.origin.step)}</span>`
    }
    ${row.problem && html`<span class="facts problem">${row.problem}</span>`}
    ${row.skipped && html`<span class="facts quiet">${row.skipped}</span>`}
    ${row.thinned && html`<span class="facts quiet">older records are shown thinned out</span>`}
    ${
      isSelected &&
      html`<nav class="facts run-links" aria-label=${`Other parts with ${row.id}`}>${parts
        .filter((key) => LEADS[key])
        .map(
          (key) => html`
      <a key=${key} href=${addressOf(key, row.id)}>${LEADS[key]}</a>`,
        )}</nav>`
    }
    ${stop && row.state === "running" && html`<${Stop} run=${row.id} stop=${stop} />`}
  </div>`;
});

/** Asks a run to stop, once. */
function Stop({ run, stop }) {
  const [asked, ask] = useState(false);
  const [problem, setProblem] = useState(null);
  const click = () => {
    ask(true);
    setProblem(null);
    stop(run).catch((error) => (setProblem(error.message), ask(false)));
  };
  return html`<div class="facts run-stop"><button class="button small" disabled=${asked} onClick=${click}>
    Stop <span class="hidden-text">${run}</span></button>
    <span class="quiet" role="status">${asked && "stopping: it saves a checkpoint"}</span>
    ${problem && html`<span class="problem" role="alert">${problem}</span>`}</div>`;
}

/** A run's colour and line. */
export function Line({ style }) {
  return html`<span class=${cx("line", style ? `series-${style.colour} dash-${style.dash}` : "none")}
    aria-hidden="true"></span>`;
}
