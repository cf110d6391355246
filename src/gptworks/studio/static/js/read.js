// The part Read: the loss of each token of a text, and for one token its causes and its places in the training data.

import { hasRuns, post } from "./api.js";
import { count, figure } from "./format.js";
import { taken } from "./shell.js";
import { Chips, html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";
import { chooseRun, ModelChoice, NoRun, stepOf, useRun } from "./choice.js";
import { Along } from "./read/along.js";
import { Examples } from "./read/examples.js";
import { asked as wanted, Source } from "./read/source.js";
import { DifferenceLegend, LossLegend, ReadText } from "./read/text.js";
import { newestOf, Steps, useSteps } from "./read/steps.js";
import { Token } from "./read/token.js";

const usable = (models) => models.filter((model) => !model.problem);

export function Part({ state, shown }) {
  const models = state.models;
  const current = useRun(models, shown);
  const [against, setAgainst] = useState(null);
  const [source, change] = useState({ kind: "text", text: "", number: 0 });
  const [found, setFound] = useState(null); // { body, answer }
  const [work, setWork] = useState(null);
  const [problem, setProblem] = useState(null);
  const [index, setIndex] = useState(null);
  const [sought, seek] = useState(null); // the token that another part opened
  const [steps, setSteps] = useState(null); // each token's loss at the slider's checkpoint
  const [weights, setWeights] = useState(null); // attention weights of one head, over the tokens before the chosen one
  const [handed, hand] = useState(null); // a text that Play wrote, as its tokens
  const [said, say] = useState("");
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);

  const read = async (event, given = null, at = null) => {
    event?.preventDefault();
    abort.current?.abort();
    const asked = (abort.current = new AbortController());
    const written = source.kind === "text" && handed?.text === source.text ? { tokens: handed.tokens } : wanted(source);
    const body = given ?? { ...current, ...written };
    setWork(asked);
    setProblem(null);
    say("Reading.");
    try {
      const answer = await post(
        "studio/read/text",
        { ...body, against: given ? null : against },
        { signal: asked.signal },
      );
      setFound({ body: { ...body, checkpoint: answer.step }, answer });
      setIndex(at ?? leastExpected(answer.tokens));
      seek(at);
      setSteps(null);
      setWeights(null);
      say(`${count(answer.n_tokens)} tokens, ${figure(answer.loss)} nats per token.`);
    } catch (error) {
      if (error.name !== "AbortError") setProblem(error.message);
    }
    if (abort.current === asked) setWork(null);
  };
  useLayoutEffect(() => {
    const brought = shown ? taken() : null; // another part opens a token of a text
    if (!brought) return;
    const { model, checkpoint, text: wrote, tokens, index: at } = brought;
    if (checkpoint !== stepOf(models, current)) chooseRun({ model, checkpoint });
    setAgainst(null);
    change({ kind: "text", text: wrote, number: 0 });
    hand({ text: wrote, tokens });
    read(null, { model, checkpoint, tokens }, at);
  }, [shown, current.model]);
  const example = (from) => {
    change({ text: "", number: 0, ...from });
    read(null, { ...current, ...wanted(from) });
  };
  const keys = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) read(event);
  };
  if (!usable(models).length) return html`<${NoRun} />`;
  const earliest = models.find((model) => model.id === current.model)?.checkpoints[0]?.step ?? "last";
  return html`<div class="cards read">
    <h1 class="hidden-text">Read</h1>
    <form class="card composer" onSubmit=${read} onKeyDown=${keys}>
      ${
        hasRuns &&
        html`<div class="toolbar">
        <${ModelChoice} models=${models} chosen=${current} choose=${chooseRun} name="Model" />
        <label class="check"><input type="checkbox" checked=${Boolean(against)} onChange=${(event) =>
          setAgainst(
            event.target.checked ? { model: current.model, checkpoint: earliest } : null,
          )} /> Compare with</label>
        ${
          against &&
          html`<${ModelChoice} models=${models} chosen=${against} choose=${setAgainst} name="Compared model" />`
        }
      </div>`
      }
      <${Source} chosen=${current} source=${source} change=${change} />
      <${Chips} name="Examples" texts=${models.find((model) => model.id === current.model)?.prompts ?? []}
        use=${(text) => example({ kind: "text", text })} />
      <div class="actions">
        <button class="button primary" disabled=${!current.model || !wanted(source) || Boolean(work)}>Read <kbd>
          Ctrl Enter</kbd></button>
        ${work && html`<button type="button" class="button" onClick=${() => abort.current.abort()}>Stop</button>`}
      </div>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    </form>
    ${!found && html`<${Examples} ...${{ shown, current, work }} pick=${example} />`}
    ${
      found &&
      html`<${Found} key=${found.answer}
        ...${{ found, index, setIndex, sought, steps, setSteps, weights, setWeights, say }}
      model=${models.find((model) => model.id === found.body.model)} />`
    }
    <p class="hidden-text" role="status">${said}</p>
  </div>`;
}

function Found({ found, index, setIndex, sought, steps, setSteps, weights, setWeights, say, model }) {
  const { answer, body } = found;
  const through = useSteps(body, answer);
  const shown = useMemo(
    () => (steps ? answer.tokens.map((token, i) => ({ ...token, nats: steps.nats[i] })) : answer.tokens),
    [answer, steps],
  );
  const [differs, setDiffers] = useState(Boolean(answer.segments));
  const second =
    answer.other && (answer.other.model === answer.model ? `step ${count(answer.other.step)}` : answer.other.model);
  const difference = differs && !steps; // the slider's checkpoint is shown by its loss
  const pick = (i) => {
    setIndex(i);
    setWeights(null);
  };
  return html`<div class="read-sides"><div class="read-text"><section class="card" aria-label="Text, coloured">
      <div class="toolbar">
        ${
          answer.segments &&
          html`<div class="switch" role="group" aria-label="Colour by">
          <button class="button small" aria-pressed=${String(!difference)} onClick=${() => setDiffers(false)}>
            Loss</button>
          <button class="button small" aria-pressed=${String(difference)} onClick=${() => setDiffers(true)}>
            Difference</button></div>`
        }
        ${difference ? html`<${DifferenceLegend} about=${`${second} needs`} />` : html`<${LossLegend} />`}
        ${weights && html`<span class="quiet">Underlined: what ${weights.name} looks at</span>`}
      </div>
      <p class="quiet">Click a token to see why the model expects it or not. At first, the token that it expected least
        is chosen.</p>
      <${Figures} answer=${answer} name=${answer.other ? answer.model : null} />
      ${answer.other && html`<${Figures} answer=${answer.other} name=${answer.other.model} />`}
      <${ReadText} tokens=${shown} segments=${difference ? answer.segments : null} index=${index} pick=${pick}
        say=${say}
        weights=${weights} second=${second} />
      <${Along} parts=${answer.along} other=${answer.other?.along} />
    </section>
    ${
      hasRuns &&
      html`<${Steps} ...${{ through, body, answer, index, steps, setSteps }} context=${model?.context}
        newest=${newestOf(model)} />`
    }</div>
    ${
      index != null &&
      html`<${Token} key=${index} ...${{ body, answer, index, weights, setWeights }} sought=${sought === index} />`
    }</div>`;
}

/** The place of the token with the largest loss; null if none is predicted. */
function leastExpected(tokens) {
  const most = Math.max(...tokens.map(({ nats }) => nats ?? -1));
  return most < 0 ? null : tokens.findIndex(({ nats }) => nats === most);
}

function Figures({ answer, name }) {
  const facts = [
    `${figure(answer.loss)} nats per token`,
    answer.bits_per_byte != null && `${figure(answer.bits_per_byte)} bits per byte`,
    answer.perplexity != null && `perplexity ${figure(answer.perplexity)}`,
    `${count(answer.n_tokens)} tokens`,
    `step ${count(answer.step)}`,
  ].filter(Boolean);
  return html`<p class="facts number">${name && html`<bdi>${name}</bdi>: `}${facts.join(" · ")}</p>`;
}
