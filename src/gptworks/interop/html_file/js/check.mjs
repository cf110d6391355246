// Open an exported file without a browser, and write what it computes: see html_file/checking.py.

import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { runInThisContext } from "node:vm";

const [, , page, asked, answers, logits] = process.argv;
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
const model = await globalThis.gptworks.load(
  (id) => file.toString("utf8", ...blocks.get(id)),
  ([name]) => readFileSync(join(dirname(page), name)),
);
const { tokens, texts, chats } = JSON.parse(readFileSync(asked, "utf8"));
const rows = [];
rows.push(await model.engine.read(tokens, { from: 0, score: (_, row) => rows.push(row) }));
writeFileSync(logits, Buffer.concat(rows.map((row) => Buffer.from(row.buffer))));
const [last] = rows.slice(-1);
const began = performance.now();
let n = 0;
for (; n < 200 && model.engine.held.length < model.about.context && performance.now() - began < 2000; n++)
  model.engine.step([last.indexOf(Math.max(...last.subarray(0, 8)))]);
const rate = (1000 * n) / (performance.now() - began);
const ids = texts.map((one) => model.tokenizer.encode(one));
const read = ids.map((one) => model.tokenizer.decode(one));
writeFileSync(
  answers,
  JSON.stringify({ ids, read, chats: chats.map((one) => model.chat.encode(one)), tokens_per_second: n ? rate : null }),
);
