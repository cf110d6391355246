// The settings of sampling: their ranges and explanations, and the panel that changes them.

import { cx, html, memo, useEffect, useState } from "../ui.js";

const MOST_TOKENS = 1048576;

/** The settings in the panel's order. The server gives their defaults. */
export const SETTINGS = [
  {
    key: "temperature",
    least: 0,
    most: 2,
    step: 0.05,
    group: "choice",
    about: "Divides the logits: lower is safer, higher is bolder. 0 always takes the likeliest token.",
  },
  {
    key: "top_k",
    least: 0,
    most: MOST_TOKENS,
    step: 1,
    group: "choice",
    slide: 100,
    about: "Keeps the k likeliest tokens. 0 keeps all.",
  },
  {
    key: "top_p",
    least: 0.01,
    most: 1,
    step: 0.01,
    group: "choice",
    about: "Keeps the fewest likeliest tokens whose probabilities reach this sum. 1 keeps all.",
  },
  {
    key: "min_p",
    least: 0,
    most: 0.99,
    step: 0.01,
    group: "choice",
    about: "Keeps tokens at least this many times as likely as the likeliest. 0 keeps all.",
  },
  {
    key: "repetition_penalty",
    least: 0.1,
    most: 10,
    step: 0.05,
    group: "penalties",
    slide: 2,
    about: "Above 1, tokens that occurred, in the prompt too, become less likely. 1 is off.",
  },
  {
    key: "frequency_penalty",
    least: -2,
    most: 2,
    step: 0.1,
    group: "penalties",
    about: "Taken from a token's logit for each time it was generated. 0 is off.",
  },
  {
    key: "presence_penalty",
    least: -2,
    most: 2,
    step: 0.1,
    group: "penalties",
    about: "Taken from a token's logit once it was generated. 0 is off.",
  },
  {
    key: "dry_multiplier",
    least: 0,
    most: 100,
    step: 0.1,
    group: "penalties",
    slide: 5,
    about: "Above 0, a token that would go on repeating earlier text becomes less likely (DRY). 0 is off.",
  },
  {
    key: "dry_base",
    least: 1,
    most: 10,
    step: 0.05,
    group: "penalties",
    slide: 4,
    about: "DRY: each repeated token multiplies the penalty by this.",
  },
  {
    key: "dry_allowed_length",
    least: 1,
    most: 50,
    step: 1,
    group: "penalties",
    slide: 20,
    about: "DRY: tokens that may be repeated without a penalty.",
  },
  {
    key: "max_tokens",
    least: 1,
    most: MOST_TOKENS,
    step: 1,
    group: "length",
    slide: 1000,
    about: "Tokens generated at most; the model's context may end the text earlier.",
  },
  {
    key: "min_tokens",
    least: 0,
    most: MOST_TOKENS,
    step: 1,
    group: "length",
    slide: 1000,
    about: "No token that ends the text is chosen before this many. Stop texts still end it.",
  },
];
const GROUPS = { choice: "Choice of the next token", penalties: "Penalties", length: "Length" };

/** The defaults of all settings; `sampling`: the sampling defaults of the program or of a model. */
export function defaultsOf(sampling) {
  return { ...sampling, stop: [], seed: null, ignore_eos: false, logit_bias: {} };
}
const LARGEST_SEED = 2 ** 31;

/** A random seed. */
export function drawSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] % LARGEST_SEED;
}

/** The stop texts in `text`, one per line, with \n for a new line, \t for a tab and \\ for a backslash. */
export function readStops(text) {
  return text
    .split("\n")
    .filter(Boolean)
    .map((line) => line.replace(/\\([nt\\])/g, (_, c) => ({ n: "\n", t: "\t", "\\": "\\" })[c]));
}

export function writeStops(stops) {
  return stops
    .map((stop) => stop.replace(/[\\\n\t]/g, (c) => ({ "\n": "\\n", "\t": "\\t", "\\": "\\\\" })[c]))
    .join("\n");
}

/** The biases in `text`, one per line: a token's id, a colon, a number. Null if a line is invalid. */
export function readBiases(text) {
  const biases = {};
  for (const line of text.split("\n").filter((one) => one.trim())) {
    const found = /^\s*(\d{1,7})\s*:\s*([-+]?\d+(?:\.\d+)?)\s*$/.exec(line);
    if (!found || Math.abs(Number(found[2])) > 100) return null;
    biases[found[1]] = Number(found[2]);
  }
  return biases;
}

export const SettingsPanel = memo(function SettingsPanel({ settings, defaults, options, change, changeOptions }) {
  const set = (key, value) => change({ ...settings, [key]: value });
  const greedy = settings.temperature === 0;
  const explain = () => changeOptions({ ...options, explained: !options.explained });
  return html`<div class=${cx("settings", options.explained && "explained")}>
    <div class="presets" role="group" aria-label="Presets">
      <button class="button small" onClick=${() => change({ ...defaults, seed: settings.seed })}>Default</button>
      <button class="button small" aria-pressed=${String(greedy)}
        onClick=${() => change({ ...defaults, seed: settings.seed, temperature: 0 })}>Greedy</button>
      <span class="fill"></span>
      <button class="button small" aria-pressed=${String(Boolean(options.explained))} onClick=${explain}>
        Explain</button>
    </div>
    <${Seed} seed=${settings.seed} set=${(seed) => set("seed", seed)} />
    ${Object.entries(GROUPS).map(
      ([group, name]) => html`<fieldset key=${group}><legend>${name}</legend>
      ${SETTINGS.filter((one) => one.group === group).map(
        (one) => html`
        <${Dial} key=${one.key} one=${{ ...one, value: defaults[one.key] }} value=${settings[one.key]} set=${set} />`,
      )}
    </fieldset>`,
    )}
    <fieldset><legend>Ends and biases</legend>
      <${Lines} name="stop" value=${writeStops(settings.stop)} rows="2" placeholder="\\n\\n"
        about="The text ends before the first of these, one a line; \\n is a new line. At most 16."
        read=${readStops} set=${(value) => set("stop", value)} />
      <label class="check"><input type="checkbox" checked=${settings.ignore_eos}
        onChange=${(event) => set("ignore_eos", event.target.checked)} /> ignore_eos</label>
      <p class="about">The end-of-text token does not end the text.</p>
      <${Lines} name="logit_bias" value=${Object.entries(settings.logit_bias)
        .map(([id, x]) => `${id}: ${x}`)
        .join("\n")}
        rows="2" placeholder="198: -100"
        about="Added to the logits of these token ids, one a line, as id: number from -100 to 100."
        read=${readBiases} set=${(value) => set("logit_bias", value)} />
    </fieldset>
    <fieldset><legend>What is shown</legend>
      <${Dial} one=${{
        key: "alternatives",
        value: 10,
        least: 0,
        most: 20,
        step: 1,
        about: "Alternatives listed for each token, before and after sampling.",
      }}
        value=${options.n_top} set=${(_, n_top) => changeOptions({ ...options, n_top })} />
      <label class="check"><input type="checkbox" checked=${options.score_prompt}
        onChange=${(event) => changeOptions({ ...options, score_prompt: event.target.checked })} /> score the
        prompt</label>
      <p class="about">Also shades the prompt's own tokens.</p>
    </fieldset>
  </div>`;
});

/** A number: a slider for usual values, and a box for all values. */
function Dial({ one, value, set }) {
  const [draft, setDraft] = useState(null);
  const { key, least, most, step } = one;
  const id = `setting-${key}`;
  const range = most === MOST_TOKENS ? `${least} or more` : `${least} to ${most}`;
  const typed = (event) => {
    const number = Number(event.target.value);
    const good =
      event.target.value.trim() !== "" && number >= least && number <= most && (step < 1 || number % 1 === 0);
    setDraft(good ? null : event.target.value);
    if (good) set(key, number);
  };
  useEffect(() => setDraft(null), [value]);
  return html`<div class="dial">
    <label for=${id} title=${one.about} class=${cx("mono", value !== one.value && "changed")}>${key}</label>
    <input type="range" aria-label=${`${key}, slider`} min=${least} max=${Math.min(most, one.slide ?? most)}
      step=${step}
      value=${value} onInput=${(event) => set(key, Number(event.target.value))} />
    <input id=${id} class="field number" inputmode="decimal" value=${draft ?? value}
      aria-invalid=${String(draft != null)}
      aria-describedby=${`${id}-about`} onInput=${typed} onBlur=${() => setDraft(null)} />
    <p id=${`${id}-about`} class="about">${
      draft != null ? html`<span class="problem">${range}${step < 1 ? "" : ", a whole number"}.</span>` : one.about
    } <span class="range">${range}, default ${one.value}.</span></p>
  </div>`;
}

function Seed({ seed, set }) {
  const [wrong, setWrong] = useState(false);
  const typed = (event) => {
    const text = event.target.value.trim();
    const good = /^\d{0,15}$/.test(text);
    setWrong(!good);
    if (good) set(text === "" ? null : Number(text));
  };
  return html`<div class="seed">
    <label for="setting-seed" class=${cx("mono", seed != null && "changed")}>seed</label>
    <input id="setting-seed" class="field number" inputmode="numeric" placeholder="new each time" value=${seed ?? ""}
      aria-invalid=${String(wrong)} aria-describedby="setting-seed-about" onInput=${typed} />
    <button class="button small" aria-label="Draw a seed" title="Draw a seed" onClick=${() => set(drawSeed())}>
      <span aria-hidden="true">⚄</span></button>
    <button class="button small" disabled=${seed == null} onClick=${() => set(null)}>Clear</button>
    <p id="setting-seed-about" class="about">${
      wrong
        ? html`<span class="problem">A whole number of at most 15 digits.</span>`
        : "The same seed and settings give the same text."
    }</p>
  </div>`;
}

function Lines({ name, value, about, read, set, ...more }) {
  const [draft, setDraft] = useState(null);
  const wrong = draft != null && read(draft) == null;
  const typed = (event) => {
    setDraft(event.target.value);
    const found = read(event.target.value);
    if (found != null) set(found);
  };
  return html`<div class="lines"><label for=${`setting-${name}`} class=${cx("mono", value && "changed")}>${name}</label>
    <textarea id=${`setting-${name}`} class="field mono" value=${draft ?? value} aria-invalid=${String(wrong)}
      aria-describedby=${`setting-${name}-about`} onInput=${typed} onBlur=${() => wrong || setDraft(null)}
      ...${more}></textarea>
    <p id=${`setting-${name}-about`} class=${cx("about", wrong && "problem")}>${about}</p></div>`;
}
