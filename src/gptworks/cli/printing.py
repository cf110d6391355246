"""Output of commands: notices on stderr, results as text or JSON, and progress bars, also for building datasets."""

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

    from gptworks.config import AnyRecipe
    from gptworks.data.opened import Prepared
    from gptworks.data.workers import Report


def say(text: str, end: str = "\n") -> None:
    """Print text on stdout in the stream's own encoding, unlike click, which writes UTF-8 to an ASCII stream."""
    print(text + end, end="", flush=True)  # one write, so that lines of several threads and ranks stay whole


def notice(text: str) -> None:
    """Print text on stderr, in the stream's own encoding."""
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
    """Show a task's progress and times. The yielded function takes the number of items done and the total number.

    Print results after the context ends, not inside it.
    """
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn()
    with progress_bars(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=f"{what}: {done:,} of {total:,}")

        yield show


@contextmanager
def preparing() -> "Iterator[Report]":
    """Show progress bars with MB/s and the remaining time. The yielded function takes a stage, its bytes done and its
    total bytes. Stages without a bar are printed as notices at the end."""
    from rich.progress import BarColumn, TimeElapsedColumn, TimeRemainingColumn, TransferSpeedColumn

    names = {
        "waiting": "waiting for another build", "cleaning": "cleaning", "sample": "sampling text for the tokenizer",
        "tokenizer": "reading for the tokenizer", "merging": "training the tokenizer", "shards": "encoding",
    }  # fmt: skip
    bar, times = BarColumn(bar_width=24), (TimeElapsedColumn(), TimeRemainingColumn())
    with progress_bars("{task.description}", bar, TransferSpeedColumn(), *times) as progress:
        tasks = {"": progress.add_task("looking at the sources", total=None)}

        lines = dict[str, None]()

        def report(stage: str, done_bytes: int, total_bytes: int | None) -> None:
            if stage not in names:
                lines[stage] = None
                return
            if stage not in tasks:
                for task in tasks.values():
                    progress.update(task, visible=False)
                tasks[stage] = progress.add_task(names[stage], total=total_bytes)
            progress.update(tasks[stage], completed=done_bytes, total=total_bytes)

        yield report
    for line in lines:
        notice(line)


def prepare_with_progress(recipe: "AnyRecipe", merge: bool = False) -> "Prepared":
    """Return the recipe's dataset, built with progress bars or reused. Print notices about the dataset, and about files
    that were not read.

    Args:
        merge: instead of building, join the parts that were built separately.
    """
    from gptworks.data.prepare import merge_parts
    from gptworks.data.prepare import prepare as prepare_data
    from gptworks.data.sources.choose import unread_files, unread_links

    with preparing() as report:
        prepared = (merge_parts if merge else prepare_data)(recipe, report=report)
    tokens = prepared.manifest.splits["train"].tokens
    if not prepared.reused and (unread := unread_files(recipe.data.texts)):
        kinds = ", ".join(f"{n} × {ending}" for ending, n in unread.most_common(5))
        notice(f"not read, since they do not end in a source's `extensions`: {kinds}")
    for link in () if prepared.reused else unread_links(recipe.data.texts):
        notice(f"not read, since it is a link to a folder elsewhere: {link}; name that folder as a source of its own")
    said = "nothing has changed, using" if prepared.reused else "prepared"
    notice(f"{said} {prepared.folder}: {tokens:,} training tokens")
    return prepared
