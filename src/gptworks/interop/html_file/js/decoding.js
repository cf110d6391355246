// Converts tokens to text as the decoders of a tokenizer.json do, and streams text as gptworks/tokenizer.py does.

/** Return GPT-2's character for each byte: the same code for printable bytes, codes from U+0100 on for the others. */
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
const INCOMPLETE = "\ufffd";

/** Return a text's bytes as GPT-2's characters. */
export function spelledInBytes(text) {
  return Array.from(new TextEncoder().encode(text), (byte) => CHARACTER_OF[byte]).join("");
}

function utf8(bytes, fatal = false) {
  return new TextDecoder("utf-8", { ignoreBOM: true, fatal }).decode(Uint8Array.from(bytes));
}

function bytesOf(name) {
  const characters = [...name];
  return characters.every((one) => BYTE_OF.has(one))
    ? characters.map((one) => BYTE_OF.get(one))
    : [...new TextEncoder().encode(name)];
}

/** Return the text of consecutive byte tokens; a replacement character for each byte if the bytes are not UTF-8. */
function runOfBytes(bytes) {
  try {
    return [utf8(bytes, true)];
  } catch {
    return bytes.map(() => INCOMPLETE);
  }
}

function withBytes(tokens) {
  const made = [];
  let bytes = [];
  for (const token of [...tokens, null]) {
    const found = /^<0x([0-9a-fA-F]{2})>$/.exec(token ?? "");
    if (found) bytes.push(parseInt(found[1], 16));
    else {
      if (bytes.length) made.push(...runOfBytes(bytes));
      bytes = [];
      if (token !== null) made.push(token);
    }
  }
  return made;
}

function stripped(token, { content, start, stop }) {
  const characters = [...token];
  let [from, to] = [0, characters.length];
  while (from < Math.min(start, characters.length) && characters[from] === content) from += 1;
  while (characters.length - to < stop && to > 0 && characters[to - 1] === content) to -= 1;
  return characters.slice(from, Math.max(from, to)).join("");
}

const STEPS = {
  ByteLevel: (tokens) => [utf8(tokens.flatMap(bytesOf))],
  ByteFallback: withBytes,
  Fuse: (tokens) => [tokens.join("")],
  Strip: (tokens, step) => tokens.map((token) => stripped(token, step)),
  Replace: (tokens, { from, to }) => tokens.map((token) => token.replaceAll(from, () => to)),
  Metaspace: (tokens, { replacement, prefixed }) =>
    tokens.map((token, i) => token.replaceAll(replacement, i === 0 && prefixed ? "" : " ")),
  Spaced: (tokens) => [tokens.join(" ")], // for a tokenizer without a decoder
};

/** Return the text of ids, without special tokens. */
export function decoded(ids, { names, decoder }, special) {
  let tokens = ids.filter((id) => names[id] && !special.has(id)).map((id) => names[id]);
  for (const step of decoder) tokens = STEPS[step.type](tokens, step);
  return tokens.join("");
}

/** Return the number of bytes of a token's text; 0 for a special token, or if the text depends on other tokens. */
export function sizeOf(id, { names, decoder }, special) {
  if (decoder.length !== 1 || special.has(id)) return 0;
  const sizes = { ByteLevel: (name) => bytesOf(name).length, Fuse: (name) => new TextEncoder().encode(name).length };
  return sizes[decoder[0].type]?.(names[id]) ?? 0;
}

/** Decodes tokens one by one, and holds back incomplete characters. The joined texts are the text of all tokens. */
export class Decoder {
  /** before: the ids of preceding tokens, on which the text of the next token may depend. */
  constructor(tokenizer, before = []) {
    this.tokenizer = tokenizer;
    this.context = []; // tokens last shown
    this.held = [];
    for (const id of before) this.push(id);
  }

  push(id) {
    const { context, held } = this;
    const decode = (ids) => this.tokenizer.decode(ids);
    this.held = [...held, id];
    const shown = decode(context);
    const text = decode([...context, ...this.held]);
    if (!text.endsWith(INCOMPLETE)) return this.show(text.slice(shown.length), this.held, []);
    const final = decode([...context, ...held]);
    const alone = decode([id]);
    return alone && text === final + alone ? this.show(final.slice(shown.length), held, [id]) : "";
  }

  flush() {
    const shown = this.tokenizer.decode(this.context);
    const text = this.tokenizer.decode([...this.context, ...this.held]);
    return this.show(text.slice(shown.length), this.held, []);
  }

  show(text, shown, held) {
    if (text) this.context = shown; // special tokens have no text and give no context
    this.held = held;
    return text;
  }
}
