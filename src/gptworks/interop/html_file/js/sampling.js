// Chooses the next token from logits, with the settings and order of gptworks/infer/sampling.py: bias, penalties and
// bans; then the best token, or temperature, top-k, top-p, min-p and a draw. A seed gives other draws than in Python.

const GREEDY_BELOW = 1e-5;
const MOST_IDS = 2 ** 21;
const LONGEST_REPEAT = 64; // a longer repetition counts as this long
const LARGEST_PENALTY = 1e30; // keeps scores finite

/** Settings that leave the model's probabilities as they are. */
export const NEUTRAL = {
  temperature: 1,
  top_k: 0,
  top_p: 1,
  min_p: 0,
  repetition_penalty: 1,
  frequency_penalty: 0,
  presence_penalty: 0,
  dry_multiplier: 0,
  dry_base: 1.75,
  dry_allowed_length: 2,
  min_tokens: 0,
};

/** Return a function that draws numbers in (0, 1]: xorshift128+, seeded by splitmix64. */
export function numbers(seed) {
  const mask = (1n << 64n) - 1n;
  let x = BigInt.asUintN(64, BigInt(seed));
  const fill = () => {
    x = (x + 0x9e3779b97f4a7c15n) & mask;
    let z = x;
    z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & mask;
    z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & mask;
    return z ^ (z >> 31n);
  };
  let [a, b] = [fill(), fill()];
  return () => {
    let s = a;
    const t = b;
    a = t;
    s ^= (s << 23n) & mask;
    b = s ^ t ^ (s >> 17n) ^ (t >> 26n);
    return (Number(((b + t) & mask) >> 11n) + 1) / 2 ** 53;
  };
}

/** Return the index of the largest value, the first if several are equal; -1 if a value is NaN. */
export function argmax(values) {
  let [at, best] = [0, -Infinity];
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value <= best) continue;
    if (Number.isNaN(value)) return -1;
    [at, best] = [i, value];
  }
  return at;
}

/** Return the logarithm of the sum of the exponentials of the values that are at least `least`. */
function logSumExp(values, least = -Infinity) {
  const top = values[argmax(values)];
  let sum = 0;
  for (let i = 0; i < values.length; i++) if (values[i] >= least) sum += Math.exp(values[i] - top);
  return top + Math.log(sum);
}

/** Return the probabilities of logits. */
export function softmax(logits) {
  const normalizer = logSumExp(logits);
  return Float64Array.from(logits, (logit) => Math.exp(logit - normalizer));
}

/** Return the indices of the n largest values, in descending order of value, equal values in order of index. */
export function largest(values, n) {
  const found = [];
  let least = -Infinity; // the smallest value found
  for (let i = 0; i < values.length && n > 0; i++) {
    const value = values[i];
    if (found.length === n && !(value > least)) continue;
    let at = found.length < n ? found.length : n - 1;
    for (; at > 0 && values[found[at - 1]] < value; at--) found[at] = found[at - 1];
    found[at] = i;
    least = values[found[found.length - 1]];
  }
  return found;
}

/** Return the k-th largest value. Reorders the array (Hoare's FIND). */
function kthLargest(values, k) {
  const at = k - 1;
  let [from, to] = [0, values.length - 1];
  while (from < to) {
    const pivot = values[at];
    let [i, j] = [from, to];
    while (i <= j) {
      while (values[i] > pivot) i += 1;
      while (values[j] < pivot) j -= 1;
      if (i > j) break;
      const value = values[i];
      values[i++] = values[j];
      values[j--] = value;
    }
    if (j < at) from = i;
    if (i > at) to = j;
  }
  return values[at];
}

/** Return a token's log-probability and rank, and the n likeliest tokens. */
export function scored(logits, id, n) {
  const normalizer = logSumExp(logits);
  const own = logits[id];
  let rank = 1;
  for (let i = 0; i < logits.length; i++) if (logits[i] > own) rank += 1;
  const top = largest(logits, n).map((other) => ({ id: other, logprob: logits[other] - normalizer }));
  return { logprob: own - normalizer, rank, top };
}

/** Finds tokens that would continue a repetition of earlier text, like Repeats in gptworks/infer/penalties.py. */
export class Repeats {
  constructor(text) {
    this.tokens = [...text];
    // For each token: the number of tokens, up to this one, that equal the end of the text; at most LONGEST_REPEAT.
    this.lengths = this.tokens.map(() => 0);
    const last = this.tokens.splice(-LONGEST_REPEAT);
    for (const id of last) this.push(id);
  }

  push(id) {
    const { tokens, lengths } = this;
    for (let i = tokens.length - 1; i >= 0; i--) {
      lengths[i] = tokens[i] === id ? Math.min((i ? lengths[i - 1] : 0) + 1, LONGEST_REPEAT) : 0;
    }
    lengths[tokens.length] = 0;
    tokens.push(id);
  }

  /** Return the tokens that would continue a repetition, each with the number to subtract from its score. */
  penalties({ dry_multiplier, dry_base, dry_allowed_length }, ends) {
    const longest = new Map();
    for (let i = 0; i < this.tokens.length - 1; i++) {
      const id = this.tokens[i + 1];
      if (this.lengths[i] >= dry_allowed_length && !ends.includes(id))
        longest.set(id, Math.max(longest.get(id) ?? 0, this.lengths[i]));
    }
    const penalty = (n) => Math.min(dry_multiplier * dry_base ** (n - dry_allowed_length), LARGEST_PENALTY);
    return [...longest].map(([id, n]) => [id, penalty(n)]);
  }
}

export class Sampler {
  constructor(settings, prompt, ends) {
    this.settings = settings;
    this.ends = ends;
    this.generated = new Map();
    this.seen = new Set(settings.repetition_penalty === 1 ? [] : prompt);
    this.repeats = settings.dry_multiplier ? new Repeats(prompt) : null;
    this.n = 0;
    this.next = numbers(settings.seed);
  }

  /**
   * Return the next token as `id`, and as `after` its log-probability and the `n_top` likeliest tokens in the
   * distribution from which it was drawn.
   */
  sample(logits, n_top) {
    const { temperature } = this.settings;
    const scores = this.adjusted(logits);
    const best = argmax(scores);
    if (best < 0) throw new Error("The model's scores are not numbers: its training diverged, or the file is damaged.");
    if (temperature < GREEDY_BELOW) return { id: best, after: { logprob: 0, top: [{ id: best, logprob: 0 }] } };
    for (let i = 0; i < scores.length; i++) scores[i] = scores[i] / temperature + 0; // -0 becomes 0
    const kept = this.filtered(scores);
    const n = kept ? kept.length : scores.length;
    const weights = (this.weights ??= new Float64Array(scores.length)).subarray(0, n);
    let total = 0;
    for (let i = 0; i < n; i++) total += weights[i] = Math.exp(scores[kept ? kept[i] : i] - scores[best]);
    const share = this.next() * total;
    let [chosen, sum] = [0, 0];
    for (let i = 0; i < n; i++) {
      if (weights[i] === 0) continue;
      sum += weights[i];
      chosen = i;
      if (sum >= share) break;
    }
    const token = (i) => ({ id: kept ? kept[i] : i, logprob: Math.log(weights[i] / total) });
    const likeliest = largest(weights, n_top).filter((i) => weights[i] > 0);
    const { id, logprob } = token(chosen);
    return { id, after: { logprob, top: likeliest.map(token) } };
  }

  /** Return the logits after bias, penalties and bans, in an array that the next call overwrites. */
  adjusted(logits) {
    const { settings } = this;
    const scores = (this.scores ??= new Float32Array(logits.length));
    scores.set(logits);
    for (const [id, bias] of Object.entries(settings.logit_bias ?? {})) if (id in scores) scores[id] += bias;
    for (const id of this.seen) {
      scores[id] = scores[id] < 0 ? scores[id] * settings.repetition_penalty : scores[id] / settings.repetition_penalty;
    }
    for (const [id, n] of this.generated) scores[id] -= n * settings.frequency_penalty + settings.presence_penalty;
    if (this.repeats) for (const [id, penalty] of this.repeats.penalties(settings, this.ends)) scores[id] -= penalty;
    if (this.n < settings.min_tokens) for (const id of this.ends) scores[id] = -Infinity;
    return scores;
  }

  /** Return the ids that the filters keep, in ascending order; null: all. */
  filtered(scores) {
    const { top_k, top_p, min_p } = this.settings;
    if (!top_k && top_p >= 1 && !min_p) return null;
    const n = scores.length;
    const bits = new Uint32Array(scores.buffer); // float32: sign and magnitude
    // Sorting by place puts higher scores first, and of equal scores the lower id. The id is the place modulo MOST_IDS.
    const place = (id) => (bits[id] >>> 31 ? bits[id] : 0x7fffffff - bits[id]) * MOST_IDS + id;
    let least = top_k && top_k < n ? kthLargest(scores.slice(), top_k) : -Infinity;
    let last = Infinity; // place of the last token that top-p keeps
    let n_kept = 0;
    if (top_p < 1) {
      const normalizer = logSumExp(scores, least);
      // All tokens with lower scores together have too little probability to be kept.
      least = Math.max(least, normalizer + Math.log((1 - top_p) / (2 * n)));
      const places = new Float64Array(n);
      for (let id = 0; id < n; id++) if (scores[id] >= least) places[n_kept++] = place(id);
      const sorted = places.subarray(0, n_kept).sort();
      let before = 0;
      for (let i = 0; i < n_kept && (i === 0 || before < top_p); i++) {
        last = sorted[i];
        before += Math.exp(scores[last % MOST_IDS] - normalizer);
      }
    }
    if (min_p) least = Math.max(least, scores[argmax(scores)] + Math.log(min_p));
    const kept = new Uint32Array(n);
    n_kept = 0;
    for (let id = 0; id < n; id++) if (scores[id] >= least && place(id) <= last) kept[n_kept++] = id;
    return kept.subarray(0, n_kept);
  }

  push(id) {
    this.n += 1;
    if (this.settings.repetition_penalty !== 1) this.seen.add(id);
    if (this.settings.frequency_penalty || this.settings.presence_penalty)
      this.generated.set(id, (this.generated.get(id) ?? 0) + 1);
    this.repeats?.push(id);
  }
}

/** Cuts a streamed text before the first stop string, and holds back what may be the beginning of one. */
export class Stops {
  constructor(strings) {
    this.strings = strings ?? [];
    this.held = "";
    this.found = false;
  }

  push(text) {
    text = this.held + text;
    const ends = this.strings.flatMap((stop) => {
      const start = text.indexOf(stop);
      return start < 0 ? [] : [[start + stop.length, start]];
    });
    if (ends.length) {
      this.found = true;
      this.held = "";
      return text.slice(0, ends.reduce((a, b) => (b[0] < a[0] || (b[0] === a[0] && b[1] < a[1]) ? b : a))[1]);
    }
    let n = 0;
    for (const stop of this.strings)
      for (let k = Math.min(stop.length - 1, text.length); k > n; k--) if (text.endsWith(stop.slice(0, k))) n = k;
    this.held = n ? text.slice(-n) : "";
    return n ? text.slice(0, -n) : text;
  }

  flush() {
    const { held } = this;
    this.held = "";
    return held;
  }
}
