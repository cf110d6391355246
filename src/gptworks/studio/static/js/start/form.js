// The recipe as a form. It shows the settings that the recipe states and those that are changed most often. The others
// can be searched or unfolded.

import { cx, html, useState } from "../ui.js";

/** `goesOn`: whether a run is resumed with the recipe, so that some settings are fixed. */
export function Form({ groups, recipe, goesOn }) {
  const [search, setSearch] = useState("");
  const [all, setAll] = useState(false);
  const [open, setOpen] = useState(new Set()); // titles of the groups whose settings are all shown
  const [only, setOnly] = useState(false); // whether to show only changed settings
  const { given, fixed } = recipe.checked;
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const stays = ({ path }) => fixed.some((one) => one === path || one.startsWith(`${path}.`));
  const problems = placed(recipe.checked.problems, groups);
  const changed = recipe.changed;
  const shows = (field, group) =>
    words.length
      ? words.every((word) => `${field.path} ${field.help} ${group.title}`.toLowerCase().includes(word))
      : only
        ? changed.includes(field.path)
        : all ||
          open.has(group.title) ||
          ((field.common || field.path in given) && !(goesOn && stays(field))) ||
          problems.has(field.path);
  const shown = groups
    .map((group) => {
      const there = group.fields.filter((field) => belongs(field, group, recipe));
      const fields = there.filter((field) => shows(field, group));
      return { group, fields, more: words.length || only ? 0 : there.length - fields.length };
    })
    .filter(
      ({ group, fields }) =>
        fields.length ||
        problems.has(group.title) ||
        (!words.length && !only && group.optional && (all || (!goesOn && group.path in given))),
    );
  return html`<form class="start-form" aria-label="Settings" onSubmit=${(event) => event.preventDefault()}>
    <div class="start-search">
      <label><span class="hidden-text">Search settings</span>
        <input class="field" type="search" placeholder="Search settings"
        value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>
      <${Check} on=${all} set=${setAll} text="All settings" />
    </div>
    ${
      (changed.length > 0 || only) &&
      html`<div class="start-search start-changed"><${Check} on=${only} set=${setOnly} text="Changed only" />
        <span class="fill"></span>
        <button class="button small" disabled=${!changed.length}
          onClick=${() => recipe.reset(...changed)}>Reset all ${changed.length}</button></div>`
    }
    <${Problems} problems=${problems.get("")} />
    ${shown.map(
      (one) => html`<${Group} key=${one.group.title} ...${{ ...one, recipe, problems }}
        unfold=${() => setOpen(new Set([...open, one.group.title]))} />`,
    )}
    ${
      goesOn &&
      !all &&
      !words.length &&
      html`<p class="quiet">Settings that a run cannot change are left out here: All settings has them.</p>`
    }
    ${!shown.length && words.length > 0 && html`<p class="quiet">No setting has ${search} in its name or its text.</p>`}
  </form>`;
}

function Check({ on, set, text }) {
  return html`<label class="start-all"><input type="checkbox" checked=${on}
    onChange=${(event) => set(event.target.checked)} /> ${text}</label>`;
}

/** The problems by place: the path of their setting, else the title of their group, else "". */
function placed(problems, groups) {
  const found = new Map();
  const paths = new Set(groups.flatMap((group) => group.fields.map((field) => field.path)));
  for (const one of problems) {
    const parts = (one.path ?? "").split(".");
    const around = parts.map((_, i) => parts.slice(0, parts.length - i).join("."));
    const group = around.map((path) => groups.find((each) => path && each.path === path)).find(Boolean);
    const place = around.find((path) => paths.has(path)) ?? group?.title ?? "";
    found.set(place, [...(found.get(place) ?? []), one]);
  }
  return found;
}

function Problems({ problems }) {
  return (
    problems &&
    html`<div class="card problem" role="alert">${problems.map(
      (one) => html`<p key=${one.message}>${one.message}</p>`,
    )}</div>`
  );
}

/** Whether the section's `type` has the setting. */
function belongs(field, group, { checked }) {
  const type = checked.given[`${group.path}.type`] ?? group.fields.find((one) => one.name === "type")?.default;
  return !field.kinds || field.kinds.includes(type);
}

function Group({ group, fields, more, recipe, problems, unfold }) {
  const { given } = recipe.checked;
  const there = group.path in given;
  const folded = `${more} more setting${more === 1 ? "" : "s"}`;
  const help = group.kinds?.[given[`${group.path}.type`]] ?? group.help;
  return html`<fieldset class="card start-group">
    <legend>${group.title}</legend>
    ${help && html`<p class="quiet start-help">${help}</p>`}
    <${Problems} problems=${problems.get(group.title)} />
    ${
      group.optional &&
      html`<label class="start-all"><input type="checkbox" checked=${there}
        onChange=${({ target }) => recipe.edit([group.path, target.checked ? "{}" : null])}
        /> Use ${group.title}</label>`
    }
    ${
      there || !group.optional
        ? fields.map(
            (field) =>
              html`<${Field} key=${field.path} ...${{ field, recipe }} wrong=${problems.get(field.path) ?? []} />`,
          )
        : fields.length > 0 &&
          html`<p class="quiet start-help">It has ${fields.map((field) => field.name).join(", ")}.</p>`
    }
    ${
      more > 0 &&
      (there || !group.optional) &&
      html`<button class="button small start-more" aria-label=${`${folded} of ${group.title}`}
        onClick=${unfold}>${folded}</button>`
    }
  </fieldset>`;
}

function Field({ field, recipe, wrong }) {
  const { given, defaults } = recipe.checked;
  const id = `setting-of-${field.path}`;
  const normal = defaults[field.path] ?? field.default;
  const value = given[field.path];
  const changed = recipe.changed.includes(field.path);
  const was = recipe.first[field.path];
  const about = [
    field.help,
    field.bounds,
    field.default != null && field.default.length < 40 && `Default: ${field.default}.`,
  ].filter(Boolean);
  return html`<div class=${cx("start-field", changed && "changed")}>
    <label for=${id} title=${field.path}>${field.name}</label>
    <${Input} ...${{ id, field, value, normal }} wrong=${wrong.length > 0}
      edit=${(typed) => recipe.edit([field.path, typed])} />
    ${wrong.map((one) => html`<p class="problem" id=${`${id}-wrong`} key=${one.message}>${one.message}</p>`)}
    ${
      changed &&
      html`<p class="start-was">Changed: ${was == null ? "not set before" : `was ${was.slice(0, 60)}`}.
        <button class="button small" aria-label=${`Reset ${field.name}`} onClick=${() => recipe.reset(field.path)}>
        Reset</button></p>`
    }
    ${about.length > 0 && html`<p class="quiet start-help" id=${`${id}-help`}>${about.join(" ")}</p>`}
  </div>`;
}

function Input({ id, field, value, normal, wrong, edit }) {
  const [typed, setTyped] = useState(null); // the text, while the input has the focus
  const shared = {
    id,
    class: cx("field", value != null && "given"),
    "aria-invalid": String(wrong),
    "aria-describedby":
      [wrong && `${id}-wrong`, (field.help || field.bounds || field.default != null) && `${id}-help`]
        .filter(Boolean)
        .join(" ") || null,
  };
  const choices = field.input === "switch" ? ["true", "false"] : field.choices;
  if (choices) {
    return html`<select ...${shared} value=${value ?? ""} onChange=${(event) => edit(event.target.value || null)}>
      <option value="">${normal == null || normal === "null" ? "not set" : `default: ${normal}`}</option>
      ${choices.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      ${value && !choices.includes(value) && html`<option value=${value}>${value}</option>`}</select>`;
  }
  const change = (event) => {
    setTyped(event.target.value);
    edit(event.target.value.trim() === "" && field.input !== "text" ? null : event.target.value || null);
  };
  const text = {
    ...shared,
    value: typed ?? value ?? "",
    placeholder: normal == null || normal === "null" ? "not set" : `default: ${normal}`,
    onInput: change,
    onBlur: () => setTyped(null),
    spellcheck: false,
  };
  if (field.input === "yaml" && (value ?? normal ?? "").length + (value ?? "").split("\n").length > 30) {
    return html`<textarea ...${text} class=${cx(shared.class, "mono")}
      rows=${Math.min(8, (value ?? "").split("\n").length + 1)}></textarea>`;
  }
  return html`<input ...${text} inputmode=${field.input === "number" ? "decimal" : null} />`;
}

/** The number of wrong settings, and a button that leads to the first of them. */
export function Wrong({ problems }) {
  const show = () => {
    const first = document.querySelector(".start-form .problem");
    first?.scrollIntoView({ block: "center" });
    first?.closest(".start-field")?.querySelector(".field").focus({ preventScroll: true });
  };
  return html`<div class="start-row"><p class="problem" role="status">
    ${problems.length === 1 ? "One setting is" : `${problems.length} settings are`} wrong.</p>
    <button class="button small" onClick=${show}>Show the first</button></div>`;
}
