// What the model computes on the way to its logits, for a text of a few tokens: the kernels write it down.

import { AT_ONCE, FLOAT32 } from "./engine.js";

export const MOST_TOKENS = 256;

/** Calls of the kernels that trace.cpp exports, with room for what they write. */
class Watcher {
  constructor(engine) {
    const { n_layers, n_heads, d_head, d_model, d_ff } = engine.shape;
    this.engine = engine;
    this.n_keys = MOST_TOKENS;
    this.sizes = {
      stream: (n) => [2 * n_layers + 1, n, d_model],
      attention: (n) => [n_layers, n_heads, n, this.n_keys],
      mixed: (n) => [n_layers, n, n_heads * d_head],
      neurons: (n) => [n_layers, n, d_ff],
    };
    const room = (sizes) => engine.tensor(FLOAT32, 4 * sizes.reduce((a, b) => a * b));
    this.tensors = Object.fromEntries(Object.entries(this.sizes).map(([name, of]) => [name, room(of(AT_ONCE))]));
    this.found = room([3 + n_layers * (n_heads + 2)]);
  }

  /** The numbers of a tensor of these sizes, until the memory grows. */
  numbers(tensor, sizes) {
    return new Float32Array(
      this.engine.memory.buffer,
      tensor.data,
      sizes.reduce((a, b) => a * b),
    );
  }

  /** Compute the next tokens of the text, at most AT_ONCE, and return what was written down. */
  watch(tokens) {
    const { engine } = this;
    const n = tokens.length;
    const all = Object.entries(this.tensors).map(([name, tensor]) => [name, tensor, this.sizes[name](n)]);
    const places = all.map(([, tensor, sizes]) => engine.describe(tensor, ...sizes));
    const [rows, slots, positions] = engine.place(tokens);
    engine.guarded(() => engine.kernels.gptworks_watch(engine.model, rows, slots, positions, ...places, 1n));
    engine.held.push(...tokens);
    const written = all.map(([name, tensor, sizes]) => [name, this.numbers(tensor, sizes)]);
    return { n, n_keys: this.n_keys, ...Object.fromEntries(written) };
  }

  /** Logits of one row of the residual stream. */
  lens(row) {
    const { engine } = this;
    const { stream } = this.tensors;
    const [from, to] = [engine.describe(stream, 1, row.length), engine.describe(engine.logits, 1, engine.vocabulary)];
    this.numbers(stream, [row.length]).set(row);
    engine.guarded(() => engine.kernels.gptworks_lens(engine.model, from, to, 1n));
    return this.numbers(engine.logits, [engine.vocabulary]).slice();
  }

  /** What each part adds to the logit of token `of`; rows of one token: of the streams, and of the heads' outputs. */
  parts(token, position, of, streams, mixed) {
    const { engine } = this;
    const put = (tensor, rows) => {
      rows.forEach((row, i) => this.numbers(tensor, [rows.length, row.length]).set(row, i * row.length));
      return engine.describe(tensor, rows.length, rows[0].length);
    };
    const { n_layers, n_heads } = engine.shape;
    const n = 3 + n_layers * (n_heads + 2);
    const numbers = [token, position, of].map(BigInt);
    const places = [put(this.tensors.stream, streams), put(this.tensors.mixed, mixed), engine.describe(this.found, n)];
    engine.guarded(() => engine.kernels.gptworks_parts(engine.model, ...numbers, ...places));
    return this.numbers(this.found, [n]).slice();
  }
}

export class Trace {
  /**
   * Read a text. `rest()` is awaited between steps, and may throw to stop. Arrays are float32, row by row; T tokens, D
   * wide, H heads, F neurons, V tokens of the vocabulary.
   */
  static async read(engine, ids, rest) {
    const most = Math.min(MOST_TOKENS, engine.capacity);
    if (!ids.length || ids.length > most)
      throw new Error(`The text has ${ids.length} tokens: from 1 to ${most} are looked into at once. Choose a part.`);
    engine.watcher ??= new Watcher(engine);
    const trace = new Trace(engine, ids);
    engine.held.length = 0;
    for (let n = 0; n < ids.length; n += AT_ONCE) {
      if (n) await rest();
      trace.take(n, engine.watcher.watch(ids.slice(n, n + AT_ONCE)));
    }
    return trace;
  }

  constructor(engine, ids) {
    const { n_layers, n_heads, d_head, d_model, d_ff } = engine.shape;
    const rows = (n, width) => Array.from({ length: n }, () => new Float32Array(ids.length * width));
    this.engine = engine;
    this.ids = [...ids];
    this.streams = rows(2 * n_layers + 1, d_model);
    this.weights = rows(n_layers, n_heads * ids.length);
    this.mixed = rows(n_layers, n_heads * d_head);
    this.inner = rows(n_layers, d_ff);
  }

  /** Copy what was written down of the tokens from `from` on. */
  take(from, { n, n_keys, ...watched }) {
    const length = this.ids.length;
    for (const [name, to] of [
      ["stream", this.streams],
      ["mixed", this.mixed],
      ["neurons", this.inner],
    ]) {
      const size = (n * to[0].length) / length;
      to.forEach((one, i) => one.set(watched[name].subarray(i * size, (i + 1) * size), (from * size) / n));
    }
    const { n_heads } = this.engine.shape;
    this.weights.forEach((one, layer) => {
      for (let head = 0; head < n_heads; head++)
        for (let t = 0; t < n; t++) {
          const row = ((layer * n_heads + head) * n + t) * n_keys;
          one.set(watched.attention.subarray(row, row + from + t + 1), (head * length + from + t) * length);
        }
    });
  }

  /** The residual stream [T·D]: 0 the embeddings, 2l + 1 after layer l's attention, 2l + 2 after its MLP. */
  stream(i) {
    return this.streams[i];
  }

  /** A layer's probabilities [H·T·T]: of head h, query t, key s. */
  attention(layer) {
    return this.weights[layer];
  }

  /** What enters the down projection of a layer's MLP [T·F]. */
  neurons(layer) {
    return this.inner[layer];
  }

  /** Logits [V] that stream(i) gives at token t through the final norm and the head. */
  lens(i, t) {
    return this.engine.watcher.lens(this.row(this.streams[i], t));
  }

  logits(t) {
    return this.lens(this.streams.length - 1, t);
  }

  /**
   * What each part adds to the logit of token `id` after token t, the final norm's divisor held fixed: by head, as
   * gptworks/interpret/attribution.py.
   */
  byHead(t, id) {
    const { n_layers, n_heads } = this.engine.shape;
    const rows = (of) => of.map((one) => this.row(one, t));
    const values = this.engine.watcher.parts(this.ids[t], t, id, rows(this.streams), rows(this.mixed));
    const parts = [];
    let at = 0;
    const add = (kind, layer = null, head = null) => {
      const value = values[at++];
      if (!Number.isNaN(value)) parts.push({ kind, layer, head, value });
    };
    add("embedding");
    add("position");
    for (let layer = 0; layer < n_layers; layer++) {
      for (let head = 0; head < n_heads; head++) add("head", layer, head);
      add("attention bias", layer);
      add("mlp", layer);
    }
    add("norm bias");
    return parts;
  }

  /** The same as { name, layer, value }: embeddings, each layer's attention and MLP, and a bias of the final norm. */
  parts(t, id) {
    const named = { embedding: "embeddings", position: "embeddings", mlp: "MLP", "norm bias": "final norm" };
    const made = [];
    for (const { kind, layer, value } of this.byHead(t, id)) {
      const name = named[kind] ?? "attention";
      const last = made.at(-1);
      if (last?.name === name && last.layer === layer) last.value += value;
      else made.push({ name, layer, value });
    }
    return made;
  }

  row(rows, t) {
    const width = rows.length / this.ids.length;
    return rows.subarray(t * width, (t + 1) * width);
  }
}
