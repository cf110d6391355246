// In place of the studio's api.js: the model of this file answers, and nothing leaves the page.

export const serves = false; // requests of other programs

let answers = null;

export class ApiError extends Error {}

/** model: a promise of the model. state: what the studio's server answers to studio/state. */
export function answerBy(model, state) {
  answers = { model, state };
}

export const takeCode = () => null;
export const key = () => null;
export const setKey = () => {};
export const dropKey = () => {};
export const signIn = () => Promise.resolve();

export function get(path) {
  return path === "studio/state" ? Promise.resolve(answers.state) : unanswered(path);
}

export function post(path) {
  return path === "studio/load" ? answers.model.then(() => ({ loaded: true })) : unanswered(path);
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
