"""Writes the page of bench/league.py from its entries."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from gptworks.files import write_whole
from league_entries import SIZES, Entry, Minutes

COLUMNS = (
    "", "contender", "bits per byte", "seed", "parameters", "steps", "tokens", "seconds", "gptworks", "torch",
    "precision", "date",
)  # fmt: skip


def write_page(entries: Sequence[Entry], path: Path) -> None:
    """Write the entries as a Markdown page."""
    write_whole(path, page(entries))


def tables_of(entries: Sequence[Entry]) -> dict[tuple[str, int], dict[str, list[Entry]]]:
    """Return the entries by size class and minutes, and then by processor, since times of different processors are not
    comparable; fewest bits per byte first. Only the last entry of a contender and seed is included."""
    last = {(one.size, one.minutes, one.processor, one.contender, one.seed): one for one in entries}
    tables = dict[tuple[str, int], dict[str, list[Entry]]]()
    for entry in sorted(last.values(), key=lambda entry: (entry.processor, entry.bits_per_byte)):
        tables.setdefault((entry.size, entry.minutes), {}).setdefault(entry.processor, []).append(entry)
    return tables


def page(entries: Sequence[Entry]) -> str:
    """Return the text of the Markdown page."""
    return "\n".join(_lines(entries)) + "\n"


def _lines(entries: Sequence[Entry]) -> Iterator[str]:
    yield "# The league"
    yield ""
    yield (
        "`make league` writes this page from `docs/league.jsonl`; edit neither by hand. Each contender is a recipe in "
        "`bench/league/`. All train on TinyShakespeare without its last tenth, from random weights, on two cores, and "
        "are scored by the bits per byte of that tenth, all of it, after the last step."
    )
    yield ""
    yield (
        "A contender competes in the smallest class that holds all parameters of its model, as `gptworks plan` counts "
        "them: embeddings and experts included, a tied head once. The seconds are those of all steps of the run, with "
        "reading batches and the optimizer, without the start of the program and the evaluation after the last step. A "
        "run that would take longer than the time of its table is stopped before it is scored."
    )
    yield ""
    yield (
        "`python bench/league.py --replay NAME` trains an entry again and says whether the number is the same: it is "
        "with the same gptworks and torch on the same kind of processor. `--minutes 60` means an entry of 60 minutes. "
        "To enter, add a recipe to `bench/league/5-minutes/` or `bench/league/60-minutes/`."
    )
    tables = tables_of(entries)
    for minutes in get_args(Minutes):
        for size in SIZES:
            yield from ("", f"## At most {size} parameters, {minutes} minutes", "")
            found = tables.get((size, minutes))
            if not found:
                yield "No entry yet."
            for i, (processor, table) in enumerate((found or {}).items()):
                if i:
                    yield ""
                yield from (f"Two cores of {processor}:", "")
                yield f"| {' | '.join(COLUMNS)} |"
                yield "|---:|---|---:|---:|---:|---:|---:|---:|---|---|---|---|"
                for rank, entry in enumerate(table, 1):
                    yield _row(rank, entry)


def _row(rank: int, entry: Entry) -> str:
    cells = (
        str(rank), entry.contender, f"{entry.bits_per_byte:.4f}", str(entry.seed), f"{entry.parameters:,}",
        f"{entry.steps:,}", f"{entry.tokens:,}", f"{entry.seconds:.0f}", f"{entry.gptworks} ({entry.commit})",
        entry.torch, entry.precision, entry.date,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"
