// The part Play: write, and see what a model makes of it, token by token.

import { Chips, cx, html, Name, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";
import { NoRun, useRun } from "./choice.js";
import { count } from "./format.js";
import { Branches } from "./play/branches.js";
import { Column } from "./play/column.js";
import { Session } from "./play/session.js";
import { SettingsPanel } from "./play/settings.js";
import { Legend } from "./play/text.js";

const MAC = /Mac|iPhone|iPad/.test(navigator.platform);
const WIDE = "(min-width: 60rem)";

export function Part({ state, shown }) {
  const session = useMemo(() => new Session(state.sampling), []);
  const [, setVersion] = useState(0);
  const [said, say] = useState("");
  session.listener = setVersion;
  useEffect(() => {
    const leaving = () => session.save();
    addEventListener("pagehide", leaving);
    return () => removeEventListener("pagehide", leaving);
  }, []);
  const models = state.models;
  session.settle(models, useRun(models, shown));
  const choice = session.columns.map(({ model, checkpoint }) => `${model}@${checkpoint}`).join("\n");
  const prepare = () => session.prepare(models);
  useEffect(() => void (shown && prepare()), [shown, choice]);
  const chosen = session.columns.map((column) => models.find((model) => model.id === column.model));
  const canChat = chosen.some((model) => model?.chat); // one is enough: the other models use its template
  const chat = canChat && !(session.plain ?? !chosen[0]?.chat); // at first, the kind that suits the first column
  const busy = session.busy;
  useAnnouncements(session, busy, say);
  useFollowing(chat && busy);
  const prompt = useRef(null);
  const caret = useRef(null); // where to put the caret once the prompt to edit is shown
  const editPrompt = (before, whole) => {
    caret.current = before.length;
    session.set({ prompt: whole });
  };
  useLayoutEffect(() => {
    if (caret.current === null || !prompt.current) return;
    prompt.current.focus();
    prompt.current.setSelectionRange(caret.current, caret.current);
    caret.current = null;
  });
  if (!models.length) {
    return html`<${NoRun} />`;
  }
  const setPlain = (plain) =>
    session.set({ plain, columns: session.columns.map((column) => ({ ...column, current: null })) });
  return html`<div class=${cx("play", session.mono && "as-code")}>
    <h1 class="hidden-text">Play</h1>
    <div class="work">
      ${!chat && html`<${Prompt} ...${{ session, busy, box: prompt, prepare, chosen }} />`}
      <div class="toolbar">
        ${
          canChat &&
          html`<div class="switch" role="group" aria-label="Kind of text">
          <button class="button small" aria-pressed=${String(chat)} onClick=${() => setPlain(false)}>
            Conversation</button>
          <button class="button small" aria-pressed=${String(!chat)} onClick=${() => setPlain(true)}>
            Text</button></div>`
        }
        <div class="switch" role="group" aria-label="Shade tokens by">
          ${["probability", "rank", "off"].map(
            (kind) => html`<button key=${kind} class="button small"
            aria-pressed=${String(session.shade === kind)} onClick=${() => session.set({ shade: kind })}>${
              { probability: "Probability", rank: "Rank", off: "Off" }[kind]
            }</button>`,
          )}</div>
        <${Legend} kind=${session.shade} />
        <button class="button small" aria-pressed=${String(session.mono)}
          title="Every character as wide as another, for code"
          onClick=${() => session.set({ mono: !session.mono })}>Monospaced</button>
        <span class="fill"></span>
        ${
          session.columns.length < 2 &&
          html`<button class="button small" onClick=${() => session.addColumn()}>Side by side</button>`
        }
      </div>
      <div class=${cx("columns", session.columns.length > 1 && "two")}>
        ${session.columns.map(
          (_, index) => html`<${Column} key=${index} ...${{ session, index, models, chat, say, editPrompt }}
          canRead=${state.parts.includes("read")} />`,
        )}
      </div>
      ${chat && html`<${Message} ...${{ session, busy, prepare, chosen }} />`}
    </div>
    <aside aria-label="Branches and settings">
      <${Folding} name="Branches" n=${session.tree.branches.size}>
        ${html`<${Branches} session=${session} />`}</${Folding}>
      <${Folding} name="Settings"><${SettingsPanel} settings=${session.settings} defaults=${session.defaults}
        options=${session.options}
        change=${(session.changeSettings ??= (settings) => session.set({ settings }))}
        changeOptions=${(session.changeOptions ??= (options) => session.set({ options }))} /></${Folding}>
    </aside>
    <p class="hidden-text" role="status">${said}</p>
  </div>`;
}

/** Announce the beginning and the end of a text, and its new words every few seconds. */
function useAnnouncements(session, busy, say) {
  useEffect(() => {
    if (!busy) return undefined;
    say("Generating.");
    const branch = session.tree.get(session.columns.find((column) => column.work)?.work.branch);
    if (!branch) return undefined; // the text has ended already
    let n = 0;
    const rest = () => {
      const text = branch.tokens
        .slice(n)
        .map((token) => token.text)
        .join("");
      n = branch.tokens.length;
      return text;
    };
    const timer = setInterval(() => say(rest()), 3000);
    return () => {
      clearInterval(timer);
      say(branch.problem ?? `${rest()} – ${branch.tokens.length} tokens.`);
    };
  }, [busy]);
}

/** Keep the end of a growing conversation visible if it was visible. */
function useFollowing(follows) {
  const atEnd = useRef(true);
  useEffect(() => {
    const scrolled = () => (atEnd.current = innerHeight + scrollY > document.documentElement.scrollHeight - 40);
    addEventListener("scroll", scrolled, { passive: true });
    return () => removeEventListener("scroll", scrolled);
  }, []);
  useLayoutEffect(() => {
    if (follows && atEnd.current) scrollTo(0, document.documentElement.scrollHeight);
  });
}

/** A folding section, open if there is room. */
function Folding({ name, n, children }) {
  const [open, setOpen] = useState(matchMedia(WIDE).matches);
  return html`<details class="folding card" open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary><h2>${name}</h2>${n > 0 && html` <span class="quiet number">${n}</span>`}</summary>${children}</details>`;
}

function sends(event) {
  return event.key === "Enter" && (event.ctrlKey || event.metaKey);
}

/** Whether a key press sends the message: Enter does. Shift and Enter begin a new line. In an input method, Enter
 * chooses a word; Safari then sends the key code 229 after the composition has ended. */
function ends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}

function Go({ name, keys, busy, go, stop, disabled }) {
  return html`<button class="button primary" disabled=${busy || disabled} onClick=${go}>${name}
      <kbd aria-hidden="true">${keys}</kbd></button>
    <button class="button" disabled=${!busy} onClick=${stop}>Stop</button>`;
}

/** The heading of a box, and the models that its text goes to. */
function Head({ name, of, session }) {
  const models = session.columns.map(
    ({ model, checkpoint }, i) =>
      html`${i > 0 && " and "}<${Name} text=${model ?? "no model"} />${
        checkpoint != null && `, ${Number.isInteger(checkpoint) ? `step ${count(checkpoint)}` : checkpoint}`
      }`,
  );
  return html`<div class="head"><label for=${of}><h2>${name}</h2></label><span class="quiet">to ${models}</span></div>`;
}

const promptsOf = (models) => [...new Set(models.flatMap((model) => model?.prompts ?? []))];

function Prompt({ session, busy, box, prepare, chosen }) {
  const go = () => session.generate();
  const typed = (event) => session.set({ prompt: event.target.value });
  return html`<div class="composer">
    <${Head} name="Prompt" of="prompt" session=${session} />
    <textarea id="prompt" class="field" rows="4" ref=${box} value=${session.prompt} onInput=${typed} onFocus=${prepare}
      spellcheck="false"
      placeholder="The beginning of a text"
      onKeyDown=${(event) => sends(event) && !busy && (event.preventDefault(), go())}></textarea>
    <${Chips} name="Sample prompts" texts=${promptsOf(chosen)} use=${(prompt) => session.set({ prompt })} />
    <div class="actions"><${Go} name="Generate" keys=${MAC ? "⌘ ↵" : "Ctrl ↵"} busy=${busy} go=${go}
        stop=${() => session.stop()} />
      ${
        session.tree.get(session.columns[0].current) &&
        html`<span class="fill"></span>
      <button class="button plain" disabled=${busy} onClick=${() => fresh(session)}>New text</button>`
      }</div></div>`;
}

function fresh(session) {
  session.set({ prompt: "", columns: session.columns.map((column) => ({ ...column, current: null })) });
}

function Message({ session, busy, prepare, chosen }) {
  const [text, setText] = useState("");
  const [system, setSystem] = useState("");
  const begun = session.columns.some((column) => column.current);
  const go = () => {
    if (!text.trim()) return;
    session.say(text, system);
    setText("");
  };
  return html`<div class="composer">
    ${
      !begun &&
      html`<label>System message <span class="quiet">(may be empty)</span>
      <textarea class="field" rows="1" value=${system}
        onInput=${(event) => setSystem(event.target.value)}></textarea></label>`
    }
    <${Head} name="Message" of="message" session=${session} />
    <textarea id="message" class="field" rows="3" value=${text} placeholder="Ask or say something" onFocus=${prepare}
      onInput=${(event) => setText(event.target.value)}
      onKeyDown=${(event) => ends(event) && (event.preventDefault(), busy || go())}></textarea>
    ${!begun && html`<${Chips} name="Sample prompts" texts=${promptsOf(chosen)} use=${setText} />`}
    <div class="actions">
      <${Go} name="Send" keys="↵" busy=${busy} disabled=${!text.trim()} go=${go} stop=${() => session.stop()} />
      ${
        begun &&
        html`<span class="fill"></span>
      <button class="button plain" disabled=${busy} onClick=${() => fresh(session)}>New conversation</button>`
      }</div></div>`;
}
