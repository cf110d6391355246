// Converts text to token ids and back, with the same ids as the run's tokenizer (exported by html_file/words.py).

import { decoded, spelledInBytes } from "./decoding.js";
import { modelOf } from "./pieces.js";

export { Decoder } from "./decoding.js";

export function escaped(text) {
  return text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
}

const WORD = String.raw`[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]`;
const [ENDS_WITH_WORD, STARTS_WITH_WORD] = [new RegExp(`${WORD}$`, "u"), new RegExp(`^${WORD}`, "u")];

export class Tokenizer {
  constructor(words) {
    this.words = words;
    this.added = new Map(words.added.map((one) => [one.name, one.id]));
    this.special = new Set(words.added.filter((one) => one.special).map((one) => one.id));
    this.finders = [false, true].map((normalized) =>
      finder(words.added.filter((one) => one.normalized === normalized)),
    );
    this.normalizers = words.normalizers.map(normalizer);
    this.steps = words.steps.map(step);
    this.model = modelOf(words);
  }

  /**
   * Return the ids of a text. `special`: whether names of special tokens in the text become these tokens, as in a
   * rendered conversation. `continues`: whether another text precedes this one.
   */
  encode(text, { special = false, continues = false } = {}) {
    const [plain, normalized] = this.finders;
    const made = [];
    let first = !continues;
    const between = (found, then) => {
      if (typeof found === "string") then(found);
      else made.push(found.id);
      first = false;
    };
    for (const found of plain(text, special))
      between(found, (part) => {
        for (const work of this.normalizers) part = work(part);
        for (const one of normalized(part, special)) between(one, (piece) => this.piece(piece, first, made));
      });
    return made;
  }

  /** Return the ids of a prompt, with special tokens around the text. "" begins a new document. */
  prompt(text) {
    const { before, after, start } = this.words;
    return text ? [...before, ...this.encode(text), ...after] : [...start];
  }

  piece(text, first, made) {
    let pieces = [text];
    for (const work of this.steps) pieces = pieces.flatMap((one, i) => work(one, first && i === 0)).filter(Boolean);
    for (const one of pieces)
      for (const id of this.model(this.words.is_bytes ? spelledInBytes(one) : one)) made.push(id);
  }

  /** Return the token's spelling, which no other token has. */
  spelling(id) {
    return this.words.spellings[id] ?? this.words.names[id] ?? "";
  }

  decode(ids) {
    return decoded(ids, this.words, this.special);
  }
}

/** Return a function that divides a text at added tokens. If several begin at one place, the longest counts. */
function finder(added) {
  const tokens = new Map(added.map((one) => [one.matched, one]));
  const longest_first = [...tokens.keys()].sort((a, b) => b.length - a.length);
  const pattern = new RegExp(longest_first.map(escaped).join("|"), "gu");
  return (text, special) => {
    if (!tokens.size) return text ? [text] : [];
    const made = [];
    let at = 0;
    for (const found of text.matchAll(pattern)) {
      const token = tokens.get(found[0]);
      let from = found.index;
      let to = from + found[0].length;
      if (token.special && !special) continue;
      if (token.single_word && (ENDS_WITH_WORD.test(text.slice(0, from)) || STARTS_WITH_WORD.test(text.slice(to))))
        continue;
      if (token.lstrip) from = Math.max(at, text.slice(0, from).search(/\p{White_Space}*$/u));
      if (token.rstrip) to += /^\p{White_Space}*/u.exec(text.slice(to))[0].length;
      if (at < from) made.push(text.slice(at, from));
      made.push(token);
      at = to;
    }
    if (at < text.length) made.push(text.slice(at));
    return made;
  };
}

function normalizer({ type, from, to }) {
  return {
    NFC: (text) => text.normalize("NFC"),
    Lowercase: (text) => [...text].map((one) => one.toLowerCase()).join(""),
    Prepend: (text) => (text ? to + text : text),
    Replace: (text) => text.replaceAll(from, () => to),
  }[type];
}

/** Return a function that divides a piece into pieces. */
function step({ type, pattern, inverted, keeps, from, to, always }) {
  if (type === "Replace") return (text) => [text.replaceAll(from, () => to)];
  if (type === "Prefix") return (text, first) => [(always || first) && !text.startsWith(to) ? to + text : text];
  const splits = new RegExp(pattern, "gu");
  return (text) => joined(divided(text, splits, inverted), keeps);
}

/** Return the parts of a text, each with a flag: whether the part matches (if `inverted`, whether it does not). */
function divided(text, pattern, inverted) {
  const made = [];
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    if (found.index > at) made.push([text.slice(at, found.index), inverted]);
    made.push([found[0], !inverted]);
    at = found.index + found[0].length;
  }
  if (at < text.length) made.push([text.slice(at), inverted]);
  return made;
}

/** Join parts to pieces by `keeps`, the behaviour of the library's Split. */
function joined(parts, keeps) {
  if (keeps === "Isolated") return parts.map(([text]) => text);
  if (keeps === "Removed") return parts.flatMap(([text, matches]) => (matches ? [] : [text]));
  const backwards = keeps === "MergedWithNext";
  const made = [];
  let previous = keeps === "Contiguous" ? null : false;
  for (const [text, matches] of backwards ? parts.reverse() : parts) {
    const joins = keeps === "Contiguous" ? matches === previous : matches && !previous;
    if (joins && made.length) made.push(backwards ? text + made.pop() : made.pop() + text);
    else made.push(text);
    previous = matches;
  }
  return backwards ? made.reverse() : made;
}
