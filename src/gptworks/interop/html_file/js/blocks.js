// Bytes in the text of a page, as html_file/blocks.py writes them: eight characters for seven bytes.

const MASK = 0x55;
const REPLACED = [0x00, 0x0d, 0x3c]; // characters that a page cannot hold; U+00C0 and the next ones are in their place
const FIRST_REPLACING = 0xc0;

function decode(text, n, to, at) {
  const end = at + n;
  let [held, bits] = [0, 0];
  for (let i = 0; at < end; i++) {
    let code = text.charCodeAt(i);
    if (code >= FIRST_REPLACING) code = REPLACED[code - FIRST_REPLACING];
    held = ((held << 7) | (code ^ MASK)) & 0x3fff;
    bits += 7;
    if (bits >= 8) {
      bits -= 8;
      to[at++] = held >> bits;
    }
  }
  return at;
}

export function bytesOf(text, n) {
  const made = new Uint8Array(n);
  decode(text, n, made, 0);
  return made;
}

const BLOCK_BYTES = 7 * 2 ** 21;

/** Copy n bytes, which lie in the texts of blocks, into memory. */
export function fillFrom(textOf, n, memory, at) {
  const to = new Uint8Array(memory.buffer);
  const end = at + n;
  for (let i = 0; at < end; i++) at = decode(textOf(i), Math.min(BLOCK_BYTES, end - at), to, at);
}
