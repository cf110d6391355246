// The part Start: a recipe as a form and as text, its plan, and the runs that are started with it.

import { get, post } from "./api.js";
import { freeName } from "./choice.js";
import { count } from "./format.js";
import { html, useCallback, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";
import { Changes, useChanges } from "./start/changes.js";
import { useExtension } from "./start/extension.js";
import { Form, Wrong } from "./start/form.js";
import { Plan } from "./start/plan.js";
import { Training } from "./start/training.js";

const TYPED_MS = 300;
const WAYS = { new: "New run", resume: "Resume it", fork: "Fork it" };
const LISTED_MS = 3000; // until the server's list has a new run

export function Part({ state, route, refresh, shown }) {
  const [known, setKnown] = useState(null); // the recipes to begin from, and the form
  const [origin, setOrigin] = useState(null);
  const [name, setName] = useState("");
  const [way, setWay] = useState("new"); // new, resume, or fork
  const [step, setStep] = useState(null); // of the checkpoint that a fork begins at
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const [said, say] = useState("");
  const recipe = useRecipe(origin);
  const linked = route.join("/");
  const look = () => get("studio/start").then(setKnown, (error) => setProblem(error.message));
  useEffect(() => void look(), []);
  const begin = useCallback(
    (chosen, way = "new") => {
      setOrigin(chosen);
      setWay(way);
      setStep(null);
      setProblem(null);
      say("");
      const own = known.own.find((one) => one.file === chosen.file);
      setName(freeName(own?.name ?? (chosen.recipe ?? chosen.run).split("/").at(-1), taken(state.models, known)));
    },
    [state.models, known],
  );
  useLayoutEffect(() => {
    if (!known || (origin && !linked)) return;
    const run = state.models.find((model) => model.id === linked && model.run);
    if (run) begin({ run: run.id }, run.checkpoints.some((one) => one.resumable) ? "fork" : "new");
    else if (!origin) begin({ recipe: "demo" });
  }, [known, linked]);
  const act = async (path, body, words) => {
    setBusy(true);
    setProblem(null);
    say("");
    try {
      await post(`studio/start/${path}`, body);
      say(words);
      if (path !== "resume" && body.name)
        (setName(freeName(body.name, taken([...state.models, { id: body.name }], known))), look());
    } catch (error) {
      setProblem(error.message);
    }
    setBusy(false);
    refresh();
    setTimeout(refresh, LISTED_MS);
  };
  const run = state.models.find((model) => model.id === origin?.run);
  const steps = (run?.checkpoints ?? []).filter((one) => one.resumable).map((one) => one.step);
  const from = way === "fork" ? (step ?? steps.at(-1) ?? null) : null;
  const longer = useExtension(origin, way, from, recipe);
  const goesOn = useChanges(way === "new" || !longer.done ? null : origin.run, from, recipe);
  const waits = busy || !recipe.right || !longer.done || Boolean(goesOn?.problem) || (way !== "resume" && !name);
  if (!known) return html`<p class="notice" role="status">${problem ?? "Reading the schema…"}</p>`;
  const start = () =>
    way === "fork"
      ? act(
          "fork",
          { run: origin.run, step: from, name, text: recipe.text },
          `${name} is forked, and trains: see above.`,
        )
      : way === "resume"
        ? act("resume", { run: origin.run, text: recipe.text }, `${origin.run} is resumed: see above.`)
        : act("new", { name, text: recipe.text, origin }, `${name} is started: see above.`);
  return html`<div class="cards start-part">
    <h1 class="hidden-text">Start</h1>
    <${Training} ...${{ state, shown, act, readOnly: known.read_only }} />
    <section class="card start-begin" aria-label="What to start">
      <div class="start-row"><label>
        Begin from <select class="field" value=${key(origin)} onChange=${(event) => begin(parsed(event.target.value))}>
        ${
          known.own.length > 0 &&
          html`<optgroup label="Your recipes">${known.own.map(
            (one) => html`<option key=${one.file} value=${`file ${one.file}`}>${one.file}</option>`,
          )}</optgroup>`
        }
        <optgroup label="Recipes of gptworks">${known.recipes.map(
          (one) => html`
          <option key=${one.name} value=${`recipe ${one.name}`}>${one.name}</option>`,
        )}</optgroup>
        ${
          state.models.length > 0 &&
          html`<optgroup label="Runs">${state.models.map(
            (one) => html`
          <option key=${one.id} value=${`run ${one.id}`}>${one.id}</option>`,
          )}</optgroup>`
        }
      </select></label>
      ${
        origin?.run &&
        html`<div class="start-way" role="group" aria-label="What to do with it">${Object.entries(WAYS).map(
          ([key, words]) =>
            (key !== "fork" || steps.length > 0) &&
            html`<button key=${key} class="button" aria-pressed=${String(way === key)} onClick=${() => setWay(key)}>
              ${words}</button>`,
        )}
      </div>`
      }</div>
      <div class="start-row">
      ${
        way === "fork" &&
        html`<label>At step <select class="field" value=${String(from)}
          onChange=${(event) => setStep(Number(event.target.value))}>
        ${[...steps]
          .reverse()
          .map((one) => html`<option key=${one} value=${String(one)}>${one}</option>`)}</select></label>`
      }
      ${
        way !== "resume" &&
        html`<label>Name <input class="field" value=${name} spellcheck="false" maxlength="100"
        onInput=${(event) => setName(event.target.value.trim())} /></label>`
      }
      ${
        known.read_only
          ? html`<p>This studio was started with <code>--read-only</code>: it starts and writes nothing.</p>`
          : html`<button class="button primary" onClick=${start}
            disabled=${waits}>
          ${{ new: "Start", resume: "Resume", fork: "Fork" }[way]}</button>`
      }</div>
      <p class="start-about quiet">${about(known, origin, way, name, from)} ${longer.why} ${left(goesOn)}</p>
      <${Changes} found=${goesOn} />
      ${recipe.checked?.problems.length > 0 && html`<${Wrong} problems=${recipe.checked.problems} />`}
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      <p class=${said ? "start-about start-said" : "hidden-text"} role="status">${said}</p>
    </section>
    ${recipe.problem && html`<p class="problem start-wide" role="alert">${recipe.problem}</p>`}
    ${
      recipe.checked &&
      html`<${Form} groups=${known.form} recipe=${recipe} goesOn=${way !== "new"} />
    <div class="start-beside">
      <${Plan} ...${{ recipe, origin, name, devices: known.devices }} />
      <${RecipeText} recipe=${recipe} />
    </div>`
    }
  </div>`;
}

/** The recipe's text, which is the source of the form, and the server's check of it. */
function useRecipe(origin) {
  const [text, setText] = useState(null);
  const [checked, setChecked] = useState(null); // given, defaults, fixed, problems
  const [problem, setProblem] = useState(null);
  const [waits, setWaits] = useState(false);
  const [first, setFirst] = useState({}); // the settings that the recipe began with, as typed
  const held = useRef({ edits: [] });
  const ask = useCallback(
    (body) => {
      const now = held.current;
      clearTimeout(now.timer);
      now.stop?.abort();
      now.stop = new AbortController();
      const { signal } = now.stop;
      const edits = now.edits;
      setWaits(true);
      now.timer = setTimeout(
        async () => {
          try {
            const answer = await post("studio/start/check", { ...body, edits, origin }, { signal });
            now.edits = now.edits.slice(edits.length);
            if (edits.length || body.text == null) setText(answer.text);
            if (body.text == null) setFirst(answer.given);
            setChecked((was) => ({
              ...answer,
              of: origin,
              defaults: answer.defaults ?? was?.defaults ?? {},
              fixed: answer.fixed ?? was?.fixed ?? [],
              right: !answer.problems.length,
            }));
            setProblem(null);
            setWaits(now.edits.length > 0);
          } catch (error) {
            if (error.name !== "AbortError") (setProblem(error.message), setWaits(false));
          }
        },
        body.text == null ? 0 : TYPED_MS,
      );
    },
    [origin],
  );
  useEffect(() => {
    if (!origin) return;
    held.current.edits = [];
    ask({ text: null });
  }, [origin]);
  const edit = (...edits) => {
    const later = new Set(edits.map(([path]) => path));
    held.current.edits = [...held.current.edits.filter(([path]) => !later.has(path)), ...edits];
    setChecked((was) => ({ ...was, given: withEdits(was.given, edits) })); // the server's answer replaces it
    ask({ text });
  };
  const type = (typed) => {
    held.current.edits = [];
    setText(typed);
    ask({ text: typed });
  };
  const given = checked?.given ?? {};
  const differs = (path) => given[path] !== first[path];
  const changed = Object.keys({ ...first, ...given }).filter(differs);
  const reset = (...paths) => {
    const added = paths.filter((path) => !(path in first)); // removing a section also removes its settings
    const own = paths.filter((path) => !added.some((section) => path.startsWith(`${section}.`)));
    edit(...own.map((path) => [path, first[path] === "" ? "{}" : (first[path] ?? null)]));
  };
  return {
    text,
    checked,
    problem,
    edit,
    type,
    first,
    changed,
    reset,
    right: Boolean(checked?.right) && !waits && !problem,
    waits,
  };
}

function withEdits(given, edits) {
  const made = { ...given };
  for (const [path, value] of edits) {
    if (value == null) delete made[path];
    else made[path] = value;
  }
  return made;
}

function RecipeText({ recipe }) {
  return html`<section class="card start-text" aria-label="The recipe as text">
    <label for="recipe-text"><h2>Recipe</h2></label>
    <textarea id="recipe-text" class="field mono" rows="24" spellcheck="false" value=${recipe.text}
      onInput=${(event) => recipe.type(event.target.value)}></textarea>
  </section>`;
}

function left(goesOn) {
  if (goesOn?.steps_left == null || goesOn.problem) return "";
  return `${count(goesOn.steps_left)} ${goesOn.steps_left === 1 ? "step is" : "steps are"} left to train.`;
}

function about(known, origin, way, name, step) {
  if (way === "fork")
    return `The fork continues from step ${step} in ${known.folder}/${name || "NAME"}; ${origin.run} is not changed.`;
  const shipped = known.recipes.find((one) => one.name === origin?.recipe);
  const what = shipped ? `${shipped.summary} ${shipped.time ? `Training takes ${shipped.time}.` : ""} ` : "";
  const kept = origin?.file ? `${origin.file} is not changed. ` : "";
  return way === "resume"
    ? "The run trains on from its newest checkpoint."
    : `${what}${kept}The recipe is written to ${known.folder}/${name || "NAME"}.yaml.`;
}

/** Runs and recipes whose names a new run cannot have: all runs, and recipes in the folder of the new recipe. */
function taken(models, { own }) {
  return [...models, ...own.filter((one) => one.taken).map((one) => ({ id: one.name }))];
}

function key(origin) {
  const [[kind, name]] = Object.entries(origin ?? { run: "" });
  return `${kind} ${name}`;
}

function parsed(text) {
  const [kind, ...rest] = text.split(" ");
  return { [kind]: rest.join(" ") };
}
