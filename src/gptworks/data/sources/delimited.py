"""Sources of delimited text (CSV, TSV); one column of each table is the text."""

import csv
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from gptworks.config.sources import CSVSource
from gptworks.data.sources.base import Unit
from gptworks.data.sources.opening import has_ending, open_file
from gptworks.data.sources.records import Fields, Skip, listed_names, read_lines, refuse
from gptworks.errors import UserError

MOST_ROW_BYTES = 1 << 24
_STATED = re.compile(rb"(?:\xef\xbb\xbf)?sep=([,;|\t])\r?\n", re.IGNORECASE)
_DELIMITERS, _SNIFFED_BYTES = ",;\t|", 1 << 12
"""The delimiters to recognize, and the number of bytes at the beginning of a table in which to look for them."""
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
    skip: Skip = refuse,
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place (FILE:LINE) of each row, and its fields, or only `field`. The first row only names the columns.
    `CSVSource` describes `delimiter` and `quotes`, `read_lines` describes `opened`. `skip` takes the error of a
    row that has a wrong number of fields or wrong quotation marks.

    Raises:
        UserError: not exactly one column is named `field`, a row is too large, or a line is not UTF-8 text.
    """
    stream: Any = opened or open_file(file)
    n_before = 0
    if delimiter is None:
        is_tsv = has_ending(file.name, (".tsv",))
        head = stream.peek(_SNIFFED_BYTES)[:_SNIFFED_BYTES]
        if stated := _STATED.match(head):  # a line that Excel writes
            n_before = 1
            delimiter = stated[1].decode("ascii")
        else:
            delimiter = "\t" if is_tsv else sniffed(head)
    columns: list[str] = []
    for where, row in _rows(file, delimiter, quotes, stream, n_before, skip):
        if not columns:
            columns = row
            if field is not None and (n := columns.count(field)) != 1:
                raise UserError(
                    f"{where}: {n or 'no'} columns are named `{field}`, and one must be. The columns are "
                    f"{listed_names(columns)}. Set the source's `field` or `delimiter`, or name the columns in the "
                    f"first row."
                )
        elif len(row) != len(columns):
            rule = _QUOTED if quotes else _PLAIN
            n_fields = f"{len(row):,} field{'s' * (len(row) != 1)}"
            skip(UserError(f"{where}: {n_fields}, and the first row names {len(columns):,} columns. {rule}"))
        elif field is None:
            yield where, dict(zip(columns, row, strict=True))
        else:
            yield where, {field: row[columns.index(field)]}


def sniffed(head: bytes) -> str:
    """Return the delimiter that divides the largest share, at least half, of a table's first lines into as many columns
    as the first line, at least two; a comma if there is no such delimiter."""
    lines = head.decode("utf-8-sig", "replace").splitlines(keepends=True)
    if len(lines) > 1 and len(head) >= _SNIFFED_BYTES:
        lines.pop()  # it may be cut off
    best, delimiter = (0.5, 1), ","
    for one in _DELIMITERS:
        widths = [len(row) for row in csv.reader(lines, delimiter=one) if row]
        if widths and widths[0] > 1 and (found := (widths.count(widths[0]) / len(widths), widths[0])) > best:
            best, delimiter = found, one
    return delimiter


def _rows(
    file: Path, delimiter: str, quotes: bool, opened: BinaryIO, n_before: int, skip: Skip
) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each row as FILE:LINE, and its fields. Skip empty lines, and the first `n_before` lines."""
    csv.field_size_limit(
        max(csv.field_size_limit(), MOST_ROW_BYTES)
    )  # this limit is for the whole process; `lines` below applies a stricter one
    first_line, row_bytes = n_before + 1, 0

    def lines() -> Iterator[str]:
        nonlocal row_bytes
        for number, line in islice(read_lines(file, MOST_ROW_BYTES, opened=opened), n_before, None):
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
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            rule = _QUOTED if quotes else _PLAIN
            skip(UserError(f"{file}:{first_line}: {str(error).partition(' - ')[0]}. {rule}"))
            row = []
        if row is None:
            return
        if row:
            yield f"{file}:{first_line}", row
        first_line, row_bytes = n_before + rows.line_num + 1, 0
