// The plan of the recipe, updated as it is typed.

import { post } from "../api.js";
import { cx, html, useEffect, useState } from "../ui.js";

export function Plan({ recipe, origin, name, devices }) {
  const [device, setDevice] = useState("");
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState(null);
  const [asked, setAsked] = useState(false);
  useEffect(() => {
    if (!recipe.right) return undefined;
    const stop = new AbortController();
    setAsked(true);
    post(
      "studio/start/plan",
      { text: recipe.text, origin, name: name || "run", device: device || null },
      { signal: stop.signal },
    ).then(
      (answer) => (setFound(answer), setProblem(null), setAsked(false)),
      (error) => error.name !== "AbortError" && (setProblem(error.message), setAsked(false)),
    );
    return () => stop.abort();
  }, [recipe.text, recipe.right, device]);
  const fit = found?.plan.fit;
  const wrong = problem || (!recipe.right && !recipe.waits);
  const old = asked || !recipe.right || problem;
  return html`<section class="card start-plan" aria-label="Plan" aria-busy=${String(asked)}>
    <div class="toolbar"><h2>Plan</h2><span class="fill"></span>
      <label><span class="hidden-text">Device</span>
        <select class="field" value=${device} onChange=${(event) => setDevice(event.target.value)}>
        <option value="">this machine's CPU</option>
        ${Object.entries(devices).map(
          ([key, title]) => html`<option key=${key} value=${key}>${title}</option>`,
        )}</select></label></div>
    ${
      wrong &&
      html`<p class="quiet">
        ${found ? "This was the plan before the last change." : "The plan follows when the recipe is right."}</p>`
    }
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${
      found &&
      html`<div class=${cx("start-found", old && "old")}>
      ${
        !wrong &&
        html`<p role="status" class=${fit.fits ? "start-fits" : "problem"}>
          ${fit.fits ? "It fits in memory." : "It does not fit in memory."}</p>`
      }
      ${
        found.missing &&
        html`<p class="problem">${found.missing} What depends on its tokens is unknown in this plan.</p>`
      }
      ${
        !wrong &&
        fit.changes.some((one) => one.fits) &&
        html`<div class="actions" role="group" aria-label="Changes with which it fits">
        ${fit.changes
          .filter((one) => one.fits && one.world_size === 1)
          .map(
            (one) => html`<button key=${one.words} class="button small"
          title=${one.costs} onClick=${() => recipe.edit(...one.overrides.map(split))}>${one.words}</button>`,
          )}</div>`
      }
      ${found.tables.map(
        (table, i) =>
          html`<div class="start-scroll" key=${i} tabindex="0" role="group" aria-label=${table.header.join(" ").trim()}>
            <${Table} ...${table} /></div>`,
      )}
    </div>`
    }
    ${!found && asked && html`<p class="quiet" role="status">Planning…</p>`}
  </section>`;
}

function Table({ header, align, rows }) {
  const side = (i) => (align[i] === "r" ? "number right" : null);
  return html`<table>
    <thead><tr>${header.map((cell, i) =>
      cell ? html`<th key=${i} scope="col" class=${side(i)}>${cell}</th>` : html`<td key=${i}></td>`,
    )}</tr></thead>
    <tbody>${rows.map(
      (row, n) => html`<tr key=${n}>${row.map((cell, i) => html`<td key=${i} class=${side(i)}>${cell}</td>`)}</tr>`,
    )}</tbody>
  </table>`;
}

function split(override) {
  const at = override.indexOf("=");
  return [override.slice(0, at), override.slice(at + 1)];
}
