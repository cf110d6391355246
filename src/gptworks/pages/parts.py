"""Functions that make the parts of pages. A `str` is text and will be escaped; a `Markup` is HTML and will not."""

import base64
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard, cast

import jinja2
from markupsafe import Markup

from gptworks.terminal import UNPRINTABLE
from gptworks.units import readable

MOST_CHARACTERS = 20_000
"""Maximum number of characters of one text on a page; the rest is cut."""

_COUNTS = {"k": "thousand", "M": "million", "G": "billion", "T": "trillion"}


@cache
def environment() -> jinja2.Environment:
    """Return the Jinja environment of the templates, which escape everything that is not `Markup`."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("gptworks.pages"),
        autoescape=True,
        finalize=shortened,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def stylesheet() -> str:
    """Return the stylesheet of the pages that `gptworks.pages.page` makes, and of pictures."""
    return environment().get_template("style.css").render()


def printable(text: str) -> str:
    """Return the text with U+FFFD for each character that cannot be shown."""
    return text.translate(UNPRINTABLE)


def shortened(value: Any) -> Any:
    """Return a long text cut short, with the number of characters left out, and any other value unchanged."""
    if isinstance(value, str) and not isinstance(value, Markup) and len(value) > MOST_CHARACTERS:
        return f"{value[:MOST_CHARACTERS]}… ({len(value) - MOST_CHARACTERS:,} more characters)"
    return value


def _made(macro: str, *arguments: Any) -> Markup:
    return cast(Markup, getattr(_macros(), macro)(*arguments))


def _macro(name: str) -> Callable[..., Markup]:
    return lambda *arguments: _made(name, *arguments)


bold = _macro("bold")
columns = _macro("columns")
"""Returns sections side by side, where there is room."""
figure = _macro("figure")
folded = _macro("folded")
"""Returns a part that a screen hides until its title is clicked. A printed page always shows the part."""
figures = _macro("figures")
"""Returns drawings in rows of two, where there is room."""
key_figures = _macro("key_figures")
"""Returns tiles, each with a name, a large figure and a note."""
key = _macro("key")
"""Returns an entry of a chart's key: a dot in the curve's colour, given as a class of the stylesheet, and a text."""
exact = _macro("exact")
"""Returns an exact value in bold, for a table that also has published, rounded values."""
samples = _macro("samples")
"""Returns texts that a model wrote, each with its step, prompt and continuation."""


@cache
def _macros() -> Any:
    return environment().get_template("parts.html").module


def unbroken(text: str) -> str:
    """Return the text with no-break spaces, so that lines break only after a `·`."""
    return text.replace(" ", "\xa0").replace("\xa0·\xa0", "\xa0· ")


def paragraph(text: str, kind: str = "") -> Markup:
    """Return a paragraph; `kind` is a class of the stylesheet, such as note or verdict."""
    return _made("paragraph", text, kind)


def section(title: str, *parts: str | Markup) -> Markup:
    """Return a section: the parts under `title`, which may be empty. Return nothing if all parts are empty."""
    return _made("section", title, parts) if any(parts) else Markup("")


def image(svg: str, words: str) -> Markup:
    """Return an SVG file as an image with the alternative text `words`. The page's style does not affect the image."""
    data = Markup(base64.b64encode(svg.encode("utf-8")).decode("ascii"))  # noqa: S704  base64 is safe
    return _made("image", data, words)


def large(value: float, unit: str = "") -> Markup:
    """Return a number in short form: `265.2 million` without a unit, `530.3 MB` with a unit."""
    text, _, prefixed = readable(value, unit).partition(" ")
    return number(value, text, prefixed if unit else _COUNTS.get(prefixed, prefixed))


def number(value: float, text: str | None = None, unit: str = "") -> Markup:
    """Return a number with its unit, shown as `text` or with thousands separators. The exact value is added as data."""
    exact = str(int(value)) if math.isfinite(value) and value == int(value) else repr(value)
    return _made("number", exact, f"{value:,}" if text is None else text, unit)


def rounded(value: object, form: str = ".4f", unit: str = "") -> Markup:
    """Return a record's figure in the given format; empty if it is not a number."""
    return number(value, format(value, form), unit) if is_figure(value) else Markup("")


def is_figure(value: object) -> TypeGuard[float]:
    """Return whether a value of a record is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Bar:
    """A bar in a table: the share of its track that it fills."""

    share: float
    kind: str = "memory"
    """The bar's colour, as a class of the stylesheet."""

    def __html__(self) -> str:
        return _made("bar", f"{max(self.share, 0.005):.2%}", self.kind)

    def __str__(self) -> str:
        return "█" * round(30 * self.share)


Cell = str | Bar


def table(
    header: Sequence[Cell], align: str, rows: Iterable[Sequence[Cell]], foot: Iterable[Sequence[Cell]] = ()
) -> Markup:
    """Return a table of rows under a header; empty without rows. The first cell of a row is its header.

    Args:
        align: a letter for each column: l (text), r (numbers), q (muted text), t (bars) or n (notes).
    """
    if not (rows := list(rows)):
        return Markup("")
    kinds = {"l": "", "r": "number", "q": "quiet", "t": "track", "n": "note"}
    return _made("table", list(zip(header, align, strict=True)), [kinds[side] for side in align], rows, list(foot))


def percent(share: float) -> str:
    """Return a share in percent: empty for 0, and `< 0.1%` for less than 0.05%."""
    return "" if not share else "< 0.1%" if share < 0.0005 else f"{share:.1%}"


def byte_table(sizes: Iterable[tuple[str, int]]) -> Markup:
    """Return a table of memory sizes by name, with bars; empty without sizes."""
    named = list(sizes)
    largest = max((n for _, n in named), default=0) or 1
    rows = [(name, number(n, readable(n, "B")), Bar(n / largest)) for name, n in named]
    return table(("", "bytes", ""), "lrt", rows)


def flow_boxes(boxes: Any, stack: str, logits: str, parallel: bool) -> Markup:
    """Return a diagram of a model's operations, from token ids to logits, in boxes along its residual stream.

    Args:
        boxes: a `gptworks.describe.diagram.Flow`.
        stack: the title of the blocks.
        logits: the shape of the logits.
        parallel: whether both branches of a block read the block's input.
    """
    return _made("flow", boxes, stack, logits, parallel)


def settings(tree: dict[str, Any]) -> Markup:
    """Return a list of all settings by their paths, each with its value as in a recipe."""
    return _made("settings", list(_flat(tree)))


def _flat(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, given in tree.items():
        of_sections = isinstance(given, list) and any(isinstance(item, dict) for item in given)
        value = dict(enumerate(given)) if of_sections else given
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", ", ".join(map(str, value))
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)
