// The part Explain: a walk in eight steps from a text to a model's next token, and to what the model learned from.

import { addressOf } from "../../../../studio/static/js/shell.js";
import { html, useCallback, useEffect, useMemo, useRef, useState } from "../../../../studio/static/js/ui.js";
import { AttentionStep } from "./attention.js";
import { DataStep } from "./data.js";
import { EmbeddingsStep } from "./embeddings.js";
import { LogitsStep } from "./logits.js";
import { MlpStep } from "./mlp.js";
import { MOST_TOKENS, Reading, firstText } from "./reading.js";
import { SamplingStep } from "./sampling.js";
import { TokensStep } from "./tokens.js";
import { TrainingStep } from "./training.js";

const STEPS = [
  ["Tokens", "A text becomes tokens", TokensStep],
  ["Embeddings", "Each token becomes a list of numbers", EmbeddingsStep],
  ["Attention", "Tokens look back at each other", AttentionStep],
  ["MLP", "Each token is worked on alone", MlpStep],
  ["Logits", "Every possible next token gets a score", LogitsStep],
  ["Sampling", "One token is drawn", SamplingStep],
  ["Training", "How the model learned", TrainingStep],
  ["Data", "What the model has read", DataStep],
];
const PAUSE_MS = 500; // pause after the last key before the text is read
const TYPES = "input, textarea, select, [role=region]"; // elements with their own use of arrow keys

/** Return the part's component from the page's content, the studio's state, and the model or a promise of it. */
export function explain({ how, facts, card }, { models: [stated], sampling }, model) {
  const known = Object.entries(stated.sampling ?? {}).filter(([, value]) => value != null);
  const given = {
    how,
    card,
    name: facts.name,
    prompts: stated.prompts,
    defaults: { ...sampling, ...Object.fromEntries(known) },
  };
  return function Part({ shown, route }) {
    const [opened, open] = useState(false);
    useEffect(() => shown && open(true), [shown]);
    return opened && html`<${Walk} ...${given} loading=${model} shown=${shown} route=${route} />`;
  };
}

function Walk({ how, card, name, prompts, defaults, loading, shown, route }) {
  const [step, setStep] = useStep(route);
  const [at, setAt] = useState(null); // the chosen token; null: the last one
  const { model, text, setText, reading, problem, busy } = useReading(loading, prompts, defaults);
  const top = useRef(null);
  const go = useCallback((to) => {
    if (to < 0 || to >= STEPS.length) return;
    location.hash = addressOf("explain", String(to + 1));
    setStep(to);
    if (top.current.getBoundingClientRect().top < 0) top.current.scrollIntoView();
  }, []);
  useEffect(() => {
    if (!shown) return undefined;
    const keys = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
      if (event.target.closest?.(TYPES)) return;
      event.preventDefault();
      go(step + by);
    };
    document.addEventListener("keydown", keys);
    return () => document.removeEventListener("keydown", keys);
  }, [shown, step]);
  const [, title, Step] = STEPS[step];
  const place = reading && Math.min(at ?? reading.length - 1, reading.length - 1);
  return html`<div class="explain" ref=${top}>
    <h1>How <bdi>${name}</bdi> works</h1>
    <nav class="ex-steps" aria-label="Steps"><ol>${STEPS.map(
      ([word], i) => html`<li key=${word}><a href=${addressOf("explain", String(i + 1))}
        aria-current=${i === step ? "step" : null}><b>${i + 1}</b><span>${word}</span></a></li>`,
    )}</ol></nav>
    <label class="ex-text"><span>Your text, up to ${MOST_TOKENS} tokens</span>
      <textarea class="field" rows="1" spellcheck=${false} value=${text}
        onInput=${(event) => (setAt(null), setText(event.target.value))}></textarea></label>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <article class="ex-step" aria-labelledby="ex-title" aria-busy=${String(busy)}>
      <h2 id="ex-title"><span class="ex-number" aria-hidden="true">${step + 1}</span>${title}</h2>
      ${
        reading
          ? html`<${Step} key=${step} ...${{ how, card, model, reading, prompts, defaults, busy, setText }}
              at=${place} choose=${setAt} />`
          : !problem && html`<p class="quiet" role="status">The model is being loaded …</p>`
      }
    </article>
    <div class="ex-turn"><button class="button" type="button" aria-disabled=${String(step === 0)}
        onClick=${() => go(step - 1)}>← Back</button>
      <span role="status">Step ${step + 1} of ${STEPS.length}<span class="hidden-text">: ${title}</span></span>
      <button class="button primary" type="button" aria-disabled=${String(step === STEPS.length - 1)}
        onClick=${() => go(step + 1)}>Next →</button></div>
  </div>`;
}

/** Return the step that the address names, or the previous step if it names none; and the function that sets it. */
function useStep(route) {
  const [step, setStep] = useState(0);
  useEffect(() => {
    const named = Number(route[0]);
    if (named >= 1 && named <= STEPS.length) setStep(Math.floor(named) - 1);
  }, [route[0]]);
  return [step, setStep];
}

/** Return the text and its newest reading, which stays until the next reading is ready. */
function useReading(loading, prompts, defaults) {
  const [model, setModel] = useState(null);
  const [text, setText] = useState("");
  const [reading, setReading] = useState(null);
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(true);
  const failed = (error) => error.name !== "AbortError" && (setProblem(error.message), setBusy(false));
  useEffect(() => {
    const asked = new AbortController();
    const begin = async () => {
      const made = await loading;
      const first = await firstText(made, prompts, defaults, asked.signal);
      setModel(made);
      setText((was) => was || first);
    };
    begin().catch(failed);
    return () => asked.abort();
  }, []);
  const first = useRef(true);
  useEffect(() => {
    if (!model) return undefined;
    const asked = new AbortController();
    setBusy(true);
    const read = async () => {
      const made = await Reading.of(model, text, asked.signal);
      if (asked.signal.aborted) return;
      setReading(made);
      setProblem(null);
      setBusy(false);
    };
    const timer = setTimeout(() => read().catch(failed), first.current ? 0 : PAUSE_MS);
    first.current = false;
    return () => (clearTimeout(timer), asked.abort());
  }, [model, text]);
  return useMemo(() => ({ model, text, setText, reading, problem, busy }), [model, text, reading, problem, busy]);
}
