// The page of a model in one file: Play and About of the studio's frame, and the model behind them.

import * as play from "../../../studio/static/js/play.js";
import { part, start } from "../../../studio/static/js/shell.js";
import { about as aboutPart } from "./about.js";
import { answerBy } from "./api.js";
import { bytesOf, fillFrom } from "./blocks.js";
import { Model } from "./model.js";

/** Load the model. textOf(id): the text of the file's block with this id. */
export function load(textOf) {
  const about = JSON.parse(textOf("about"));
  return Model.load(about, bytesOf(textOf("kernels"), about.module_bytes), (memory, at) =>
    fillFrom((i) => textOf(`weights-${i}`), about.model.n_bytes, memory, at),
  );
}

if (typeof document === "undefined") globalThis.gptworks = { load };
else {
  const textOf = (id) => {
    const block = document.getElementById(id);
    const text = block.textContent;
    block.remove(); // the page keeps it no longer than it is needed
    return text;
  };
  const { state, page } = JSON.parse(document.getElementById("page").textContent);
  const whole = new Promise((resolve) =>
    document.readyState === "loading" ? addEventListener("DOMContentLoaded", resolve) : resolve(),
  );
  const model = whole.then(() => load(textOf));
  model.catch(() => {}); // a request for a text reports it
  answerBy(model, state);
  part("play", "Play", () => Promise.resolve(play));
  part("about", "About", () => Promise.resolve({ Part: aboutPart(page) }));
  start(document.getElementById("app")).then(() => (document.title = page.facts.name));
}
