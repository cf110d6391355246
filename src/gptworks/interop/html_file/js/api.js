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
export const signIn = async () => {};

export async function get(path) {
  if (path === "studio/state") return answers.state;
  throw new ApiError(`This file does not answer ${path}.`);
}

export async function post(path) {
  if (path === "studio/load") return { loaded: Boolean(await answers.model) };
  throw new ApiError(`This file does not answer ${path}.`);
}

export async function* stream(path, body, { signal } = {}) {
  if (path !== "studio/generate") throw new ApiError(`This file does not answer ${path}.`);
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
