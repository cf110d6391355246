// Traces a short text: the kernels write down the intermediate results on the way to the logits.

import { AT_ONCE, FLOAT32, THREADS } from "./engine.js";

const MOST_TOKENS = 256; // limit for a text of which all tokens are traced
const MOST_PAIRS = MOST_TOKENS ** 2; // limit for traced tokens times tokens of the text

/** Return the number of keys that the kernels write down for a text of `length` tokens: a multiple of 32. */
const keysOf = (length) => 32 * Math.ceil(length / 32);

/** Calls the kernels that trace.cpp exports, and holds the memory for their results. */
class Watcher {
  constructor(engine) {
    const { n_layers, n_heads, d_head, d_model, d_ff } = engine.shape;
    this.engine = engine;
    this.sizes = {
      stream: (n) => [2 * n_layers + 1, n, d_model],
      attention: (n, n_keys) => [n_layers, n_heads, n, n_keys],
      mixed: (n) => [n_layers, n, n_heads * d_head],
      neurons: (n) => [n_layers, n, d_ff],
    };
    this.pairs = Math.max(AT_ONCE * MOST_TOKENS, keysOf(engine.capacity));
    const room = (sizes) => engine.tensor(FLOAT32, 4 * sizes.reduce((a, b) => a * b));
    const tensors = Object.entries(this.sizes).map(([name, of]) => [name, room(of(AT_ONCE, this.pairs / AT_ONCE))]);
    this.tensors = Object.fromEntries(tensors);
    this.found = room([4 + n_layers * (n_heads + 2)]);
  }

  /** Return the number of tokens to compute at once in a text of `length` tokens. */
  atOnce(length) {
    return Math.min(AT_ONCE, Math.floor(this.pairs / keysOf(length)));
  }

  /** Return a view of a tensor of these sizes. The view is valid until the memory grows. */
  numbers(tensor, sizes) {
    return new Float32Array(
      this.engine.memory.buffer,
      tensor.data,
      sizes.reduce((a, b) => a * b),
    );
  }

  /** Compute the next tokens of a text of `length`, at most atOnce(length), and return the intermediate results. */
  watch(tokens, length) {
    const { engine } = this;
    const [n, n_keys] = [tokens.length, keysOf(length)];
    const all = Object.entries(this.tensors).map(([name, tensor]) => [name, tensor, this.sizes[name](n, n_keys)]);
    const places = all.map(([, tensor, sizes]) => engine.describe(tensor, ...sizes));
    const [rows, slots, positions] = engine.inputs(tokens);
    engine.guarded(() => engine.kernels.gptworks_watch(engine.model, rows, slots, positions, ...places, THREADS));
    engine.held.push(...tokens);
    const written = all.map(([name, tensor, sizes]) => [name, this.numbers(tensor, sizes)]);
    return { n, n_keys, ...Object.fromEntries(written) };
  }

  /** Return the logits of each of at most AT_ONCE rows of the residual stream. */
  lens(rows) {
    const { engine } = this;
    const { stream } = this.tensors;
    const [n, width] = [rows.length, rows[0].length];
    const [from, to] = [engine.describe(stream, n, width), engine.describe(engine.logits, n, engine.vocabulary)];
    rows.forEach((row, i) => this.numbers(stream, [n, width]).set(row, i * width));
    engine.guarded(() => engine.kernels.gptworks_lens(engine.model, from, to, THREADS));
    const found = this.numbers(engine.logits, [n, engine.vocabulary]);
    return rows.map((_, i) => found.slice(i * engine.vocabulary, (i + 1) * engine.vocabulary));
  }

  /**
   * Return the number that each part adds to the logit of token `of`. `streams` and `mixed` are the rows of `token`:
   * the states of its residual stream, and its heads' outputs in each layer.
   */
  parts(token, position, of, streams, mixed) {
    const { engine } = this;
    const put = (tensor, rows) => {
      rows.forEach((row, i) => this.numbers(tensor, [rows.length, row.length]).set(row, i * row.length));
      return engine.describe(tensor, rows.length, rows[0].length);
    };
    const { n_layers, n_heads } = engine.shape;
    const n = 4 + n_layers * (n_heads + 2);
    const numbers = [token, position, of].map(BigInt);
    const places = [put(this.tensors.stream, streams), put(this.tensors.mixed, mixed), engine.describe(this.found, n)];
    engine.guarded(() => engine.kernels.gptworks_parts(engine.model, ...numbers, ...places));
    return this.numbers(this.found, [n]).slice();
  }
}

export class Trace {
  /**
   * Read a text, and keep the intermediate results of its tokens from `first` on. `rest()` is awaited between steps,
   * and may throw to stop. Arrays are float32 in row-major order. Sizes: T tokens in the text, R tokens kept, D width,
   * H heads, F neurons, V vocabulary. `t` is a token's index in the text.
   */
  static async read(engine, ids, rest, first = 0) {
    const most = Math.min(Math.floor(MOST_PAIRS / (ids.length - first || 1)), engine.capacity);
    if (!ids.length || ids.length > most)
      throw new Error(`The text has ${ids.length} tokens: from 1 to ${most} are looked into at once. Choose a part.`);
    engine.watcher ??= new Watcher(engine);
    const trace = new Trace(engine, ids, first);
    engine.held.length = Math.min(engine.held.length, first);
    if (first) await engine.read(ids.slice(0, first), { rest });
    const at_once = engine.watcher.atOnce(ids.length);
    for (let n = first; n < ids.length; n += at_once) {
      await rest();
      trace.take(n, engine.watcher.watch(ids.slice(n, n + at_once), ids.length));
    }
    return trace;
  }

  constructor(engine, ids, first) {
    const { n_layers, n_heads, d_head, d_model, d_ff } = engine.shape;
    this.engine = engine;
    this.ids = [...ids];
    this.first = first;
    this.n_rows = ids.length - first;
    const rows = (n, width) => Array.from({ length: n }, () => new Float32Array(this.n_rows * width));
    this.streams = rows(2 * n_layers + 1, d_model);
    this.weights = rows(n_layers, n_heads * ids.length);
    this.mixed = rows(n_layers, n_heads * d_head);
    this.inner = rows(n_layers, d_ff);
  }

  /** Copy the results that `watch` returned for the tokens from `from` on. */
  take(from, { n, n_keys, ...watched }) {
    const { n_rows, ids } = this;
    const at = from - this.first;
    for (const [name, to] of [
      ["stream", this.streams],
      ["mixed", this.mixed],
      ["neurons", this.inner],
    ]) {
      const width = to[0].length / n_rows;
      to.forEach((one, i) => one.set(watched[name].subarray(i * n * width, (i + 1) * n * width), at * width));
    }
    const { n_heads } = this.engine.shape;
    this.weights.forEach((one, layer) => {
      for (let head = 0; head < n_heads; head++)
        for (let t = 0; t < n; t++) {
          const row = ((layer * n_heads + head) * n + t) * n_keys;
          one.set(watched.attention.subarray(row, row + ids.length), (head * n_rows + at + t) * ids.length);
        }
    });
  }

  /** Return the residual stream [R·D] after the embeddings (i = 0), layer l's attention (2l + 1) or MLP (2l + 2). */
  stream(i) {
    return this.streams[i];
  }

  /** Return a layer's attention weights [H·R·T] by head, query and key. */
  attention(layer) {
    return this.weights[layer];
  }

  /** Return a head's attention weights [T] at token t. */
  weightsOf(layer, head, t) {
    const row = head * this.n_rows + t - this.first;
    return this.weights[layer].subarray(row * this.ids.length, (row + 1) * this.ids.length);
  }

  /** Return the input of the down projection in a layer's MLP, [R·F]. */
  neurons(layer) {
    return this.inner[layer];
  }

  /** Return the logits [V] that the final norm and the head compute from stream(i) at token t. */
  lens(i, t) {
    return this.lenses(i, [t])[0];
  }

  /** Return the logits of `lens` at each of at most AT_ONCE tokens. This is faster than one call per token. */
  lenses(i, tokens) {
    return this.engine.watcher.lens(tokens.map((t) => this.row(this.streams[i], t)));
  }

  logits(t) {
    return this.lens(this.streams.length - 1, t);
  }

  /**
   * Return the number that each part, such as a head, adds to the logit of token `id` after token t. The final norm's
   * divisor is fixed, as in gptworks/interpret/attribution.py.
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
    add("bigram");
    add("position");
    for (let layer = 0; layer < n_layers; layer++) {
      for (let head = 0; head < n_heads; head++) add("head", layer, head);
      add("attention bias", layer);
      add("mlp", layer);
    }
    add("norm bias");
    return parts;
  }

  /** Return the values of `byHead` summed by embeddings, each layer's attention and MLP, and the final norm's bias. */
  parts(t, id) {
    const named = {
      embedding: "embeddings",
      bigram: "embeddings",
      position: "embeddings",
      mlp: "MLP",
      "norm bias": "final norm",
    };
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
    const width = rows.length / this.n_rows;
    return rows.subarray((t - this.first) * width, (t - this.first + 1) * width);
  }
}
