// Blocks of bytes, as html_file/blocks.py writes them: in the page's text, or in files next to it.

const MASK = 0x55;
const REPLACED = [0x00, 0x0d, 0x3c]; // characters that a page cannot hold; U+00C0 to U+00C2 replace them
const FIRST_REPLACING = 0xc0;
const SUMS_BYTES = 8;

const BITS = Uint8Array.from({ length: 0xc3 }, (_, code) => (REPLACED[code - FIRST_REPLACING] ?? code) ^ MASK);

/** Return the error for a damaged file. */
export const damaged = () =>
  new Error("This file is not whole, or was changed on its way: copy it again, or export it again.");

/** Decode n bytes from a text, eight characters for seven bytes; throw if the checksums after them are wrong. */
export function bytesOf(text, n) {
  const size = 4 * Math.ceil(n / 4) + SUMS_BYTES;
  const made = new Uint8Array(size);
  if (text?.length !== Math.ceil((8 * size) / 7)) throw damaged();
  const bits = (i) => BITS[text.charCodeAt(i)];
  for (let at = 0, i = 0; at < size; at += 7, i += 8) {
    const first = (bits(i) << 21) | (bits(i + 1) << 14) | (bits(i + 2) << 7) | bits(i + 3);
    const second = (bits(i + 4) << 21) | (bits(i + 5) << 14) | (bits(i + 6) << 7) | bits(i + 7);
    made[at] = first >> 20; // writes beyond the end have no effect
    made[at + 1] = first >> 12;
    made[at + 2] = first >> 4;
    made[at + 3] = (first << 4) | (second >> 24);
    made[at + 4] = second >> 16;
    made[at + 5] = second >> 8;
    made[at + 6] = second;
  }
  const numbers = new Uint32Array(made.buffer);
  const sums = numbers.subarray(-2);
  let [sum, sumOfSums] = [0, 0];
  for (let i = 0; i < numbers.length - 2; i++) {
    sum = (sum + numbers[i]) | 0;
    sumOfSums = (sumOfSums + sum) | 0;
  }
  if (sum >>> 0 !== sums[0] || sumOfSums >>> 0 !== sums[1]) throw damaged();
  return made.subarray(0, n);
}

export const BLOCK_BYTES = 7 * 2 ** 21;

/** Return the bytes of a file next to the page. The browser asks the server whether its cached copy is current, and
 * refuses bytes with another SHA-256 than `sum`. */
export async function fetched([file, sum]) {
  if (location.protocol === "file:")
    throw new Error(
      "This page reads the model from files next to it, which a browser does only on a web server. In this folder, " +
        "run python -m http.server and open http://localhost:8000, or upload the folder to a host.",
    );
  const again = "Reload the page; if that does not help, upload the whole exported folder again.";
  const answer = await fetch(file, { cache: "no-cache", integrity: `sha256-${sum}` }).catch(() => {
    throw new Error(`${file} did not arrive, or is not the file that this page was exported with. ${again}`);
  });
  if (!answer.ok) throw new Error(`${file}: the server answers ${answer.status}. ${again}`);
  return new Uint8Array(await answer.arrayBuffer());
}
