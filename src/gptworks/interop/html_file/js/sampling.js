// The next token from logits, by the settings and in the order of gptworks/infer/sampling.py:
// bias, penalties, bans; greedy, or temperature, top-k, top-p, min-p, draw. Seeds draw other numbers than in Python.

const GREEDY_BELOW = 1e-5;

/** Numbers in (0, 1] of a seed: xorshift128+, filled by splitmix64. */
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

function argmax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

function logSumExp(values) {
  const top = values[argmax(values)];
  let sum = 0;
  for (const value of values) sum += Math.exp(value - top);
  return top + Math.log(sum);
}

/** Indices of the n largest, in descending order. */
export function largest(values, n) {
  const found = [];
  if (n <= 0) return found;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (found.length === n && !(value > values[found[n - 1]])) continue;
    let at = found.length;
    while (at > 0 && values[found[at - 1]] < value) at -= 1;
    found.splice(at, 0, i);
    if (found.length > n) found.pop();
  }
  return found;
}

/** A token's log-probability and rank, and the n likeliest tokens. */
export function scored(logits, id, n) {
  const normalizer = logSumExp(logits);
  let rank = 1;
  for (const value of logits) if (value > logits[id]) rank += 1;
  const top = largest(logits, n).map((other) => ({ id: other, logprob: logits[other] - normalizer }));
  return { logprob: logits[id] - normalizer, rank, top };
}

export class Sampler {
  constructor(settings, prompt, ends) {
    this.settings = settings;
    this.ends = ends;
    this.generated = new Map();
    this.seen = new Set(settings.repetition_penalty === 1 ? [] : prompt);
    this.n = 0;
    this.next = numbers(settings.seed);
  }

  /** The next token, and its log-probability in the distribution that it was drawn from, with the `n_top` likeliest. */
  sample(logits, n_top) {
    const { temperature } = this.settings;
    const scores = this.adjusted(logits);
    if (Number.isNaN(scores[argmax(scores)]) || scores.some(Number.isNaN))
      throw new Error("The model's scores are not numbers: its training diverged, or the file is damaged.");
    if (temperature < GREEDY_BELOW) {
      const id = argmax(scores);
      return { id, after: { logprob: 0, top: [{ id, logprob: 0 }] } };
    }
    for (let i = 0; i < scores.length; i++) scores[i] /= temperature;
    const kept = this.filtered(scores);
    const top = scores[argmax(scores)];
    let total = 0;
    const weights = Float64Array.from(scores, (score, i) => (kept === null || kept.has(i) ? Math.exp(score - top) : 0));
    for (const weight of weights) total += weight;
    const share = this.next() * total;
    let id = 0;
    let sum = 0;
    for (let i = 0; i < weights.length; i++) {
      if (weights[i] === 0) continue;
      sum += weights[i];
      id = i;
      if (sum >= share) break;
    }
    const likeliest = largest(weights, n_top).filter((other) => weights[other] > 0);
    const of = (other) => Math.log(weights[other] / total);
    return { id, after: { logprob: of(id), top: likeliest.map((other) => ({ id: other, logprob: of(other) })) } };
  }

  adjusted(logits) {
    const { settings } = this;
    const scores = Float32Array.from(logits);
    for (const [id, bias] of Object.entries(settings.logit_bias ?? {})) if (id in scores) scores[id] += bias;
    for (const id of this.seen) {
      scores[id] = scores[id] < 0 ? scores[id] * settings.repetition_penalty : scores[id] / settings.repetition_penalty;
    }
    for (const [id, n] of this.generated) scores[id] -= n * settings.frequency_penalty + settings.presence_penalty;
    if (this.n < settings.min_tokens) for (const id of this.ends) scores[id] = -Infinity;
    return scores;
  }

  /** The tokens that the filters keep; null: all. */
  filtered(scores) {
    const { top_k, top_p, min_p } = this.settings;
    if (!top_k && top_p >= 1 && !min_p) return null;
    let order = Array.from(scores.keys()).sort((a, b) => scores[b] - scores[a] || a - b);
    const best = scores[order[0]];
    if (top_k && top_k < order.length) {
      const kth = scores[order[top_k - 1]];
      order = order.filter((id) => scores[id] >= kth);
    }
    const normalizer = logSumExp(order.map((id) => scores[id]));
    let before = 0;
    if (top_p < 1)
      order = order.filter((id, i) => {
        const keeps = i === 0 || before < top_p;
        before += Math.exp(scores[id] - normalizer);
        return keeps;
      });
    if (min_p) order = order.filter((id) => scores[id] >= best + Math.log(min_p));
    return new Set(order);
  }

  push(id) {
    this.n += 1;
    if (this.settings.repetition_penalty !== 1) this.seen.add(id);
    if (this.settings.frequency_penalty || this.settings.presence_penalty)
      this.generated.set(id, (this.generated.get(id) ?? 0) + 1);
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
