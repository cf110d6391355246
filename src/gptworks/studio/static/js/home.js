// The part Home, the first screen: make a model from a folder, talk to one, or look inside one.

import { get, post } from "./api.js";
import { freeName } from "./choice.js";
import { count } from "./format.js";
import { Cost, Found, Passages } from "./home/found.js";
import { Live } from "./home/live.js";
import { Picker } from "./home/picker.js";
import { addressOf } from "./shell.js";
import { Training } from "./start/training.js";
import { html, useCallback, useEffect, useState } from "./ui.js";

const EVERY_MS = 500; // while the folder is looked at
const INSIDE = {
  read: ["Read", "why it wrote this token"],
  time: ["Through time", "what it had learned when"],
  data: ["Data", "what it was trained on"],
  model: ["Model", "its parts and weights"],
};

export function Part({ state, shown, refresh }) {
  const [home, setHome] = useState(null);
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const [started, setStarted] = useState(null); // the run that was started here
  const ask = useCallback(async (work) => {
    try {
      setHome(await work());
      setProblem(null);
    } catch (error) {
      setProblem(error.message);
    }
  }, []);
  const drafting = home?.drafting;
  const working = drafting?.state === "working";
  useEffect(() => void (shown && ask(() => get("studio/home"))), [shown]);
  useEffect(() => {
    if (!shown || !working) return undefined;
    const timer = setInterval(() => ask(() => get("studio/home")), EVERY_MS);
    return () => clearInterval(timer);
  }, [shown, working]);
  const act = async (path, body) => {
    setBusy(true);
    try {
      await post(`studio/start/${path}`, body);
      setProblem(null);
      if (path === "new") (setStarted(body.name), refresh(), ask(() => get("studio/home")));
    } catch (error) {
      setProblem(error.message);
    }
    setBusy(false);
  };
  const isThere = (name) => name === started || state.models.some((model) => model.id === name);
  const look = (body) => (setStarted(null), ask(() => post("studio/home/look", body)));
  return html`<div class="cards home-part">
    <h1>What would you like to do?</h1>
    <section class="card home-make" aria-label="Make a model from a folder">
      <h2>Make a model from a folder</h2>
      <p>A small language model learns from your texts, and then writes like them. Text, documents, tables, code and
        web pages are read; what cannot be read is left out, with the reason. Your files stay on this machine.</p>
      ${
        home?.read_only
          ? html`<p>This studio was started with <code>--read-only</code>: it starts and writes nothing.</p>`
          : home && html`<${Ask} ...${{ home, working, look, models: state.models }} />`
      }
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      ${working && html`<${Working} drafting=${drafting} cancel=${() => ask(() => post("studio/home/cancel", {}))} />`}
      ${drafting?.state === "cancelled" && html`<p class="quiet" role="status">Cancelled.</p>`}
      ${drafting?.problem && html`<p class="problem" role="alert">${drafting.problem}</p>`}
    </section>
    <section class="card home-other" aria-label="Talk to a model">
      <h2>Talk to a model</h2>
      <p>Give a model the beginning of a text, or chat with a fine-tuned one, and click a token to see what else it
        considered.</p>
      <${Go} models=${state.models} links=${[["play", "Play", countOf(state.models)]]} />
    </section>
    <section class="card home-other" aria-label="Look inside a model">
      <h2>Look inside a model</h2>
      <p>See why a model writes what it writes.</p>
      <${Go} models=${state.models} links=${Object.entries(INSIDE).map(([key, words]) => [key, ...words])} />
    </section>
    <${Training} ...${{ state, shown, act, refresh, started, readOnly: state.read_only }} card=${Live} />
    ${
      drafting?.draft &&
      html`<${Cost} drafting=${drafting} busy=${busy} started=${isThere(drafting.name)}
      start=${() => act("new", { name: drafting.name, text: drafting.draft.text })} />`
    }
    ${
      drafting?.texts &&
      html`<${Found} texts=${drafting.texts} folder=${drafting.folder} />
      <${Passages} passages=${drafting.texts.passages} />`
    }
  </div>`;
}

function countOf(models) {
  return `${count(models.length)} ${models.length === 1 ? "model is" : "models are"} here`;
}

function Go({ models, links }) {
  if (!models.length) return html`<p class="quiet">There is no model here yet: make one first.</p>`;
  return html`<ul class="home-links">${links.map(
    ([key, name, what]) =>
      html`<li key=${key}><a class="button" href=${addressOf(key)}>${name}</a> <span class="quiet">${what}</span></li>`,
  )}</ul>`;
}

/** The form: folder, minutes, and the run's name, which follows the folder's name until the user types another. */
function Ask({ home, working, look, models }) {
  const was = home.drafting;
  const [folder, setFolder] = useState(was?.folder ?? "");
  const [minutes, setMinutes] = useState(String(was?.minutes ?? 10));
  const [typed, setTyped] = useState(null);
  const [picks, setPicks] = useState(false);
  const name = typed ?? freeName(folder.split(/[\\/]/).filter(Boolean).at(-1) ?? "", models);
  const submit = (event) => {
    event.preventDefault();
    look({ folder: folder.trim(), minutes: Number(minutes), name });
  };
  return html`<form class="home-ask" onSubmit=${submit}>
    <div class="home-folder"><label>Folder <input class="field" required maxlength="4096" spellcheck="false"
      autocomplete="off" placeholder="texts" value=${folder} aria-describedby="home-where"
      onInput=${(event) => setFolder(event.target.value)} /></label>
      <button type="button" class="button" onClick=${() => setPicks(true)}>Browse…</button></div>
    <label>Minutes <input class="field number" type="number" required min="0.1" max="100000" step="any"
      value=${minutes} onInput=${(event) => setMinutes(event.target.value)} /></label>
    <label>Name <input class="field" required maxlength="100" spellcheck="false" autocomplete="off" value=${name}
      onInput=${(event) => setTyped(event.target.value.trim() || null)} /></label>
    <button class="button primary" disabled=${working}>Look at it</button>
    <p id="home-where" class="quiet">The folder, or one file, must be in ${home.folders.join(" or ")}.
      Nothing is trained before you have seen what was found and what it
      costs.${home.makes && ` The first run makes the folder ${home.makes}.`}</p>
  </form>
  ${picks && html`<${Picker} start=${folder.trim()} choose=${setFolder} close=${() => setPicks(false)} />`}`;
}

function Working({ drafting, cancel }) {
  const { progress, texts, step } = drafting;
  const words = texts
    ? (step ?? "training a tokenizer on a part of the text")
    : progress
      ? `looked at ${count(progress[0])} of ${count(progress[1])} files`
      : "looking at the folder";
  return html`<div class="toolbar">
    ${progress && !texts && html`<progress max=${progress[1]} value=${progress[0]} aria-label="Files looked at" />`}
    <span role="status">${words}…</span><span class="fill"></span>
    <button class="button small" onClick=${cancel}>Cancel</button></div>`;
}
