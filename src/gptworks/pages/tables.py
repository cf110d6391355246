"""A table that can be shown on a terminal, in Markdown and on a page."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from gptworks.pages import parts as html


@dataclass(frozen=True)
class Table:
    """Rows under a header. In Markdown and on a terminal, cells that are `Markup` lose their tags."""

    header: Sequence[html.Cell]
    align: str
    """A letter for each column; see `parts.table`."""
    rows: Sequence[Sequence[html.Cell]]
    foot: Sequence[Sequence[html.Cell]] = ()
    """Rows of totals, below the others."""

    def first(self, n: int) -> "Table":
        """Return a table of this table's first n columns."""
        rows, foot = ([row[:n] for row in part] for part in (self.rows, self.foot))
        return Table(self.header[:n], self.align[:n], rows, foot)

    def html(self) -> Markup:
        """Return the table as HTML for a page; empty if the table has no rows."""
        return html.table(self.header, self.align, self.rows, self.foot)

    def markdown(self) -> str:
        rule = ["---:" if side == "r" else "---" for side in self.align]
        rows = (map(in_a_cell, map(_text, cells)) for cells in (self.header, rule, *self.rows, *self.foot))
        return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)

    def rich(self) -> RichTable:
        table = RichTable(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for i, (title, side) in enumerate(zip(self.header, self.align, strict=True)):
            justify, no_wrap = "right" if side == "r" else "left", side == "r" or i == 0
            table.add_column(Text(_text(title)), justify=justify, no_wrap=no_wrap)  # type: ignore[arg-type]
        for row in (*self.rows, *self.foot):
            table.add_row(*(Text(_text(cell)) for cell in row), style="bold" if row[0] == "total" else None)
        return table


def _text(cell: html.Cell) -> str:
    return cell.striptags() if isinstance(cell, Markup) else str(cell)


def in_a_cell(text: str) -> str:
    """Return the text for a cell of a Markdown table: on one line, with `|` and `<` escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
