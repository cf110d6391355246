// Computes what the export compares with the engine (html_file/checking.py), in a browser or in Node.

/**
 * Return the model's results for `tokens` to score, of which the first `n_prompt` are a prompt, `texts` to encode and
 * `chats` to render. Afterwards, `gptworks.rowOf(i)` returns the logits after token i, float32 in base64.
 */
export async function answered(model, { tokens, n_prompt, texts, chats }) {
  const rows = [];
  const last = await model.engine.read(tokens, { from: 0, score: (_, row) => rows.push(row) });
  rows.push(last);
  globalThis.gptworks.rowOf = (i) => base64(new Uint8Array(rows[i].buffer));
  const settings = { ...GREEDY, max_tokens: Math.max(1, tokens.length - n_prompt) };
  const write = () => events(model.generate({ tokens: tokens.slice(0, n_prompt), settings }));
  const began = performance.now();
  const [start, ...written] = await write();
  let end = written.at(-1);
  while (performance.now() - began < WARM_MS) end = (await write()).at(-1);
  const [scored] = await events(
    model.generate({ tokens, settings: { ...settings, max_tokens: 1 }, score_prompt: true, n_top: 1 }),
  );
  const ids = texts.map((one) => model.tokenizer.encode(one));
  return {
    prompt: start.tokens.map((one) => one.text),
    written: written.filter((one) => one.type === "token").map((one) => one.id),
    text: written.map((one) => one.text).join(""),
    tokens_per_second: end.tokens_per_second,
    losses: scored.tokens.slice(1).map((one) => -one.logprob),
    ids,
    read: ids.map((one) => model.tokenizer.decode(one)),
    chats: chats.map((one) => model.chat.encode(one)),
  };
}

const WARM_MS = 150; // milliseconds of generation, in which a browser optimizes the code

const GREEDY = { temperature: 0, ignore_eos: true, seed: 0 };

async function events(generator) {
  const made = [];
  for await (const event of generator) made.push(event);
  return made;
}

function base64(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x2000) text += String.fromCharCode(...bytes.subarray(i, i + 0x2000));
  return btoa(text);
}
