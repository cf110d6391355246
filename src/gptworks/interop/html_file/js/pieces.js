// Converts a piece of text to token ids by the kinds of model that a tokenizer.json can have. The ids equal those of
// the library `tokenizers`, because merges and sums have the same order.

const MOST_WORDS = 50_000; // most pieces remembered
const LONGEST_WORD = 256;
const UNKNOWN_PENALTY = 10; // below the lowest score of a token

/** Return a function that turns a piece into ids, and remembers the ids of short pieces. */
export function modelOf(words) {
  const ids = new Map(words.known.map((id) => [nameOf(words, id), id]));
  const model = { BPE: Pairs, Unigram: Likeliest, WordLevel: Whole }[words.kind];
  const made = new model(words, ids);
  const remembered = new Map();
  return (piece) => {
    let found = remembered.get(piece);
    if (found) return found;
    found = made.encode(piece);
    if (remembered.size >= MOST_WORDS) remembered.clear();
    if (piece.length < LONGEST_WORD) remembered.set(piece, found);
    return found;
  };
}

/** Return a token's name in the model's vocabulary. In texts, an added token may have another name. */
function nameOf(words, id) {
  return words.inner[id] ?? words.names[id];
}

/** Return the byte tokens, <0x00> to <0xFF>, of a text; null if the vocabulary lacks one of them. */
function fallback(text, ids) {
  const found = Array.from(new TextEncoder().encode(text), (byte) =>
    ids.get(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`),
  );
  return found.every((id) => id !== undefined) ? found : null;
}

class Whole {
  constructor(words, ids) {
    Object.assign(this, { words, ids });
  }

  encode(piece) {
    return [this.ids.get(piece) ?? this.words.unknown].filter((id) => id !== null);
  }
}

/** Byte pair encoding. */
class Pairs {
  constructor(words, ids) {
    Object.assign(this, { words, ids });
    this.merges = new Map();
    for (let i = 0; i < words.merges.length; i += 2) {
      const [a, b] = [words.merges[i], words.merges[i + 1]];
      this.merges.set(pair(a, b), { rank: i, id: ids.get(nameOf(words, a) + nameOf(words, b)) });
    }
  }

  encode(piece) {
    if (this.words.ignore_merges && this.ids.has(piece)) return [this.ids.get(piece)];
    return this.merged(this.characters(piece));
  }

  characters(piece) {
    const { unknown, fuse_unknown, byte_fallback } = this.words;
    const made = [];
    let waiting = false; // an unknown token is written before the next known one
    const flush = () => waiting && made.push(unknown);
    for (const character of piece) {
      const id = this.ids.get(character);
      const bytes = id === undefined && byte_fallback ? fallback(character, this.ids) : null;
      if (id !== undefined) {
        flush();
        waiting = false;
        made.push(id);
      } else if (bytes) made.push(...bytes);
      else if (unknown !== null) {
        if (!fuse_unknown) flush();
        waiting = true;
      }
    }
    flush();
    return made;
  }

  /** Merge the pair of lowest rank, the leftmost of equal ranks, until no pair can be merged. */
  merged(ids) {
    const n = ids.length;
    const before = ids.map((_, i) => i - 1);
    const after = ids.map((_, i) => i + 1);
    const queue = new Queue();
    const add = (at) => {
      const found = at >= 0 && after[at] < n ? this.merges.get(pair(ids[at], ids[after[at]])) : undefined;
      if (found) queue.push({ at, rank: found.rank, id: found.id });
    };
    for (let i = 0; i < n; i++) add(i);
    for (let top = queue.pop(); top; top = queue.pop()) {
      const { at, id } = top;
      const next = after[at];
      if (ids[at] === null || next >= n || this.merges.get(pair(ids[at], ids[next]))?.id !== id) continue;
      ids[at] = id;
      ids[next] = null;
      after[at] = after[next];
      if (after[at] < n) before[after[at]] = at;
      add(before[at]);
      add(at);
    }
    return ids.filter((id) => id !== null);
  }
}

const pair = (a, b) => a * 2 ** 26 + b;

/** A heap of possible merges: the lowest rank first, of equal ranks the leftmost. */
class Queue {
  constructor() {
    this.items = [];
  }

  push(item) {
    const { items } = this;
    let i = items.length;
    for (; i && below(item, items[(i - 1) >> 1]); i = (i - 1) >> 1) items[i] = items[(i - 1) >> 1];
    items[i] = item;
  }

  pop() {
    const { items } = this;
    const [top] = items;
    const last = items.pop();
    for (let i = 0; items.length;) {
      let child = 2 * i + 1;
      if (child + 1 < items.length && below(items[child + 1], items[child])) child += 1;
      if (child >= items.length || !below(items[child], last)) {
        items[i] = last;
        break;
      }
      items[i] = items[child];
      i = child;
    }
    return top;
  }
}

const below = (a, b) => a.rank < b.rank || (a.rank === b.rank && a.at < b.at);

/** Unigram: finds the tokens whose scores have the largest sum. */
class Likeliest {
  constructor(words, ids) {
    Object.assign(this, { words, ids });
    this.longest = words.known.reduce((n, id) => Math.max(n, nameOf(words, id).length), 0);
    this.unknown_score = words.scores.reduce((a, b) => Math.min(a, b), Infinity) - UNKNOWN_PENALTY;
  }

  encode(piece) {
    return this.path(piece).flatMap(([from, to]) => {
      const text = piece.slice(from, to);
      const id = this.ids.get(text);
      if (id !== undefined) return [id];
      const bytes = this.words.byte_fallback ? fallback(text, this.ids) : null;
      if (!bytes && this.words.unknown === null)
        throw new Error(`This model has no token for ${JSON.stringify(text)}.`);
      return bytes ?? [this.words.unknown];
    });
  }

  /** Return the [start, end] of each token. Consecutive unknown characters are one token. */
  path(piece) {
    const { scores, unknown } = this.words;
    const best = [{ score: 0 }]; // the best path to each position
    const offer = (to, from, id, score) => {
      if (!best[to] || score > best[to].score) best[to] = { score, from, id };
    };
    for (let from = 0; from < piece.length;) {
      const single = from + (piece.codePointAt(from) > 0xffff ? 2 : 1);
      const { score } = best[from];
      let known = false;
      for (let to = single; to <= Math.min(from + this.longest, piece.length); to++) {
        const id = this.ids.get(piece.slice(from, to));
        if (id === undefined) continue;
        offer(to, from, id, scores[id] + score);
        known ||= to === single;
      }
      if (!known) offer(single, from, unknown, this.unknown_score + score);
      from = single;
    }
    const made = [];
    for (let to = piece.length; to > 0; to = best[to].from) {
      const { from, id } = best[to];
      const [next] = made.slice(-1);
      if (id === unknown && next?.id === unknown) next.from = from;
      else made.push({ from, to, id });
    }
    return made.reverse().map(({ from, to }) => [from, to]);
  }
}
