// The frame around the parts: tabs, light or dark, the state of the connection, the key.

import { dropKey, get, setKey, signIn, takeCode } from "./api.js";
import { chooseRun, lastChosen, useChosen } from "./choice.js";
import { inBrowser } from "./store.js";
import { cx, html, render, useCallback, useEffect, useRef, useState } from "./ui.js";

const parts = new Map();
const RUNNING_SECONDS = 4;
const QUIET_SECONDS = 20;
let brought = null;
let refusedLink = null; // the reason why the last link did not sign in
const FIRST = "home"; // the first screen
const NOWHERE = []; // the route of parts that are not shown

/**
 * Add a part: its key in the server's state and in the address, its tab's name, and its module with `Part`.
 * `ofRun`: it shows the chosen run, which its address names.
 */
export function part(key, name, load, { ofRun = false } = {}) {
  parts.set(key, { name, load, ofRun });
}

/** Open a part and hand it `what`, which it gets from `taken`. */
export function go(key, rest = "", what = null) {
  brought = what;
  location.hash = addressOf(key, rest);
}

/** Return the `what` of the last `go`; null if it was taken already. */
export function taken() {
  const what = brought;
  brought = null;
  return what;
}

/** The address of a part that shows a run. */
export function addressOf(key, run = "") {
  return ["#", key, ...run.split("/").filter(Boolean).map(encodeURIComponent)].join("/");
}

export async function start(element) {
  await signedIn();
  followAddress();
  render(html`<${Shell} />`, element);
}

/** Sign in if the address has a code, and return whether it has one. The form for a key shows why a code is refused. */
async function signedIn() {
  const code = takeCode();
  if (code)
    await signIn(code).then(
      () => (refusedLink = null),
      (error) => (refusedLink = error.message),
    );
  return Boolean(code);
}

function route() {
  const [, key = "", ...rest] = location.hash.split("/");
  return { key, rest: rest.filter(Boolean).map(decoded) };
}

/** Choose the run in the address, before anything is drawn, so that no other run appears for a moment. */
function followAddress() {
  const at = route();
  const model = at.rest.join("/");
  if (model && parts.get(at.key)?.ofRun && model !== lastChosen().model) chooseRun({ model });
  return at;
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

// ---------------------------------------------------------------------------------------------------- the theme

const THEMES = ["system", "light", "dark"];

function theme() {
  const stored = inBrowser.get("gptworks-theme");
  return THEMES.includes(stored) ? stored : "system";
}

function Theme() {
  const [chosen, choose] = useState(theme());
  const change = (event) => {
    inBrowser.set("gptworks-theme", event.target.value);
    dispatchEvent(new CustomEvent("gptworks-theme", { detail: event.target.value })); // to theme.js
    choose(event.target.value);
  };
  return html`<label class="theme"><span class="hidden-text">Colours</span>
    <select class="field" value=${chosen} onChange=${change}>
      <option value="system">System</option><option value="light">Light</option><option value="dark">Dark</option>
    </select></label>`;
}

// ---------------------------------------------------------------------------------------------------- the state

/** The server's state, fetched repeatedly while the page is visible, and more often while a run trains. */
function useServer() {
  const [server, set] = useState({ state: null, problem: null, status: null });
  const timer = useRef(0);
  const refresh = useCallback(async () => {
    clearTimeout(timer.current);
    let seconds = RUNNING_SECONDS;
    let status = 200;
    try {
      const state = await get("studio/state");
      if (!state.models.some((model) => model.state === "running")) seconds = QUIET_SECONDS;
      const text = JSON.stringify(state);
      set((was) => (was.text === text && !was.problem ? was : { state, text, problem: null, status: 200 }));
    } catch (error) {
      status = error.status;
      set((was) => ({ ...was, problem: error.message, status: error.status }));
    }
    clearTimeout(timer.current);
    timer.current = setTimeout(() => (document.hidden ? undefined : refresh()), 1000 * seconds);
    return status;
  }, []);
  useEffect(() => {
    refresh();
    const shown = () => document.hidden || refresh();
    document.addEventListener("visibilitychange", shown);
    return () => (clearTimeout(timer.current), document.removeEventListener("visibilitychange", shown));
  }, []);
  return { ...server, refresh };
}

// ---------------------------------------------------------------------------------------------------- the frame

function Shell() {
  const { state, problem, status, refresh } = useServer();
  const [at, setAt] = useState(route());
  const { model } = useChosen();
  useEffect(() => {
    const changed = async () => {
      if (await signedIn()) refresh();
      setAt(followAddress());
    };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  const known = state ? state.parts.filter((key) => parts.has(key)) : [];
  const key = known.includes(at.key) ? at.key : known[0];
  const addressIn = (name) => addressOf(name, parts.get(name).ofRun && model ? model : "");
  useEffect(() => {
    if (!parts.get(key)?.ofRun || !model || (at.key === key && at.rest.join("/") === model)) return;
    history.replaceState(null, "", addressIn(key));
    setAt(route());
  }, [key, model, at]);
  useEffect(() => {
    document.title = [state?.title ?? (key && parts.get(key).name), "gptworks"].filter(Boolean).join(" · ");
  }, [key, state?.title]);
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header class="shell">
      <strong class="brand">gptworks</strong>
      ${
        known.length > 1 &&
        html`<nav aria-label="Parts">${known.map(
          (name) => html`
        <a key=${name} href=${addressIn(name)} aria-current=${name === key ? "page" : null}>
          ${parts.get(name).name}</a>`,
        )}
      </nav>`
      }
      <span class="fill"></span>
      <${Connection} place=${state?.place} connected=${state && !problem} problem=${problem} status=${status} />
      <${Theme} />
    </header>
    <main id="main" tabindex="-1">
      ${status === 401 && html`<${AskForKey} refresh=${refresh} had=${Boolean(state)} />`}
      ${
        problem &&
        status !== 401 &&
        html`<p class="problem notice" role="alert">${problem}
        <button class="button" onClick=${refresh}>Try again</button></p>`
      }
      ${state?.notice && html`<p class="notice" role="status">${state.notice}</p>`}
      ${known.map(
        (name) => html`<${Loaded} key=${name} name=${name} shown=${name === key}
        state=${state} route=${name === at.key ? at.rest : NOWHERE} refresh=${refresh} />`,
      )}
      ${state && !known.length && html`<p class="notice">This server has no part that the page can show.</p>`}
    </main>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function Connection({ place = "Connected", connected, problem, status }) {
  const word = connected ? place : status === 401 ? "Not signed in" : problem ? "No connection" : "Connecting";
  return html`<span class=${cx("connection", connected && "good", problem && "bad")} role="status">
    <span class="dot" aria-hidden="true"></span><span class="word">${word}</span></span>`;
}

/** Load the stylesheets of the parts, which the first paint does not wait for: the first screen needs none of them. */
function styled() {
  const sheets = [...document.querySelectorAll("link[rel=stylesheet][media]")];
  return Promise.all(
    sheets.map((link) => {
      link.media = "all";
      return link.sheet ?? new Promise((loaded) => (link.onload = link.onerror = loaded));
    }),
  );
}

/** One part: its module is loaded when it is first shown, and it keeps its state while another is shown. */
function Loaded({ name, shown, ...props }) {
  const [Part, setPart] = useState(null);
  const [problem, setProblem] = useState(null);
  const asked = useRef(false);
  useEffect(() => {
    if (!shown || asked.current) return;
    asked.current = true;
    Promise.all([parts.get(name).load(), name === FIRST || styled()]).then(
      ([module]) => setPart(() => module.Part),
      (error) => setProblem(error.message),
    );
  }, [shown]);
  if (problem) return shown && html`<p class="problem notice" role="alert">This part cannot be loaded: ${problem}</p>`;
  return html`<div class="part" hidden=${!shown}>${Part && html`<${Part} shown=${shown} ...${props} />`}</div>`;
}

function AskForKey({ refresh, had }) {
  const [refused, refuse] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    const key = event.target.elements.key.value.trim();
    if (!/^[!-~]+$/.test(key)) {
      refuse("A key has letters, digits and signs of ASCII only: this is not one.");
      return;
    }
    setKey(key);
    if ((await refresh()) === 401) {
      dropKey(key); // else it would hide a session that begins in another tab
      refuse("The server does not take this key: check it, or open the newest link.");
    }
  };
  const why =
    refused ??
    refusedLink ??
    (had
      ? "The session has ended, since the studio was started again for instance. What is on this page stays as it is."
      : null);
  return html`<form class="ask-key card" onSubmit=${submit}>
    <h1>This server asks for a key</h1>
    ${why && html`<p class="problem" role="alert">${why}</p>`}
    <p>Open the newest link that it printed in the terminal: each signs one browser in. Or enter an API key of the
      server
      here, which stays in this tab.</p>
    <label>Key <input class="field" name="key" type="password" autocomplete="off" required /></label>
    <button class="button primary">Open</button>
  </form>`;
}
