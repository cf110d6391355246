// One column: its model, its text or conversation, and the actions on it.

import { key as apiKey, serves } from "../api.js";
import { ModelChoice } from "../choice.js";
import { count, rate, short } from "../format.js";
import { go } from "../shell.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { TokenCard } from "./card.js";
import { Conversation } from "./chat.js";
import { curl, python, request } from "./copy.js";
import { TokenText } from "./text.js";

const ENDS = {
  stop: "it came to its end",
  length: "max_tokens reached",
  context: "the context is full",
  stopped: "stopped",
  edited: "edited by you",
};
const OPEN_MS = 60;
const CLOSE_MS = 220;

/** The open token's card. Hovering opens it after a moment, leaving closes it, unless it is pinned. */
function useCard(branch) {
  const [card, set] = useState(null);
  const timer = useRef(0);
  const later = (ms, value) => {
    clearTimeout(timer.current);
    timer.current = setTimeout(() => set((was) => (was?.pinned && !value?.pinned ? was : value)), ms);
  };
  useEffect(() => (set(null), () => clearTimeout(timer.current)), [branch?.id]);
  const close = (focus) => {
    clearTimeout(timer.current);
    if (focus) card?.anchor.closest(".text")?.focus({ preventScroll: true });
    set(null);
  };
  useEffect(() => {
    if (!card) return undefined;
    const away = (event) => event.target.closest(".token-card, .text") || set(null);
    document.addEventListener("pointerdown", away);
    return () => document.removeEventListener("pointerdown", away);
  }, [card]);
  return {
    card,
    close,
    look: (part, i, anchor, pinned) => later(pinned ? 0 : OPEN_MS, { part, i, anchor, pinned }),
    leave: (now) => (now ? close(false) : later(CLOSE_MS, null)),
    hold: () => clearTimeout(timer.current),
    release: () => later(CLOSE_MS, null),
  };
}

export function Column({ session, index, models, chat, say, editPrompt, canRead }) {
  const column = session.columns[index];
  const { tree } = session;
  const branch = tree.get(column.current);
  const { card, close, look, leave, hold, release } = useCard(branch);
  const model = models.find((one) => one.id === column.model);
  const work = column.work;
  const isChat = branch ? Boolean(tree.root(branch).prompt.messages) : chat;
  const edit = (part, i) => {
    const prompt = tree.root(branch).prompt_tokens;
    const before = part === "prompt" ? prompt.slice(0, i) : [...prompt, ...tree.answer(branch).slice(0, i)];
    close(false);
    editPrompt(before.map((one) => one.text).join(""), whole());
  };
  const why = ({ part, i }) => {
    // opens the token in the part Read, at the checkpoint that wrote the token
    const prompt = tree.root(branch).prompt_tokens;
    const tokens = [...prompt, ...tree.answer(branch)];
    close(false);
    go("read", branch.model, {
      model: branch.model,
      checkpoint: branch.step,
      text: tokens.map((one) => one.text).join(""),
      tokens: tokens.map((one) => one.id),
      index: part === "prompt" ? i : prompt.length + i,
    });
  };
  const whole = () =>
    tree
      .root(branch)
      .prompt_tokens.map((one) => one.text)
      .join("") + tree.answerText(branch);
  const shownToken =
    card && branch && (card.part === "prompt" ? tree.root(branch).prompt_tokens : tree.answer(branch))[card.i];
  const text = {
    tree,
    branch,
    kind: session.shade,
    busy: Boolean(work),
    look,
    leave,
    say,
    edit: isChat ? () => {} : edit,
  };
  return html`<section class="column card" aria-label=${`Column ${index + 1}`}>
    <div class="head">
      <div class="choices">
        <${ModelChoice} models=${models} chosen=${column} choose=${(next) => session.setColumn(index, next)}
          name=${`Model of column ${index + 1}`} of=${`column ${index + 1}`} />
        ${
          model?.parameters != null &&
          html`<span class="quiet number about-model">${short(model.parameters)} parameters${
            model.context != null && html` · context ${count(model.context)}`
          }</span>`
        }
      </div>
      ${
        session.columns.length > 1 &&
        html`<button class="button plain" aria-label=${`Close column ${index + 1}`}
        onClick=${() => session.closeColumn(index)}>✕</button>`
      }
    </div>
    ${
      isChat &&
      !model?.chat &&
      html`<p class="quiet hint">It has no chat template, so that of ${session.templateFor(column.model)} writes
        its conversation.</p>`
    }
    ${
      !branch &&
      html`<p class="quiet start">
        ${isChat ? "Write a message below." : "Write the beginning of a text above, and generate."}</p>`
    }
    ${
      branch &&
      (isChat
        ? html`<${Conversation} session=${session} index=${index} busy=${Boolean(work)} text=${text} />`
        : html`<${TokenText} ...${text} withPrompt=${true} label="Text, token by token" />`)
    }
    ${work?.loading && html`<p class="quiet" role="status">Loading ${column.model} …</p>`}
    ${branch?.problem && html`<p class="problem" role="alert">${branch.problem}</p>`}
    ${
      branch &&
      !work &&
      html`<p class="quiet hint">
        Point at a token, or tap it, to see its alternatives; a click keeps them open.</p>`
    }
    ${
      branch &&
      html`<${Facts} branch=${branch} session=${session} work=${work} />
      <${Actions} ...${{ session, index, branch, work, say }}
        context=${models.find((one) => one.id === branch.model)?.context}
        edit=${isChat ? null : () => editPrompt(whole(), whole())} />`
    }
    ${
      shownToken &&
      html`<${TokenCard} token=${shownToken} place=${card} anchor=${card.anchor} pinned=${card.pinned}
      close=${close} hold=${hold} release=${release} edit=${isChat ? null : ({ part, i }) => edit(part, i)}
      why=${canRead && (card.part === "answer" || card.i > 0) ? why : null}
      take=${(one, at) => {
        const { part, i } = card;
        close(true);
        const token = {
          id: one.id,
          spelling: one.spelling,
          logprob: one.before,
          top: at.top,
          after: at.after && { ...at.after, logprob: one.after ?? -1e4 },
          rank: null,
        };
        const rank = at.top.findIndex((other) => other.id === one.id);
        session.branch(index, part, i, { ...token, rank: rank < 0 ? null : rank + 1 });
      }} />`
    }
  </section>`;
}

function Facts({ branch, session, work }) {
  const { end, seed, step } = branch;
  const facts = [
    end?.generated != null && `${count(end.generated)} tokens`,
    end?.tokens_per_second != null && `${rate(end.tokens_per_second)} tokens/s`,
    end && !work && (ENDS[end.reason] ?? end.reason),
    step != null && `step ${count(step)}`,
  ].filter(Boolean);
  return html`<p class="facts quiet number">${facts.join(" · ")}${
    seed != null &&
    html`${facts.length > 0 && " · "}seed ${seed} ${
      session.settings.seed !== seed &&
      html`<button class="button plain small" onClick=${() =>
        session.set({ settings: { ...session.settings, seed } })}>Keep this seed</button>`
    }`
  }</p>`;
}

function Actions({ session, index, branch, work, say, context, edit }) {
  const [shown, show] = useState(null);
  useEffect(() => show(null), [branch.id]);
  if (work)
    return html`<div class="actions"><button class="button small" onClick=${() => session.stop(index)}>
      Stop</button></div>`;
  const made = branch.edited == null;
  const full = context != null && session.tree.ids(branch).length >= context;
  const whole = branch.at == null || session.tree.root(branch).prompt.text != null; // not after a part of an answer
  const named = branch.step == null ? branch.model : `${branch.model}@${branch.step}`;
  const copy = (how, name) => async () => {
    const text = how(request(session.tree, branch, named), Boolean(apiKey()));
    show({ name, text });
    try {
      await navigator.clipboard.writeText(text);
      say(`Copied as ${name}.`);
    } catch {
      say("Select the text and copy it: the browser does not let the page do it.");
    }
  };
  return html`<div class="actions">
      ${
        made &&
        html`<button class="button small" disabled=${full || !branch.tokens.length}
        aria-describedby=${full ? `full-${index}` : null} onClick=${() => session.proceed(index)}>Continue</button>
      <button class="button small" onClick=${() => session.regenerate(index)}>Regenerate</button>`
      }
      ${edit && html`<button class="button small" onClick=${edit}>Edit text</button>`}
      ${
        made &&
        whole &&
        serves &&
        !(branch.template_of && session.tree.root(branch).prompt.messages) &&
        html`<span class="copies"><button class="button plain small" onClick=${copy(curl, "curl")}>Copy as curl</button>
      <button class="button plain small" onClick=${copy(python, "Python")}>Copy as Python</button></span>`
      }
    </div>
    ${
      full &&
      html`<p class="quiet hint" id=${`full-${index}`}>
        It cannot be continued: the text fills the model's context of ${count(
          context,
        )} tokens.${edit && " Shorten it with “Edit text” to continue."}</p>`
    }
    ${
      shown &&
      html`<div class="copied"><div class="head"><span class="quiet">${shown.name}</span><span class="fill"></span>
      <button class="button plain small" aria-label="Close the copied text" onClick=${() => show(null)}>✕</button></div>
      <pre class="mono" tabindex="0" aria-label=${`As ${shown.name}`}>${shown.text}</pre></div>`
    }`;
}
