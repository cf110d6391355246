// Open an exported file without a browser, and write what it computes: see html_file/checking.py.

import { readFileSync, writeFileSync } from "node:fs";
import { runInThisContext } from "node:vm";

const [, , page, asked, answers, logits] = process.argv;
const text = readFileSync(page, "utf8");
const blocks = new Map();
const scripts = [];
for (let at = 0; ;) {
  const from = text.indexOf("<script", at);
  if (from < 0) break;
  const begin = text.indexOf(">", from) + 1;
  at = text.indexOf("</script>", begin);
  const id = /id="([^"]+)"/.exec(text.slice(from, begin));
  if (id) blocks.set(id[1], text.slice(begin, at));
  else scripts.push(text.slice(begin, at));
}
globalThis.navigator ??= { platform: "" };
runInThisContext(scripts.at(-1));
const model = await globalThis.gptworks.load((id) => blocks.get(id));
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
