// One token: attention, logit lens, what the parts of the model add, and the training data.

import { post } from "../api.js";
import { count, figure, percent, visible } from "../format.js";
import { cx, html, useEffect, useState } from "../ui.js";
import { Attention } from "./attention.js";
import { lossShade } from "./text.js";

export function Token({ body, answer, index, setWeights }) {
  const [found, setFound] = useState(null);
  const [against, setAgainst] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    const asked = new AbortController();
    setProblem(null);
    post("studio/read/token", { ...body, index, against }, { signal: asked.signal }).then(setFound, (error) =>
      error.name === "AbortError" || setProblem(error.message));
    return () => asked.abort();
  }, [index, against]);
  const token = answer.tokens[index];
  return html`<section class="token" aria-label="The chosen token">
    <h2><bdi class="spelling">${visible(token.spelling)}</bdi> <span class="quiet number">token ${count(index)} · ${
      figure(token.nats)} nats · ${percent(Math.exp(-token.nats))}</span></h2>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${!found && !problem && html`<p class="quiet" role="status">Looking into the model …</p>`}
    ${found && html`<div class="panels">
      <${Attention} numbers=${found.attention} first=${found.first_read} tokens=${answer.tokens} setWeights=${setWeights} />
      <${Lens} lens=${found.lens} tokens=${answer.tokens} index=${index} />
      <${Attribution} made=${found.attribution} lens=${found.lens} index=${index} against=${against} setAgainst=${setAgainst} />
      <${NGrams} body=${body} index=${index} />
    </div>`}</section>`;
}

function Lens({ lens, tokens, index }) {
  const layers = lens.layers.map((row, i) => ({ row, name: i ? `after block ${i - 1}` : "embedding" })).reverse();
  return html`<section class="card" aria-labelledby="lens-title">
    <h3 id="lens-title">Logit lens</h3>
    <p class="quiet">What each block would predict if it were the last. The first line is the model's own prediction.</p>
    <div class="scrolls" tabindex="0" role="region" aria-label="Logit lens, by layer and token"><table class="lens">
      <thead><tr><th scope="col">Block</th>${lens.tokens.map((i) => html`<th key=${i} scope="col" class=${cx(i === index && "here")}>
        <bdi class="spelling">${visible(tokens[i].spelling)}</bdi></th>`)}</tr></thead>
      <tbody>${layers.map(({ row, name }) => html`<tr key=${name}><th scope="row">${name}</th>${row.map((guess, i) => {
        const best = guess.top[0];
        const right = best.id === tokens[lens.tokens[i]].id;
        const title = guess.top.map((one) => `${visible(one.spelling)} ${percent(one.probability)}`).join("\n");
        return html`<td key=${i} class=${cx("t", lossShade(-Math.log(guess.probability)), right && "right")}
          title=${`${title}\nthe token here: ${percent(guess.probability)}, rank ${guess.rank}`}>
          <bdi class="spelling">${visible(best.spelling)}</bdi> <span class="number">${percent(best.probability)}</span></td>`;
      })}</tr>`)}</tbody></table></div>
    <p class="quiet">Each cell: the likeliest token and its probability; bold where it is the token that stands there. The
      shade is the loss of that token, as in the text.</p></section>`;
}

const SHOWN = 14;
const NAMES = { embedding: "embedding", position: "position", mlp: "MLP", "norm bias": "last norm's bias" };

function nameOf({ kind, layer, head }) {
  if (kind === "head") return `block ${layer} head ${head}`;
  if (kind === "attention bias") return `block ${layer} attention's bias`;
  return layer == null ? NAMES[kind] : `block ${layer} ${NAMES[kind]}`;
}

function Attribution({ made, lens, index, against, setAgainst }) {
  const [all, setAll] = useState(false);
  const parts = [...made.parts].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const most = Math.abs(parts[0].value) || 1;
  const others = lens.layers.at(-1)[lens.tokens.indexOf(index)].top.filter((one) => one.id !== made.token.id);
  const what = html`<bdi class="spelling">${visible(made.token.spelling)}</bdi>`;
  return html`<section class="card" aria-labelledby="adds-title">
    <h3 id="adds-title">What each part adds</h3>
    <label class="quiet">To the logit of ${what}, less that of <select class="field" value=${against ?? ""}
      onChange=${(event) => setAgainst(event.target.value === "" ? null : Number(event.target.value))}>
      <option value="">no other token</option>${others.map((one) => html`<option key=${one.id} value=${one.id}>${
        visible(one.spelling)}, ${percent(one.probability)}</option>`)}</select></label>
    <ul class="bars">${parts.slice(0, all ? undefined : SHOWN).map((part) => html`<li key=${nameOf(part)}>
      <span class="name">${nameOf(part)}</span>
      <span class="diverging" aria-hidden="true"><span class=${part.value < 0 ? "less" : "more"}
        style=${{ width: `${50 * Math.abs(part.value) / most}%` }}></span></span>
      <span class="number value">${signed(part.value)}</span></li>`)}</ul>
    ${parts.length > SHOWN && html`<button class="button small" onClick=${() => setAll(!all)}>${
      all ? "Show the largest" : `Show all ${count(parts.length)}`}</button>`}
    <p class="quiet number">Together ${figure(made.logit)}${made.logit.toPrecision(4) !== made.capped_logit.toPrecision(4) &&
      `, which the model caps to ${figure(made.capped_logit)}`}. The last norm's divisor is taken as it is here.</p></section>`;
}

function signed(x) {
  return `${x < 0 ? "−" : "+"}${figure(Math.abs(x))}`;
}

function NGrams({ body, index }) {
  const [found, setFound] = useState(null);
  const [work, setWork] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => () => work?.abort(), [work]);
  const search = async () => {
    const asked = new AbortController();
    setWork(asked);
    setProblem(null);
    try {
      setFound(await post("studio/read/ngrams", { ...body, index }, { signal: asked.signal }));
    } catch (error) {
      if (error.name !== "AbortError") setProblem(error.message);
    }
    setWork(null);
  };
  return html`<section class="card" aria-labelledby="ngrams-title">
    <h3 id="ngrams-title">In the training data</h3>
    ${!found && html`<p><button class="button" disabled=${Boolean(work)} onClick=${search}>${
      work ? "Searching …" : "Search for the same tokens"}</button></p>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${found && html`<p class="quiet">Of ${count(found.n_tokens)} tokens, ${count(found.searched_tokens)} were searched.</p>
      <div class="scrolls" tabindex="0" role="region" aria-label="N-grams"><table class="ngrams">
        <thead><tr><th scope="col">Tokens before</th><th scope="col">Seen</th><th scope="col">Then this token</th>
          <th scope="col">What follows most often</th></tr></thead>
        <tbody>${found.by_length.map((one) => html`<tr key=${one.n}><th scope="row" class="number">${one.n - 1}</th>
          <td class="number">${count(one.contexts)}</td><td class="number">${count(one.followed)}</td>
          <td>${one.next.map(({ id, spelling, count: n }) => html`<span key=${id} class="next"><bdi class="spelling">${
            visible(spelling)}</bdi> <span class="quiet number">${count(n)}</span></span>`)}</td></tr>`)}</tbody></table></div>
      ${found.places.length > 0 && html`<p>The longest match has ${count(found.longest)} tokens. It first occurs here:</p>
        <ul class="places">${found.places.map((one) => html`<li key=${`${one.document}-${one.token}`}>
          <span class="quiet number">document ${count(one.document)}, token ${count(one.token)}</span>
          <p><span class="quiet">${one.before}</span><mark>${one.found}</mark><span class="quiet">${one.after}</span></p></li>`)}</ul>`}
      ${found.longest === 0 && html`<p>The token itself does not occur there.</p>`}`}</section>`;
}
