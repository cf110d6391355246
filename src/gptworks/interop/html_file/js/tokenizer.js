// Text to token ids and back, with the ids of the run's tokenizer (html_file/words.py states it).

/** GPT-2's characters for bytes: printable ones stand for themselves, the others come from U+0100 on. */
function byteCharacters() {
  const made = [];
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    made.push(String.fromCharCode(printable ? byte : next++));
  }
  return made;
}

const CHARACTER_OF = byteCharacters();
const BYTE_OF = new Map(CHARACTER_OF.map((character, byte) => [character, byte]));
const MOST_WORDS = 50_000; // that are remembered

export function escaped(text) {
  return text.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&");
}

/** A pattern that finds any of these names, the longest first; null if there are none. */
function anyOf(names) {
  const sorted = names.filter(Boolean).sort((a, b) => b.length - a.length);
  return sorted.length ? new RegExp(sorted.map(escaped).join("|"), "gu") : null;
}

export class Tokenizer {
  constructor(words) {
    this.words = words;
    this.ids = new Map(words.known.map((id) => [words.names[id], id]));
    this.added = new Map(words.added.map((one) => [one.name, one.id]));
    this.special = new Set(words.added.filter((one) => one.special).map((one) => one.id));
    this.splits = words.splits.map(({ pattern, keeps }) => ({ pattern: new RegExp(pattern, "gu"), keeps }));
    this.plain = anyOf(words.added.filter((one) => !one.special).map((one) => one.name));
    this.every = anyOf(words.added.map((one) => one.name));
    this.merges = new Map();
    for (let i = 0; i < words.merges.length; i += 2) {
      const [a, b] = [words.merges[i], words.merges[i + 1]];
      const key = a * 2 ** 26 + b;
      if (!this.merges.has(key)) this.merges.set(key, { rank: i, id: this.ids.get(words.names[a] + words.names[b]) });
    }
    this.remembered = new Map();
    this.bytes = words.names.map(() => null);
  }

  /** The ids of a text. `special`: names of special tokens in it are these tokens, as in a rendered conversation. */
  encode(text, special = false) {
    const pattern = special ? this.every : this.plain;
    const made = [];
    let at = 0;
    for (const found of pattern ? text.matchAll(pattern) : []) {
      this.piece(text.slice(at, found.index), made);
      made.push(this.added.get(found[0]));
      at = found.index + found[0].length;
    }
    this.piece(text.slice(at), made);
    return made;
  }

  /** The ids of a prompt: the text's, with the special tokens around it. "" begins a new document. */
  prompt(text) {
    const { before, after, start } = this.words;
    return text ? [...before, ...this.encode(text), ...after] : [...start];
  }

  piece(text, made) {
    if (!text) return;
    for (const kind of this.words.normalizers)
      text = kind === "NFC" ? text.normalize("NFC") : [...text].map((one) => one.toLowerCase()).join("");
    let pieces = [text];
    for (const { pattern, keeps } of this.splits) pieces = pieces.flatMap((one) => split(one, pattern, keeps));
    for (const word of pieces) for (const id of this.word(word)) made.push(id);
  }

  word(word) {
    let ids = this.remembered.get(word);
    if (ids) return ids;
    if (this.words.is_bytes) {
      const spelled = Array.from(new TextEncoder().encode(word), (byte) => CHARACTER_OF[byte]).join("");
      ids = this.merged(spelled);
    } else if (this.words.merges.length) ids = this.merged(word);
    else ids = [this.ids.get(word) ?? this.words.unknown].filter((id) => id != null);
    if (this.remembered.size >= MOST_WORDS) this.remembered.clear();
    this.remembered.set(word, ids);
    return ids;
  }

  /** Byte pair encoding: the pair with the lowest rank, the leftmost of equals, is merged until none is left. */
  merged(word) {
    if (this.words.ignore_merges && this.ids.has(word)) return [this.ids.get(word)];
    const ids = [...word].map((one) => this.ids.get(one) ?? this.words.unknown).filter((id) => id != null);
    for (;;) {
      let best = null;
      let at = -1;
      for (let i = 0; i + 1 < ids.length; i++) {
        const found = this.merges.get(ids[i] * 2 ** 26 + ids[i + 1]);
        if (found && (best === null || found.rank < best.rank)) [best, at] = [found, i];
      }
      if (best === null) return ids;
      ids.splice(at, 2, best.id);
    }
  }

  /** The bytes of a token's text; none of a special token. */
  bytesOf(id) {
    if (this.special.has(id)) return new Uint8Array();
    return (this.bytes[id] ??= this.spelled(id));
  }

  spelled(id) {
    const name = this.words.names[id] ?? "";
    const characters = [...name];
    if (this.words.decoder === "bytes" && !this.added.has(name) && characters.every((one) => BYTE_OF.has(one)))
      return Uint8Array.from(characters, (one) => BYTE_OF.get(one));
    return new TextEncoder().encode(name);
  }

  /** A text that no other token has. */
  spelling(id) {
    return this.words.spellings[id] ?? this.words.names[id] ?? "";
  }

  decode(ids) {
    const decoder = new Decoder(this);
    return ids.map((id) => decoder.push(id)).join("") + decoder.flush();
  }
}

function split(text, pattern, keeps) {
  const made = [];
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    if (keeps === "all" && found.index > at) made.push(text.slice(at, found.index));
    if (found[0]) made.push(found[0]);
    at = found.index + found[0].length;
  }
  if (keeps === "all" && at < text.length) made.push(text.slice(at));
  return made;
}

/** Decodes tokens as they come. Bytes of an incomplete character are held back until it is complete. */
export class Decoder {
  constructor(tokenizer) {
    this.tokenizer = tokenizer;
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.begun = false;
  }

  push(id) {
    const bytes = this.tokenizer.bytesOf(id);
    const text = this.decoder.decode(bytes, { stream: true });
    if (this.tokenizer.words.decoder !== "spaced" || this.tokenizer.special.has(id)) return text;
    const space = this.begun ? " " : "";
    this.begun = true;
    return space + text;
  }

  flush() {
    return this.decoder.decode();
  }
}
