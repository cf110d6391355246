// A dialog to choose a folder, or a file, among those that the page may read, by mouse or keys.

import { get } from "../api.js";
import { bytes, count } from "../format.js";
import { html, useEffect, useRef, useState } from "../ui.js";

const TYPED_MS = 200;

/** `start`: the folder to open first; `choose` is called with a path, then `close`. */
export function Picker({ start, choose, close }) {
  const [at, setAt] = useState({ folder: start || null, words: "" });
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState(null);
  const dialog = useRef(null);
  const list = useRef(null);
  const toFocus = useRef(""); // the name to focus when the folder is shown; "": the first
  useEffect(() => dialog.current.showModal(), []);
  useEffect(() => {
    const stop = new AbortController();
    const query = new URLSearchParams({ words: at.words });
    if (at.folder) query.set("folder", at.folder);
    const look = async () => {
      try {
        setFound(await get(`studio/home/folders?${query}`, { signal: stop.signal }));
        setProblem(null);
      } catch (error) {
        if (error.name === "AbortError") return;
        if (!found && at.folder)
          setAt({ folder: null, words: "" }); // what was typed is not a folder: begin at the top
        else setProblem(error.message);
      }
    };
    const timer = setTimeout(look, at.words ? TYPED_MS : 0);
    return () => (clearTimeout(timer), stop.abort());
  }, [at]);
  useEffect(() => {
    if (!found || toFocus.current == null) return;
    const all = buttons();
    (all.find((one) => one.dataset.name === toFocus.current) ?? all[0] ?? dialog.current).focus();
    toFocus.current = null;
  }, [found]);
  const end = () => {
    dialog.current.close(); // gives the focus back; its close event comes later, when this dialog may be gone
    close();
  };
  const pick = (path) => (choose(path), end());
  const buttons = () => [...list.current.querySelectorAll("button:not([disabled])")];
  const open = (folder, from = "") => {
    toFocus.current = from;
    setAt({ folder, words: "" });
  };
  const above = found?.above ?? [];
  const up = () => above.length > 1 && open(above.at(-2).path, above.at(-1).name);
  const keys = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Backspace" || event.key === "ArrowLeft") return (event.preventDefault(), up());
    if (event.key === "ArrowRight" && event.target.dataset.folder) {
      return (event.preventDefault(), open(event.target.dataset.folder));
    }
    const all = buttons();
    const now = all.indexOf(document.activeElement);
    const to = { ArrowDown: now + 1, ArrowUp: now - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to == null || !all.length) return;
    event.preventDefault();
    all[Math.max(0, Math.min(all.length - 1, to))].focus();
  };
  return html`<dialog class="home-picker card" ref=${dialog} tabindex="-1" aria-label="Choose a folder"
    onClose=${(event) => event.target.isConnected && close()}>
    <div class="toolbar"><h2>Choose a folder</h2><span class="fill"></span>
      <button class="button small" onClick=${end}>Cancel</button></div>
    ${
      above.length > 0 &&
      html`<nav class="home-above" aria-label="Folders around it">${above.map(
        ({ name, path }, i) => html`<span key=${path}>${i > 0 && html`<span aria-hidden="true">/ </span>`}
          <button class="button small" aria-current=${i === above.length - 1 ? "location" : null}
          onClick=${() => open(path, above[i + 1]?.name)}>${name}</button></span>`,
      )}</nav>`
    }
    <input class="field" type="search" aria-label="Only names with" placeholder="Only names with…" value=${at.words}
      spellcheck="false" autocomplete="off" maxlength="256"
      onInput=${(event) => setAt({ ...at, words: event.target.value })} />
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <p class="quiet" role="status">${found ? summary(found, at.words) : "Looking…"}</p>
    <ul class="home-entries" ref=${list} aria-label="Folders and files" onKeyDown=${keys}>
      ${found?.folders.map(
        ({ name, path }) => html`<li key=${`${name}/`}><button class="home-entry" disabled=${!path} data-name=${name}
          data-folder=${path} onClick=${() => open(path)}><span class="home-name">${name}</span>
          <span class="quiet">${path ? "folder" : "folder; its name is not UTF-8"}</span></button></li>`,
      )}
      ${found?.files.map(
        ({ name, path, n_bytes: size }) => html`<li key=${name}><button class="home-entry" disabled=${!path}
          data-name=${name} onClick=${() => pick(path)}><span class="home-name">${name}</span>
          <span class="quiet">${path ? `file, ${size == null ? "deleted" : bytes(size)}` : "its name is not UTF-8"}
          </span></button></li>`,
      )}
    </ul>
    <div class="toolbar"><button class="button primary" disabled=${!found?.path} onClick=${() => pick(found.path)}>
      ${found?.path ? `Choose ${above.at(-1).name}` : "Choose"}</button>
      <span class="quiet">A folder is read with all that is in it; click a file to choose only this file.</span></div>
  </dialog>`;
}

function summary({ folders, files, n_folders: nFolders, n_files: nFiles, notes }, words) {
  const left = nFolders + nFiles - folders.length - files.length;
  const there = [
    [nFolders, "folder"],
    [nFiles, "file"],
  ].map(([n, word]) => `${count(n)} ${word}${n === 1 ? "" : "s"}`);
  const more = left > 0 ? ` The first ${count(folders.length + files.length)} are listed: filter by name.` : "";
  return `${there.join(", ")}${words ? ` with “${words}”` : ""}.${more} ${notes.join(" ")}`;
}
