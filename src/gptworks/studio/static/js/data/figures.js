// The figures of a run's data: amounts, lengths, duplicates, languages.

import { count, figure } from "../format.js";
import { html, Scrolls } from "../ui.js";
import { useAsked } from "./asked.js";

export function Figures({ chosen }) {
  const { found, problem, busy } = useAsked("info", chosen);
  return html`<section class="card" aria-label="Figures" aria-busy=${String(busy)}>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${!found && !problem && html`<p class="quiet">Reading every token …</p>`}
    ${
      found &&
      html`<${Table} name="Amounts" header=${["", "Documents", "Tokens", "Bytes", "Tokens a byte"]}
        rows=${found.amounts.map((one) => [
          one.source ?? one.name ?? one.split,
          count(one.documents),
          count(one.tokens),
          count(one.text_bytes),
          figure(one.tokens_per_byte),
        ])} />
      <p>${Object.entries(found.duplicates)
        .map(
          ([split, one]) =>
            `${split}: ${count(one.documents)} exact ${one.documents === 1 ? "duplicate" : "duplicates"}`,
        )
        .join(" · ")}${
        found.held_out_in_training > 0 &&
        ` · ${count(found.held_out_in_training)} of the validation documents also in the training text`
      }</p>
      ${Object.entries(found.lengths).map(
        ([split, one]) => html`<${Lengths} key=${split} ...${{ split, lengths: one }} />`,
      )}
      ${
        found.languages &&
        html`<${Table} name="Languages" header=${["Language", `Of ${count(found.languages.sample)} documents`]}
        rows=${Object.entries(found.languages.counts).map(([name, n]) => [name, count(n)])} />`
      }`
    }</section>`;
}

function Lengths({ split, lengths }) {
  const most = Math.max(...lengths.histogram.map((one) => one.documents));
  return html`<p class="number">
    ${split}: ${count(lengths.shortest)} to ${count(lengths.longest)} tokens a document, half have ${count(
      lengths.percentiles.p50,
    )} or more</p>
    <${Scrolls} name=${`Lengths of ${split} documents`}><table class="number lengths">
      <thead><tr><th scope="col">Tokens</th><th scope="col">Documents</th><td></td></tr></thead>
      <tbody>${lengths.histogram.map(
        (
          one,
        ) => html`<tr key=${one.at_least}><th scope="row">${count(one.at_least)} to ${count(2 * one.at_least - 1)}</th>
        <td>${count(one.documents)}</td><td class="length-bar" aria-hidden="true">
          <span style=${{ width: `${(100 * one.documents) / most}%` }}></span></td></tr>`,
      )}</tbody></table><//>`;
}

function Table({ name, header, rows }) {
  return html`<${Scrolls} name=${name}><table class="number">
    <thead><tr>${header.map((title) => (title ? html`<th scope="col">${title}</th>` : html`<td></td>`))}</tr></thead>
    <tbody>${rows.map(
      (cells, i) =>
        html`<tr key=${i}><th scope="row">${cells[0]}</th>${cells.slice(1).map((cell) => html`<td>${cell}</td>`)}</tr>`,
    )}</tbody></table><//>`;
}
