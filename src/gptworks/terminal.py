"""Protection of the terminal against control characters in models' texts, files and names.

If standard output or standard error is a terminal, `guard` filters all that commands, warnings, tracebacks and Python
libraries write to it. Only `Console`, which filters the text that it renders, and progress bars of libraries within
`unguarded` bypass the filter.
"""

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich import console as rich
from rich.segment import Segment

_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that change the direction of the text after them."""
UNPRINTABLE = dict.fromkeys(
    (*range(9), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF,
     *_DIRECTIONS),
    "\ufffd",
)  # fmt: skip
"""A table for `str.translate` from each control or undisplayable character, except tabs and line ends, to U+FFFD."""
_ON_TERMINALS = UNPRINTABLE | {0x0D: "\ufffd"}


def clean(text: str) -> str:
    """Replace each character that controls a terminal or cannot be displayed by U+FFFD; keep tabs and line feeds."""
    return text.translate(_ON_TERMINALS)


def one_line(text: str) -> str:
    """Replace each character that is not printable by U+FFFD, including line breaks, which file names may contain."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


class _Guarded:
    """A stream that cleans text written to it. It has no `buffer`, because bytes written there would not be cleaned."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The original stream, to which rich's consoles write their own control sequences."""

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(clean(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "detach"):
            raise AttributeError(name)
        return getattr(self.rich_proxied_file, name)


def guard() -> None:
    """Clean all text that this process writes from now on to standard output and error, if they are terminals."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Guarded) and stream.isatty():
            setattr(sys, name, _Guarded(stream))


@contextmanager
def unguarded() -> Iterator[None]:
    """Leave standard error unfiltered in the `with` block, for progress bars of libraries, which move the cursor."""
    before = sys.stderr
    sys.stderr = getattr(before, "rich_proxied_file", before)
    try:
        yield
    finally:
        sys.stderr = before


class Console(rich.Console):
    """A rich console that prints text without interpreting markup, and cleans it if the output is a terminal."""

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        if "file" not in options:
            stream = sys.stderr if stderr else sys.stdout
            options["file"] = getattr(stream, "rich_proxied_file", stream)
        super().__init__(**{"markup": False, "emoji": False, "highlight": False} | options)

    def render(self, renderable: rich.RenderableType, options: rich.ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or not self.is_terminal:
                yield segment
            else:
                yield Segment(clean(segment.text), segment.style)


def lines_of(value: rich.RenderableType) -> list[str]:
    """Return the lines that rich prints for a value, 100 columns wide, without styles."""
    console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
    with console.capture() as shown:
        console.print(value)
    return [line.rstrip() for line in shown.get().splitlines()]
