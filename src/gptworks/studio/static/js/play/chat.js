// A column of a conversation: its turns, each of which can be changed.

import { html, useState } from "../ui.js";
import { TokenText } from "./text.js";

const ROLES = { system: "System", user: "You", assistant: "Model", developer: "System" };

export function Conversation({ session, index, busy, text }) {
  const [editing, edit] = useState(null);
  const { tree } = session;
  const turns = session.conversation(index);
  const unread = firstRead(turns, tree.get(session.columns[index].current)?.dropped);
  const save = (place) => (content) => {
    edit(null);
    if (place === "system") session.setSystem(index, content);
    else session.editTurn(index, place, content);
  };
  return html`<ol class="turns">
    ${
      turns.length > 0 &&
      turns[0].role !== "system" &&
      html`<li key="system">${
        editing === "system"
          ? html`<${Editor} name="System message" content="" save=${save("system")} cancel=${() => edit(null)} />`
          : html`<button class="button plain small" disabled=${busy} onClick=${() => edit("system")}>
            Add a system message</button>`
      }</li>`
    }
    ${turns.map(
      (turn, place) => html`${
        place === unread &&
        html`<li key="unread" class="quiet hint">The model did not read the turns above for its
          last answer: the conversation is longer than its context.</li>`
      }<li key=${place} class=${`turn ${turn.role}`}>
      <div class="head"><strong>${ROLES[turn.role]}</strong><span class="fill"></span>
        <button class="button plain small" disabled=${busy} aria-label=${`Edit: ${ROLES[turn.role]}, turn ${place + 1}`}
          onClick=${() => edit(place)}>Edit</button></div>
      ${
        editing === place
          ? html`<${Editor} name=${ROLES[turn.role]} content=${turn.content} save=${save(place)}
            cancel=${() => edit(null)} />`
          : turn.from && tree.get(turn.from) && tree.get(turn.from).edited == null
            ? place === turns.length - 1
              ? html`<${TokenText} ...${text} busy=${busy} label="Answer, token by token" />`
              : html`<${Earlier} tree=${tree} branch=${tree.get(turn.from)} kind=${text.kind}
                show=${() => session.show(turn.from)} />`
            : html`<div class="text">${turn.content}</div>`
      }
    </li>`,
    )}
  </ol>`;
}

/** The place of the first turn that the model read if it did not read the `dropped` oldest ones; else -1. */
function firstRead(turns, dropped) {
  if (!dropped) return -1;
  const places = turns.flatMap(({ role }, place) => (ROLES[role] === "System" ? [] : [place]));
  return places[dropped] ?? -1;
}

/** An answer before the last. Its tokens are shaded; opening it makes its branch the current one. */
function Earlier({ tree, branch, kind, show }) {
  return html`<${TokenText} tree=${tree} branch=${branch} kind=${kind} busy=${false} label="Earlier answer"
      look=${(_part, _i, _element, pin) => pin && show()} leave=${() => {}} edit=${() => {}} say=${() => {}} />`;
}

function Editor({ name, content, save, cancel }) {
  const submit = (event) => {
    event.preventDefault();
    save(event.target.elements.content.value);
  };
  const keys = (event) => {
    if (event.key === "Escape") cancel();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
  };
  return html`<form class="turn-editor" onSubmit=${submit}>
    <textarea class="field" name="content" aria-label=${name} rows="3" onKeyDown=${keys}
      ref=${(element) => element && document.activeElement?.form !== element.form && element.focus()}>
      ${content}</textarea>
    <button class="button small primary">Save</button>
    <button type="button" class="button small" onClick=${cancel}>Cancel</button></form>`;
}
