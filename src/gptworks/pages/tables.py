"""A table that prints on a terminal and as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable
from rich.text import Text


@dataclass(frozen=True)
class Table:
    """Rows under a header."""

    header: tuple[str, ...]
    align: str
    """`l` or `r` for each column."""
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        rule = tuple("---:" if side == "r" else "---" for side in self.align)
        rows = (map(in_a_cell, cells) for cells in (self.header, rule, *self.rows))
        return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)

    def rich(self) -> RichTable:
        table = RichTable(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for i, (title, side) in enumerate(zip(self.header, self.align, strict=True)):
            table.add_column(Text(title), justify="right" if side == "r" else "left", no_wrap=side == "r" or i == 0)
        for row in self.rows:
            table.add_row(*map(Text, row), style="bold" if row[0] == "total" else None)
        return table


def in_a_cell(text: str) -> str:
    """A text for a cell of a Markdown table: on one line, with `|` and `<` escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
