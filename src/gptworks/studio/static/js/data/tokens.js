// Rows of tokens with their borders. The pointer and the arrow keys show a token's id and details.

import { count, figure, percent, visible } from "../format.js";
import { lossShade } from "../read/text.js";
import { cx, html, memo, useCursor, useEffect, useRef, useState } from "../ui.js";

/** Tokens without a text of their own are shown by their spelling: special ones, and parts of a character. */
function Token({ token, masks, row, i }) {
  const shade = token.nats == null ? null : lossShade(token.nats);
  const learned = masks && (token.learned ? !shade && "learned" : "masked");
  return html`<span class=${cx("t", shade, learned, !token.text && "bare")}
    data-row=${row} data-i=${i}>${token.text ? withEnds(token.text) : visible(token.spelling)}</span>`;
}

/** The text with a sign at the end of each line. The sign is not part of the text. */
function withEnds(text) {
  const [first, ...rest] = text.split("\n");
  return [first, ...rest.map((line) => html`<span class="line-end"></span>${`\n${line}`}`)];
}

function Border({ begins }) {
  const from = begins.first ? `, from its token ${count(begins.first + 1)}` : "";
  const where = `document ${count(begins.document + 1)}${from}`;
  return html`<span class=${cx("begins", begins.alone && "alone")}>${where}</span>`;
}

const Row = memo(function Row({ row, index, masks }) {
  const made = row.tokens.map(
    (token, i) => html`${token.begins && html`<${Border} begins=${token.begins} />`}
    <${Token} key=${i} ...${{ token, masks, i }} row=${index} />`,
  );
  return html`<div class="line-of-tokens">${row.title && html`<h2 class="facts number">${row.title}</h2>`}
    <div class="text tokens">${made}${
      row.tokens.length === 0 && html`<span class="quiet">It ends before these tokens.</span>`
    }</div></div>`;
});

export function Tokens({ rows, first }) {
  const pane = useRef(null);
  const batch = rows.map((row) => row.tokens)[0];
  const { cursor, mark, walk } = useCursor(pane, batch);
  const [shown, show] = useState(null);
  const masks = rows.some((row) => row.tokens.some((token) => token.learned === false && !token.begins?.alone));
  const look = (element) => element && show([Number(element.dataset.row), Number(element.dataset.i)]);
  useEffect(() => show(null), [batch]);
  const point = ({ target }) => {
    const element = target.closest(".t");
    if (!element || element === cursor.current) return;
    mark(element);
    look(element);
  };
  const token = shown && rows[shown[0]]?.tokens[shown[1]];
  return html`<div class="tokens-pane">
    ${
      masks && html`<p class="facts"><span class="t learned">learned</span> <span class="t masked">only read</span></p>`
    }
    <div class="rows" ref=${pane} tabindex="0" role="group" aria-label="Tokens; the arrow keys walk through them"
      onKeyDown=${(event) => look(walk(event))}
      onPointerMove=${point} onClick=${point}>${rows.map(
        (row, i) => html`<${Row} key=${i} row=${row} index=${i} masks=${masks} />`,
      )}</div>
    <p class="detail number" role="status">${
      token
        ? html`Token <b>${count(first + shown[1] + 1)}</b>: <bdi class="spelling">${visible(token.spelling)}</bdi>,
      id <b>${token.id}</b>${masks && (token.learned ? ", learned" : ", only read")}${
        token.nats != null && `, ${figure(token.nats)} nats, ${percent(Math.exp(-token.nats))}`
      }`
        : html`<span class="quiet">Point at a token, or walk with the arrow keys, to see its id.</span>`
    }</p></div>`;
}
