"""Build a recipe's dataset with progress bars, for the commands that need one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gptworks.cli.printing import notice, progress_bars

if TYPE_CHECKING:
    from gptworks.config import AnyRecipe
    from gptworks.data.opened import Prepared
    from gptworks.data.workers import Report


@contextmanager
def preparing() -> "Iterator[Report]":
    """Show progress bars with MB/s and the remaining time; yield a function that updates them. This function
    takes a stage with its done and total bytes. Print stages without a bar as notices at the end."""
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
