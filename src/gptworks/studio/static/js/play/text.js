// The tokens of a branch, shaded. They are drawn in chunks: while a text streams, only the last chunk is redrawn.

import { percent, visible } from "../format.js";
import { cx, html, memo, useCursor, useRef } from "../ui.js";

const CHUNK = 50;

/** The shades' meanings, from the likeliest to the least likely; the index is the shade. */
export const SHADES = {
  probability: {
    names: ["≥ 50 %", "≥ 20 %", "≥ 5 %", "≥ 1 %", "≥ 0.1 %", "less"],
    bounds: [0.5, 0.2, 0.05, 0.01, 0.001],
    of: (token, bound) => token.logprob != null && Math.exp(token.logprob) >= bound,
  },
  rank: {
    names: ["1st", "2nd", "3–5", "6–20", "21–100", "beyond"],
    bounds: [1, 2, 5, 20, 100],
    of: (token, bound) => token.rank != null && token.rank <= bound,
  },
};

function shade(token, kind) {
  if (kind === "off" || token.logprob == null) return 0;
  const { bounds, of } = SHADES[kind];
  const found = bounds.findIndex((bound) => of(token, bound));
  return found < 0 ? bounds.length : found;
}

export const Legend = memo(function Legend({ kind }) {
  if (kind === "off") return null;
  return html`<span class="legend" role="img" aria-label=${`Shades by ${kind}: ${SHADES[kind].names.join(", ")}`}>
    ${SHADES[kind].names.map((name, i) => html`<span key=${i} class=${`t s${i}`}>${name}</span>`)}</span>`;
});

const Chunk = memo(function Chunk({ list, from, to, offset, kind, name }) {
  const made = [];
  for (let i = from; i < to; i++) {
    const token = list[i];
    const { text } = token;
    made.push(
      html`<span key=${i} class=${cx(
        "t",
        `s${shade(token, kind)}`,
        !text && "empty",
        token.chosen && "chosen",
        text.startsWith("\n") && "break",
      )} data-part=${name} data-i=${offset + i}>${text}</span>`,
    );
  }
  return html`<span>${made}</span>`;
});

function chunks(list, n, offset, kind, name, key) {
  const made = [];
  for (let from = 0; from < n; from += CHUNK) {
    made.push(html`<${Chunk} key=${`${key}-${from}`} list=${list} from=${from} to=${Math.min(n, from + CHUNK)}
      offset=${offset} kind=${kind} name=${name} />`);
  }
  return made;
}

/** A branch's text. `look(part, i, element, pin)` shows a token's card, `leave()` closes it. */
export function TokenText({ tree, branch, kind, busy, withPrompt, look, leave, edit, say, label }) {
  const pane = useRef(null);
  const { cursor, mark, walk: step } = useCursor(pane, branch.id);
  const hovered = useRef(null);
  const token = (element) => {
    const i = Number(element.dataset.i);
    return element.dataset.part === "prompt" ? tree.root(branch).prompt_tokens[i] : tree.answer(branch)[i];
  };
  const walk = (event) => {
    const element = step(event);
    if (element) {
      const { logprob, rank, spelling } = token(element);
      say(`${visible(spelling)}${logprob == null ? "" : `, ${percent(Math.exp(logprob))}, rank ${rank}`}`);
      look(element.dataset.part, Number(element.dataset.i), element, false);
    } else if (event.key === "Enter" && cursor.current) {
      event.preventDefault();
      look(cursor.current.dataset.part, Number(cursor.current.dataset.i), cursor.current, true);
    } else if (event.key === "e" && cursor.current) {
      event.preventDefault();
      edit(cursor.current.dataset.part, Number(cursor.current.dataset.i));
    } else if (event.key === "Escape") {
      mark(null);
      leave(true);
    }
  };
  const over = (event) => {
    // only real moves: a text that grows below a resting pointer opens no card
    const element = event.target.closest(".t");
    if (!element || element === hovered.current || event.pointerType !== "mouse") return;
    hovered.current = element;
    look(element.dataset.part, Number(element.dataset.i), element, false);
  };
  const out = () => ((hovered.current = null), leave(false));
  const click = (event) => {
    const element = event.target.closest(".t");
    if (!element || String(getSelection())) return;
    mark(element);
    look(element.dataset.part, Number(element.dataset.i), element, true);
  };
  let offset = 0;
  const answer = tree.segments(branch).flatMap(({ branch: { id }, tokens, n }) => {
    const made = chunks(tokens, n, offset, kind, "answer", id);
    offset += n;
    return made;
  });
  return html`<div class="text" ref=${pane} tabindex="0" role="group" aria-label=${label} aria-busy=${String(busy)}
      onKeyDown=${walk} onPointerMove=${over} onPointerLeave=${out} onClick=${click}
    >${
      withPrompt &&
      html`<span class="prompt">${chunks(
        tree.root(branch).prompt_tokens,
        tree.root(branch).prompt_tokens.length,
        0,
        kind,
        "prompt",
        "prompt",
      )}</span>`
    }${branch.edited ?? answer}${branch.rest}${busy && html`<span class="caret" aria-hidden="true"></span>`}</div>`;
}
