"""Writes the page of bench/league.py from its file of results."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from gptworks.files import write_whole
from recorded import Result


def write_page(entries: Sequence[Result], path: Path) -> None:
    """Write the page."""
    write_whole(path, page(entries))


def tables_of(entries: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the entries by the heading of their table, fewest bits per byte first. Entries limited by time are
    compared only on the same kind of machine, those limited by FLOPs on all; a contender's last entry of a seed
    counts."""
    tables: dict[str, dict[tuple[str, int], Result]] = {}
    for entry in entries:
        heading = entry["budget"]
        if heading.endswith(" s"):
            heading += f", {entry['threads']} threads of {entry['processor']}"
        key = (entry["contender"], entry["seed"])
        table = tables.setdefault(heading, {})
        table.pop(key, None)
        table[key] = entry
    return {
        heading: sorted(table.values(), key=lambda entry: (entry["over"], entry["bits_per_byte"]))
        for heading, table in tables.items()
    }


def page(entries: Sequence[Result]) -> str:
    """Return the page as Markdown."""
    return "\n".join(_lines(entries)) + "\n"


def _lines(entries: Sequence[Result]) -> Iterator[str]:
    yield "# The league"
    yield ""
    yield (
        "`make league` writes this page from `docs/league.jsonl`; edit neither by hand. Each contender is a recipe in "
        "`bench/league/`. All train on TinyShakespeare without its last tenth, from random weights, for as long as the "
        "table's heading says, and are scored by the bits per byte of that tenth, all of it, after the last step. "
        "`bench/league.py` holds the rules; `python bench/league.py --replay NAME` trains an entry again and says "
        "whether the number is the same. To enter, add a recipe."
    )
    if not entries:
        yield ""
        yield "No entries yet."
    for heading, table in tables_of(entries).items():
        yield from ("", f"## {heading}", "")
        yield (
            "| | contender | bits per byte | seed | parameters | steps | tokens | FLOPs | seconds | machine | torch | "
            "gptworks | date |"
        )
        yield "|---:|---|---:|---:|---:|---:|---:|---:|---:|---|---|---|---|"
        for rank, entry in enumerate(table, 1):
            yield _row("over" if entry["over"] else str(rank), entry)
        if any(entry["over"] for entry in table):
            yield ""
            yield "*over*: the run took longer than the time allowed, and does not count."


def _row(rank: str, entry: Result) -> str:
    cells = (
        rank, entry["contender"], f"{entry['bits_per_byte']:.4f}", str(entry["seed"]), f"{entry['parameters']:,}",
        f"{entry['steps']:,}", f"{entry['tokens']:,}", f"{entry['flops']:.2e}", f"{entry['seconds']:.0f}",
        f"{entry['processor']}, {entry['threads']} threads, {entry['precision']}", entry["torch"],
        f"{entry['gptworks']} ({entry['commit'] or 'unknown commit'})", entry["date"],
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"
