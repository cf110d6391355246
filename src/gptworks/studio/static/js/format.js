// Numbers and characters as the page shows them.

const NAMES = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };
const UNSEEN = new RegExp(
  String.raw`[\u0000-\u001f\u007f-\u00a0\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u2000-\u200f` +
    String.raw`\u2028-\u202f\u205f-\u206f\u3000\u3164\ufeff\uffa0\ufff0-\ufffb]`,
  "gu",
);

/** A text with visible signs for whitespace and invisible characters. */
export function visible(text) {
  return text
    .replace(/ /g, "␣")
    .replace(UNSEEN, (c) => NAMES[c] ?? `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 12345 → 12,345 */
export function count(n) {
  return n == null ? "–" : WHOLE.format(Math.round(n));
}

/** 12345.6 → 12,346, 3.14159 → 3.14: a rate, in three digits or more. */
export function rate(x) {
  return x >= 100 ? count(x) : String(Number(x.toPrecision(3)));
}

/** 3100000 → 3.1M */
export function short(n) {
  for (const [size, unit] of [
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "K"],
  ]) {
    if (n >= size) return `${Number((n / size).toPrecision(3))}${unit}`;
  }
  return String(n);
}

/** 1423000000 → 1.423 GB */
export function bytes(n) {
  const power = Math.max(0, Math.min(4, Math.floor(Math.log10(Math.abs(n) || 1) / 3)));
  return `${Number((n / 1000 ** power).toPrecision(4))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

/** 0.1234 → 12.3 % */
export function percent(p) {
  const hundredths = 100 * p;
  if (hundredths >= 99.95) return hundredths === 100 ? "100 %" : "> 99.9 %";
  if (hundredths >= 9.995) return `${hundredths.toFixed(1)} %`;
  if (hundredths >= 0.01) return `${hundredths.toFixed(2)} %`;
  return hundredths === 0 ? "0 %" : "< 0.01 %";
}

/** A number in up to four significant digits. */
export function figure(x) {
  return x == null ? "–" : String(Number(x.toPrecision(4)));
}
