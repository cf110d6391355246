// The recipe as a form: its settings and those that are changed most often; a search box finds the others.

import { cx, html, useState } from "../ui.js";

/** `goesOn`: whether a run is resumed with the recipe, so that some settings are fixed. */
export function Form({ groups, recipe, goesOn }) {
  const [search, setSearch] = useState("");
  const [all, setAll] = useState(false);
  const { given, problems, fixed } = recipe.checked;
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const stays = ({ path }) => fixed.some((one) => one === path || one.startsWith(`${path}.`));
  const shows = (field, group) =>
    words.length
      ? words.every((word) => `${field.path} ${field.help} ${group.title}`.toLowerCase().includes(word))
      : all ||
        ((field.common || field.path in given) && !(goesOn && stays(field))) ||
        problems.some((one) => one.path === field.path);
  const shown = groups
    .map((group) => ({
      group,
      fields: group.fields.filter((field) => belongs(field, group, recipe) && shows(field, group)),
    }))
    .filter(
      ({ group, fields }) =>
        fields.length || (!words.length && group.optional && (all || (!goesOn && group.path in given))),
    );
  const known = new Set(groups.flatMap((group) => group.fields.map((field) => field.path)));
  const elsewhere = problems.filter((one) => !known.has(one.path));
  return html`<form class="start-form" aria-label="Settings" onSubmit=${(event) => event.preventDefault()}>
    <div class="start-search">
      <label><span class="hidden-text">Search settings</span>
        <input class="field" type="search" placeholder="Search all settings"
        value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>
      <label class="start-all">
        <input type="checkbox" checked=${all} onChange=${(event) => setAll(event.target.checked)} /> Show all</label>
    </div>
    ${
      elsewhere.length > 0 &&
      html`<div class="card problem" role="alert">${elsewhere.map(
        (one) => html`<p key=${one.message}>${one.message}</p>`,
      )}</div>`
    }
    ${shown.map(({ group, fields }) => html`<${Group} key=${group.path} ...${{ group, fields, recipe }} />`)}
    ${
      goesOn &&
      !all &&
      !words.length &&
      html`<p class="quiet">Settings that a run cannot change are left out here: Show all has them.</p>`
    }
    ${!shown.length && html`<p class="quiet">No setting has ${search} in its name or its text.</p>`}
  </form>`;
}

/** Whether the section's `type` has the setting. */
function belongs(field, group, { checked }) {
  const type = checked.given[`${group.path}.type`] ?? group.fields.find((one) => one.name === "type")?.default;
  return !field.kinds || field.kinds.includes(type);
}

function Group({ group, fields, recipe }) {
  const { given } = recipe.checked;
  const there = group.path in given;
  const type = given[`${group.path}.type`];
  return html`<fieldset class="card start-group">
    <legend>${group.title}</legend>
    <p class="quiet start-help">${group.kinds?.[type] ?? group.help}</p>
    ${
      group.optional &&
      html`<label class="start-all"><input type="checkbox" checked=${there}
        onChange=${({ target }) => recipe.edit([group.path, target.checked ? "{}" : null])}
        /> Use ${group.title}</label>`
    }
    ${
      there || !group.optional
        ? fields.map((field) => html`<${Field} key=${field.path} ...${{ field, recipe }} />`)
        : fields.length > 0 &&
          html`<p class="quiet start-help">It has ${fields.map((field) => field.name).join(", ")}.</p>`
    }
  </fieldset>`;
}

function Field({ field, recipe }) {
  const { given, defaults, problems } = recipe.checked;
  const id = `setting-of-${field.path}`;
  const wrong = problems.filter((one) => one.path === field.path || one.path?.startsWith(`${field.path}.`));
  const normal = defaults[field.path] ?? field.default;
  const value = given[field.path];
  return html`<div class="start-field">
    <label for=${id} title=${field.path}>${field.name}</label>
    <${Input} ...${{ id, field, value, normal }} wrong=${wrong.length > 0}
      edit=${(typed) => recipe.edit([field.path, typed])} />
    ${wrong.map((one) => html`<p class="problem" id=${`${id}-wrong`} key=${one.message}>${one.message}</p>`)}
    ${field.help && html`<p class="quiet start-help" id=${`${id}-help`}>${field.help}</p>`}
  </div>`;
}

function Input({ id, field, value, normal, wrong, edit }) {
  const [typed, setTyped] = useState(null); // while it has the focus
  const shared = {
    id,
    class: cx("field", value != null && "given"),
    "aria-invalid": String(wrong),
    "aria-describedby": [wrong && `${id}-wrong`, field.help && `${id}-help`].filter(Boolean).join(" ") || null,
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
