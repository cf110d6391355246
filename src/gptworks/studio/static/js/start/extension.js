// The length of a run that is resumed or forked: long enough to train further, unless the user types another length.

import { get } from "../api.js";
import { useEffect, useRef, useState } from "../ui.js";

/** Fill in the length. Return whether this is `done`, and `why` the length was raised. `step`: a fork's checkpoint. */
export function useExtension(origin, way, step, recipe) {
  const [found, setFound] = useState(null); // the question and its answer's `why`
  const lengths = useRef(null); // by path: `own`, the run's values; `filled`, the values that were filled in last
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
    lengths.current ??= { own: pick(first, values), filled: pick(first, values) }; // values that were typed are kept
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
