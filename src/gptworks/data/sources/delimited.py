"""Sources of delimited text (CSV, TSV); one column of each table is the text."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gptworks.config.sources import CSVSource
from gptworks.data.sources.base import Unit
from gptworks.data.sources.opening import plain_name
from gptworks.data.sources.records import Fields, read_lines
from gptworks.errors import UserError

MOST_ROW_BYTES = 1 << 24
_QUOTED = (
    "A field with the delimiter, a quotation mark or a line break needs quotation marks around it, and those in it are "
    "doubled. Write it so, or set the source's `delimiter`, or `quotes` to false if quotation marks are text."
)
_PLAIN = "With `quotes` false, no field holds the delimiter or a line break. Set the source's `delimiter` or `quotes`."


class CSV(Fields):
    """A source of rows of tables; the first row names the columns."""

    settings: CSVSource
    endings = (".csv", ".tsv")

    def records(self, unit: Unit) -> Iterator[tuple[str, dict[str, str]]]:
        return read_table(unit.file, self.settings.field, self.settings.delimiter, self.settings.quotes)


def read_table(
    file: Path,
    field: str | None = None,
    delimiter: str | None = None,
    quotes: bool = True,
    opened: BinaryIO | None = None,
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place (FILE:LINE) of each row, and its fields, or only `field`. `CSVSource` describes `delimiter` and
    `quotes`; `read_lines` describes `opened`."""
    delimiter = delimiter or ("\t" if plain_name(file.name).endswith(".tsv") else ",")
    columns: list[str] = []
    for where, row in _rows(file, delimiter, quotes, opened):
        if not columns:
            columns = row
            if field is not None and (n := columns.count(field)) != 1:
                raise UserError(
                    f"{where}: {n or 'no'} columns are named `{field}`, and one must be. The columns are "
                    f"{listed_names(columns)}. Set the source's `field` or `delimiter`, or name the columns in line 1."
                )
        elif len(row) != len(columns):
            rule = _QUOTED if quotes else _PLAIN
            n_fields = f"{len(row):,} field{'s' * (len(row) != 1)}"
            raise UserError(f"{where}: {n_fields}, and the first line names {len(columns):,} columns. {rule}")
        elif field is None:
            yield where, dict(zip(columns, row, strict=True))
        else:
            yield where, {field: row[columns.index(field)]}


def listed_names(columns: list[str]) -> str:
    """Return the first ten column names, shortened and escaped for a message."""
    few = [f"`{name[:40]}`" if name[:40].isprintable() else ascii(name[:40]) for name in columns[:10]]
    return ", ".join(few) + (f" and {len(columns) - 10:,} more" if len(columns) > 10 else "")


def _rows(file: Path, delimiter: str, quotes: bool, opened: BinaryIO | None) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each row as FILE:LINE, and its fields. Empty lines are skipped."""
    csv.field_size_limit(
        max(csv.field_size_limit(), MOST_ROW_BYTES)
    )  # this limit is for the whole process; `lines` below applies a stricter one
    first_line, row_bytes = 1, 0

    def lines() -> Iterator[str]:
        nonlocal row_bytes
        for number, line in read_lines(file, MOST_ROW_BYTES, opened=opened):
            row_bytes += len(line)
            if row_bytes > MOST_ROW_BYTES:
                why = " Perhaps a quotation mark is never closed. " if quotes else " "
                rule = f"a row is larger than {MOST_ROW_BYTES:,} bytes.{why}{_QUOTED if quotes else 'Divide it.'}"
                raise UserError(f"{file}:{first_line}: {rule}")
            if b"\0" in line:
                raise UserError(f"{file}:{number}: a NUL byte: this is not text. Convert the file, or leave it out.")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                at = f"byte 0x{line[error.start]:02x} at byte {error.start} of the line"
                raise UserError(f"{file}:{number} is not UTF-8 text: {at}. Convert the file to UTF-8.") from None

    rows = csv.reader(
        lines(), delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE, strict=True
    )
    try:
        for row in rows:
            if row:
                yield f"{file}:{first_line}", row
            first_line, row_bytes = rows.line_num + 1, 0
    except csv.Error as error:
        rule = _QUOTED if quotes else _PLAIN
        raise UserError(f"{file}:{first_line}: {str(error).partition(' - ')[0]}. {rule}") from None
