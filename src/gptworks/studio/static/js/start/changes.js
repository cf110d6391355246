// The settings that change if a run, or its fork, resumes with the recipe, or the reason why it cannot resume.

import { post } from "../api.js";
import { html, useEffect, useState } from "../ui.js";

/** The server's answer: `changes`, `problem`, `steps_left`; null until it comes, and if no run is resumed. */
export function useChanges(run, step, recipe) {
  const [found, setFound] = useState(null);
  useEffect(() => setFound(null), [run]);
  useEffect(() => {
    if (!run || !recipe.right) return undefined;
    const stop = new AbortController();
    post("studio/start/changes", { run, step, text: recipe.text }, { signal: stop.signal }).then(
      setFound,
      (error) => error.name !== "AbortError" && setFound({ changes: [], problem: error.message, steps_left: null }),
    );
    return () => stop.abort();
  }, [run, step, recipe.text, recipe.right]);
  return run ? found : null;
}

export function Changes({ found }) {
  if (!found) return null;
  const { changes, problem } = found;
  return html`${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${
      !changes.length &&
      !problem &&
      html`<p class="quiet start-about">It continues with its current settings. Change some below.</p>`
    }
    ${
      changes.length > 0 &&
      html`<ul class="start-changes" aria-label="Changes">${changes.map(
        (one) => html`<li key=${one.path}>
      <code>${one.path}</code> ${one.old} → ${one.new}
      ${
        one.recorded &&
        html`<span class="quiet"> – the loss curve depends on it: the run folder records the change</span>`
      }</li>`,
      )}</ul>`
    }`;
}
