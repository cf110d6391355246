// The part Through time: one text under each checkpoint of a run, and what the run learned between two of them.

import { post } from "./api.js";
import { chooseRun, NoRun, RunChoice, useRun } from "./choice.js";
import { count, figure, percent, visible } from "./format.js";
import { html, Scrolls, useEffect, useMemo, useRef, useState } from "./ui.js";
import { asked, Source } from "./read/source.js";
import { newestOf, Steps, useSteps } from "./read/steps.js";
import { DifferenceLegend, ReadText } from "./read/text.js";

const LISTED = 10;

export function Part({ state, shown }) {
  const models = state.models;
  const usable = models.filter((model) => !model.problem && model.checkpoints.length);
  const { model } = useRun(models, shown);
  const [source, change] = useState({ kind: "text", text: "", number: 0 });
  const [found, setFound] = useState(null); // { body, answer }
  const [work, setWork] = useState(null);
  const [problem, setProblem] = useState(null);
  const [said, say] = useState("");
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  if (!usable.length) return html`<${NoRun} />`;
  const chosen = { model, checkpoint: "last" };
  const read = async (event) => {
    event.preventDefault();
    abort.current?.abort();
    const asking = (abort.current = new AbortController());
    const body = { ...chosen, ...asked(source) };
    setWork(asking);
    setProblem(null);
    try {
      const answer = await post("studio/read/text", body, { signal: asking.signal });
      setFound({ body: { ...body, checkpoint: answer.step }, answer });
    } catch (error) {
      if (error.name !== "AbortError") setProblem(error.message);
    }
    if (abort.current === asking) setWork(null);
  };
  const keys = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) read(event);
  };
  return html`<div class="cards read time">
    <h1 class="hidden-text">Through time</h1>
    <form class="card composer" onSubmit=${read} onKeyDown=${keys}>
      <div class="toolbar">
        <${RunChoice} models=${models} chosen=${chosen} choose=${chooseRun} name="Run" /></div>
      <${Source} chosen=${chosen} source=${source} change=${change} />
      <div class="actions">
        <button class="button primary" disabled=${!asked(source) || Boolean(work)}>Read at each checkpoint <kbd>
          Ctrl Enter</kbd></button>
      </div>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    </form>
    ${
      !found &&
      html`<p class="quiet">
        Paste a text, or choose a document, to see what the run learned, and when: the text's loss at each checkpoint,
        how each checkpoint continues it with one seed, and the tokens that the run learned between two
        checkpoints.</p>`
    }
    ${
      found &&
      html`<${Found} key=${found.answer} ...${found} say=${say}
        model=${models.find((model) => model.id === found.body.model)} />`
    }
    <p class="hidden-text" role="status">${said}</p>
  </div>`;
}

function Found({ body, answer, model, say }) {
  const through = useSteps(body, answer);
  const [index, setIndex] = useState(null);
  const [steps, setSteps] = useState(null); // the slider's checkpoint
  const [first, setFirst] = useState(null); // the step that it is compared with
  useEffect(() => void (through.found || through.look()), []);
  const points = through.found?.points ?? [];
  const from = points.find(({ step }) => step === first) ?? points[0];
  const to = steps ?? points.at(-1);
  const parts = useMemo(
    () =>
      from &&
      answer.tokens.map((token, i) => ({ ...token, tokens: [i, i + 1], nats: from.nats[i], other_nats: to.nats[i] })),
    [answer, from, to],
  );
  return html`<${Steps} ...${{ through, body, answer, index, steps, setSteps }} writing=${true}
    context=${model?.context}
      newest=${newestOf(model)} />
    ${
      points.length > 1 &&
      html`<section class="card" aria-labelledby="learned-title">
      <h2 id="learned-title">What it learned between <select class="field" aria-label="From step" value=${from.step}
        onChange=${(event) => setFirst(Number(event.target.value))}>${points.map(
          ({ step }) => html`<option key=${step} value=${step}>step ${count(step)}</option>`,
        )}</select> and step ${count(to.step)}</h2>
      <p class="facts number">${figure(from.loss)} → ${figure(to.loss)} nats per token</p>
      <div class="toolbar"><${DifferenceLegend} about=${`Step ${count(to.step)} needs`} /></div>
      <${ReadText} tokens=${answer.tokens} segments=${parts} index=${index} pick=${setIndex} say=${say}
        second=${`step ${count(to.step)}`} />
      <${Changes} ...${{ parts, from, to, pick: setIndex }} />
    </section>`
    }`;
}

/** The tokens that changed most, each token id once. */
function Changes({ parts, from, to, pick }) {
  const changed = parts
    .map((part, i) => ({ ...part, i, less: part.nats - part.other_nats }))
    .filter((one) => one.nats != null && one.other_nats != null);
  const several = (list) =>
    list.filter((one, i) => list.findIndex((other) => other.id === one.id) === i).slice(0, LISTED);
  const better = several(changed.filter(({ less }) => less > 0).sort((a, b) => b.less - a.less));
  const worse = several(changed.filter(({ less }) => less < 0).sort((a, b) => a.less - b.less));
  const table = (name, list) =>
    list.length > 0 &&
    html`<${Scrolls} name=${name}><table>
      <caption>${name} (probability)</caption>
      <thead><tr><th scope="col">Token</th><th scope="col">At step ${count(from.step)}</th><th scope="col">
        At step ${count(to.step)}</th></tr></thead>
      <tbody>${list.map(
        (one) => html`<tr key=${one.i}><th scope="row"><button class="button plain small" onClick=${() => pick(one.i)}>
        <bdi class="spelling">${visible(one.spelling)}</bdi> <span class="quiet">
          token ${count(one.i + 1)}</span></button></th>
        <td class="number">${percent(Math.exp(-one.nats))}</td><td class="number">
          ${percent(Math.exp(-one.other_nats))}</td></tr>`,
      )}</tbody></table><//>`;
  return html`<div class="changes">${table("Learned most", better)}${table("Forgotten most", worse)}</div>`;
}
