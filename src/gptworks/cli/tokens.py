"""Show text of datasets on a terminal, with token borders and without control characters."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

    from gptworks.data.search import Hit

_ON_ONE_LINE = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥"})


def harmless(text: str, one_line: bool = False) -> str:
    """Return the text with its control characters replaced by visible signs or U+FFFD; line feeds and tabs stay unless
    `one_line`."""
    from gptworks.pages.parts import printable

    shown = printable(text)
    return shown.translate(_ON_ONE_LINE) if one_line else shown.replace("\r", "␍")


def quoted(hit: "Hit") -> "Text":
    """Return a found phrase with the text around it, on one line."""
    from rich.text import Text

    before, text, after = (harmless(part, one_line=True) for part in (hit.before, hit.text, hit.after))
    where = Text(f"document {hit.document:,}, token {hit.first:,}: ", "dim")
    return where.append(before, "").append(f"⟦{text}⟧", "bold green").append(after, "")


def bordered(tokens: Sequence[dict[str, Any]], coloured: bool) -> "Text":
    """Return the text of tokens from `RunData`, with a border after each.

    If some tokens besides the first of each text are not learned, the learned ones are green, or in brackets without
    colours. Tokens without text are shown by their spelling.
    """
    from rich.text import Text

    masked = any(one["learned"] is False and not (one.get("begins") or {}).get("alone") for one in tokens)
    shown, inside = Text(), False
    for one in tokens:
        learned = masked and bool(one["learned"])
        if inside and (not learned or one.get("begins")):
            shown.append("⟧")
            inside = False
        if one.get("begins"):
            shown.append(_border(one["begins"], bool(shown)), "dim cyan")
        if learned and not coloured and not inside:
            shown.append("⟦")
            inside = True
        text = harmless(one["text"] or one["spelling"]).replace("\n", "⏎\n")
        style = ("green" if learned else "dim") if masked else ""
        shown.append(text, style if one["text"] else f"{style} magenta".strip()).append("│", "dim cyan")
    return shown.append("⟧" * inside)


def _border(begins: dict[str, Any], within: bool) -> str:
    after = f", from its token {begins['first']:,}" if begins["first"] else ""
    return "\n" * within + f"── document {begins['document']:,}{after} ──\n"
