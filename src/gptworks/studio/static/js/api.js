// Calls to the server. The key comes from the address (#token=…), and stays in this tab.

const STORED = "gptworks-token";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Take the key off the address and keep it. Call it before the address is read for anything else. */
export function takeToken() {
  const fragment = location.hash.slice(1);
  if (!fragment.startsWith("token=")) return;
  const [token, ...rest] = fragment.slice("token=".length).split("&");
  setToken(decodeURIComponent(token));
  history.replaceState(null, "", rest.length ? `#${rest.join("&")}` : location.pathname + location.search);
}

export function setToken(token) {
  sessionStorage.setItem(STORED, token);
}

export function token() {
  return sessionStorage.getItem(STORED);
}

export async function get(path, { signal } = {}) {
  return (await call(path, { signal })).json();
}

export async function post(path, body, { signal } = {}) {
  return (await call(path, { method: "POST", body: JSON.stringify(body), signal })).json();
}

/** The events of a stream, as they come; without a body, of a GET. Leaving the loop early ends the work on the server. */
export async function* stream(path, body, { signal } = {}) {
  const response = await call(path, body === undefined ? { signal } : { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
        if (data.length && data[0] !== "[DONE]") yield JSON.parse(data.join("\n"));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function call(path, options) {
  const headers = options.body ? { "content-type": "application/json" } : {};
  if (token()) headers.authorization = `Bearer ${token()}`;
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
    // not the server's JSON: the text itself
  }
  throw new ApiError(message, response.status);
}
