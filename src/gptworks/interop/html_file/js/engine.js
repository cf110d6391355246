// Computes logits with the WebAssembly kernels from one model's image, with a cache for one text.

import { MOST_THREADS, instantiate } from "./kernels.js";

export const AT_ONCE = 16; // most tokens of a step
const INT64 = 5; // a dtype's number in entries.py
export const FLOAT32 = 0;
export const THREADS = BigInt(MOST_THREADS);
const TENSOR_BYTES = 104; // entries.py: a pointer, two numbers, 5 sizes, 5 strides

const TRIED = 5; // steps timed on all threads, and then on one
const AGAIN = 256; // steps after which both are timed again

/** Chooses all threads or one, whichever is faster: if other programs use the cores, a step waits for a late thread. */
class Pace {
  constructor() {
    this.n = -1;
    this.times = [0, 0]; // milliseconds on all threads, on one
  }

  /** Run `step` with the number of threads to use. */
  run(step) {
    const at = (this.n += 1) % AGAIN;
    const tries = at < 2 * TRIED;
    const kind = Number(tries ? at >= TRIED : this.times[0] > this.times[1]);
    const began = performance.now();
    step(kind === 0 ? THREADS : 1n);
    // The first try also wakes the threads, so its time does not count.
    if (tries) this.times[kind] = at % TRIED ? this.times[kind] + performance.now() - began : 0;
  }
}

export class Engine {
  /**
   * Return an engine. module: the kernels' bytes; model: the result of `_model` in html_file/exporting.py; fill(memory,
   * at): copies the image to the address `at` in the memory.
   */
  static async load(module, model, fill) {
    const { kernels, memory } = await instantiate(module);
    const engine = new Engine(kernels, memory, model);
    await fill(engine.memory, engine.base);
    engine.relocate(model);
    return engine;
  }

  constructor(kernels, memory, model) {
    this.kernels = kernels;
    this.memory = memory;
    this.vocabulary = model.vocabulary;
    this.capacity = model.capacity;
    this.shape = model.shape;
    this.held = []; // tokens whose keys and values are cached
    this.pace = new Pace();
    this.base = this.room(model.n_room);
    this.model = this.base + model.model;
    this.numbers = ["tokens", "slots", "positions", "wanted"].map(() => this.tensor(INT64, AT_ONCE * 8));
    this.logits = this.tensor(FLOAT32, AT_ONCE * this.vocabulary * 4);
  }

  /** Add the image's address to its pointers. */
  relocate({ pointers }) {
    const view = new DataView(this.memory.buffer);
    for (const at of pointers) view.setUint32(this.base + at, view.getUint32(this.base + at, true) + this.base, true);
  }

  /** The number of threads. */
  get threads() {
    return this.kernels.gptworks_threads();
  }

  room(bytes) {
    return this.guarded(() => this.kernels.gptworks_room(bytes) >>> 0);
  }

  tensor(kind, bytes) {
    return { at: this.room(TENSOR_BYTES), data: this.room(bytes), kind };
  }

  /** Return work(). If the kernels trap, throw an Error with the reason that they have kept. */
  guarded(work) {
    try {
      return work();
    } catch (error) {
      this.kernels.gptworks_lost();
      const bytes = new Uint8Array(this.memory.buffer, this.kernels.gptworks_error());
      const said = new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
      throw said ? new Error(said) : error;
    }
  }

  describe(tensor, ...sizes) {
    const view = new DataView(this.memory.buffer, tensor.at);
    view.setUint32(0, tensor.data, true);
    view.setBigInt64(8, BigInt(tensor.kind), true);
    view.setBigInt64(16, BigInt(sizes.length), true);
    let stride = 1;
    for (let i = sizes.length - 1; i >= 0; i--) {
      view.setBigInt64(24 + 8 * i, BigInt(sizes[i]), true);
      view.setBigInt64(64 + 8 * i, BigInt(stride), true);
      stride *= sizes[i];
    }
    return tensor.at;
  }

  /** Keep only the cached tokens that equal the start of `tokens` before its last token; return their number. */
  keep(tokens) {
    let n = 0;
    while (n < this.held.length && n < tokens.length - 1 && this.held[n] === tokens[n]) n += 1;
    this.held.length = n;
    return n;
  }

  /**
   * Write the kernels' inputs for the next tokens, and return the addresses of these tensors: tokens, slots, positions,
   * and `wanted`, the indices of the tokens after which logits are computed.
   */
  inputs(tokens, wanted = []) {
    const lists = [tokens, tokens.map(() => 0), tokens.map((_, i) => this.held.length + i), wanted];
    return lists.map((list, i) => {
      new BigInt64Array(this.memory.buffer, this.numbers[i].data, list.length).set(list.map(BigInt));
      return this.describe(this.numbers[i], list.length);
    });
  }

  /** Compute the next tokens, at most AT_ONCE; return the logits of the last `n_wanted`, one Float32Array each. */
  step(tokens, n_wanted = 1) {
    const rows = tokens.map((_, i) => i);
    const places = this.inputs(tokens, rows.slice(rows.length - n_wanted));
    const out = n_wanted ? this.describe(this.logits, n_wanted, this.vocabulary) : 0;
    const compute = (n_threads) =>
      this.guarded(() => this.kernels.gptworks_step(this.model, ...places, out, 0, n_threads));
    tokens.length > 1 || this.threads === 1 ? compute(THREADS) : this.pace.run(compute);
    this.held.push(...tokens);
    return rows
      .slice(0, n_wanted)
      .map((i) => new Float32Array(this.memory.buffer, this.logits.data + 4 * i * this.vocabulary, this.vocabulary))
      .map((row) => row.slice());
  }

  /**
   * Read a text, and return the logits after its last token. With `from`, do not use the cache for tokens from `from`
   * on, and call `score(i, logits)` with the logits that predict token i. `rest()` is awaited between steps.
   */
  async read(tokens, { from = null, score = null, rest = () => {} } = {}) {
    if (from !== null) this.held.length = Math.min(this.held.length, from);
    let n = this.keep(tokens);
    for (;;) {
      const some = tokens.slice(n, n + AT_ONCE);
      const last = n + some.length === tokens.length;
      const n_wanted = from === null ? Number(last) : some.length;
      const found = this.step(some, n_wanted);
      if (from !== null) found.forEach((logits, i) => n + i + 1 < tokens.length && score(n + i + 1, logits));
      n += some.length;
      if (last) return found.at(-1);
      await rest();
    }
  }
}
