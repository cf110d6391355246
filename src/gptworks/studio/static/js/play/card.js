// The card of one token: its alternatives, before and after sampling.

import { percent, visible } from "../format.js";
import { cx, html, useEffect, useLayoutEffect, useRef } from "../ui.js";

/** Rows of the alternatives: in the model's order, then alternatives that are listed only after sampling. */
function rows(token) {
  const made = new Map();
  const row = ({ id, spelling }) => made.get(id) ?? made.set(id, { id, spelling, before: null, after: null }).get(id);
  for (const one of token.top ?? []) row(one).before = one.logprob;
  for (const one of token.after?.top ?? []) row(one).after = one.logprob;
  row(token).before ??= token.logprob;
  row(token).after ??= token.after?.logprob ?? null;
  return [...made.values()];
}

function Bar({ logprob, of }) {
  const said = html`<span class="hidden-text"> ${of}, </span>`;
  if (logprob == null)
    return html`<span class="bar none"><span aria-hidden="true">–</span><span class="hidden-text">not listed</span>
      ${said}</span>`;
  const width = `${100 * Math.exp(logprob)}%`;
  return html`<span class="bar"><span class="length" style=${{ width }}></span><span class="number">${percent(
    Math.exp(logprob),
  )}</span>${said}</span>`;
}

function unscored({ part, i }) {
  if (part !== "prompt") return "Not scored.";
  return i === 0
    ? "There is no token before it, so the model does not predict it."
    : "Not scored: “score the prompt” in the settings gives the prompt's tokens their probabilities.";
}

/** Put the card below or above its token, inside the window. */
function besideToken(card, anchor) {
  const { style, offsetWidth: width, offsetHeight: height } = card;
  const box = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const below = box.bottom + height + 8 < innerHeight || box.top < height + 8;
  style.setProperty(
    "left",
    `${scrollX + Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8))}px`,
  );
  style.setProperty("top", `${scrollY + (below ? box.bottom + 4 : box.top - height - 4)}px`);
  // On a small screen the card is at the foot and may cover its token.
  const covered = box.bottom + 8 - card.getBoundingClientRect().top;
  if (getComputedStyle(card).position === "fixed" && covered > 0) scrollBy(0, covered);
}

/** `anchor`: the token's element. `pinned`: the card stays open and has the focus. */
export function TokenCard({ token, place, anchor, pinned, take, edit, why, close, hold, release }) {
  const beside = (by) => {
    // for touch screens, on which a token is a small target
    const all = [...anchor.closest(".text").querySelectorAll(".t")];
    const next = all[all.indexOf(anchor) + by];
    next?.click();
    next?.scrollIntoView({ block: "nearest" });
  };
  const card = useRef(null);
  useLayoutEffect(() => {
    const placed = () => besideToken(card.current, anchor);
    placed();
    addEventListener("resize", placed);
    return () => removeEventListener("resize", placed);
  }, [anchor, token]);
  useEffect(() => {
    if (pinned) (card.current.querySelector(".row:not(:disabled)") ?? card.current).focus({ preventScroll: true });
  }, [pinned, anchor]);
  const keys = (event) => {
    const all = [...card.current.querySelectorAll("button:not(:disabled)")].filter((one) => one.checkVisibility());
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") close(true);
    else if (step) {
      event.preventDefault();
      all[(all.indexOf(document.activeElement) + step + all.length) % all.length]?.focus();
    }
  };
  const shown = rows(token);
  const sampled = token.after != null;
  return html`<div class="token-card card" ref=${card} role="dialog" aria-label="Token" tabindex="-1" onKeyDown=${keys}
      onPointerEnter=${hold} onPointerLeave=${release}>
    <div class="head"><bdi class="spelling">${visible(token.spelling)}</bdi>
      <span class="quiet number">id ${token.id}</span><span class="fill"></span>
      <button class="button small beside" aria-label="Token before" onClick=${() => beside(-1)}>‹</button>
      <button class="button small beside" aria-label="Token after" onClick=${() => beside(1)}>›</button>
      <button class="button plain small" aria-label="Close" onClick=${() => close(true)}>✕</button></div>
    <p class="figures number">${
      token.logprob == null
        ? html`<span class="quiet">${unscored(place)}</span>`
        : html`
      <b>${percent(Math.exp(token.logprob))}</b> by the model, rank ${token.rank}${
        sampled &&
        html`,
      <b> ${percent(Math.exp(token.after.logprob))}</b> after sampling`
      }${token.chosen && ", chosen by you"}`
    }</p>
    ${
      token.top?.length > 0 &&
      html`<div class="rows">
      <div class="names quiet" aria-hidden="true"><span></span><span>Model</span><span>
        ${sampled && "After sampling"}</span></div>
      ${shown.map(
        (one) => html`<button key=${one.id} class=${cx("row", one.id === token.id && "this")}
          disabled=${one.id === token.id} onClick=${() => take(one, token)}>
        <bdi class="spelling">${visible(one.spelling)}</bdi><span class="hidden-text">: </span>
        <${Bar} logprob=${one.before} of="by the model" />${
          sampled && html`<${Bar} logprob=${one.after} of="after sampling" />`
        }${one.id === token.id && html`<span class="hidden-text">the token here</span>`}</button>`,
      )}
    </div>
    <p class="quiet hint">Choose one and the text continues from there.</p>`
    }
    <div class="actions">${
      edit && html`<button class="button small" onClick=${() => edit(place)}>Edit from here</button>`
    }
      ${why && html`<button class="button small" onClick=${() => why(place)}>Why this token?</button>`}</div>
  </div>`;
}
