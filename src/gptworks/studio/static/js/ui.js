// Preact with hooks and htm, and small helpers.

import { Component, h, html, useEffect, useRef, useState } from "../vendor/preact-htm.js";

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

/** The component, which its parent renders again only when a prop other than `children` has changed. */
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

/** A region that scrolls sideways where it is too narrow; its edges show where there is more. */
export function Scrolls({ name, children, ...more }) {
  const box = useRef(null);
  const [hidden, set] = useState("");
  const look = () => {
    const { scrollLeft, scrollWidth, clientWidth } = box.current;
    const right = scrollWidth - clientWidth - scrollLeft;
    set([scrollLeft > 1 && "left", right > 1 && "right"].filter(Boolean).join(" "));
  };
  useEffect(() => {
    const resized = new ResizeObserver(look);
    for (const element of [box.current, ...box.current.children]) resized.observe(element);
    return () => resized.disconnect();
  }, []);
  return html`<div class="scrolls-frame" data-more=${hidden}><div class=${cx("scrolls", more.class)} ref=${box}
    tabindex="0" role="region" aria-label=${name} onScroll=${look}>${children}</div></div>`;
}

/** Texts to click, such as examples. */
export function Chips({ name, texts, use }) {
  if (!texts.length) return null;
  return html`<div class="chips" role="group" aria-label=${name}><span class="quiet">${name}:</span>${texts.map(
    (text) => html`<button type="button" key=${text} class="button small" title=${text} onClick=${() => use(text)}>
      <span>${text}</span></button>`,
  )}</div>`;
}

const TAIL = 12;

/** The parts of a name. A long name has two: its beginning, which CSS cuts if needed, and its last TAIL characters. */
export function cutName(text) {
  const at = text.length > 2 * TAIL ? text.length - TAIL : text.length;
  return [text.slice(0, at), text.slice(at)].filter(Boolean);
}

/** A name that is cut in its middle where it is too long, since long names often differ at their ends. */
export function Name({ text }) {
  return html`<bdi class="cut-name" title=${text}>${cutName(text).map((part) => html`<span>${part}</span>`)}</bdi>`;
}

/** The element of a list that the left or right arrow, Home or End selects; undefined for other keys. */
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
