// Next to the curves: the conclusions of `gptworks compare`, the settings that differ, a step's record, and samples.

import { get } from "../api.js";
import { count, figure } from "../format.js";
import { html, Name, Scrolls, useEffect, useState } from "../ui.js";
import { Line, loss } from "./list.js";

const MOST_COMPARED = 64;
const MOST_COLUMNS = 12;

/** The answer to a request, repeated when the request or the version changes. */
export function useAnswer(question, version, waitMs) {
  const [found, set] = useState({ answer: null, problem: null });
  useEffect(() => {
    if (!question) return set({ answer: null, problem: null });
    const stop = new AbortController();
    const timer = setTimeout(
      () =>
        get(question, { signal: stop.signal }).then(
          (answer) => set({ answer, problem: null }),
          (error) => error.name === "AbortError" || set({ answer: null, problem: error.message }),
        ),
      waitMs,
    );
    return () => (clearTimeout(timer), stop.abort());
  }, [question, version]);
  return found;
}

function asked(path, runs, more = {}) {
  const query = new URLSearchParams(more);
  for (const run of runs) query.append("run", run);
  return `studio/runs/${path}?${query}`;
}

export function Comparison({ ids, styles, version }) {
  const few = ids.length > 0 && ids.length <= MOST_COMPARED;
  const { answer, problem } = useAnswer(few ? asked("compare", ids) : null, version, 300);
  const settings = answer ? Object.entries(answer.differing_settings) : [];
  const columns = answer ? answer.runs.slice(0, MOST_COLUMNS) : [];
  return html`<section class="card" aria-label="Comparison">
    <h2>What can be concluded</h2>
    ${!ids.length && html`<p class="quiet">Choose runs in the list.</p>`}
    ${ids.length > MOST_COMPARED && html`<p class="quiet">Choose at most ${MOST_COMPARED} runs to compare them.</p>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${
      answer &&
      !answer.whole &&
      html`<p class="quiet" role="status">The logs are still being read; what follows is of what has been.</p>`
    }
    ${answer && html`<ul class="notes">${answer.notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>`}
    ${
      answer &&
      !answer.notes.length &&
      html`<p class="quiet">Nothing: the runs are of one recipe, and within one group there is nothing to test.</p>`
    }
    ${
      answer &&
      html`<h2>Figures</h2><${Scrolls} class="scroll" name="Figures of the runs"><table>
      <thead><tr>${["run", "parameters", "tokens", "tokens/s", "best loss", "last loss", "bits per byte"].map(
        (name) => html`<th key=${name} scope="col">${name}</th>`,
      )}</tr></thead>
      <tbody>${answer.runs.map(
        (run, i) => html`<tr key=${answer.ids[i]}>
        <th scope="row"><${Line} style=${styles.get(answer.ids[i])} /> <${Name} text=${run.run} /></th>
        <td>${count(run.parameters)}</td><td>${count(run.tokens)}</td><td>${count(run.tokens_per_second)}</td>
        <td>${loss(run.best_validation_loss)}</td><td>${loss(run.last_validation_loss)}</td><td>
          ${loss(run.best_bits_per_byte)}</td>
      </tr>`,
      )}</tbody></table><//>`
    }
    ${
      settings.length > 0 &&
      html`<h2>Settings that differ</h2><${Scrolls} class="scroll" name="Settings that differ">
        <table>
      <thead><tr><th scope="col">setting</th>${columns.map(
        (run, i) =>
          html`<th key=${run.run} scope="col">
            <${Line} style=${styles.get(answer.ids[i])} /> <${Name} text=${run.run} /></th>`,
      )}</tr></thead>
      <tbody>${settings.map(
        ([key, values]) => html`<tr key=${key}><th scope="row">${key}</th>
        ${columns.map(
          (run) => html`<td key=${run.run}>${values[run.run] == null ? "" : String(values[run.run])}</td>`,
        )}</tr>`,
      )}</tbody></table><//>`
    }
    ${
      answer &&
      answer.runs.length > MOST_COLUMNS &&
      settings.length > 0 &&
      html`<p class="quiet">The table shows the first ${MOST_COLUMNS} runs.</p>`
    }
  </section>`;
}

export function StepDetails({ picked, styles, forget }) {
  const { answer, problem } = useAnswer(picked && asked("step", [picked.run], { at: picked.at, x: picked.x }), 0, 0);
  if (!picked)
    return html`<section class="card" aria-label="One step"><h2>One step</h2>
    <p class="quiet">Click a curve to see all that its run recorded at that step.</p></section>`;
  return html`<section class="card" aria-label="One step">
    <h2>One step of <${Line} style=${styles.get(picked.run)} /> ${picked.run} <button class="button small plain"
      onClick=${forget}>Close</button></h2>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${
      answer &&
      Object.entries(answer.records).map(
        ([kind, record]) => html`<h3 key=${kind}>
          ${kind === "train" ? "Training" : "Last evaluation before"}: step ${count(record.step)}</h3>
      <dl class="record">${Object.entries(record)
        .filter(([key]) => key !== "kind" && key !== "step")
        .map(
          ([key, value]) => html`
        <div key=${key}><dt>${key.replaceAll("_", " ")}</dt><dd class="number">${written(value)}</dd></div>`,
        )}</dl>`,
      )
    }
    ${answer && !Object.keys(answer.records).length && html`<p class="quiet">The log has no record of it.</p>`}
  </section>`;
}

function written(value) {
  if (Array.isArray(value)) return value.map(written).join(" · ");
  if (value && typeof value === "object")
    return Object.entries(value)
      .map(([key, one]) => `${key} ${written(one)}`)
      .join(" · ");
  if (typeof value !== "number") return value == null ? "–" : String(value);
  return Number.isInteger(value)
    ? count(value)
    : Math.abs(value) < 1e-3
      ? value.toExponential(4)
      : Math.abs(value) < 100
        ? String(Number(value.toFixed(4)))
        : figure(value);
}

export function Samples({ ids, styles, version }) {
  const { answer, problem } = useAnswer(
    ids.length ? asked("samples", ids.slice(0, 256), { most: 20 }) : null,
    version,
    300,
  );
  return html`<section class="card" aria-label="Samples">
    <h2>Samples</h2>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${answer && !answer.samples.length && html`<p class="quiet">The chosen runs have written none yet.</p>`}
    ${
      answer &&
      answer.samples.map(
        (sample, i) => html`<article class="sample" key=${`${sample.run} ${sample.step} ${i}`}>
      <h3><${Line} style=${styles.get(sample.run)} /> ${sample.run}, step ${count(sample.step)}</h3>
      <p class="mono text" tabindex="0" role="group" aria-label=${`Sample of ${sample.run} at step ${sample.step}`}><b>
        ${sample.prompt}</b>${sample.text}</p></article>`,
      )
    }
  </section>`;
}
