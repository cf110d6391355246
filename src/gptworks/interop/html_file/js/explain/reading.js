// A text as the model reads it: the tokens, and the trace of the model's computation.

import { visible } from "../../../../studio/static/js/format.js";
import { softmax } from "../sampling.js";

export const MOST_TOKENS = 64; // most tokens of a picture
const FIRST_TOKENS = 16; // least tokens of the first text

/** Return a token's text for the page. */
export const nameOf = (model, id) => visible(model.tokenizer.spelling(id));

export class Reading {
  /** Read a text's first tokens; throw an Error if there are none. */
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

  /** Return the probabilities of the token after place t. */
  chances(t) {
    if (!this.kept.has(t)) this.kept.set(t, softmax(this.trace.logits(t)));
    return this.kept.get(t);
  }

  /** Return the loss of the token at place t in nats; null for the first token, which is not predicted. */
  loss(t) {
    return t > 0 ? -Math.log(this.chances(t - 1)[this.ids[t]]) : null;
  }

  /** Mean loss per predicted token; null if there is none. */
  get meanLoss() {
    const losses = this.ids.map((_, t) => this.loss(t)).slice(1);
    return losses.length ? losses.reduce((a, b) => a + b, 0) / losses.length : null;
  }

  /** Return the row of the token at place t in a table of numbers that has one row for each token. */
  row(table, t) {
    const width = table.length / this.length;
    return table.subarray(t * width, (t + 1) * width);
  }

  /** Return a head's attention weights at place t. */
  attention(layer, head, t) {
    const { length } = this;
    const at = (head * length + t) * length;
    return this.trace.attention(layer).subarray(at, at + length);
  }
}

/** Return the text with which the walk begins: a prompt of the run, continued by the model if the prompt is short. */
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

/** Return the kind of the model's tokens: characters, words or pieces. */
export function kindOf({ words }) {
  if (words.kind !== "WordLevel") return "pieces";
  const special = new Set(words.added.map((one) => one.id));
  return words.known.every((id) => special.has(id) || [...words.names[id]].length <= 1) ? "characters" : "words";
}
