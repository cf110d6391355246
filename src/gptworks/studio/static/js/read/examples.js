// Examples to read with one click: the first documents of the run's validation split.

import { hasRuns, post } from "../api.js";
import { count } from "../format.js";
import { html, useEffect, useState } from "../ui.js";

const MOST = 6;
const TOKENS = 60;

/** `pick({ kind, number })` is called with the chosen document. */
export function Examples({ shown, current, work, pick }) {
  const [texts, setTexts] = useState([]);
  const { model, checkpoint } = current;
  useEffect(() => {
    if (!hasRuns || !shown || !model) return undefined;
    const asked = new AbortController();
    const { signal } = asked;
    const look = async () => {
      const { n_documents: n } = await post("studio/read/documents", { model, checkpoint }, { signal });
      const numbers = Array.from({ length: Math.min(MOST, n) }, (_, number) => number);
      const from = { model, checkpoint, split: "validation", first: 0, n: TOKENS };
      const found = await Promise.all(
        numbers.map((document) => post("studio/data/document", { ...from, document }, { signal })),
      );
      setTexts(found.map(({ tokens }) => tokens.map((token) => token.text).join("")));
    };
    look().catch(() => setTexts([])); // a run without its data: a text is pasted instead
    return () => asked.abort();
  }, [shown, model, checkpoint]);
  return html`<section class="card" aria-labelledby="examples-title">
    <h2 id="examples-title">What this shows</h2>
    <p class="quiet">Each token of a text is coloured by its loss. For the one that you choose: what else was likely,
      what each part of the model added, where each head looked${
        hasRuns ? ", and since which checkpoint the run knows it" : ", and what each block would have predicted"
      }.</p>
    ${texts.length > 0 && html`<h3>Click one of its validation documents to read it</h3>`}
    <ul class="examples">${texts.map(
      (text, number) => html`<li key=${number}><button class="card" disabled=${Boolean(work)}
        onClick=${() => pick({ kind: "document", number })}>
        <span class="quiet number">Document ${count(number + 1)}</span><bdi>${text}</bdi></button></li>`,
    )}</ul></section>`;
}
