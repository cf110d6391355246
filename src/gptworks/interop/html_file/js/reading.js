// Answers the requests of the part Read as the studio's server does (gptworks/studio/read.py, interpret/text.py).

import { sizeOf } from "./decoding.js";
import { scored } from "./sampling.js";
import { Decoder } from "./tokenizer.js";

const MOST_TOKENS = 8192;
const STRETCHES = 32; // number of parts of a text that get their bits per byte
const NEIGHBOURS = 3; // tokens on each side of a token for which the logit lens is shown, too
const N_TOP = 5;

/** Return a text's tokens and their losses. */
export async function readText(model, body, signal) {
  const text = textOf(model, body);
  const nats = await model.inTurn((rest) => lossOf(model, text.ids, rest), signal);
  const total = nats.reduce((a, b) => a + b, 0);
  const n_tokens = text.ids.length - 1;
  const perplexity = Math.exp(total / n_tokens);
  return {
    model: model.about.name,
    step: model.about.step,
    tokens: text.ids.map((id, i) => ({ ...named(model, id), text: text.pieces[i], nats: nats[i] })),
    along: along(text, nats),
    loss: total / n_tokens,
    perplexity: Number.isFinite(perplexity) ? perplexity : null,
    bits_per_byte: text.bytes === null ? null : total / Math.LN2 / text.bytes,
    text_bytes: text.bytes,
    n_tokens,
    other: null,
    segments: null,
  };
}

/** Return the explanation of one token: attention, the logit lens, and each part's contribution to its logit. */
export function readToken(model, body, signal) {
  const { index, against = null } = body;
  const { ids } = textOf(model, body);
  if (!(index >= 1 && index < ids.length))
    throw new Error(`Token ${index} is not predicted: choose one from 1 to ${ids.length - 1}.`);
  const { context } = model.about;
  const start = Math.max(0, Math.ceil((index - context) / strideOf(context))) * strideOf(context);
  const end = Math.min(start + context, ids.length - 1);
  const [first, last] = [Math.max(start + 1, index - NEIGHBOURS), Math.min(end, index + NEIGHBOURS)];
  const around = Array.from({ length: last - first + 1 }, (_, i) => first + i);
  const rows = around.map((i) => i - 1 - start); // the tokens that predict them, as indices after `start`
  const token = body.token ?? ids[index];
  return model.inTurn(async (rest) => {
    const trace = await model.traced(ids.slice(start, last), rest, rows[0]);
    const layers = [];
    for (let i = 0; i < trace.streams.length; i += 2) {
      await rest();
      const found = trace.lenses(i, rows);
      layers.push(found.map((logits, k) => guess(model, logits, ids[around[k]])));
    }
    const row = index - 1 - start;
    const less = against === null ? [] : trace.byHead(row, against);
    const parts = trace.byHead(row, token).map((one, i) => ({ ...one, value: one.value - (less[i]?.value ?? 0) }));
    const logits = trace.logits(row);
    const logit = logits[token] - (against === null ? 0 : logits[against]);
    return {
      index,
      first_read: start,
      attention: attentionOf(trace, row),
      lens: { tokens: around, layers },
      attribution: {
        token: named(model, token),
        against: against === null ? null : named(model, against),
        parts,
        logit,
        capped_logit: logit,
      },
    };
  }, signal);
}

const named = (model, id) => ({ id, spelling: model.tokenizer.spelling(id) });
const strideOf = (context) => Math.max(1, Math.floor(context / 2));
const bytesIn = (text) => new TextEncoder().encode(text).length;

/**
 * Return the tokens to read as { ids, pieces, bytes }. pieces: the text that each token adds; bytes: the size of the
 * predicted text, or null if the tokens and the text do not determine each other.
 */
function textOf({ tokenizer }, { text = null, tokens = null }) {
  const ids = tokens ?? tokenizer.encode(text);
  const begin = tokens ? [] : tokenizer.words.document;
  if (!ids.length) throw new Error("The text has no token that this model knows. Write another.");
  const all = [...begin, ...ids];
  if (all.length < 2) throw new Error("The text has one token, which nothing predicts. Write a longer one.");
  if (all.length > MOST_TOKENS)
    throw new Error(
      `The text has ${all.length} tokens and at most ${MOST_TOKENS} are read at once: give a part of it.`,
    );
  const decoder = new Decoder(tokenizer);
  const pieces = all.map((id) => decoder.push(id));
  pieces[pieces.length - 1] += decoder.flush();
  const whole = pieces.join("");
  if (tokens) {
    const cut = whole ? [...tokenizer.words.document, ...tokenizer.encode(whole)] : [];
    if (cut.length === all.length && cut.every((id, i) => id === all[i])) return textOf({ tokenizer }, { text: whole });
    return { ids: all, pieces, bytes: null };
  }
  if (whole !== text)
    return { ids: all, pieces: aligned(all, pieces, text, tokenizer.words.unknown) ?? pieces, bytes: null };
  const unseen = begin.length ? 0 : sizeOf(ids[0], tokenizer.words, tokenizer.special);
  return { ids: all, pieces, bytes: bytesIn(text) - unseen };
}

/** Return the pieces, with the original text for unknown tokens; null if the text of other tokens differs, too. */
function aligned(ids, pieces, text, unknown) {
  const made = [...pieces];
  let [rest, waiting] = [text, []];
  const found = (piece, at) => {
    const between = [...rest.slice(0, at)];
    waiting.forEach((i, k) => (made[i] = between.splice(0, k + 1 < waiting.length ? 1 : Infinity).join("")));
    waiting = [];
    rest = rest.slice(at + piece.length);
    return !between.length;
  };
  for (const [i, piece] of pieces.entries()) {
    if (ids[i] === unknown) waiting.push(i);
    else if (piece && (!rest.includes(piece) || !found(piece, rest.indexOf(piece)))) return null;
  }
  return found("", rest.length) ? made : null;
}

/** Return each token's loss in nats; null for the first. In a long text, each is predicted from a window of tokens. */
async function lossOf({ engine, about: { context } }, ids, rest) {
  const nats = ids.map(() => null);
  for (let start = 0, known = 0; known < ids.length - 1; start += strideOf(context)) {
    const window = ids.slice(start, Math.min(start + context, ids.length - 1));
    const score = (i, logits) => {
      if (start + i > known) nats[start + i] = -scored(logits, ids[start + i], 0).logprob;
    };
    score(window.length, await engine.read(window, { from: 0, score, rest }));
    known = start + window.length;
  }
  return nats;
}

/** Return the bits per byte of about equally long parts of a text. A token belongs to the part in which it begins. */
function along({ pieces }, nats) {
  const begins = [0];
  for (const piece of pieces) begins.push(begins.at(-1) + bytesIn(piece));
  const made = [];
  let part = null;
  for (let i = 1; i < pieces.length; i++) {
    const number = Math.floor((begins[i] * STRETCHES) / Math.max(1, begins.at(-1)));
    if (part?.number !== number) made.push((part = { number, first_token: i, nats: 0 }));
    part.end_token = i + 1;
    part.nats += nats[i];
  }
  return made.flatMap(({ first_token, end_token, nats: sum }) => {
    const bytes = begins[end_token] - begins[first_token];
    return bytes ? [{ first_token, end_token, bits_per_byte: sum / Math.LN2 / bytes }] : [];
  });
}

/** Return the likeliest tokens by the logits, and the probability and rank of token `id`. */
function guess(model, logits, id) {
  const { logprob, rank, top } = scored(logits, id, N_TOP);
  const likeliest = top.map((one) => ({ ...named(model, one.id), probability: Math.exp(one.logprob) }));
  return { top: likeliest, probability: Math.exp(logprob), rank };
}

/** Return a token's attention weights in all heads, [layers, heads, keys], as float32 in base64. */
function attentionOf(trace, row) {
  const { n_layers, n_heads } = trace.engine.shape;
  const n_keys = row + 1;
  const values = new Float32Array(n_layers * n_heads * n_keys);
  for (let layer = 0; layer < n_layers; layer++)
    for (let head = 0; head < n_heads; head++)
      values.set(trace.weightsOf(layer, head, row).subarray(0, n_keys), (layer * n_heads + head) * n_keys);
  const bytes = new Uint8Array(values.buffer);
  let text = "";
  for (let i = 0; i < bytes.length; i += 2 ** 15) text += String.fromCharCode(...bytes.subarray(i, i + 2 ** 15));
  return { shape: [n_layers, n_heads, n_keys], data: btoa(text) };
}
