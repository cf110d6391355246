"""What every page is made of: one file without network or script, for light and dark screens and for A4."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from gptworks.errors import UserError
from gptworks.files import write_whole
from gptworks.plan.published import readable

COUNTS = {"k": "thousand", "M": "million", "G": "billion", "T": "trillion"}


def page(title: str, lines: Sequence[str], parts: Sequence[str], footer: str, style: str = "") -> str:
    """A whole page. `lines` stand below the title; they and the title are text, the parts and the footer markup."""
    sheet = files("gptworks.plan").joinpath("sheet.css").read_text(encoding="utf-8")
    under = "".join(f"<p>{line(text)}</p>" for text in lines)
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{sheet}{style}</style>\n</head>\n<body>\n<main>",
            f"<header><h1>{escape(title)}</h1>{under}</header>",
            *parts,
            f"<footer><p>{footer}</p></footer>",
            "</main>\n</body>\n</html>\n",
        )
    )


def write_page(text: str, path: Path, option: str) -> None:
    """Write a page at once, over an older one. `option` is what the command calls the path.

    Raises:
        UserError: the path is a folder, or lies in none.
    """
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder: name a file, such as {path / 'page.html'}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; make it first")
    write_whole(path, text)


def line(text: str) -> str:
    """Broken between its parts alone."""
    return escape(text).replace(" ", "\xa0").replace("\xa0·\xa0", "\xa0· ")


def section(title: str, content: str) -> str:
    """A part of a page, under its heading; the content is markup."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def columns(*sections: str) -> str:
    """Sections side by side where there is room."""
    return f'<div class="columns">{"".join(sections)}</div>'


def key_figures(figures: Iterable[tuple[str, str, str]]) -> str:
    """Tiles of a name, a large figure (markup), and a note."""
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd><dd>{note}</dd></div>" for name, value, note in figures)
    return f'<dl class="figures">{tiles}</dl>'


def large(value: float, unit: str = "") -> str:
    """`265.2 million` for a count, `530.3 MB` for the rest."""
    figure, _, prefixed = readable(value, unit).partition(" ")
    words = prefixed if unit else COUNTS.get(prefixed, prefixed)
    return number(value, f"{figure} <small>{words}</small>")


def number(value: float, text: str | None = None) -> str:
    """A number with its exact value, written as `text` (markup) or with thousands apart."""
    exact = str(int(value)) if math.isfinite(value) and value == int(value) else repr(value)
    return f'<data value="{exact}">{f"{value:,}" if text is None else text}</data>'


def table(header: Sequence[str], align: str, rows: Iterable[Sequence[str]], foot: Iterable[Sequence[str]] = ()) -> str:
    """Cells are markup; in `align` a letter a column: l, r (numbers), q (quiet), t (the track of a bar), n (a note)."""
    kinds = {"l": "", "r": ' class="number"', "q": ' class="quiet"', "t": ' class="track"', "n": ' class="note"'}
    heads = "".join(
        f'<th scope="col"{kinds[side] if side == "r" else ""}>{title}</th>' if title else "<td></td>"
        for title, side in zip(header, align, strict=True)
    )

    def lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
        for first, *rest in rows:
            cells = "".join(f"<td{kinds[side]}>{cell}</td>" for cell, side in zip(rest, align[1:], strict=True))
            yield f'<tr><th scope="row">{first}</th>{cells}</tr>'

    footer = "".join(lines(foot))
    return (
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines(rows))}</tbody>"
        + (f"<tfoot>{footer}</tfoot>" if footer else "")
        + "</table>"
    )


def percent(share: float) -> str:
    """Empty for nothing, and never 0.0% for something."""
    return "" if not share else "&lt; 0.1%" if share < 0.0005 else f"{share:.1%}"


def bar(share: float, kind: str) -> str:
    """A bar of this share of its track."""
    return f'<span class="bar {kind}" style="width:{share:.2%}"></span>'


def settings(tree: dict[str, Any]) -> str:
    """Each setting as a recipe has it."""
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _flat(tree))
    return f'<dl class="settings">{pairs}</dl>'


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield from _flat({str(i): item for i, item in enumerate(value)}, f"{prefix}{name}.")
        elif isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield prefix + name, ", ".join(map(str, value))
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)
