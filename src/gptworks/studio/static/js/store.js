// What the page keeps: in the tab, or in the browser for all tabs. Where a browser gives a page no storage, as in a
// sandboxed frame, nothing is kept.

let place = "";

/** Keep the tab's texts apart from those of other pages that share its storage, such as other files of a folder. */
export function keepApart(name) {
  place = `@${name}`;
}

function store(storage, keyOf) {
  return {
    /** A kept text, or null. */
    get(key) {
      try {
        return globalThis[storage].getItem(keyOf(key));
      } catch {
        return null;
      }
    },
    /** Keep a text in place of the last one; if there is no room for it, keep neither. */
    set(key, text) {
      try {
        globalThis[storage].removeItem(keyOf(key));
        globalThis[storage].setItem(keyOf(key), text);
      } catch {
        // no storage, or no room in it: only the page has the text
      }
    },
  };
}

export const inTab = store("sessionStorage", (key) => key + place);
export const inBrowser = store("localStorage", (key) => key);
