// Bits per byte from the beginning of the text to its end.

import { figure } from "../format.js";
import { html } from "../ui.js";

export function Along({ parts, other }) {
  if (parts.length < 2) return null;
  const most = Math.max(...[...parts, ...(other ?? [])].map((part) => part.bits_per_byte));
  const bars = (list) => html`<span class="along" role="img" aria-label=${`Bits per byte along the text: ${list
    .map((part) => figure(part.bits_per_byte))
    .join(", ")}`}>
    ${list.map(
      (part) =>
        html`<span key=${part.first_token} title=${`tokens ${part.first_token + 1}–${part.end_token}: ${figure(
          part.bits_per_byte,
        )} bits per byte`} style=${{ height: `${(100 * part.bits_per_byte) / most}%` }}></span>`,
    )}</span>`;
  return html`<details><summary>Bits per byte along the text</summary>
    <p class="quiet">Each bar is a part of the text; the highest has ${figure(most)} bits per byte.</p>
    ${bars(parts)}${other && html`<p class="quiet">The second model:</p>${bars(other)}`}</details>`;
}
