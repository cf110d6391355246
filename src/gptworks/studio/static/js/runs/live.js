// The list of runs, kept up to date by the server's events.

import { stream } from "../api.js";

const AGAIN_MS = 2000;

/**
 * Call `show` with the runs by id, and with the reasons why others are left out, whenever some have changed. Return a
 * function that ends these calls.
 */
export function follow(show, report) {
  const stop = new AbortController();
  let runs = new Map();
  let leftOut = {};
  (async () => {
    while (!stop.signal.aborted) {
      try {
        for await (const event of stream("studio/runs/live", undefined, { signal: stop.signal })) {
          if (event.type !== "runs") continue;
          runs = new Map(event.all ? [] : runs);
          for (const row of event.runs) runs.set(row.id, row);
          for (const id of event.gone) runs.delete(id);
          leftOut = event.left_out ?? leftOut;
          show(runs, leftOut);
          report(null);
        }
      } catch (error) {
        if (!stop.signal.aborted) report(error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  })();
  return () => stop.abort();
}
