// Blocks of bytes, as html_file/blocks.py writes them: in the page's text, or in files next to it.

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

export const BLOCK_BYTES = 7 * 2 ** 21;

/** The bytes of a file next to the page. The browser refuses other bytes than those of this sum. */
export async function fetched([file, sum]) {
  if (location.protocol === "file:")
    throw new Error(
      "This page reads the model from files next to it, which a browser does only on a web server. In this folder, " +
        "run python -m http.server and open http://localhost:8000, or upload the folder to a host.",
    );
  const again = "Reload the page; if that does not help, upload the whole exported folder again.";
  const answer = await fetch(file, { integrity: `sha256-${sum}` }).catch(() => {
    throw new Error(`${file} did not arrive, or is not the file that this page was exported with. ${again}`);
  });
  if (!answer.ok) throw new Error(`${file}: the server answers ${answer.status}. ${again}`);
  return new Uint8Array(await answer.arrayBuffer());
}
