// The server's answer for the shown data, requested again when other data is chosen; and controls that choose it.

import { post } from "../api.js";
import { count } from "../format.js";
import { html, useEffect, useState } from "../ui.js";

const PAUSE_MS = 120; // before a request, since a number may still be being typed

/** The server's answer to `body`; without a body, nothing is sent. The last answer stays until the new one comes. */
export function useAsked(what, body) {
  const [answer, set] = useState({ found: null, problem: null, busy: false });
  const key = body && JSON.stringify(body);
  useEffect(() => {
    if (!key) return undefined;
    const asked = new AbortController();
    set((was) => ({ ...was, busy: true }));
    const timer = setTimeout(
      () =>
        post(`studio/data/${what}`, body, { signal: asked.signal }).then(
          (found) => set({ found, problem: null, busy: false }),
          (error) => error.name === "AbortError" || set({ found: null, problem: error.message, busy: false }),
        ),
      PAUSE_MS,
    );
    return () => (clearTimeout(timer), asked.abort());
  }, [what, key]);
  return answer;
}

/** A control for an index from 0, shown as a number from `first` on: a box to type in, with buttons next to it. */
export function Place({ name, value, set, min = 0, max, by = 1, of, first = 1 }) {
  const to = (n) => set(Math.max(min, Math.min(max ?? Infinity, n)));
  const last = max == null || value + by > max;
  const typed = ({ target }) => target.value !== "" && to((Math.floor(Number(target.value)) || 0) - first);
  return html`<span class="place"><label>
    ${name} <input class="field number" type="number" min=${min + first} max=${max == null ? null : max + first}
      step="1" value=${value + first} onInput=${typed} /></label>
    ${of && html`<span class="quiet number">${of}</span>`}
    <button class="button small" aria-label=${`Previous ${name.toLowerCase()}`} disabled=${value <= min}
      onClick=${() => to(value - by)}>‹</button>
    <button class="button small" aria-label=${`Next ${name.toLowerCase()}`} disabled=${last}
      onClick=${() => to(last ? value : value + by)}>›</button></span>`;
}

/** A control to choose which tokens are shown. */
export function TokenPages({ first, n, total, set }) {
  if (total <= n && !first) return null;
  return html`<div class="toolbar">
    <${Place} name="First token" value=${first} set=${set} max=${Math.max(0, total - 1)} by=${n} />
    <span class="quiet number">
      tokens ${count(first + 1)} to ${count(Math.min(total, first + n))} of ${count(total)}</span></div>`;
}
