// The part Runs: the curves of many runs as they train, and the conclusions from them.

import { post } from "./api.js";
import { chooseRun, lastChosen, NoRun, useRun } from "./choice.js";
import { follow } from "./runs/live.js";
import { styleOf } from "./runs/chart.js";
import { Figures } from "./runs/figures.js";
import { Comparison, Samples, StepDetails } from "./runs/findings.js";
import { LeftOut, newest, RunList } from "./runs/list.js";
import { Tries } from "./runs/tries.js";
import { html, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState, useTheme } from "./ui.js";

const FIRST = 8;
const NONE = [];
const REFRESH_MS = 2000;
const AXES = { step: "Steps", tokens: "Tokens", seconds: "Seconds" };

export function Part({ shown, route, state, refresh }) {
  const [{ runs, leftOut }, setRuns] = useState({ runs: null, leftOut: {} });
  const [problem, setProblem] = useState(null);
  const [chosen, setChosen] = useState(null);
  const [picked, setPicked] = useState(null);
  const [settings, set] = useState({ x: "step", window: null, smooth: 0, logX: false, logY: false, parents: true });
  const theme = useTheme();
  const rank = (row) => 2 * (row.id === lastChosen().model) + (row.state === "running");
  useEffect(
    () => (shown ? follow((found, out) => setRuns({ runs: found, leftOut: out }), setProblem) : undefined),
    [shown],
  );
  const rows = useMemo(() => (runs ? [...runs.values()] : []), [runs]);
  const linked = route.join("/");
  const { model: selected } = useRun(state.models, shown);
  useLayoutEffect(() => {
    // a linked run may come into the list later
    if (!rows.length || (chosen && !linked)) return;
    if (runs.has(linked)) {
      setChosen([linked]);
      chooseRun({ model: linked });
    } else if (!chosen) {
      const first = [...rows].sort((a, b) => rank(b) - rank(a) || newest(a, b)).slice(0, FIRST);
      setChosen(first.map((row) => row.id));
    }
  }, [rows.length > 0, linked, Boolean(runs?.has(linked))]);
  const select = useCallback((id) => {
    chooseRun({ model: id });
    setChosen((was) => (was.includes(id) ? was : [...was, id]));
  }, []);
  const ids = useMemo(() => (chosen ?? []).filter((id) => runs?.has(id)), [chosen, runs?.size]);
  const styles = useStyles(ids);
  const drawn = useMemo(() => ids.map((id) => runs.get(id)).filter(Boolean), [ids, runs]);
  const parents = useMemo(
    () =>
      drawn
        .map((row) => row.origin?.id)
        .filter((id, i, all) => runs.has(id) && !ids.includes(id) && all.indexOf(id) === i)
        .map((id) => runs.get(id)),
    [drawn],
  );
  const faint = settings.parents ? parents : NONE;
  const version = useVersion([...drawn, ...faint]);
  const view = useMemo(() => ({ ...settings, theme }), [settings, theme]);
  const zoom = useCallback((from, to) => set((was) => ({ ...was, window: from == null ? null : [from, to] })), []);
  const pick = useCallback((run, at) => setPicked({ run, at, x: view.x }), [view.x]);
  const forget = useCallback(() => setPicked(null), []);
  const stop = useCallback((run) => post("studio/start/stop", { run }).then(refresh), [refresh]);
  if (!runs) return html`<p class="notice" role="status">${problem ?? "Looking for runs…"}</p>`;
  if (!rows.length) return html`<${NoRun}><${LeftOut} reasons=${leftOut} /></${NoRun}>`;
  return html`<div class="runs">
    <h1 class="hidden-text">Runs</h1>
    <a class="skip" href="#charts" onClick=${skip}>Skip to the first chart</a>
    <aside><${RunList} rows=${rows} chosen=${ids} styles=${styles} faint=${faint} leftOut=${leftOut} choose=${setChosen}
      selected=${selected} select=${select} parts=${state.parts} stop=${state.read_only ? null : stop} /></aside>
    <div class="work">
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <${Controls} settings=${settings} set=${set} parents=${parents} />
      ${!drawn.length && html`<p class="card quiet">No run is chosen: tick some in the list.</p>`}
      <${Figures} rows=${drawn} parents=${faint} ...${{ styles, view, version, zoom, pick }} />
    </div>
    <div class="findings">
      <${Tries} rows=${rows} choose=${setChosen} />
      <${StepDetails} ...${{ picked, styles, forget }} />
      <${Comparison} ...${{ ids, styles, version }} />
      <${Samples} ...${{ ids, styles, version }} />
    </div>
  </div>`;
}

function skip(event) {
  event.preventDefault();
  document.querySelector(".runs .plot")?.focus();
}

function Controls({ settings, set, parents }) {
  const change = (more) => set((was) => ({ ...was, ...more }));
  const { x, window: zoomed, smooth } = settings;
  const check = (name, text) => html`<label class="check"><input type="checkbox" checked=${settings[name]}
    onChange=${(event) => change({ [name]: event.target.checked })} /> ${text}</label>`;
  return html`<div class="card controls" role="group" aria-label="How the curves are drawn">
    <label>Along <select class="field" value=${x}
      onChange=${(event) => change({ x: event.target.value, window: null })}>
      ${Object.entries(AXES).map(
        ([key, name]) => html`<option key=${key} value=${key}>${name}</option>`,
      )}</select></label>
    <label>Smoothing of training figures <input type="range" min="0" max="0.99" step="0.01" value=${smooth}
      onInput=${(event) => change({ smooth: Number(event.target.value) })} /> <output class="number">
      ${smooth.toFixed(2)}</output></label>
    ${check("logX", "Log x")} ${check("logY", "Log y")}
    ${parents.length > 0 && check("parents", "Show parents of forks, faintly")}
    <span class="fill"></span>
    <span class="quiet hint">Drag to zoom, double-click to show all.</span>
    <button class="button small" disabled=${!zoomed} onClick=${() => change({ window: null })}>Show all</button>
  </div>`;
}

/** A run keeps its colour while it is drawn. */
function useStyles(ids) {
  const held = useRef(new Map());
  return useMemo(() => {
    const kept = new Map(ids.filter((id) => held.current.has(id)).map((id) => [id, held.current.get(id)]));
    const taken = new Set(kept.values());
    let next = 0;
    for (const id of ids) {
      while (taken.has(next)) next += 1;
      if (!kept.has(id)) (taken.add(next), kept.set(id, next));
    }
    held.current = kept;
    return new Map([...kept].map(([id, n]) => [id, styleOf(n)]));
  }, [ids]);
}

/** A number that grows when the drawn runs have new records, but not more often than every two seconds. */
function useVersion(drawn) {
  const now = drawn.map((row) => `${row.id} ${row.records} ${row.whole}`).join("\n");
  const [shown, show] = useState(0);
  const last = useRef({ text: "", at: 0 });
  useEffect(() => {
    if (now === last.current.text) return undefined;
    const timer = setTimeout(
      () => {
        last.current = { text: now, at: Date.now() };
        show((version) => version + 1);
      },
      Math.max(0, last.current.at + REFRESH_MS - Date.now()),
    );
    return () => clearTimeout(timer);
  }, [now]);
  return shown;
}
