"""Output of commands: notices on stderr, results as text or JSON, and progress bars."""

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.progress import Progress, ProgressColumn


def say(text: str, end: str = "\n") -> None:
    """Print text on stdout in the stream's own encoding, unlike click, which writes UTF-8 to an ASCII stream."""
    print(text + end, end="", flush=True)  # one write, so that lines of several threads and ranks stay whole


def notice(text: str) -> None:
    """Print text on stderr, as `say` does."""
    print(text + "\n", end="", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print a result of dictionaries, lists, dataclasses and plain values as JSON."""
    from pydantic_core import to_jsonable_python

    tree = to_jsonable_python(value, by_alias=False, fallback=str)
    writes_all = codecs.lookup(sys.stdout.encoding or "utf-8").name.startswith("utf")
    say(json.dumps(tree, indent=2, ensure_ascii=not writes_all))


def show(value: Any, as_json: bool) -> None:
    """Print a result that has `to_json`, as JSON or as rich renders it."""
    print_json(value.to_json()) if as_json else console_of().print(value)


def show_lines(tree: Any, as_json: bool, *lines: str) -> None:
    """Print a result as JSON, or as lines of text."""
    if as_json:
        print_json(tree)
    else:
        say("\n".join(lines))


def write_html(page: str, path: "Path") -> None:
    """Write the page to the file of the option --html."""
    from gptworks.pages.page import write_page

    write_page(page, path, "--html")
    notice(f"wrote {path}")


def console_of(stderr: bool = False) -> "Console":
    from gptworks.terminal import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=100)


@contextmanager
def progress_bars(*columns: "ProgressColumn | str") -> "Iterator[Progress]":
    """Show progress bars on stderr, if it is a terminal and this is the first rank. Outer bars are hidden."""
    from rich.progress import Progress

    console = console_of(stderr=True)
    disabled = not console.is_terminal or os.environ.get("RANK", "0") != "0"
    progress = Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=disabled)
    for outer in _shown[-1:]:
        outer.stop()
    _shown.append(progress)
    try:
        with progress:
            yield progress
    finally:
        _shown.pop()
        for outer in _shown[-1:]:
            outer.start()


_shown: "list[Progress]" = []


@contextmanager
def working(what: str) -> "Iterator[Callable[[int, int], None]]":
    """Show a task and its elapsed time; call the yielded function with the number of items done and their total.

    Print results after the context ends, not inside it.
    """
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn()
    with progress_bars(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=f"{what}: {done:,} of {total:,}")

        yield show
