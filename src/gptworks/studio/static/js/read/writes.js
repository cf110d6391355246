// What each checkpoint writes in the place of the chosen token, or after the text, with the same beginning and seed.

import { stream } from "../api.js";
import { count, visible } from "../format.js";
import { html, useEffect, useState } from "../ui.js";

const PAUSE_MS = 200;
const MAX_TOKENS = 40;

export function Writes({ body, answer, index, step, context, writing }) {
  const [on, setOn] = useState(writing);
  const [seed, setSeed] = useState(1);
  const [texts, setTexts] = useState({});
  const [problem, setProblem] = useState(null);
  const key = `${step}/${seed}/${index}`;
  const end = index ?? answer.tokens.length;
  const tokens = answer.tokens
    .slice(Math.max(0, end - Math.max(1, Math.floor((context ?? 2) / 2))), end)
    .map(({ id }) => id);
  useEffect(() => {
    if (!on || texts[key]?.done) return undefined;
    const asked = new AbortController();
    const write = async () => {
      setProblem(null);
      let text = "";
      const show = (done) => setTexts((was) => ({ ...was, [key]: { text, done } }));
      try {
        const settings = { seed, max_tokens: MAX_TOKENS };
        const wanted = { model: body.model, checkpoint: step, tokens, settings, n_top: 0 };
        for await (const event of stream("studio/generate", wanted, { signal: asked.signal })) {
          if (event.type === "error") throw new Error(event.message);
          if (event.type === "token" || event.type === "end") text += event.text;
          show(event.type === "end");
        }
      } catch (error) {
        if (error.name !== "AbortError") setProblem(error.message);
      }
    };
    const timer = setTimeout(write, PAUSE_MS); // the slider may move on
    return () => (clearTimeout(timer), asked.abort());
  }, [on, key]);
  const number = (event) => setSeed(Math.max(0, Math.floor(Number(event.target.value)) || 0));
  if (!on) {
    return html`<p><button class="button" onClick=${() => setOn(true)}>${
      index == null
        ? "Write on from the end of the text"
        : `Write from before ${visible(answer.tokens[index].spelling)} on`
    }</button></p>`;
  }
  return html`<div class="writes"><label>
    Seed <input class="field" type="number" min="0" step="1" value=${seed} onInput=${number} /></label>
    <p class="quiet">What step ${count(step)} writes ${
      index == null
        ? "after the text"
        : html`in the place of ${""}
      <bdi class="spelling">${visible(answer.tokens[index].spelling)}</bdi>`
    }, up to ${MAX_TOKENS} tokens:</p>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <p class="text written" aria-busy=${String(!texts[key]?.done)}>${texts[key]?.text ?? "…"}</p></div>`;
}
