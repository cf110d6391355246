// The kernels in WebAssembly over one model's image: logits of tokens, with a cache of one text.

import { MOST_THREADS, instantiate } from "./kernels.js";

export const AT_ONCE = 16; // tokens of a step
const INT64 = 5; // a dtype's number in entries.py
export const FLOAT32 = 0;
export const THREADS = BigInt(MOST_THREADS);
const TENSOR_BYTES = 104; // entries.py: a pointer, two numbers, 5 sizes, 5 strides

const TRIED = 5; // steps on all threads, and then on one,
const AGAIN = 256; // of so many

/** All threads, or one where that is faster: others may need the cores, and a step waits for its slowest thread. */
class Pace {
  constructor() {
    this.n = -1;
    this.times = [0, 0]; // milliseconds on all threads, on one
  }

  /** Run a step, given how many threads are to compute it. */
  run(step) {
    const at = (this.n += 1) % AGAIN;
    const tries = at < 2 * TRIED;
    const kind = Number(tries ? at >= TRIED : this.times[0] > this.times[1]);
    const began = performance.now();
    step(kind === 0 ? THREADS : 1n);
    if (tries) this.times[kind] = at % TRIED ? this.times[kind] + performance.now() - began : 0; // the first wakes them
  }
}

export class Engine {
  /** module: bytes. model: `_model` of html_file/exporting.py. fill(memory, at): copies the image into memory. */
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

  /** How many threads compute. */
  get threads() {
    return this.kernels.gptworks_threads();
  }

  room(bytes) {
    return this.guarded(() => this.kernels.gptworks_room(bytes) >>> 0);
  }

  tensor(kind, bytes) {
    return { at: this.room(TENSOR_BYTES), data: this.room(bytes), kind };
  }

  /** What fails in the kernels ends by a trap; they keep the reason. */
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

  /** Forget all cached tokens except those with which `tokens` begins, without its last one; return how many remain. */
  keep(tokens) {
    let n = 0;
    while (n < this.held.length && n < tokens.length - 1 && this.held[n] === tokens[n]) n += 1;
    this.held.length = n;
    return n;
  }

  /** Write down the next tokens, and which of them are wanted, for the kernels: tokens, slots, positions, wanted. */
  inputs(tokens, wanted = []) {
    const lists = [tokens, tokens.map(() => 0), tokens.map((_, i) => this.held.length + i), wanted];
    return lists.map((list, i) => {
      new BigInt64Array(this.memory.buffer, this.numbers[i].data, list.length).set(list.map(BigInt));
      return this.describe(this.numbers[i], list.length);
    });
  }

  /** Compute the next tokens of the text, at most AT_ONCE. Logits of the last `n_wanted`, one Float32Array each. */
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
   * Read a text, and return the logits after its last token. With `from`, compute at least from token `from` on, and
   * call `score(i, logits)` with the logits that predict token i. `rest()` is awaited between steps.
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
