// One chart: uPlot draws the axes, the cursor and the selection; this file draws the curves, whose x values differ.

import uPlot from "../../vendor/uPlot.esm.js";
import { short } from "../format.js";
import { cutName, html, useEffect, useLayoutEffect, useRef } from "../ui.js";

/** The height of an axis label in pixels: the smallest type of the page. */
const LABEL = 0.75 * parseFloat(getComputedStyle(document.documentElement).fontSize);
const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3]];
const DOTS = 60;
const FEW = 8;
const FAINT = 0.45;

/** The style of a run that a fork comes from. */
export const PARENT = { colour: "parent", dash: 0, faint: true };

/** The colour and the line of the nth run: eight colours, then the same ones with each kind of dashes. */
export function styleOf(n) {
  return (STYLES[n] ??= { colour: n % 8, dash: Math.floor(n / 8) % DASHES.length });
}

const STYLES = []; // one object for each n, so that a row is drawn again only if its style changes

/**
 * curves: [{ id, name, style, x, y, raw: { x, y } | undefined, forkedAt: where a fork begins | undefined }],
 * bands: [{ name, style, x, low, high }], view: { window, logX, logY, theme },
 * zoom(from, to) or zoom(null), pick(id, x), xName, write(y): a value as text, tick(y): the text at the axis.
 */
export function Chart({ title, ...props }) {
  const box = useRef(null);
  const readout = useRef(null);
  const kept = useRef({});
  kept.current = Object.assign(kept.current, { props, readout });
  const { view, curves, bands, xName } = props;
  useLayoutEffect(() => {
    const plot = new uPlot(
      options(kept.current, box.current),
      [
        [0, 1],
        [null, null],
      ],
      box.current,
    );
    kept.current.plot = plot;
    const resized = new ResizeObserver(() => {
      const { clientWidth: width, clientHeight: height } = box.current;
      if (width && (width !== plot.width || height !== plot.height)) plot.setSize({ width, height });
    });
    resized.observe(box.current);
    return () => (resized.disconnect(), waiting.delete(kept.current), plot.destroy());
  }, [view.logX, view.logY, view.theme]);
  useEffect(() => drawSoon(kept.current), [view, curves, bands]);
  const keys = (event) => keyed(event, kept.current);
  const label = `${title} by ${xName}, ${curves.length} curves. Plus and minus zoom, arrows move, 0 shows all.`;
  return html`<figure class="chart">
    <figcaption><h2>${title}</h2></figcaption>
    <div class="plot" ref=${box} tabindex="0" role="group" onKeyDown=${keys}
      aria-label=${label}><div class="readout number" ref=${readout} hidden></div></div>
  </figure>`;
}

const waiting = new Set();

/** Draw charts one after the other, so that the page can answer between two of them. */
function drawSoon(kept) {
  if (!waiting.size) setTimeout(drawNext);
  waiting.add(kept);
}

function drawNext() {
  const [kept] = waiting;
  waiting.delete(kept);
  kept?.plot.setData([windowOf(kept.props), [null, null]]);
  if (waiting.size) setTimeout(drawNext);
}

function options(kept, { clientWidth: width, clientHeight: height }) {
  const style = getComputedStyle(document.documentElement);
  const [ink, rule] = ["--muted", "--rule"].map((name) => style.getPropertyValue(name).trim());
  const { view } = kept.props;
  const axis = {
    stroke: ink,
    grid: { stroke: rule, width: 1 },
    ticks: { stroke: rule, width: 1 },
    font: `${LABEL}px system-ui`,
  };
  return {
    width: width || 300,
    height: height || 150,
    padding: [8, null, 0, 0],
    legend: { show: false },
    pxAlign: 0,
    scales: {
      x: { time: false, distr: view.logX ? 3 : 1, range: () => windowOf(kept.props) },
      y: { distr: view.logY ? 3 : 1, range: () => heightOf(kept.props) },
    },
    series: [{}, { show: true, stroke: "transparent", points: { show: false } }],
    axes: [
      {
        ...axis,
        size: LABEL + 14,
        gap: 3,
        values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))),
      },
      {
        ...axis,
        gap: 3,
        size: labelsWidth,
        values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : (kept.props.tick ?? plainNumber)(tick))),
      },
    ],
    cursor: {
      sync: { key: "runs", scales: ["x", null], setSeries: false },
      points: { show: false },
      drag: { setScale: false, x: true, y: false },
      bind: { dblclick: () => () => (kept.props.zoom(null), null) },
    },
    hooks: {
      draw: [(plot) => (paint(plot, kept.props, style), readSoon(plot, kept))],
      setSelect: [(plot) => selected(plot, kept)],
      setCursor: [(plot) => readSoon(plot, kept)],
      ready: [(plot) => plot.over.addEventListener("click", () => clicked(plot, kept))],
    },
  };
}

/** The room for the labels of the y axis: no more than they need, so that the curves have the rest. */
function labelsWidth(plot, labels) {
  if (!labels?.length) return 30;
  plot.ctx.font = `${LABEL * (devicePixelRatio || 1)}px system-ui`;
  const widest = Math.max(...labels.map((label) => plot.ctx.measureText(label ?? "").width));
  return Math.ceil(widest / (devicePixelRatio || 1)) + 15; // with the tick and a gap
}

function plainNumber(value) {
  const size = Math.abs(value);
  return size >= 1e5
    ? short(value)
    : size && size < 1e-3
      ? value.toExponential(0)
      : String(Number(value.toPrecision(6)));
}

/** The ends of the axis: the window, or the range of all curves. */
function windowOf({ view, curves }) {
  if (view.window) return view.window;
  let [low, high] = [Infinity, -Infinity];
  for (const { x } of curves) {
    const first = view.logX ? x.find((one) => one > 0) : x[0];
    if (first < low) low = first;
    if (x.length && x[x.length - 1] > high) high = x[x.length - 1];
  }
  if (!(low <= high)) return [view.logX ? 1 : 0, 10];
  return low < high ? [low, high] : view.logX ? [low / 2, high * 2] : [low - 1, high + 1];
}

/** The lowest and highest values in the window, with a margin. */
function heightOf(props) {
  const { view, curves, bands } = props;
  const [from, to] = windowOf(props);
  let [low, high] = [Infinity, -Infinity];
  const take = (x, y) => {
    for (let i = 0; i < x.length; i++) {
      if (x[i] < from || x[i] > to || (view.logY && y[i] <= 0)) continue;
      if (y[i] < low) low = y[i];
      if (y[i] > high) high = y[i];
    }
  };
  for (const { x, y, raw } of curves) (take(x, y), raw && take(raw.x, raw.y));
  if (low > high) for (const band of bands) (take(band.x, band.low), take(band.x, band.high));
  if (low > high) return view.logY ? [0.1, 10] : [0, 1];
  if (view.logY) return [low / 1.1, high * 1.1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

// ---------------------------------------------------------------------------------------------------- drawing

function paint(plot, { curves, bands }, style) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio || 1;
  const across = placer(plot.scales.x, bbox.left, bbox.width);
  const up = placer(plot.scales.y, bbox.top + bbox.height, -bbox.height);
  const colourOf = (one) => style.getPropertyValue(`--series-${one.colour}`).trim();
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const band of bands) {
    ctx.beginPath();
    band.x.forEach((x, i) => ctx.lineTo(across(x), up(band.high[i])));
    for (let i = band.x.length - 1; i >= 0; i--) ctx.lineTo(across(band.x[i]), up(band.low[i]));
    ctx.globalAlpha = 0.2;
    ctx.fillStyle = colourOf(band.style);
    ctx.fill();
  }
  ctx.lineJoin = "round";
  const line = ({ x, y }, from = 0, to = x.length) => {
    ctx.beginPath();
    for (let i = from; i < to; i++) ctx.lineTo(across(x[i]), up(y[i]));
    ctx.stroke();
  };
  const dots = ({ x, y }, from, to = x.length) => {
    ctx.beginPath();
    for (let i = from; i < to; i++) {
      ctx.moveTo(across(x[i]), up(y[i]));
      ctx.arc(across(x[i]), up(y[i]), 2.2 * ratio, 0, 7);
    }
    ctx.fill();
  };
  ctx.globalAlpha = 0.25;
  ctx.lineWidth = ratio;
  for (const {
    raw,
    style: { colour },
  } of curves) {
    ctx.strokeStyle = colourOf({ colour });
    if (raw) line(raw);
  }
  const full = curves.length > 3 * FEW ? 0.6 : 1;
  ctx.lineWidth = ratio * (curves.length > 3 * FEW ? 1 : 1.5);
  for (const {
    x,
    y,
    style: { colour, dash, faint },
    forkedAt,
  } of curves) {
    ctx.strokeStyle = ctx.fillStyle = colourOf({ colour });
    ctx.setLineDash(DASHES[dash].map((length) => length * ratio));
    // The number of points to draw faintly: those that a fork has from another run; all points of a parent.
    const before = faint ? x.length : forkedAt == null ? 0 : x.filter((one) => one <= forkedAt).length;
    ctx.globalAlpha = FAINT * full;
    line({ x, y }, 0, before);
    ctx.globalAlpha = full;
    line({ x, y }, Math.max(0, before - 1));
    if (x.length > DOTS) continue;
    dots({ x, y }, before);
    ctx.globalAlpha = FAINT * full;
    dots({ x, y }, 0, before);
  }
  ctx.restore();
}

/** A function that maps a value to its place on the canvas. */
function placer({ min, max, distr }, start, length) {
  const of = distr === 3 ? (value) => Math.log10(Math.max(value, 1e-300)) : (value) => value;
  const [low, size] = [of(min), of(max) - of(min) || 1];
  return (value) => start + ((of(value) - low) / size) * length;
}

// ------------------------------------------------------------------------------------------------ the pointer and keys

function selected(plot, { props }) {
  const { left, width } = plot.select;
  if (width < 4) return;
  const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  props.zoom(from, to);
  plot.dragged = performance.now();
}

function clicked(plot, kept) {
  if (performance.now() - (plot.dragged ?? -1e9) < 300) return;
  const found = nearest(plot, kept.props);
  if (found) kept.props.pick(found.curve.id, found.curve.x[found.at]);
}

/** Write the readout at the next frame, once for all moves until then: the cursor moves in all charts at once. */
function readSoon(plot, kept) {
  kept.reading ??= requestAnimationFrame(() => {
    kept.reading = null;
    read(plot, kept);
  });
}

/** Write the values of the curves at the cursor, or of the nearest curve if there are more than FEW. Curves that end
 * before the cursor, or begin after it, are left out. */
function read(plot, { props, readout }) {
  const box = readout.current;
  if (!box) return;
  const { left } = plot.cursor;
  box.hidden = left == null || left < 0;
  if (box.hidden) return;
  const x = plot.posToVal(left, "x");
  const shown =
    props.curves.length <= FEW
      ? props.curves.filter(reaching(plot)).map((curve) => ({ curve, at: placeOf(curve.x, x) }))
      : [nearest(plot, props)].filter(Boolean);
  const line = (kind, ...children) => {
    const made = document.createElement("span");
    made.className = kind;
    made.append(...children);
    return made;
  };
  const rows = shown.map(({ curve, at }) => {
    const { colour, dash } = curve.style;
    const name = line("cut-name", ...cutName(curve.name).map((part) => line("", part)));
    return line("row", line(`line series-${colour} dash-${dash}`), name, " ", line("value", props.write(curve.y[at])));
  });
  box.replaceChildren(line("row", `${props.xName} ${Math.round(x).toLocaleString("en-US")}`), ...rows);
  box.classList.toggle("at-left", left > plot.bbox.width / (devicePixelRatio || 1) / 2);
}

const NEAR_PIXELS = 4;

/** A function that says whether a curve has points on both sides of the cursor, or next to it. */
function reaching(plot) {
  const x = (pixels) => plot.posToVal(plot.cursor.left + pixels, "x");
  const [low, high] = [x(-NEAR_PIXELS), x(NEAR_PIXELS)];
  return (curve) => curve.x.length > 0 && curve.x[0] <= high && curve.x[curve.x.length - 1] >= low;
}

/** The curve and its point that are nearest to the pointer. */
function nearest(plot, { curves }) {
  const { left, top } = plot.cursor;
  if (left == null || left < 0) return null;
  const x = plot.posToVal(left, "x");
  let found = null;
  for (const curve of curves.filter(reaching(plot))) {
    const at = placeOf(curve.x, x);
    const away =
      Math.abs(plot.valToPos(curve.y[at], "y") - top) + 0.2 * Math.abs(plot.valToPos(curve.x[at], "x") - left);
    if (!found || away < found.away) found = { curve, at, away };
  }
  return found;
}

/** The place of the point that is nearest to x. */
export function placeOf(along, x) {
  let [low, high] = [0, along.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (along[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - along[low - 1] < along[low] - x ? low - 1 : low;
}

function keyed(event, { props }) {
  const [from, to] = windowOf(props);
  const log = props.view.logX;
  const size = log ? Math.log(to / from) : to - from;
  const moved = (start, end) =>
    log ? [from * Math.exp(size * start), from * Math.exp(size * end)] : [from + size * start, from + size * end];
  const windows = {
    "+": [0.2, 0.8],
    "=": [0.2, 0.8],
    "-": [-0.33, 1.33],
    ArrowLeft: [-0.1, 0.9],
    ArrowRight: [0.1, 1.1],
  };
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in windows) props.zoom(...moved(...windows[event.key]));
  else if (event.key === "0" || event.key === "Escape") props.zoom(null);
  else return;
  event.preventDefault();
}
