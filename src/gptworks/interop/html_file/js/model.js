// The model of this file. It generates texts as the events that the studio's server would send.

import { ChatTemplate } from "./conversation.js";
import { Engine } from "./engine.js";
import { NEUTRAL, Sampler, Stops, scored } from "./sampling.js";
import { Decoder, Tokenizer } from "./tokenizer.js";
import { Trace } from "./trace.js";

const LEAST_LOGPROB = -9999; // JSON has no infinity
const CONTEXT_TOKENS = 16; // last tokens of a prompt, on which the next token's text may depend
const AT_ONCE_MS = 30; // milliseconds of work after which the page may draw

export class Model {
  /** about: the facts that html_file/exporting.py writes. module, fill: see Engine.load. */
  static async load(about, module, fill) {
    return new Model(about, await Engine.load(module, about.model, fill));
  }

  constructor(about, engine) {
    this.about = about;
    this.engine = engine;
    this.tokenizer = new Tokenizer(about.words);
    this.chat = about.chat && new ChatTemplate(about.chat, this.tokenizer);
    this.turn = Promise.resolve(); // texts wait for one another
  }

  /** Generate a text, and yield its events. request: the request of the studio's page. */
  async *generate(request, signal) {
    const done = await this.myTurn();
    try {
      yield* this.text(request, signal);
    } finally {
      done();
    }
  }

  /** Wait until no other text is computed; the next one waits until the returned function is called. */
  async myTurn() {
    const before = this.turn;
    let done;
    this.turn = new Promise((resolve) => (done = resolve));
    await before;
    return done;
  }

  /** Return the result of work(rest), run while no other text is computed. `rest()` lets the page draw; see Clock. */
  async inTurn(work, signal) {
    const done = await this.myTurn();
    try {
      signal?.throwIfAborted();
      const clock = new Clock(signal);
      return await work(() => clock.rest());
    } finally {
      done();
    }
  }

  /** Return the trace of a short text (trace.js). */
  trace(ids, signal) {
    return this.inTurn((rest) => this.traced(ids, rest), signal);
  }

  /** Return the trace of a text's tokens from `first` on. The caller must have the turn. */
  traced(ids, rest, first = 0) {
    return Trace.read(this.engine, ids, rest, first);
  }

  async *text({ prompt, tokens, messages, answers, settings, n_top = 10, score_prompt = false }, signal) {
    const { tokenizer, engine } = this;
    const { context } = this.about;
    settings = { ...NEUTRAL, ...settings, seed: settings.seed ?? crypto.getRandomValues(new Uint32Array(1))[0] };
    const fitted = messages ? this.chat.fit(messages, context, settings.max_tokens) : null;
    const ids = fitted?.ids ?? tokens ?? tokenizer.prompt(prompt ?? "");
    if (!ids.length) throw new Error("The prompt has no token that this model knows. Write another.");
    if (ids.length > context)
      throw new Error(`The prompt has ${ids.length} tokens; this model's context is ${context} tokens. Shorten it.`);
    const ends = settings.ignore_eos ? [] : [...tokenizer.words.ends, ...(messages || answers ? this.chat.ends : [])];
    const scores = ids.map(() => null);
    const clock = new Clock(signal);
    let logits = await engine.read(ids, {
      from: score_prompt ? 0 : null,
      score: (i, found) => (scores[i] = scored(found, ids[i], n_top)),
      rest: () => clock.rest(),
    });
    const read = new Decoder(tokenizer);
    const start = ids.map((id, i) => this.token(id, read.push(id), scores[i]));
    yield { type: "start", seed: settings.seed, step: null, dropped: fitted?.dropped ?? 0, tokens: start };
    const sampler = new Sampler(settings, ids, ends);
    const decoder = new Decoder(tokenizer, ids.slice(-CONTEXT_TOKENS));
    const stops = new Stops(settings.stop);
    const began = performance.now();
    let [reason, sum] = [null, 0];
    for (;;) {
      const { id, after } = sampler.sample(logits, n_top);
      if (ends.includes(id) && sampler.n >= settings.min_tokens) {
        reason = "stop";
        break;
      }
      sampler.push(id);
      const text = stops.push(decoder.push(id));
      const score = scored(logits, id, n_top);
      sum += score.logprob;
      yield { type: "token", ...this.token(id, text, score), after: this.spelled(after) };
      reason = stops.found
        ? "stop"
        : sampler.n >= settings.max_tokens
          ? "length"
          : ids.length + sampler.n > context
            ? "context"
            : null;
      if (reason) break;
      await clock.rest();
      [logits] = engine.step([id]);
    }
    const rest = stops.found ? "" : stops.push(decoder.flush()) + stops.flush();
    const seconds = (performance.now() - began) / 1000;
    yield {
      type: "end",
      reason,
      text: rest,
      generated: sampler.n,
      seconds,
      tokens_per_second: sampler.n > 1 ? (sampler.n - 1) / seconds : null,
      mean_logprob: sampler.n ? Math.max(sum / sampler.n, LEAST_LOGPROB) : null,
    };
  }

  token(id, text, score) {
    const rank = score?.rank ?? null;
    return { id, text, spelling: this.tokenizer.spelling(id), rank, ...(score ? this.spelled(score) : EMPTY) };
  }

  spelled({ logprob, top }) {
    const finite = (x) => Math.max(x, LEAST_LOGPROB);
    return {
      logprob: finite(logprob),
      top: top.map((one) => ({ id: one.id, spelling: this.tokenizer.spelling(one.id), logprob: finite(one.logprob) })),
    };
  }
}

const EMPTY = { logprob: null, top: [] };

/** Lets the page draw from time to time, and throws if the work was stopped. */
class Clock {
  constructor(signal) {
    this.signal = signal;
    this.since = performance.now();
  }

  async rest() {
    if (performance.now() - this.since > AT_ONCE_MS) {
      await new Promise((resolve) => {
        const { port1, port2 } = new MessageChannel();
        port1.onmessage = () => (port1.close(), resolve());
        port2.postMessage(null);
      });
      this.since = performance.now();
    }
    this.signal?.throwIfAborted();
  }
}
