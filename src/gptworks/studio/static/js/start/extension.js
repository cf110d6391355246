// The length of a run that trains on: long enough that something is left, unless another one is typed.

import { get } from "../api.js";
import { useEffect, useRef, useState } from "../ui.js";

/** Fills the length in. Returns whether that is `done`, and `why` it was raised; `step`: the checkpoint of a fork. */
export function useExtension(origin, way, step, recipe) {
  const [found, setFound] = useState(null); // the question and its answer's `why`
  const lengths = useRef(null); // by path: `own`, of the run, and `filled`, the values that were filled in last
  const latest = useRef(recipe);
  latest.current = recipe;
  const begun = recipe.checked?.of === origin;
  const question = `${way} ${step}`;
  useEffect(() => {
    lengths.current = null;
    setFound(null);
  }, [origin]);
  const fill = (values, why) => {
    const { first, checked } = latest.current;
    const { given } = checked;
    lengths.current ??= { own: pick(first, values), filled: pick(first, values) }; // what is typed by now is kept
    const { filled } = lengths.current;
    const kept = Object.keys(values).filter((path) => given[path] === filled[path]); // not typed over
    const edits = kept.filter((path) => given[path] !== values[path]).map((path) => [path, values[path] ?? null]);
    for (const path of kept) filled[path] = values[path];
    if (edits.length) latest.current.edit(...edits);
    setFound({ question, why: kept.length === Object.keys(values).length ? why : null });
  };
  useEffect(() => {
    if (!begun || !origin.run) return undefined;
    if (way === "new") {
      if (lengths.current) fill(lengths.current.own, null);
      return undefined;
    }
    const stop = new AbortController();
    const query = new URLSearchParams({ run: origin.run, ...(way === "fork" && { step }) });
    get(`studio/start/extension?${query}`, { signal: stop.signal }).then(
      ({ edits, why }) => fill(Object.fromEntries(edits), why),
      (error) => error.name !== "AbortError" && setFound({ question, why: null }),
    );
    return () => stop.abort();
  }, [begun, question]);
  const done = way === "new" || found?.question === question;
  return { done, why: done ? found?.why : null };
}

function pick(given, values) {
  return Object.fromEntries(Object.keys(values).map((path) => [path, given[path]]));
}
