// The tree of branches: walk it, rename, delete.

import { count, figure, visible } from "../format.js";
import { cx, html, useEffect, useRef, useState } from "../ui.js";

const FIRST_CHARACTERS = 48;

export function Branches({ session }) {
  const { tree } = session;
  const shown = new Set(session.columns.map((column) => column.current));
  const [renaming, rename] = useState(null);
  const nav = useRef(null);
  useEffect(() => {
    // scroll to the current branch without moving the page
    const box = nav.current?.closest("details");
    const at = nav.current?.querySelector(".current")?.getBoundingClientRect();
    if (!at) return;
    const { top, bottom } = box.getBoundingClientRect();
    if (at.bottom > bottom || at.top < top)
      box.scrollTop += at.bottom > bottom ? at.bottom - bottom + 8 : at.top - top - 8;
  }, [[...shown].join()]);
  if (!tree.branches.size)
    return html`<p class="quiet">Every text is kept here: what you generate, and each other way you take.</p>`;
  const below = new Map();
  for (const branch of tree.branches.values()) {
    const parent = tree.get(branch.parent) ? branch.parent : null;
    below.set(parent, [...(below.get(parent) ?? []), branch]);
  }
  const several = new Set([...tree.branches.values()].map((branch) => branch.model)).size > 1;
  const names = namesOf(tree, below);
  /** A branch and the branches below it. An only child that continues the whole text is not indented; others are. */
  const item = (branch) => {
    const next = below.get(branch.id) ?? [];
    const goesOn = next.length === 1 && continues(tree, branch, next[0]);
    return html`<li key=${branch.id}>
      <${Item} ...${{ session, branch, several, rename }} words=${branch.name || names.get(branch.id)}
        renaming=${renaming === branch.id} current=${shown.has(branch.id)} />
      ${next.length > 0 && !goesOn && html`<ul>${next.map(item)}</ul>`}</li>${goesOn && item(next[0])}`;
  };
  return html`<nav class="branches" aria-label="Branches" ref=${nav}>
    <ul>${(below.get(null) ?? []).map(item)}</ul></nav>`;
}

/** Whether a branch takes its parent's whole text or conversation and adds to it. */
function continues(tree, parent, branch) {
  if (branch.at != null) return branch.at >= tree.length(parent);
  return Boolean(branch.prompt.messages) && branch.prompt.messages.length > tree.root(parent).prompt.messages?.length;
}

function Item({ session, branch, several, words, renaming, rename, current }) {
  const { tree } = session;
  const n = tree.length(branch);
  const named = (event) => {
    event.preventDefault();
    branch.name = event.target.elements.name.value.trim();
    rename(null);
    session.changed();
  };
  if (renaming) {
    return html`<form class="rename" onSubmit=${named}><label><span class="hidden-text">Name</span>
      <input class="field" name="name" value=${branch.name} placeholder=${words} maxlength="80" ref=${focusOnce}
        onKeyDown=${(event) => event.key === "Escape" && rename(null)} /></label>
      <button class="button small">Save</button></form>`;
  }
  const mean = branch.end?.mean_logprob;
  return html`<div class=${cx("branch", current && "current")}>
    <button class="open" aria-current=${current ? "true" : null} onClick=${() => session.show(branch.id)}>
      <bdi class="words">${words}</bdi>
      <span class="quiet number facts">${several && html`<bdi>${branch.model} · </bdi>`}${
        branch.problem ? "failed" : `${count(n)} tokens`
      }${
        mean != null &&
        html` · <span
          title="The mean of −ln of the probabilities that the model alone gave its new tokens; 0 is certain">${figure(
            -mean,
          )} nats per token</span>`
      }</span>
    </button>
    ${
      current &&
      html`<span class="tools">
      <button class="button plain small" aria-label=${`Rename ${words}`} onClick=${() => rename(branch.id)}>
        Rename</button>
      <button class="button plain small" aria-label=${`Delete ${words}`} onClick=${() => session.remove(branch.id)}>
        Delete</button>
    </span>`
    }</div>`;
}

function focusOnce(element) {
  if (element && !element.dataset.focused) {
    element.dataset.focused = "yes";
    element.focus();
  }
}

/** Short names: the text that a branch adds to its parent. Branches that add the same text also get the settings in
 * which they differ. */
function namesOf(tree, below) {
  const names = new Map();
  for (const siblings of below.values()) {
    const alike = new Map();
    for (const branch of siblings) {
      const words = added(tree, branch);
      alike.set(words, [...(alike.get(words) ?? []), branch]);
    }
    for (const [words, group] of alike) {
      const differ = differences(group);
      group.forEach((branch, i) => {
        const own = branch.parent == null && branch.at == null && line(branch.edited ?? textOf(branch));
        const alone = own ? `${words} → ${own}` : words;
        const nth = i && !differ[i].length ? ` (${i + 1})` : ""; // a repetition with the same settings
        names.set(branch.id, group.length > 1 ? [...differ[i], words].join(" · ") + nth : alone);
      });
    }
  }
  return names;
}

const textOf = (branch) =>
  branch.tokens
    .slice(0, 20)
    .map((one) => one.text)
    .join("");

function added(tree, branch) {
  if (branch.at != null) return `… ${line(textOf(branch)) || "(empty)"}`;
  const prompt = tree.promptText(branch);
  const parent = tree.get(branch.parent);
  const other = parent && !branch.prompt.messages ? tree.promptText(parent) + tree.answerText(parent) : "";
  return line(differing(prompt, other)) || "(no prompt)";
}

/** The end of a text, from the first word in which it differs from `other`. */
function differing(text, other) {
  let at = 0;
  while (at < text.length && text[at] === other[at]) at += 1;
  const word = at < text.length ? text.lastIndexOf(" ", at) + 1 : 0;
  return word > 0 ? `… ${text.slice(word)}` : text;
}

/** The model, checkpoint and settings in which branches differ, as words for each of them. */
function differences(branches) {
  const facts = branches.map(({ model, step, settings, seed }) => ({ model, step, ...settings, seed }));
  const keys = Object.keys(facts[0]).filter((key) => new Set(facts.map((one) => JSON.stringify(one[key]))).size > 1);
  const words = (key, value) => (key === "model" ? value : `${key} ${value == null ? "–" : value}`);
  return facts.map((one) => keys.map((key) => words(key, one[key])));
}

function line(text) {
  return visible(text.slice(0, 400).trim().replace(/\s+/g, " ").slice(0, FIRST_CHARACTERS)).replaceAll("␣", " ");
}
