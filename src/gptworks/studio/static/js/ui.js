// Preact with hooks and htm, and small helpers.

import { Component, h, useEffect, useRef, useState } from "../vendor/preact-htm.js";

export {
  Component,
  h,
  html,
  render,
  useCallback,
  useEffect,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "../vendor/preact-htm.js";

/** The component, rendered again only when one of its props changes. */
export function memo(Inner) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const names = new Set([...Object.keys(this.props), ...Object.keys(next)]);
      return [...names].some((name) => name !== "children" && this.props[name] !== next[name]);
    }

    render(props) {
      return h(Inner, props);
    }
  };
}

/** The shown colours, light or dark: a canvas must be redrawn when they change. */
export function useTheme() {
  const now = () => document.documentElement.dataset.theme;
  const [theme, set] = useState(now());
  useEffect(() => {
    const observer = new MutationObserver(() => set(now()));
    observer.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => observer.disconnect();
  }, []);
  return theme;
}

/** A class attribute of the truthy names. */
export function cx(...names) {
  return names.filter(Boolean).join(" ");
}

/** The element of a list that an arrow key, Home or End selects; undefined for other keys. */
export function stepped(event, all, current) {
  if (event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const at = all.indexOf(current);
  const to = { ArrowRight: at + 1, ArrowLeft: at < 0 ? all.length - 1 : at - 1, Home: 0, End: all.length - 1 }[
    event.key
  ];
  return to == null ? undefined : all[Math.max(0, Math.min(all.length - 1, to))];
}

/** The marked token of a `pane`, unmarked when `reset` changes. */
export function useCursor(pane, reset) {
  const cursor = useRef(null);
  const mark = (element) => {
    cursor.current?.classList.remove("at");
    cursor.current = element;
    element?.classList.add("at");
  };
  /** Mark and return the token that a key selects; undefined for other keys. */
  const walk = (event) => {
    const element = stepped(event, [...pane.current.querySelectorAll(".t")], cursor.current);
    if (!element) return undefined;
    event.preventDefault();
    mark(element);
    element.scrollIntoView({ block: "nearest" });
    return element;
  };
  useEffect(() => mark(null), [reset]);
  return { cursor, mark, walk };
}
