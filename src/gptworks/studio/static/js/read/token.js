// One token: the causes of its probability, in words and by the parts of the model, and its places in the data.

import { hasRuns, post } from "../api.js";
import { count, figure, percent, visible } from "../format.js";
import { cx, html, Scrolls, useEffect, useMemo, useRef, useState } from "../ui.js";
import { Attention, headsOf } from "./attention.js";
import { lossShade } from "./text.js";

const LEAST_SEEN = 120; // pixels; if fewer of the section are visible, as on a phone, scroll to it

/** `sought`: whether another part opened this token, so that the page scrolls to it. */
export function Token({ body, answer, index, sought, weights, setWeights }) {
  const [found, setFound] = useState(null);
  const [against, setAgainst] = useState(null);
  const [problem, setProblem] = useState(null);
  const section = useRef(null);
  const heads = useMemo(() => found && headsOf(found.attention, found.first_read), [found?.attention]);
  useEffect(() => {
    const { top } = section.current.getBoundingClientRect();
    if (sought || (found && top > innerHeight - LEAST_SEEN)) section.current.scrollIntoView();
  }, [Boolean(found)]);
  useEffect(() => {
    const asked = new AbortController();
    setProblem(null);
    post("studio/read/token", { ...body, index, against }, { signal: asked.signal }).then(
      setFound,
      (error) => error.name === "AbortError" || setProblem(error.message),
    );
    return () => asked.abort();
  }, [index, against]);
  const token = answer.tokens[index];
  const look = (row) => setWeights(heads.of(row));
  return html`<section class="token" aria-label="The chosen token" ref=${section}>
    <h2>Why <bdi class="spelling">${visible(token.spelling)}</bdi>? <span class="quiet number">
      token ${count(index + 1)} · probability ${percent(Math.exp(-token.nats))} · ${figure(token.nats)} nats</span></h2>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${!found && !problem && html`<p class="quiet" role="status">Looking into the model …</p>`}
    ${
      found &&
      html`<${InWords} token=${token} lens=${found.lens} parts=${sorted(found.attribution)} index=${index}
        against=${found.attribution.against} />
    <div class="panels">
      <${Attribution} made=${found.attribution} lens=${found.lens} tokens=${answer.tokens}
        ...${{ index, against, setAgainst, weights, look, heads }} />
      <${Lens} lens=${found.lens} tokens=${answer.tokens} index=${index} />
      <${Attention} heads=${heads} tokens=${answer.tokens} look=${look} />
      ${hasRuns && html`<${NGrams} body=${body} index=${index} />`}
    </div>`
    }</section>`;
}

/** The model's prediction, and the parts that raise and lower the token's logit most. `parts`: the largest first. */
function InWords({ token, lens, parts, index, against }) {
  const { top, rank, probability } = lens.layers.at(-1)[lens.tokens.indexOf(index)];
  const others = top.filter(({ id }) => id !== token.id).slice(0, 3);
  const named = (one) => html`<bdi class="spelling">${visible(one.spelling)}</bdi> ${percent(one.probability)}`;
  const [most] = parts.filter(({ value }) => value > 0);
  const [least] = parts.filter(({ value }) => value < 0);
  return html`<p class="number">Before sampling, the model gives it <b>${percent(probability)}</b>: ${
    rank === 1 ? "no token is likelier. Next come " : `rank ${count(rank)}. It expects instead `
  }${others.map((one, i) => html`${i > 0 && ", "}${named(one)}`)}. ${
    most &&
    html`What raises its logit most${
      against &&
      html` over that of ${""}
      <bdi class="spelling">${visible(against.spelling)}</bdi>`
    } is ${nameOf(most)} (${signed(most.value)})${
      least && `; what lowers it most is ${nameOf(least)} (${signed(least.value)})`
    }.`
  }</p>`;
}

function Lens({ lens, tokens, index }) {
  const layers = lens.layers.map((row, i) => ({ row, name: i ? `after block ${i - 1}` : "embedding" })).reverse();
  return html`<section class="card" aria-labelledby="lens-title">
    <h3 id="lens-title">Logit lens</h3>
    <p class="quiet">
      What each block would predict if it were the last. The first line is the model's own prediction.</p>
    <${Scrolls} name="Logit lens, by layer and token"><table class="lens">
      <thead><tr><th scope="col">Block</th>${lens.tokens.map(
        (i) => html`<th key=${i} scope="col" class=${cx(i === index && "here")}>
        <bdi class="spelling">${visible(tokens[i].spelling)}</bdi></th>`,
      )}</tr></thead>
      <tbody>${layers.map(
        ({ row, name }) =>
          html`<tr key=${name}><th scope="row">${name}</th>${row.map((guess, i) => {
            const best = guess.top[0];
            const right = best.id === tokens[lens.tokens[i]].id;
            const title = guess.top.map((one) => `${visible(one.spelling)} ${percent(one.probability)}`).join("\n");
            return html`<td key=${i} class=${cx("t", lossShade(-Math.log(guess.probability)), right && "right")}
          title=${`${title}\nthe token here: ${percent(guess.probability)}, rank ${guess.rank}`}>
          <bdi class="spelling">${visible(best.spelling)}</bdi> <span class="number">
            ${percent(best.probability)}</span></td>`;
          })}</tr>`,
      )}</tbody></table><//>
    <p class="quiet">Each cell: the likeliest token and its probability; bold if it is the actual token. The
      shade is the loss of that token, as in the text.</p></section>`;
}

const SHOWN = 14;
const NAMES = {
  embedding: "embedding",
  position: "position",
  bigram: "token pair",
  mlp: "MLP",
  "norm bias": "last norm's bias",
};

function nameOf({ kind, layer, head }) {
  if (kind === "head") return `block ${layer} head ${head}`;
  if (kind === "attention bias") return `block ${layer} attention's bias`;
  return layer == null ? NAMES[kind] : `block ${layer} ${NAMES[kind]}`;
}

const sorted = ({ parts }) => [...parts].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));

function Attribution({ made, lens, tokens, index, against, setAgainst, weights, look, heads }) {
  const [all, setAll] = useState(false);
  const parts = sorted(made);
  const most = Math.abs(parts[0].value) || 1;
  const others = lens.layers.at(-1)[lens.tokens.indexOf(index)].top.filter((one) => one.id !== made.token.id);
  const what = html`<bdi class="spelling">${visible(made.token.spelling)}</bdi>`;
  const name = (part) => {
    if (part.kind !== "head") return nameOf(part);
    const row = part.layer * heads.n_heads + part.head;
    return html`<button class="button plain small" aria-pressed=${String(weights?.row === row)}
      onClick=${() => look(row)}>${nameOf(part)}</button>`;
  };
  return html`<section class="card" aria-labelledby="adds-title">
    <h3 id="adds-title">What each part adds</h3>
    <label class="quiet">To the logit of ${what}, less that of <select class="field" value=${against ?? ""}
      onChange=${(event) => setAgainst(event.target.value === "" ? null : Number(event.target.value))}>
      <option value="">no other token</option>${others.map(
        (one) =>
          html`<option key=${one.id} value=${one.id}>${visible(one.spelling)}, ${percent(one.probability)}</option>`,
      )}</select></label>
    <ul class="bars">${parts.slice(0, all ? undefined : SHOWN).map(
      (part) => html`<li key=${nameOf(part)}>
      <span class="name">${name(part)}</span>
      <span class="diverging" aria-hidden="true"><span class=${part.value < 0 ? "less" : "more"}
        style=${{ width: `${(50 * Math.abs(part.value)) / most}%` }}></span></span>
      <span class="number value">${signed(part.value)}</span></li>`,
    )}</ul>
    ${
      parts.length > SHOWN &&
      html`<button class="button small" onClick=${() => setAll(!all)}>${
        all ? "Show the largest" : `Show all ${count(parts.length)}`
      }</button>`
    }
    <p class="number" role="status">${
      weights
        ? html`${weights.name} looks at ${lookedAt(weights, tokens)}`
        : html`<span
      class="quiet">Choose a head to see which tokens it looks at.</span>`
    }</p>
    <p class="quiet number">
      All parts together make ${made.against ? "this difference of the logits" : "the logit"}: ${figure(made.logit)}${
        made.logit.toPrecision(4) !== made.capped_logit.toPrecision(4) &&
        `, which the model caps to ${figure(made.capped_logit)}`
      }. They add up because the last norm's factor is held as it is at this token.</p></section>`;
}

/** The tokens with a head's largest weights. */
function lookedAt({ values, first }, tokens) {
  const most = Array.from(values, (weight, i) => ({ weight, i }))
    .sort((a, b) => b.weight - a.weight)
    .slice(0, 3);
  return most.map(
    ({ weight, i }, k) =>
      html`${k > 0 && ", "}<bdi class="spelling">${visible(tokens[first + i].spelling)}</bdi> ${percent(
        weight,
      )} <span class="quiet">(token ${count(first + i + 1)})</span>`,
  );
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
    ${
      !found &&
      html`<p><button class="button" disabled=${Boolean(work)} onClick=${search}>${
        work ? "Searching …" : "Search for the same tokens"
      }</button></p>`
    }
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${
      found &&
      html`<p class="quiet">Of ${count(found.n_tokens)} tokens, ${count(found.searched_tokens)} were searched.</p>
      <${Scrolls} name="N-grams"><table class="ngrams">
        <thead><tr><th scope="col">Tokens before</th><th scope="col">Seen</th><th scope="col">Then this token</th>
          <th scope="col">What follows most often</th></tr></thead>
        <tbody>${found.by_length.map(
          (one) => html`<tr key=${one.n}><th scope="row" class="number">${one.n - 1}</th>
          <td class="number">${count(one.contexts)}</td><td class="number">${count(one.followed)}</td>
          <td>${one.next.map(
            ({ id, spelling, count: n }) =>
              html`<span key=${id} class="next"><bdi class="spelling">${visible(
                spelling,
              )}</bdi> <span class="quiet number">${count(n)}</span></span>`,
          )}</td></tr>`,
        )}</tbody></table><//>
      ${
        found.places.length > 0 &&
        html`<p>The longest match has ${count(found.longest)} tokens. It first occurs here:</p>
        <ul class="places">${found.places.map(
          (one) => html`<li key=${`${one.document}-${one.token}`}>
          <span class="quiet number">document ${count(one.document + 1)}, token ${count(one.token + 1)}</span>
          <p><span class="quiet">${one.before}</span><mark>${one.found}</mark><span class="quiet">
            ${one.after}</span></p></li>`,
        )}</ul>`
      }
      ${found.longest === 0 && html`<p>The token itself does not occur there.</p>`}`
    }</section>`;
}
