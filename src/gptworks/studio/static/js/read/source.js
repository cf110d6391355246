// The source to read: a text, or a document of a run's validation split.

import { hasRuns, post } from "../api.js";
import { count } from "../format.js";
import { html, useEffect, useState } from "../ui.js";

/** `source`: { kind: "text" | "document", text, number }. */
export function Source({ chosen, source, change }) {
  return html`${
    hasRuns &&
    html`<div class="switch" role="group" aria-label="What to read">
      ${[
        ["text", "A text"],
        ["document", "A validation document"],
      ].map(
        ([kind, name]) => html`<button type="button" key=${kind}
        class="button small" aria-pressed=${String(source.kind === kind)} onClick=${() => change({ ...source, kind })}>
        ${name}</button>`,
      )}
    </div>`
  }
    ${
      source.kind === "text"
        ? html`<textarea class="field" rows="4" maxlength="100000" aria-label="Text" placeholder="Paste a text"
        value=${source.text} onInput=${(event) => change({ ...source, text: event.target.value })}></textarea>`
        : html`<${Document} chosen=${chosen} number=${source.number}
          setNumber=${(number) => change({ ...source, number })} />`
    }`;
}

/** The source in the server's format; null if there is no text yet. */
export function asked({ kind, text, number }) {
  if (kind === "document") return { document: number };
  return text ? { text } : null;
}

/** The number of a document in a run's validation split. */
function Document({ chosen, number, setNumber }) {
  const [about, setAbout] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    const asking = new AbortController();
    setProblem(null);
    post("studio/read/documents", chosen, { signal: asking.signal }).then(
      setAbout,
      (error) => error.name === "AbortError" || setProblem(error.message),
    );
    return () => asking.abort();
  }, [chosen.model, chosen.checkpoint]);
  if (problem) return html`<p class="problem" role="alert">${problem}</p>`;
  const last = about ? about.n_documents - 1 : null;
  const typed = ({ target }) =>
    setNumber(Math.max(0, Math.min(last ?? Infinity, Math.floor(Number(target.value)) - 1 || 0)));
  return html`<label class="document">
    Document <input class="field" type="number" min="1" max=${about ? last + 1 : null} step="1" required
      value=${number + 1} onInput=${typed} />
    <span class="quiet">${about ? `of ${count(about.n_documents)}` : "Loading …"}</span></label>`;
}
