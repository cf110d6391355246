// The state of the part Play: columns, settings, the tree of branches, and the streams that fill it.

import { post, stream } from "../api.js";
import { chooseRun } from "../choice.js";
import { sent } from "./copy.js";
import { defaultsOf, drawSeed } from "./settings.js";
import { Tree } from "./tree.js";

const REST_MS = 250;

export class Session {
  /** sampling: the default settings, until a model is chosen that has its own. */
  constructor(sampling) {
    this.tree = new Tree();
    this.version = 0;
    this.listener = () => {};
    const kept = this.tree.restore();
    this.columns = (kept?.columns ?? [{ model: null, checkpoint: null, current: null }]).map((one) => ({
      ...one,
      work: null,
    }));
    this.defaults = { ...defaultsOf(sampling), ...kept?.defaults };
    this.settings = { ...this.defaults, ...kept?.settings };
    this.options = { n_top: 10, score_prompt: false, ...kept?.options };
    this.prompt = kept?.prompt ?? "";
    this.plain = kept?.plain ?? null;
    this.shade = kept?.shade ?? "probability";
    this.mono = kept?.mono ?? false;
    this.drawn = false;
  }

  // ------------------------------------------------------------------------------------------------------ changes

  /** Set fields, redraw the page, and save the session. */
  set(fields) {
    Object.assign(this, fields);
    this.changed();
  }

  /** Change a column. The first column's model and checkpoint are chosen in all parts. */
  setColumn(index, fields) {
    Object.assign(this.columns[index], fields);
    if (index === 0) chooseRun(this.columns[0]);
    this.changed();
  }

  changed() {
    this.version += 1;
    this.listener(this.version);
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.save(), 400);
  }

  /** Redraw at the next frame, once for all changes until then. */
  soon() {
    if (this.drawn) return;
    this.drawn = true;
    const draw = () => ((this.drawn = false), (this.version += 1), this.listener(this.version));
    document.hidden ? setTimeout(draw, 200) : requestAnimationFrame(draw);
  }

  save() {
    clearTimeout(this.saving);
    const { defaults, settings, options, prompt, plain, shade, mono } = this;
    const columns = this.columns.map(({ model, checkpoint, current }) => ({ model, checkpoint, current }));
    this.tree.save({ columns, defaults, settings, options, prompt, plain, shade, mono });
  }

  /** Give the chosen run to the first column, and to other columns whose run was removed. Unchanged settings become the
   * defaults of the first column's model. */
  settle(models, chosen) {
    this.models = models;
    this.columns.forEach((column, index) => {
      if (!index || !models.some((model) => model.id === column.model)) Object.assign(column, chosen);
    });
    const first = models.find((model) => model.id === chosen.model);
    for (const [key, value] of Object.entries(first?.sampling ?? {})) {
      if (this.settings[key] === this.defaults[key]) this.settings = { ...this.settings, [key]: value };
      if (this.defaults[key] !== value) this.defaults = { ...this.defaults, [key]: value };
    }
  }

  /** Load the columns' models before a text is requested, after the choice has rested for a moment. */
  prepare(models) {
    clearTimeout(this.resting);
    this.preparing?.abort();
    this.preparing = new AbortController();
    const { signal } = this.preparing;
    const has = (id) => models.some((model) => model.id === id && !model.problem && model.state !== "served");
    this.resting = setTimeout(async () => {
      for (const { model, checkpoint } of this.columns.filter((column) => has(column.model))) {
        // A request for a text will report why the model cannot be loaded.
        await post("studio/load", { model, checkpoint }, { signal }).catch(() => {});
        if (signal.aborted) return;
      }
    }, REST_MS);
  }

  // --------------------------------------------------------------------------------------------------- the columns

  addColumn() {
    const [first] = this.columns;
    this.columns.push({ model: first.model, checkpoint: first.checkpoint, current: null, work: null });
    this.changed();
  }

  closeColumn(index) {
    this.stop(index);
    this.columns.splice(index, 1);
    this.setColumn(0, {});
  }

  /** Show a branch, with the model that wrote it, in its own column, or in the last column if its own is closed. */
  show(id) {
    const branch = this.tree.get(id);
    const index = Math.min(branch.column, this.columns.length - 1);
    this.setColumn(index, { current: id, model: branch.model, checkpoint: branch.checkpoint });
    const { prompt } = this.tree.root(branch);
    if (!prompt.messages) this.prompt = prompt.text;
    this.changed();
  }

  remove(id) {
    const gone = new Set([id]);
    for (const branch of this.tree.branches.values()) if (gone.has(branch.parent)) gone.add(branch.id);
    this.columns.forEach((column, index) => gone.has(column.current) && column.work && this.stop(index));
    const parent = this.tree.remove(id);
    for (const column of this.columns) if (gone.has(column.current)) column.current = parent;
    this.changed();
  }

  get busy() {
    return this.columns.some((column) => column.work);
  }

  stop(index) {
    for (const column of index == null ? this.columns : [this.columns[index]]) column.work?.controller.abort();
  }

  // ------------------------------------------------------------------------------------------------------ requests

  /** Generate a text from the prompt in every column, with the same seed. */
  generate() {
    const seed = this.settings.seed ?? drawSeed();
    this.columns.forEach((column, index) => {
      const { current } = column;
      this.run(index, { parent: this.edited(current) ? current : null, prompt: { text: this.prompt } }, { seed });
    });
  }

  /** Whether the prompt differs from this branch's prompt but begins with its first 40 characters. If so, the new
   * branch belongs below this one in the tree. */
  edited(id) {
    const branch = this.tree.get(id);
    const before = branch && this.tree.promptText(branch);
    return (
      Boolean(branch) &&
      !this.tree.root(branch).prompt.messages &&
      before !== this.prompt &&
      Boolean(before) &&
      this.prompt.startsWith(before.slice(0, 40))
    );
  }

  /** Send a message in every column, with the same seed. */
  say(text, system) {
    const seed = this.settings.seed ?? drawSeed();
    this.columns.forEach((column, index) => {
      const messages = [...this.conversation(index, system), { role: "user", content: text }];
      this.run(index, { parent: column.current, prompt: { messages } }, { seed });
    });
  }

  /** The turns of a column. In turns that the model wrote, `from` names the branch. */
  conversation(index, system = "") {
    const branch = this.tree.get(this.columns[index].current);
    const messages = branch && this.tree.root(branch).prompt.messages;
    if (!messages) return system ? [{ role: "system", content: system }] : [];
    return [...messages, { role: "assistant", content: this.tree.answerText(branch), from: branch.id }];
  }

  /** Change a turn. A changed answer is kept. After any other change, the next answer is generated again. */
  editTurn(index, place, content) {
    const turns = this.conversation(index);
    const { current } = this.columns[index];
    if (turns[place].role === "assistant") {
      const branch = this.tree.add({
        parent: current,
        prompt: { messages: turns.slice(0, place) },
        edited: content,
        end: { reason: "edited" },
        column: index,
        model: this.columns[index].model,
      });
      this.setColumn(index, { current: branch.id });
      return;
    }
    const end = turns.findIndex((turn, i) => i >= place && turn.role === "user") + 1;
    const messages = turns.slice(0, end).map((turn, i) => (i === place ? { ...turn, content } : turn));
    this.run(index, { parent: current, prompt: { messages } });
  }

  /** Give a conversation a system message; its first answer is generated again. */
  setSystem(index, content) {
    const turns = this.conversation(index).filter((turn) => turn.role !== "system");
    const messages = [{ role: "system", content }, ...turns.slice(0, 1)];
    this.run(index, { parent: this.columns[index].current, prompt: { messages } });
  }

  /** Repeat the request, with another seed unless one is set. */
  regenerate(index) {
    const branch = this.tree.get(this.columns[index].current);
    const { parent, at, prompt, chosen } = branch;
    if (at == null) this.run(index, { parent, prompt });
    else this.run(index, { parent, at, chosen: chosen && branch.tokens[0] }, { tokens: branch.sent, like: branch });
  }

  /** Continue at the end of the text. */
  proceed(index) {
    const branch = this.tree.get(this.columns[index].current);
    const at = this.tree.length(branch);
    this.run(index, { parent: branch.id, at }, { tokens: this.tree.ids(branch), like: branch });
  }

  /** Take another token in the answer or the prompt, and continue from there. */
  branch(index, part, place, token) {
    const branch = this.tree.get(this.columns[index].current);
    if (part === "prompt") {
      const before = this.tree.root(branch).prompt_tokens.slice(0, place);
      const text = before.map((one) => one.text).join("") + token.spelling;
      this.prompt = text;
      this.run(
        index,
        { parent: branch.id, prompt: { text } },
        { tokens: [...before.map((one) => one.id), token.id], like: branch },
      );
    } else {
      this.run(
        index,
        { parent: branch.id, at: place, chosen: token },
        { tokens: [...this.tree.ids(branch, place), token.id], like: branch },
      );
    }
  }

  /** The first model in the columns that has a chat template for `model`; null if `model` has its own, or none has. */
  templateFor(model) {
    const chats = (id) => this.models.some((one) => one.id === id && one.chat);
    return chats(model) ? null : (this.columns.map((column) => column.model).find(chats) ?? null);
  }

  /** Stream one branch into the tree. `like`: a branch whose model, checkpoint and chat template are used. */
  async run(index, made, { tokens = null, seed = this.settings.seed, like = null } = {}) {
    this.stop(index);
    const column = this.columns[index];
    const { tree, options } = this;
    const model = like?.model ?? column.model;
    const checkpoint = like ? (like.step ?? like.checkpoint) : column.checkpoint;
    const settings = { ...this.settings, seed };
    const { chosen, ...fields } = made;
    const template_of = like ? like.template_of : this.templateFor(model);
    const branch = tree.add({
      ...fields,
      column: index,
      model,
      checkpoint: like?.checkpoint ?? column.checkpoint,
      settings,
      sent: tokens,
      template_of,
      chosen: Boolean(chosen),
    });
    const work = { controller: new AbortController(), branch: branch.id, loading: false };
    Object.assign(column, { current: branch.id, work });
    this.changed();
    const root = tree.root(branch);
    const body = {
      model,
      checkpoint,
      settings,
      n_top: options.n_top,
      score_prompt: options.score_prompt && made.at == null,
    };
    if (root.prompt.messages) body.template_of = template_of;
    if (tokens) Object.assign(body, { tokens, answers: Boolean(root.prompt.messages) });
    else if (made.prompt.messages) body.messages = sent(made.prompt.messages);
    else body.prompt = made.prompt.text;
    try {
      for await (const event of stream("studio/generate", body, { signal: work.controller.signal })) {
        this.take(branch, work, chosen, event);
      }
      if (!branch.end && !branch.problem) branch.problem = "The connection ended before the text did.";
    } catch (error) {
      if (error.name !== "AbortError") branch.problem = error.message;
      else branch.end = { reason: "stopped" };
    }
    if (column.work === work) column.work = null;
    this.changed();
  }

  take(branch, work, chosen, event) {
    work.loading = event.type === "loading";
    if (event.type === "start") {
      Object.assign(branch, { seed: event.seed, step: event.step, dropped: event.dropped });
      if (branch.at == null) branch.prompt_tokens = event.tokens;
      else if (chosen)
        branch.tokens.push({ ...event.tokens.at(-1), ...chosen, text: event.tokens.at(-1).text, chosen: true });
    } else if (event.type === "token") {
      delete event.type;
      branch.tokens.push(event);
    } else if (event.type === "end") {
      Object.assign(branch, { end: event, rest: event.text });
    } else if (event.type === "error") {
      branch.problem = event.message;
    }
    this.soon();
  }
}
