// Replaces the studio's api.js: the model of this file answers, and nothing leaves the page.

import { readText, readToken } from "./reading.js";

export const serves = false; // no requests of other programs
export const hasRuns = false; // no other checkpoints, and no training data

let answers = null;

export class ApiError extends Error {}

/** Set the answers: `model` (a promise), `state` for studio/state, and `sheets` for studio/model/sheet. */
export function answerBy(model, state, sheets) {
  answers = { model, state, sheets };
}

export const takeCode = () => null;
export const key = () => null;
export const setKey = () => {};
export const dropKey = () => {};
export const signIn = () => Promise.resolve();

export function get(path) {
  return path === "studio/state" ? Promise.resolve(answers.state) : unanswered(path);
}

const POSTS = { "studio/load": () => ({ loaded: true }), "studio/read/text": readText, "studio/read/token": readToken };

export async function post(path, body, { signal } = {}) {
  if (path === "studio/model/sheet") return sheetOf(body.layer);
  return path in POSTS ? POSTS[path](await answers.model, body, signal) : unanswered(path);
}

/** Return a layer's sheet. Layers that differ only in the names of their tensors share a sheet. */
function sheetOf(layer) {
  const { made, of } = answers.sheets;
  const sheet = made[of[layer]];
  const named = (one) => ({ ...one, name: one.name.replace(/^blocks\.\d+\./, `blocks.${layer}.`) });
  return { ...sheet, layer, parts: sheet.parts.map((part) => ({ ...part, tensors: part.tensors.map(named) })) };
}

function unanswered(path) {
  return Promise.reject(new ApiError(`This file does not answer ${path}.`));
}

export async function* stream(path, body, { signal } = {}) {
  if (path !== "studio/generate") await unanswered(path);
  let loading = true;
  const model = answers.model.finally(() => (loading = false));
  await Promise.race([model, Promise.resolve()]);
  if (loading) yield { type: "loading" };
  try {
    yield* (await model).generate(body, signal);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    yield { type: "error", message: error.message };
  }
}
