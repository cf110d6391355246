// Open an exported file without a browser, and print the values of expressions in it: see html_file/checking.py.

import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { runInThisContext } from "node:vm";

const [, , page] = process.argv;
const file = readFileSync(page);
const blocks = new Map();
const scripts = [];
for (let at = 0; ;) {
  const from = file.indexOf("<script", at);
  if (from < 0) break;
  const begin = file.indexOf(">", from) + 1;
  at = file.indexOf("</script>", begin);
  const id = /id="([^"]+)"/.exec(file.toString("utf8", from, begin));
  const text = [begin, at]; // read when it is wanted: a string holds 512 MB
  if (id) blocks.set(id[1], text);
  else scripts.push(text);
}
globalThis.navigator ??= { platform: "" };
runInThisContext(file.toString("utf8", ...scripts.at(-1)));
globalThis.gptworks.model = globalThis.gptworks.load(
  (id) => file.toString("utf8", ...blocks.get(id)),
  ([name]) => readFileSync(join(dirname(page), name)),
);
const values = [];
for (const expression of JSON.parse(readFileSync(0, "utf8"))) values.push(await runInThisContext(expression));
process.stdout.write(JSON.stringify(values));
