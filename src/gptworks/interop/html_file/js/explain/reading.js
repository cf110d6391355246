// A text as the model reads it: its tokens, and the trace of what the model computed from them.

import { visible } from "../../../../studio/static/js/format.js";
import { softmax } from "../sampling.js";

export const MOST_TOKENS = 64; // that a picture holds
const FIRST_TOKENS = 16; // of the first text

/** How a token is written on the page. */
export const nameOf = (model, id) => visible(model.tokenizer.spelling(id));

export class Reading {
  /** Read a text's first tokens. Throws an Error that says why, if there are none. */
  static async of(model, text, signal) {
    const { tokenizer, about } = model;
    const all = [...tokenizer.words.before, ...tokenizer.encode(text)];
    if (!all.length) throw new Error("The model knows no token of this text. Write another one.");
    const ids = all.slice(0, Math.min(MOST_TOKENS, about.context));
    return new Reading(model, text, ids, all.length, await model.trace(ids, signal));
  }

  constructor(model, text, ids, n_tokens, trace) {
    Object.assign(this, { model, text, ids, n_tokens, trace });
    this.names = ids.map((id) => nameOf(model, id));
    this.length = ids.length;
    this.kept = new Map();
  }

  /** Probabilities of the token after place t. */
  chances(t) {
    if (!this.kept.has(t)) this.kept.set(t, softmax(this.trace.logits(t)));
    return this.kept.get(t);
  }

  /** The loss of the token at place t, in nats; null for the first one, which nothing predicts. */
  loss(t) {
    return t > 0 ? -Math.log(this.chances(t - 1)[this.ids[t]]) : null;
  }

  /** Mean loss per predicted token; null if there is none. */
  get meanLoss() {
    const losses = this.ids.map((_, t) => this.loss(t)).slice(1);
    return losses.length ? losses.reduce((a, b) => a + b, 0) / losses.length : null;
  }

  /** The row of the token at place t in a table of numbers, which has one row for each token. */
  row(table, t) {
    const width = table.length / this.length;
    return table.subarray(t * width, (t + 1) * width);
  }

  /** Attention from place t, by one head of a layer. */
  attention(layer, head, t) {
    const { length } = this;
    const at = (head * length + t) * length;
    return this.trace.attention(layer).subarray(at, at + length);
  }
}

/** The text that the walk begins with: one that the run states; if it is short, the model writes on. */
export async function firstText(model, prompts, sampling, signal) {
  const { tokenizer, about } = model;
  let text = prompts?.[0] ?? "";
  let ids = tokenizer.prompt(text);
  if (!ids.length) ids = tokenizer.prompt((text = "The"));
  const missing = Math.min(FIRST_TOKENS, about.context) - ids.length;
  if (missing <= 0 || !ids.length) return text;
  const settings = { ...sampling, seed: 1, max_tokens: missing };
  let made = text;
  for await (const event of model.generate({ prompt: text, settings, n_top: 0 }, signal))
    if (event.type === "token" || event.type === "end") made += event.text;
  return made.replace(/\uFFFD+$/, "");
}

/** What the tokens of this model are: characters, words or pieces. */
export function kindOf({ words }) {
  if (words.kind !== "WordLevel") return "pieces";
  const special = new Set(words.added.map((one) => one.id));
  return words.known.every((id) => special.has(id) || [...words.names[id]].length <= 1) ? "characters" : "words";
}
