// Step 1: a text becomes tokens.

import { count } from "../../../../studio/static/js/format.js";
import { html } from "../../../../studio/static/js/ui.js";
import { kindOf, nameOf } from "./reading.js";
import { Facts, Name, Tokens, Try } from "./parts.js";

const SAYS = {
  characters: "Here each token is one character: a letter, a sign or a space.",
  words: "Here each token is a word or a sign. All words that it does not know look the same to it.",
  pieces: "Here a token is a piece of text: a common word is one token, a rare word is several.",
};
const TRIES = {
  characters:
    "Write the same word with a capital letter. Which numbers change? Then try an emoji: does the model know it?",
  words: "Invent a word. What does the model make of it?",
  pieces: "Write a word that does not exist. How many tokens does it take? Then write a common word.",
};

export function TokensStep({ model, reading, at, choose }) {
  const kind = kindOf(model.tokenizer);
  const id = reading.ids[at];
  return html`<p>A model cannot read letters, it can only calculate. So your text is cut into <b>tokens</b>, and
      each token has a number. ${SAYS[kind]}</p>
    <div class="ex-picture"><${Tokens} ...${{ reading, at, choose }} name="Tokens of your text"
        below=${(t) => reading.ids[t]} shade=${(t) => [0.12, 0.28][t % 2]} />
      <div class="ex-answer" role="status"><p class="ex-large"><${Name}>${reading.names[at]}<//> is number ${" "}
        <b class="number">${id}</b></p>
        <p>${made(model, id)}</p><p>${neighbours(model, id)}</p></div></div>
    <${Facts} of=${[
      `It knows ${count(known(model))} tokens. Every text must be written with these.`,
      `Your text has ${count(reading.n_tokens)} tokens${
        reading.n_tokens > reading.length ? `; the pictures show the first ${reading.length}` : ""
      }.`,
      reading.model.tokenizer.words.before.length > 0 &&
        "A special token stands before every text: it only says that a text begins.",
      reading.names.some((name) => name.startsWith("bytes:")) &&
        "It has no token for some of your letters or signs: it spells them with several small ones, their bytes.",
    ]} />
    <${Try}>${TRIES[kind]}<//>`;
}

const known = ({ tokenizer }) => tokenizer.words.names.filter(Boolean).length;

/** Return a sentence on the two tokens that the tokenizer joined to make this one; null if it joined none. */
function made(model, id) {
  const { words } = model.tokenizer;
  for (let i = 0; i < words.merges.length; i += 2) {
    const [a, b] = [words.merges[i], words.merges[i + 1]];
    if (words.names[a] + words.names[b] === words.names[id])
      return html`It was made by joining <${Name}>${nameOf(model, a)}<//> and <${Name}>${nameOf(model, b)}<//>,
        because these two often stood next to each other.`;
  }
  return null;
}

function neighbours(model, id) {
  const { names } = model.tokenizer.words;
  const near = [id - 1, id + 1].filter((one) => names[one]);
  if (!near.length) return null;
  return html`The numbers next to it are ${near.map(
    (one, i) => html`${i > 0 && " and "}${one} for <${Name}>${nameOf(model, one)}<//>`,
  )}. A number is only a place in a list: it says nothing about the meaning.`;
}
