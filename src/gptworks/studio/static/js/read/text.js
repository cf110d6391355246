// A text coloured by its tokens' losses, or by the difference of two models.

import { figure, percent, visible } from "../format.js";
import { cx, html, memo, useCursor, useRef } from "../ui.js";

const CHUNK = 50;
const LOSSES = [0.7, 1.6, 3, 4.6, 6.9];
const LOSS_NAMES = ["≤ 0.7 nats", "≤ 1.6", "≤ 3", "≤ 4.6", "≤ 6.9", "more"];
const DIFFERENCES = [-2, -0.7, -0.1, 0.1, 0.7, 2];
const DIFFERENCE_NAMES = ["2 nats less", "0.7 less", "0.1 less", "alike", "0.1 more", "0.7 more", "2 more"];

export function lossShade(nats) {
  if (nats == null) return "s0";
  const found = LOSSES.findIndex((bound) => nats <= bound);
  return `s${found < 0 ? LOSSES.length : found}`;
}

/** The shade for the second model's loss minus the first model's loss. */
export function differenceShade({ nats, other_nats: other }) {
  if (nats == null || other == null) return "d3";
  const found = DIFFERENCES.findIndex((bound) => other - nats < bound);
  return `d${found < 0 ? DIFFERENCES.length : found}`;
}

export const LossLegend = () => html`<${Legend} about="Loss of each token" names=${LOSS_NAMES} letter="s" />`;
export const DifferenceLegend = ({ about }) => html`<${Legend} about=${about} names=${DIFFERENCE_NAMES} letter="d" />`;

function Legend({ about, names, letter }) {
  return html`<span class="quiet">
    ${about}</span> <span class="legend" role="img" aria-label=${`${about}: ${names.join(", ")}`}>
    ${names.map((name, i) => html`<span key=${i} class=${`t ${letter}${i}`}>${name}</span>`)}</span>`;
}

function said(item, second) {
  if (item.nats == null) return "not predicted";
  if ("other_nats" in item) return `${figure(item.nats)} nats, ${second} ${figure(item.other_nats)}`;
  return `${figure(item.nats)} nats, ${percent(Math.exp(-item.nats))}`;
}

const Chunk = memo(function Chunk({ items, from, to, index, first, weights }) {
  const made = [];
  for (let i = from; i < to; i++) {
    const item = items[i];
    const shade = "other_nats" in item ? differenceShade(item) : lossShade(item.nats);
    const weight = weights?.values[i - weights.first] ?? 0;
    made.push(html`<span key=${i} class=${cx(
      "t",
      shade,
      !item.text && "empty",
      item.text.startsWith("\n") && "break",
      first(item, i) === index && index != null && "picked",
      weights && "weighed",
    )} data-i=${i}
      style=${weights ? { "--weight": weight } : null}>${item.text}</span>`);
  }
  return html`<span>${made}</span>`;
});

const place = (item, i) => (item.tokens ? item.tokens[1] - 1 : i);

/** `pick(i)` is called with the place of the chosen token, or of the last token of the chosen segment. */
export function ReadText({ tokens, segments, index, pick, say, weights, second }) {
  const pane = useRef(null);
  const items = segments ?? tokens;
  const { cursor, mark, walk: step } = useCursor(pane, items);
  const take = (element) => {
    const i = place(items[Number(element.dataset.i)], Number(element.dataset.i));
    if (i > 0) pick(i);
    else say("The first token is not predicted.");
  };
  const walk = (event) => {
    const element = step(event);
    if (element) {
      const item = items[Number(element.dataset.i)];
      say(`${visible(item.spelling ?? item.text)}, ${said(item, second)}`);
    } else if (event.key === "Enter" && cursor.current) {
      event.preventDefault();
      take(cursor.current);
    }
  };
  const over = (event) => {
    const element = event.target.closest(".t");
    const item = element && items[Number(element.dataset.i)];
    if (item) element.title = `${visible(item.spelling ?? item.text)}: ${said(item, second)}`;
  };
  const click = (event) => {
    const element = event.target.closest(".t");
    if (!element || String(getSelection())) return;
    mark(element);
    take(element);
  };
  const made = [];
  for (let from = 0; from < items.length; from += CHUNK) {
    const to = Math.min(items.length, from + CHUNK);
    const has = index != null && place(items[from], from) <= index && index <= place(items[to - 1], to - 1);
    made.push(html`<${Chunk} key=${from} items=${items} from=${from} to=${to} index=${has ? index : null} first=${place}
      weights=${segments ? null : weights} />`);
  }
  return html`<div class="text" ref=${pane} tabindex="0" role="group"
    aria-label="Text, token by token; Enter looks into a token"
    onKeyDown=${walk} onPointerOver=${over} onClick=${click}>${made}</div>`;
}
