// Turns a conversation into a prompt by the run's chat template, as gptworks/chat_template.py and infer/fitting.py do.

import { escaped } from "./tokenizer.js";
import { Template } from "./vendor/jinja.js";

export class ChatTemplate {
  constructor({ source, names, ends }, tokenizer) {
    this.template = new Template(source);
    this.names = names;
    this.ends = ends;
    this.tokenizer = tokenizer;
    const special = [...tokenizer.added.keys()].filter((name) => tokenizer.special.has(tokenizer.added.get(name)));
    special.sort((a, b) => b.length - a.length);
    this.special = special.length ? new RegExp(`(${special.map(escaped).join("|")})`, "gu") : null;
  }

  render(messages, add_generation_prompt = true) {
    const given = { messages, tools: null, documents: null, add_generation_prompt, ...this.names };
    return this.template.render(given);
  }

  /**
   * Return a conversation's token ids. Special tokens come only from the template: a guard character inside their names
   * in messages keeps these names plain text.
   */
  encode(messages) {
    const all = JSON.stringify(messages);
    let code = 0xe000;
    while (all.includes(String.fromCharCode(code))) code += 1;
    const guard = String.fromCharCode(code);
    const mark = (text) =>
      this.special
        ? text.replace(this.special, (name) => {
            const [first, ...rest] = name;
            return first + guard + rest.join("");
          })
        : text;
    const text = this.render(messages.map((one) => ({ ...one, content: mark(one.content) })));
    if (!text.includes(guard)) return this.tokenizer.encode(text, { special: true });
    const parts = this.special ? text.split(this.special) : [text];
    return parts.flatMap((part, i) =>
      i % 2
        ? [this.tokenizer.added.get(part)]
        : this.tokenizer.encode(part.replaceAll(guard, ""), { continues: i > 0 }),
    );
  }

  /**
   * Return the ids of a prompt that leaves room for an answer, and the number of turns dropped. If the conversation is
   * too long, its oldest turns are dropped.
   */
  fit(messages, context, answer_tokens) {
    const turns = messages.flatMap((one, i) => (one.role === "system" ? [] : [i]));
    const starts = [...turns.slice(0, 1), ...turns.slice(1).filter((i) => messages[i].role === "user")];
    const room = context - Math.min(answer_tokens, Math.floor(context / 2));
    let ids = [];
    for (const start of starts.length ? starts : [0]) {
      ids = this.encode(messages.filter((one, i) => i >= start || one.role === "system"));
      if (ids.length <= room) return { ids, dropped: turns.filter((i) => i < start).length };
    }
    if (ids.length > context) {
      const rest = turns.length < messages.length ? "with the system messages" : "alone";
      const what = starts.length > 1 ? `The newest question ${rest}` : "The conversation";
      const [size, limit] = [ids.length, context].map((n) => n.toLocaleString("en-US"));
      throw new Error(`${what} has ${size} tokens; this model's context is ${limit} tokens. Shorten it.`);
    }
    return { ids, dropped: turns.filter((i) => i < starts.at(-1)).length };
  }
}
