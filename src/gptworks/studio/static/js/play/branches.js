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
  const item = (branch) => html`<li key=${branch.id}>
    <${Item} ...${{ session, branch, several, rename }} renaming=${renaming === branch.id}
      current=${shown.has(branch.id)} />
    ${list(below.get(branch.id))}</li>`;
  const list = (branches) => branches && html`<ul>${branches.map(item)}</ul>`;
  return html`<nav class="branches" aria-label="Branches" ref=${nav}>${list(below.get(null))}</nav>`;
}

function Item({ session, branch, several, renaming, rename, current }) {
  const { tree } = session;
  const n = tree.length(branch);
  const words = branch.name || firstWords(tree, branch);
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

/** A short name: the branch's prompt if it begins with one, and its own first words. */
function firstWords(tree, branch) {
  const own = line(
    branch.edited ??
      branch.tokens
        .slice(0, 20)
        .map((one) => one.text)
        .join(""),
  );
  if (branch.at != null) return `… ${own || "(empty)"}`;
  return `${line(tree.promptText(branch)) || "(no prompt)"}${own && ` → ${own}`}`;
}

function line(text) {
  return visible(text.slice(0, 400).trim().replace(/\s+/g, " ").slice(0, FIRST_CHARACTERS)).replaceAll("␣", " ");
}
