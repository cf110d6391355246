// The part About: the model's figures, how it was made, its card and its recipe, as the run states them.

import { bytes, count } from "../../../studio/static/js/format.js";
import { html, useEffect, useState } from "../../../studio/static/js/ui.js";

/** Return the part's component. The first argument is the page's content (html_file/shown.py); model: a promise. */
export function about({ facts, card, recipe, how }, model) {
  const figures = [
    ["Parameters", count(facts.parameters)],
    ["Weights", `${facts.weights}, ${bytes(facts.bytes)}`],
    ["Layers", count(facts.layers)],
    ["Width", count(facts.width)],
    ["Heads", facts.heads],
    ["Vocabulary", `${count(facts.vocabulary)} tokens`],
    ["Context", `${count(facts.context)} tokens`],
    ["Step", count(facts.step)],
  ];
  return function Part() {
    const [threads, setThreads] = useState(null);
    useEffect(
      () =>
        void model.then(
          ({ engine }) => setThreads(engine.threads),
          () => {},
        ),
      [],
    );
    const rows = threads ? [...figures, ["Computes on", threads > 1 ? `${threads} threads` : "one thread"]] : figures;
    return html`<div class="about-file"><h1><bdi>${facts.name}</bdi></h1>
      <p>The model computes in this page, on your device. Nothing is sent anywhere.</p>
      <${Figures} name="The model" rows=${rows} />
      <${Figures} name="How it was made" rows=${made(how)} wide />
      <${Text} name="Model card" text=${card} />
      <${Text} name="Recipe" text=${recipe} />
    </div>`;
  };
}

/** Return rows of a name and a text on how the model was made. */
function made({ rows = {}, data, loss, objective, imported }) {
  const trainedOn = data && [
    data.name,
    data.documents && `${count(data.documents)} ${data.documents === 1 ? "document" : "documents"}`,
    tokensOf(data),
  ];
  return [
    ["weights", imported && "imported; they were trained elsewhere, see the card"],
    ["data", trainedOn && trainedOn.filter(Boolean).join(" · ")],
    ["loss on held-out text", objective === "next_token" && loss != null && `${loss.toFixed(4)} nats per token`],
    ...Object.entries(rows).filter(([name]) => name !== "sources"),
  ].filter(([, value]) => value);
}

const tokensOf = ({ tokens }) => tokens && `${count(tokens)} tokens of training text`;

function Figures({ name, rows, wide = false }) {
  if (!rows.length) return null;
  return html`<section class="card"><h2>${name}</h2>
    <dl class=${wide ? "wide" : null}>${rows.map(
      ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class="number">${value}</dd></div>`,
    )}</dl></section>`;
}

function Text({ name, text }) {
  return (
    text && html`<section class="card"><h2>${name}</h2><pre tabindex="0" aria-label=${name}>${text}</pre></section>`
  );
}
