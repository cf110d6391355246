// A small chart of one or two rows of numbers with the same x: a histogram's bars, a line, or points.

import { figure } from "../format.js";
import { cx, html, useState } from "../ui.js";

const WIDE = 1000;
const HIGH = 200;

/** `read(i)` describes an element; `ends` are the texts below the left and the right end. */
export function Plot({ title, series, log, shape = "line", ends, read, children }) {
  const [at, setAt] = useState(null);
  const n = series[0].values.length;
  const all = series.flatMap(({ values }) => values).filter((value) => value != null && (!log || value > 0));
  const most = Math.max(...all, log ? Number.MIN_VALUE : 0);
  const least = log ? Math.min(...all) : Math.min(...all, 0);
  const scaled = (value) => (log ? Math.log10(value) : value);
  const bottom = shape === "bars" && log ? scaled(least) - 0.3 : scaled(least);
  const span = scaled(most) - bottom || 1;
  const y = (value) =>
    value == null || (log && value <= 0) ? HIGH : HIGH - ((scaled(value) - bottom) / span) * (HIGH - 6);
  const x = (i) => (shape === "bars" ? (i / n) * WIDE : n > 1 ? (i / (n - 1)) * WIDE : WIDE / 2);
  const keys = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageDown: 10, PageUp: -10, Home: -n, End: n }[event.key];
    if (!step) return;
    event.preventDefault();
    setAt((was) => Math.max(0, Math.min(n - 1, (was ?? (step > 0 ? -1 : n)) + step)));
  };
  const over = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    setAt(Math.max(0, Math.min(n - 1, shape === "bars" ? Math.floor(share * n) : Math.round(share * (n - 1)))));
  };
  const here = at != null && at < n ? at : null;
  const mark = here == null ? null : shape === "bars" ? x(here + 0.5) : x(here);
  return html`<figure class="model-plot">
    <figcaption><h3>${title}</h3>${children}</figcaption>
    <div class="plot-y quiet number" aria-hidden="true"><span>${figure(most)}</span><span>
      ${figure(shape === "bars" ? 0 : least)}</span></div>
    <div class="plot-area" tabindex="0" role="group" aria-label=${`${title}; the arrow keys read values`}
      onKeyDown=${keys}
      onPointerMove=${over}>
      <svg viewBox=${`0 0 ${WIDE} ${HIGH}`} preserveAspectRatio="none" role="img"
        aria-label=${`${title}: ${series.map(({ name }) => name).join(" and ")}`}>
        ${series.map(
          ({ name, values }, i) =>
            html`<path key=${name} class=${cx("plot-series", `plot-${shape}`, `is-${i}`)}
              d=${path(values, x, y, shape)} />`,
        )}
        ${shape === "line" && least < 0 && html`<path class="plot-zero" d=${`M0 ${y(0)}H${WIDE}`} />`}
        ${mark != null && html`<path class="plot-mark" d=${`M${mark} 0V${HIGH}`} />`}
      </svg></div>
    <div class="plot-x quiet number" aria-hidden="true"><span>${ends[0]}</span><span>${ends[1]}</span></div>
    <p class="plot-read number" role="status">${here == null ? "" : read(here)}</p>
    ${
      series.length > 1 &&
      html`<p class="plot-names">${series.map(
        ({ name }, i) => html`<span key=${name}><span
      class=${cx("plot-swatch", `is-${i}`)} aria-hidden="true"></span>${name}</span>`,
      )}</p>`
    }
  </figure>`;
}

function path(values, x, y, shape) {
  if (shape === "bars") {
    return `M0 ${HIGH}${values.map((value, i) => `V${y(value).toFixed(1)}H${x(i + 1).toFixed(1)}`).join("")}V${HIGH}`;
  }
  let drawn = false;
  return values
    .map((value, i) => {
      const hidden = value == null || y(value) >= HIGH + 1;
      const piece = hidden ? "" : `${drawn ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
      drawn = !hidden;
      return piece;
    })
    .join("");
}
