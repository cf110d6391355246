// All texts of the session as a tree of branches. A branch holds its own tokens, which follow the first `at` tokens of
// its parent's answer; if `at` is null, they follow its own prompt. The tree is kept in sessionStorage, within a limit.

import { inTab } from "../store.js";

const STORED = "gptworks-play";
const MOST_CHARACTERS = 2_000_000;

export class Tree {
  constructor() {
    this.branches = new Map();
    this.last = 0;
  }

  get(id) {
    return this.branches.get(id) ?? null;
  }

  /** Add a branch with the fields in `made`, and return it. */
  add(made) {
    const branch = {
      id: ++this.last,
      parent: null,
      at: null,
      prompt: null,
      prompt_tokens: [],
      tokens: [],
      rest: "",
      settings: {},
      seed: null,
      end: null,
      problem: null,
      name: "",
      column: 0,
      chosen: false,
      ...made,
    };
    this.branches.set(branch.id, branch);
    return branch;
  }

  children(id) {
    return [...this.branches.values()].filter((branch) => branch.parent === id);
  }

  /** Remove a branch and all branches below it. Return the parent's id, or null. */
  remove(id) {
    const { parent } = this.get(id);
    for (const child of this.children(id)) this.remove(child.id);
    this.branches.delete(id);
    return parent;
  }

  /** The branch that holds the prompt of this one. */
  root(branch) {
    return branch.at == null ? branch : this.root(this.get(branch.parent));
  }

  /** The parts of the answer in order: each a list of tokens, and the number `n` of its first tokens that are used. */
  segments(branch, n = branch.tokens.length) {
    const own = { branch, tokens: branch.tokens, n };
    return branch.at == null ? [own] : [...this.before(this.get(branch.parent), branch.at), own];
  }

  before(branch, n) {
    const made = [];
    for (const segment of this.segments(branch)) {
      if (n <= 0) break;
      made.push({ ...segment, n: Math.min(n, segment.n) });
      n -= segment.n;
    }
    return made;
  }

  answer(branch) {
    return this.segments(branch).flatMap(({ tokens, n }) => tokens.slice(0, n));
  }

  /** Number of tokens of the answer. */
  length(branch) {
    return this.segments(branch).reduce((sum, { n }) => sum + n, 0);
  }

  answerText(branch) {
    return (
      branch.edited ??
      this.answer(branch)
        .map((token) => token.text)
        .join("") + branch.rest
    );
  }

  /** The ids of the prompt and of the first `n` tokens of the answer. */
  ids(branch, n = Infinity) {
    return [...this.root(branch).prompt_tokens, ...this.answer(branch).slice(0, n)].map((token) => token.id);
  }

  promptText(branch) {
    const { prompt } = this.root(branch);
    return prompt.messages ? prompt.messages.at(-1).content : prompt.text;
  }

  // -------------------------------------------------------------------------------------------------- keeping it

  /** Write the tree and `more` to the tab's storage. If they are too large, drop the tokens' alternatives, then the
   * oldest branches with all branches below them. */
  save(more) {
    const kept = [...this.branches.values()];
    let written = JSON.stringify({ more, last: this.last, branches: kept });
    if (written.length > MOST_CHARACTERS) {
      const bare = ({ id, text, spelling, logprob, rank }) => ({
        id,
        text,
        spelling,
        logprob,
        rank,
        top: [],
        after: null,
      });
      const smaller = kept.map((b) => ({ ...b, prompt_tokens: b.prompt_tokens.map(bare), tokens: b.tokens.map(bare) }));
      do written = JSON.stringify({ more, last: this.last, branches: smaller });
      while (written.length > MOST_CHARACTERS && dropOldest(smaller));
    }
    inTab.set(STORED, written);
  }

  /** Fill the tree with what `save` wrote, and return `more`; null if there is nothing to read. */
  restore() {
    try {
      const { more, last, branches } = JSON.parse(inTab.get(STORED));
      for (const branch of branches)
        this.branches.set(branch.id, { ...branch, end: branch.end ?? { reason: "stopped" } });
      this.last = last;
      return more;
    } catch {
      return null;
    }
  }
}

function dropOldest(branches) {
  const oldest = branches.find((branch) => branch.parent == null);
  if (!oldest || branches.length < 2) return false;
  const gone = new Set([oldest.id]);
  for (const branch of branches) if (gone.has(branch.parent)) gone.add(branch.id);
  for (let i = branches.length - 1; i >= 0; i--) if (gone.has(branches[i].id)) branches.splice(i, 1);
  return branches.length > 0;
}
