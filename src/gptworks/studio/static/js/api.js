// Calls to the server. The link has a code (#code=…) that the server exchanges once for a session: a cookie, which
// scripts cannot read, and a key, which this origin keeps. A key that is typed stays in this tab.

const SESSION = "gptworks-session";
const TYPED = "gptworks-key";

export const serves = true; // whether other programs can send requests; false for a model in one file
export const hasRuns = true; // whether runs with checkpoints and data exist; false for a model in one file

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Remove the code from the address and return it; null if there is none. Call this before using the address. */
export function takeCode() {
  const fragment = location.hash.slice(1);
  if (!fragment.startsWith("code=")) return null;
  const [code, ...rest] = fragment.slice("code=".length).split("&");
  history.replaceState(null, "", rest.length ? `#${rest.join("&")}` : location.pathname + location.search);
  return code;
}

/** Exchange a code for a session. */
export async function signIn(code) {
  const { key } = await post("studio/sign-in", { code });
  sessionStorage.removeItem(TYPED);
  localStorage.setItem(SESSION, key);
}

export function setKey(key) {
  sessionStorage.setItem(TYPED, key);
}

/** Forget a typed key, if no other was typed since. */
export function dropKey(key) {
  if (sessionStorage.getItem(TYPED) === key) sessionStorage.removeItem(TYPED);
}

export function key() {
  return sessionStorage.getItem(TYPED) ?? localStorage.getItem(SESSION);
}

export async function get(path, { signal } = {}) {
  return (await call(path, { signal })).json();
}

export async function post(path, body, { signal } = {}) {
  return (await call(path, { method: "POST", body: JSON.stringify(body), signal })).json();
}

/** Yield a stream's events as they come. Without a body, send a GET. Leaving the loop ends the server's work. */
export async function* stream(path, body, { signal } = {}) {
  const response = await call(
    path,
    body === undefined ? { signal } : { method: "POST", body: JSON.stringify(body), signal },
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trim());
        if (data.length && data[0] !== "[DONE]") yield JSON.parse(data.join("\n"));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function call(path, options) {
  const headers = options.body ? { "content-type": "application/json" } : {};
  if (key()) headers.authorization = `Bearer ${key()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?", 0);
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 500) || response.statusText;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // not the server's JSON: show the text itself
  }
  throw new ApiError(message, response.status);
}
