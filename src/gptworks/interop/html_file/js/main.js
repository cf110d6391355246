// The page of a model: Play, Read, Explain, Model and About in the studio's frame, and the model behind them.

import * as modelPart from "../../../studio/static/js/model.js";
import * as play from "../../../studio/static/js/play.js";
import * as read from "../../../studio/static/js/read.js";
import { part, start } from "../../../studio/static/js/shell.js";
import { keepApart } from "../../../studio/static/js/store.js";
import { about as aboutPart } from "./about.js";
import { answerBy } from "./api.js";
import { BLOCK_BYTES, bytesOf, damaged, fetched } from "./blocks.js";
import { explain } from "./explain/part.js";
import { Model } from "./model.js";

/**
 * Load the model.
 *
 * textOf(id): the text of the file's block with this id. fileOf([name, sum]): the bytes of a file next to the page.
 * progress(share): called with the share of the weights that has been read.
 */
export async function load(textOf, fileOf = fetched, progress = () => {}) {
  const about = parsed(textOf("about"));
  const block = (id, n) => (about.files ? fileOf(about.files[id]) : bytesOf(textOf(id), n));
  const n_bytes = about.model.n_bytes;
  return Model.load(about, await block("kernels", about.module_bytes), async (memory, at) => {
    for (let i = 0, done = 0; done < n_bytes; i++) {
      const bytes = await block(`weights-${i}`, Math.min(BLOCK_BYTES, n_bytes - done));
      new Uint8Array(memory.buffer).set(bytes, at + done);
      done += bytes.length;
      progress(done / n_bytes);
      await new Promise((resolve) => setTimeout(resolve)); // the page may draw
    }
  });
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw damaged();
  }
}

const SOON_MS = 400; // a model that loads within this time needs no progress line

if (typeof document === "undefined") globalThis.gptworks = { load };
else {
  document.querySelector(".nothing-came").remove();
  const textOf = (id) => {
    const block = document.getElementById(id);
    block?.remove(); // free the memory
    return block?.textContent ?? null;
  };
  const written = document.getElementById("page").textContent;
  const { state, page } = JSON.parse(written);
  keepApart([...written].reduce((sum, one) => (31 * sum + one.codePointAt(0)) | 0, 0).toString(16));
  const whole = new Promise((resolve) =>
    document.readyState === "loading" ? addEventListener("DOMContentLoaded", resolve) : resolve(),
  );
  const line = document.getElementById("loading");
  const [said, bar] = line.children;
  const slow = setTimeout(() => (line.hidden = false), SOON_MS);
  const model = whole.then(() => load(textOf, fetched, (share) => (bar.value = share)));
  model
    .then(
      () => line.remove(),
      (error) => {
        bar.remove();
        [line.hidden, said.textContent] = [false, error.message];
      },
    )
    .finally(() => clearTimeout(slow));
  answerBy(model, state, page.sheets);
  globalThis.gptworks = { model }; // for the export's check (html_file/checking.py)
  part("play", "Play", () => Promise.resolve(play));
  part("read", "Read", () => Promise.resolve(read));
  part("explain", "Explain", () => Promise.resolve({ Part: explain(page, state, model) }));
  part("model", "Model", () => Promise.resolve(modelPart));
  part("about", "About", () => Promise.resolve({ Part: aboutPart(page, model) }));
  start(document.getElementById("app"));
}
