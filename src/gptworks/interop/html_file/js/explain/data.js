// Step 8: what the model read, and what it therefore cannot know.

import { bytes, count, percent } from "../../../../studio/static/js/format.js";
import { cx, html, useEffect, useRef, useState } from "../../../../studio/static/js/ui.js";
import { Reading } from "./reading.js";
import { Bar, Name, Try, decimal } from "./parts.js";

const NOVEL_BYTES = 500_000; // of plain English text, some 90,000 words
const TEXTS = [
  ["English", "The weather was cold, and the children stayed at home."],
  ["A play", "O gentle sir, I pray thee speak no more of love."],
  ["Python", "for name in names:\n    print(name.lower())"],
  ["Spanish", "Mañana vamos a la playa con mis amigos."],
  ["Random", "xq7 zzv kpw# jj0 wq&y mmx 9vtb"],
];

export function DataStep({ how, card, model, reading, prompts }) {
  const sources = [how.data ?? []].flat();
  const texts = [
    ["Your text", reading.text],
    ...(prompts?.[0] && prompts[0] !== reading.text ? [["Sample prompt", prompts[0]]] : []),
    ...TEXTS,
  ];
  const only = sources.length === 1;
  const measured = useMeasured(model, texts);
  const most = Math.max(...measured.map((one) => one?.loss ?? 0)) || 1;
  return html`<p>A model knows only what it has read. It does not look anything up and it cannot check whether it is
      right. So the most important question about a model is: <b>what was it trained on?</b></p>
    <div class="ex-picture">
      ${sources.map((one) => html`<${Source} key=${one.name} data=${one} tokens=${only ? how.tokens : null} />`)}
      ${!sources.length && html`<p>This page does not say what the model has read.</p>`}
      ${
        how.began &&
        html`<p>These are the texts of its last training. It began as the model <${Name}>${how.began}<//>, whose texts
          are not listed here.</p>`
      }
      ${
        card &&
        html`<details class="ex-card"><summary>The model's card, which its maker may have completed</summary>
          <pre tabindex="0" aria-label="Model card">${card}</pre></details>`
      }
      <h3>Which texts does it know best?</h3>
      <ul class="ex-homes" aria-busy=${String(measured.length < texts.length)}>${texts.map(
        ([name, text], i) => html`<li key=${name} class=${cx(i === 0 && "chosen")}><b>${name}</b>
          <bdi class="ex-sample">${text}</bdi>
          ${
            measured[i] == null
              ? html`<span class="quiet">reading …</span>`
              : measured[i].loss == null
                ? html`<span class="quiet">${measured[i].why}</span>`
                : html`<span class="ex-home"><${Bar} share=${measured[i].loss / most} />
                    <span class="number">${decimal(measured[i].loss)}</span></span>`
          }</li>`,
      )}</ul>
      <p class="ex-caption">How surprised the model is, for each character of the text. The shorter the bar, the more
        the text is like what it has read.</p></div>
    <div class="ex-facts"><h3>What it cannot know</h3><ul>
      <li>Anything that was not in its texts, and all that happened after they were collected.</li>
      <li>Whether a sentence is true. It has learned what texts look like, with their mistakes and prejudices.</li>
      <li>What you write here: the numbers of the model do not change any more.</li>
      <li>What you wrote more than ${count(model.about.context)} tokens ago.</li></ul></div>
    <${Try}>Begin a sentence about something that cannot be in its texts, such as your own name. Then let it write in
      step 6. Does it say that it does not know?<//>`;
}

function Source({ data, tokens }) {
  const facts = [
    data.documents > 0 && `${count(data.documents)} ${data.documents === 1 ? "document" : "documents"}`,
    data.tokens > 0 && `${count(data.tokens)} tokens`,
    data.bytes > 0 && `${bytes(data.bytes)}, ${novels(data.bytes)}`,
    data.tokens > 0 && tokens > 0 && read(tokens / data.tokens),
    `licence: ${data.licence || "not stated by the run"}`,
  ].filter(Boolean);
  const shelf = data.bytes > 0 ? Math.max(1, Math.min(300, Math.round(data.bytes / NOVEL_BYTES))) : 0;
  return html`<section class="ex-source"><h3><bdi>${data.name ?? "Its texts"}</bdi></h3>
    ${
      shelf > 0 &&
      html`<div class="ex-shelf" role="img" aria-label=${novels(data.bytes)}>${Array.from(
        { length: shelf },
        (_, i) => html`<span key=${i}></span>`,
      )}</div>`
    }
    <p class="number">${facts.join(" · ")}</p>
    ${data.url && html`<p class="quiet"><bdi>${data.url}</bdi></p>`}
    ${data.notes && html`<p><bdi class="ex-notes">${data.notes}</bdi></p>`}</section>`;
}

function novels(size) {
  const n = Math.round(size / NOVEL_BYTES);
  return n < 1 ? "less than one novel" : `as much as ${count(n)} ${n === 1 ? "novel" : "novels"}`;
}

const read = (times) =>
  times < 0.95
    ? `it read ${percent(times)} of this`
    : `it read this ${times < 1.05 ? "once" : `${Number(times.toPrecision(2))} times`}`;

/** Return the loss per character of each text. The texts are measured one after the other. */
function useMeasured(model, texts) {
  const [found, setFound] = useState([]);
  const kept = useRef(new Map());
  const key = texts.map(([, text]) => text).join("\0");
  useEffect(() => {
    const asked = new AbortController();
    setFound([]);
    const measure = async () => {
      for (const [, text] of texts) {
        const one =
          kept.current.get(text) ??
          (await perCharacter(model, text, asked.signal).catch((error) => {
            if (error.name === "AbortError") throw error;
            return { loss: null, why: error.message };
          }));
        if (asked.signal.aborted) return;
        kept.current.set(text, one);
        setFound((was) => [...was, one]);
      }
    };
    measure().catch((error) => error.name === "AbortError" || console.error(error));
    return () => asked.abort();
  }, [key]);
  return found;
}

async function perCharacter(model, text, signal) {
  const { tokenizer } = model;
  const ids = tokenizer.encode(text);
  if (ids.includes(tokenizer.words.unknown) || bare(tokenizer.decode(ids)) !== bare(text))
    return { loss: null, why: "It has no tokens for some of this." };
  const reading = await Reading.of(model, text, signal);
  if (reading.meanLoss == null) return { loss: null, why: "Too short to measure." };
  const read = tokenizer.decode(reading.ids.slice(1));
  const sum = reading.meanLoss * (reading.length - 1);
  return { loss: sum / Math.max(1, [...read].length) };
}

/** Return a text without differences that some tokenizers remove: normal form, case and spaces. */
const bare = (text) => text.normalize("NFC").toLowerCase().replace(/\s/gu, "");
