// The charts of the chosen runs. Each requests the points of the shown window once it is visible.

import { get } from "../api.js";
import { bytes, count, figure } from "../format.js";
import { html, useEffect, useMemo, useRef, useState } from "../ui.js";
import { Chart, PARENT, styleOf } from "./chart.js";
import { Line } from "./list.js";

const POINTS = 40_000;
const MOST_PARTS = 8;
const MOST_RAW = 16; // with more, the unsmoothed lines hide the smoothed ones
const WAIT_MS = 60;
const TITLES = {
  "validation.loss": "Validation loss",
  "train.loss": "Training loss",
  "validation.bits_per_byte": "Bits per byte",
  "train.reward": "Reward",
  "train.learning_rate": "Learning rate",
  "train.grad_norm": "Gradient norm",
  "train.tokens_per_second": "Tokens a second",
  "train.utilization": "Utilization",
  "validation.perplexity": "Perplexity",
  "train.gradient_norm_by_layer": "Gradient norm by layer",
  "train.activation_rms_by_layer": "Block output (RMS) by layer",
  "train.seconds_by_part": "Seconds by part",
  "train.flops_per_second": "FLOP a second",
  "train.resident_bytes": "Resident memory",
  "train.peak_allocated_bytes": "Peak memory of tensors",
  "train.allocated_bytes": "Memory of tensors",
};
const ORDER = Object.keys(TITLES);
const NOT_SMOOTHED = [
  "train.learning_rate",
  "train.resident_bytes",
  "train.peak_allocated_bytes",
  "train.allocated_bytes",
];

function titleOf(key) {
  const [kind, ...rest] = key.split(".");
  const words = rest.join(".").replaceAll("_", " ");
  return TITLES[key] ?? (kind === "validation" ? `Validation ${words}` : words[0].toUpperCase() + words.slice(1));
}

function ordered(keys) {
  const place = (key) => (ORDER.includes(key) ? ORDER.indexOf(key) : ORDER.length);
  return [...new Set(keys)].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
}

/** `rows`: the runs that are drawn; `parents`: the runs from which forks among them were made. */
export function Figures({ rows, parents, styles, view, version, zoom, pick }) {
  const keys = useMemo(() => ordered(rows.flatMap((row) => row.keys)), [rows]);
  const [focus, setFocus] = useState(null);
  const run = rows.find((row) => row.id === focus) ?? rows[0];
  const known = [...parents, ...rows].map((row) => `${row.id} ${row.keys.length}`).join("\n");
  const wanted = useMemo(
    () => (key) =>
      [...parents, ...rows]
        .filter((row) => row.keys.includes(key))
        .map((row) => ({ run: row.id, key, name: row.id, style: styles.get(row.id) ?? PARENT })),
    [known, keys.join(), styles],
  );
  return html`
    <div class="charts">${keys.map(
      (key) => html`<${Figure} key=${key} title=${titleWithUnit(key, rows)} wanted=${wanted} of=${key}
      ...${{ view, version, zoom, pick }} />`,
    )}</div>
    ${
      run &&
      Object.keys(run.details).length > 0 &&
      html`<section class="by-part">
      <h2>By layer and by part</h2>
      <label class="quiet">
        Layers and parts of <select class="field" value=${run.id} onChange=${(event) => setFocus(event.target.value)}>
        ${rows.map((row) => html`<option key=${row.id} value=${row.id}>${row.id}</option>`)}</select></label>
      <div class="charts">${ordered(Object.keys(run.details)).map(
        (key) => html`<${Parts} key=${`${run.id} ${key}`} run=${run.id} of=${key}
        names=${run.details[key]} ...${{ view, version, zoom, pick }} />`,
      )}</div>
    </section>`
    }`;
}

function titleWithUnit(key, rows) {
  const units = new Set(rows.map((row) => row.loss_unit).filter(Boolean));
  if (!/\.loss$/.test(key) || !units.size) return titleOf(key);
  return `${titleOf(key)}, ${units.size === 1 ? [...units][0] : "the units differ: do not compare the curves"}`;
}

/** A figure of one run with a value for each layer or part. If there are many, MOST_PARTS of them are drawn, evenly
 * spaced. */
function Parts({ run, of, names, ...props }) {
  const text = names.join("\n");
  const wanted = useMemo(() => {
    const n = Math.min(names.length, MOST_PARTS);
    const places = [
      ...new Set(Array.from({ length: n }, (_, i) => Math.round((i * (names.length - 1)) / Math.max(1, n - 1)))),
    ];
    const nameOf = (name) => (/_by_layer$/.test(of) ? `layer ${Number(name) + 1}` : name);
    return () =>
      places.map((place, i) => ({ run, key: `${of}.${names[place]}`, name: nameOf(names[place]), style: styleOf(i) }));
  }, [run, of, text]);
  return html`<div class="parts"><${Figure} title=${titleOf(of)} of=${of} wanted=${wanted} ...${props} />
    <ul class="legend-lines">${wanted().map(
      (one) => html`<li key=${one.name}><${Line} style=${one.style} /> ${one.name}</li>`,
    )}</ul></div>`;
}

function Figure({ title, of, wanted, view, version, zoom, pick }) {
  const place = useRef(null);
  const seen = useSeen(place);
  const list = useMemo(() => wanted(of), [wanted, of]);
  const [answer, setAnswer] = useState({ curves: [], bands: [] });
  const [problem, setProblem] = useState(null);
  const smooth = of.startsWith("train.") && !NOT_SMOOTHED.includes(of) ? view.smooth : 0;
  const question = useMemo(
    () => (list.length ? questionOf(list, view, smooth) : null),
    [list, view.x, view.window, view.logX, smooth],
  );
  useEffect(() => {
    if (!seen || !question) return undefined;
    const stop = new AbortController();
    const timer = setTimeout(async () => {
      try {
        setAnswer(await get(question, { signal: stop.signal }));
        setProblem(null);
      } catch (error) {
        if (error.name !== "AbortError") setProblem(error.message);
      }
    }, WAIT_MS);
    return () => (clearTimeout(timer), stop.abort());
  }, [seen, question, version]);
  const drawn = useMemo(() => {
    const known = new Map(list.map((one) => [`${one.run}\n${one.key}`, one]));
    return (answer.x === view.x ? answer.curves : [])
      .map((curve) => ({
        ...known.get(`${curve.run}\n${curve.key}`),
        id: curve.run,
        x: curve.x,
        y: curve.y,
        raw: curve.raw,
        forkedAt: curve.forked_at,
      }))
      .filter((curve) => curve.style && curve.x.length);
  }, [answer, list, view.x]);
  const bands = useMemo(() => answer.bands.map((band) => ({ ...band, style: bandStyle(band, list) })), [answer, list]);
  return html`<div class="figure" ref=${place}>
    ${
      seen === null
        ? html`<div class="chart empty"><h2>${title}</h2></div>`
        : html`<${Chart} title=${title} curves=${drawn} bands=${bands}
      view=${view} zoom=${zoom} pick=${pick} xName=${view.x} ...${writing(of)} />`
    }
    ${bands.map(
      (band) =>
        html`<p class="quiet" key=${band.name}>
          The shade is the band of ${band.name}: one more run lies in it with 95% probability.</p>`,
    )}
    ${
      answer.curves.some((curve) => !curve.whole) &&
      html`<p class="quiet" role="status">
        Reading ${count(answer.curves.filter((curve) => !curve.whole).length)} of ${count(list.length)} logs…</p>`
    }
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
  </div>`;
}

/** The formats of a figure's values, and of the texts at the axis if they differ. */
function writing(of) {
  if (/_bytes$/.test(of)) return { write: bytes, tick: bytes };
  return { write: /loss|bits/.test(of) ? (y) => y.toFixed(4) : figure };
}

function bandStyle(band, list) {
  return list.find((one) => band.runs.includes(one.run))?.style ?? styleOf(0);
}

function questionOf(list, view, smooth) {
  const asked = new URLSearchParams({
    x: view.x,
    points: Math.max(60, Math.min(1200, Math.floor(POINTS / list.length))),
    smooth,
  });
  if (smooth && list.length <= MOST_RAW) asked.set("raw", "true");
  if (view.logX) asked.set("log", "true");
  const [from, to] = view.window ?? [];
  for (const [name, end] of Object.entries(view.window ? { from, to } : {})) asked.set(name, end);
  for (const run of new Set(list.map((one) => one.run))) asked.append("run", run);
  for (const key of new Set(list.map((one) => one.key))) asked.append("key", key);
  return `studio/runs/curves?${asked}`;
}

/** Whether an element is in the window or at most 200 pixels outside; null until it is there for the first time. */
function useSeen(place) {
  const [seen, set] = useState(null);
  useEffect(() => {
    const observer = new IntersectionObserver(
      ([entry]) => set((was) => entry.isIntersecting || (was === null ? null : false)),
      { rootMargin: "200px" },
    );
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  return seen;
}
