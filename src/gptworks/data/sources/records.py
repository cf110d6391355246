"""Sources of records. In JSONL, Parquet and Hugging Face datasets, one field of a record is the text. The records of
conversations and preference pairs are read by `gptworks.data.conversations`."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gptworks.config.sources import (
    ConversationsSource,
    HuggingFaceSource,
    JSONLSource,
    ParquetSource,
    PreferencesSource,
)
from gptworks.data.sources.base import (
    PIECE_BYTES,
    UNIT_BYTES,
    Piece,
    Source,
    Unit,
    grouped,
    text_document,
    units_between,
)
from gptworks.data.sources.files import contents, walk
from gptworks.data.sources.opening import compression, open_file
from gptworks.errors import UserError, importing, reason_of
from gptworks.files import check_tree, open_regular
from gptworks.json_files import without_repeats

AnyRecords = ConversationsSource | PreferencesSource
AnyDataset = HuggingFaceSource | AnyRecords


class Fields(Source):
    """A source of files of records. The field that the settings name is the text."""

    def records(self, unit: Unit) -> Iterator[tuple[object, Mapping[str, Any]]]:
        """Yield the place of each record of a unit, and the record.

        The record may have only the field that is the text."""
        raise NotImplementedError

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        for where, record in self.records(unit):
            yield from record_document(where, record, self.settings.field)


class JSONL(Fields):
    """A source of files with one JSON object per line."""

    settings: JSONLSource
    endings = (".jsonl", ".ndjson")

    def records(self, unit: Unit) -> Iterator[tuple[object, Mapping[str, Any]]]:
        return read_jsonl(unit.file, unit.start, unit.end)

    def units_of(self, file: Path) -> Iterable[Unit]:
        return units_between(file, line_borders(file))


class Parquet(Fields):
    """A source of rows of Parquet files."""

    settings: ParquetSource
    endings = (".parquet",)

    def records(self, unit: Unit) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return read_parquet(unit.file, self.settings.field, unit.start, unit.end)

    def units_of(self, file: Path) -> Iterable[Unit]:
        """Group neighbouring row groups into units of about UNIT_BYTES each."""
        with _parquet_file(file) as table:
            sizes = [table.metadata.row_group(i).total_byte_size for i in range(table.metadata.num_row_groups)]
        return grouped(file, sizes)


class Records(Source):
    """A source of files, or a dataset, whose records are conversations or preference pairs."""

    settings: AnyRecords
    endings = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")

    def signature(self) -> list[list[Any]]:
        return _dataset_signature(self.settings) if self.settings.dataset else super().signature()


class HuggingFace(Source):
    """A source that reads a dataset of the Hugging Face hub or a local folder. One field is the text. The dataset is
    streamed, unless the library `datasets` wrote its folder with `save_to_disk`."""

    settings: HuggingFaceSource
    size_known = False

    def signature(self) -> list[list[Any]]:
        return _dataset_signature(self.settings)

    def units(self) -> list[Unit]:
        """Return one unit per file if the dataset is streamed, else a single unit."""
        _, rows = open_dataset(self.settings)
        n_files = 1 if hasattr(rows, "__len__") else getattr(rows, "num_shards", 1)
        folder = Path(self.settings.dataset)
        return [Unit(folder, UNIT_BYTES, i, i + 1) for i in range(n_files)] if n_files > 1 else [Unit(folder, 0)]

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        where, rows = open_dataset(self.settings)
        if unit.end is not None:
            where, rows = f"{where}, file {unit.start}", rows.shard(rows.num_shards, unit.start)
        for number, record in enumerate(iter_rows(where, rows)):
            yield from record_document(f"{where}, row {number}", record, self.settings.field)

    def check(self) -> None:
        next(self.documents(), None)


def _dataset_signature(settings: AnyDataset) -> list[list[Any]]:
    """Return a dataset's signature: its name, configuration, split and revision, and the sha256 of a local folder's
    files."""
    folder = Path(settings.dataset or "")
    check_tree(folder)
    name = ["huggingface", settings.dataset, settings.name, settings.split, *filter(None, [settings.revision])]
    return [name, *contents(sorted(walk(folder)))]


def _check_data_files(builder: Any, dataset: str) -> None:
    """Raise a UserError if a dataset's README.md names data files outside the dataset, by path or address."""
    folder, own = Path(dataset), f"hf://datasets/{dataset}@".lower()
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            is_inside = Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))
            if not (is_inside and "://" not in file if folder.exists() else file.lower().startswith(own)):
                raise UserError(
                    f"dataset {dataset}: its README.md names {file} as its data, which is not part of it. Correct "
                    f"that, or give that file as a source of its own."
                )


def record_document(where: object, record: Mapping[str, Any], field: str) -> Iterator[Piece]:
    """Yield the text in a record's field as the pieces of a document. Raises UserError if the record lacks the field,
    or the field holds no text."""
    if field not in record:
        raise UserError(f"{where}: no field `{field}`; its fields are {', '.join(record)}. Set the source's `field`.")
    text = record[field]
    if text is None:
        raise UserError(
            f"{where}: field `{field}` is null. Remove the record, or use a source of type files, which leaves it out."
        )
    if not isinstance(text, str):
        raise UserError(f"{where}: field `{field}` holds {type(text).__name__}, not text. Set the source's `field`.")
    yield from text_document(whole_text(text))


def whole_text(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, which JSON can spell and UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


MOST_LINE_BYTES = 1 << 26
_CHUNK_BYTES = 1 << 16


class Line:
    """The place of a line in a file: the line with this number, from 1, after the byte offset `start`. The lines before
    `start` are counted only when a message shows the place."""

    __slots__ = ("file", "number", "start")

    def __init__(self, file: Path, start: int, number: int) -> None:
        self.file, self.start, self.number = file, start, number

    def __str__(self) -> str:
        before = 0
        if self.start:
            with open_regular(self.file) as stream:
                chunks = iter(lambda: stream.read(min(PIECE_BYTES, self.start - stream.tell())), b"")
                before = sum(chunk.count(b"\n") for chunk in chunks)
        return f"{self.file}:{before + self.number}"


def read_lines(
    file: Path, most_bytes: int, start: int = 0, end: int | None = None, opened: BinaryIO | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each line, from 1, and its bytes. Memory holds at most `most_bytes` of a line.

    Args:
        start, end: read only the lines between these byte offsets of an uncompressed file; the first line at `start`
            has the number 1.
        opened: a stream of the bytes, if `file` is only a name.

    Raises:
        UserError: a line, including its line break, is larger than `most_bytes`; or compressed data is broken.
    """
    with opened or open_file(file) as stream:
        number, at = 0, stream.seek(start) if start else 0
        while (end is None or at < end) and (line := stream.readline(most_bytes + 1)):
            number, at = number + 1, at + len(line)
            if len(line) > most_bytes:
                raise UserError(
                    f"{Line(file, start, number)}: this line has more than {most_bytes:,} bytes, the most for a line. "
                    f"Divide its text into several records, or check that lines end."
                )
            yield number, line


def line_borders(file: Path) -> Iterator[int]:
    """Yield byte offsets of lines, about UNIT_BYTES apart; none in a compressed file, or after an oversized line."""
    if compression(file.name):
        return
    with open_regular(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        last = 0
        for at in range(UNIT_BYTES, size, UNIT_BYTES):
            if at > last:
                last = stream.seek(at - 1)
                while (part := stream.read(_CHUNK_BYTES)) and b"\n" not in part:
                    last += len(part)
                    if last - at > MOST_LINE_BYTES:
                        return
                last += part.find(b"\n") + 1
                if 0 < last < size:
                    yield last


Skip = Callable[[UserError], None]
"""A function that takes the error of a record, or of another part of a file, that cannot be read. If the function
returns, that part is left out."""


def refuse(error: UserError) -> None:
    """Raise the error: a record that cannot be read ends the reading."""
    raise error from None


def read_jsonl(
    file: Path, start: int = 0, end: int | None = None, opened: BinaryIO | None = None, skip: Skip = refuse
) -> Iterator[tuple[Line, Mapping[str, Any]]]:
    """Yield the place and the object of each line that is not blank; arguments and errors as for `read_lines`. `skip`
    is called with the error of a line that is not a JSON object."""
    rule = "Each line must be one JSON object."
    for number, line in read_lines(file, MOST_LINE_BYTES, start, end, opened):
        if not line.strip():
            continue
        where = Line(file, start, number)
        try:
            record = json.loads(line, object_pairs_hook=without_repeats)
        except (ValueError, RecursionError) as error:
            skip(UserError(f"{where}: not JSON ({error}). {rule}"))
            continue
        if isinstance(record, dict):
            yield where, record
        else:
            skip(UserError(f"{where}: a {type(record).__name__}, not an object. {rule}"))


_BATCH_ROWS = 64


def read_parquet(
    file: Path, field: str | None = None, start: int = 0, end: int | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each row, and its fields, or only `field`. Only the row groups `start` to `end` - 1 are read,
    or all from `start` on if `end` is None. Raises UserError if the file is broken, or has no column `field`."""
    with _parquet_file(file) as table:
        groups = range(table.metadata.num_row_groups)
        row = sum(table.metadata.row_group(i).num_rows for i in groups[:start])
        columns = table.schema_arrow.names
        if field is not None and field not in columns:
            raise UserError(f"{file}: no column `{field}`; it has {', '.join(columns)}. Set the source's `field`.")
        columns = None if field is None else [field]
        batches = table.iter_batches(batch_size=_BATCH_ROWS, row_groups=list(groups[start:end]), columns=columns)
        while records := _next_records(file, row, batches):
            for record in records:
                yield f"{file}, row {row}", record
                row += 1


def _next_records(file: Path, row: int, batches: Iterator[Any]) -> list[dict[str, Any]]:
    """Return the records of the next batch, which begins at `row`; empty at the end."""
    import pyarrow as pa

    try:
        return next((batch.to_pylist() for batch in batches if batch.num_rows), [])
    except UnicodeDecodeError as error:
        reason = f"a text that is not UTF-8 ({error.reason}), though the type of the column is text"
    except (pa.ArrowException, OSError) as error:
        reason = f"broken data ({reason_of(error)})"
    raise UserError(f"{file}, in the {_BATCH_ROWS} rows from row {row} on: {reason}. Get or write the file again.")


def _parquet_file(file: Path) -> Any:
    with importing("pyarrow", "data", f"{file}: reading it"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # the disk failed, not the data
            raise
        raise UserError(
            f"{file} is not a parquet file: {reason_of(error)}. Check the path, or use another source type."
        ) from None


def iter_rows(where: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a dataset that `open_dataset` opened; `where` names the dataset in errors. Raises UserError if
    the library `datasets` cannot read a row, for example because its columns differ from earlier rows' columns."""
    n_read = 0
    try:
        for row in rows:
            yield row
            n_read += 1
    except UserError:
        raise
    except Exception as error:  # `datasets` raises many types of errors
        raise UserError(
            f"{where}, after its row {n_read}: {reason_of(error)} If its files differ in "
            f"their columns, give them as a source with a `path`, which reads each record by itself."
        ) from None


def open_dataset(source: AnyDataset) -> tuple[str, Any]:
    """Open a dataset of the Hugging Face hub or a local folder. Return its name for messages, and its rows. Raises
    UserError if the split is a slice, the library `datasets` is not installed or cannot open the dataset, or a link or
    the README.md leads to data outside the dataset."""
    where, folder = f"dataset {source.dataset}", Path(source.dataset or "")
    if "[" in source.split:
        raise UserError(f"{where}: split={source.split} is a slice, and a dataset is read as a stream, which has none. "
                        f"Name a whole split, such as {source.split.partition('[')[0]}.")  # fmt: skip
    with importing("datasets", "data", f"{where}: reading it"):
        import datasets
    if source.dataset:
        check_tree(folder)
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            saved = datasets.load_from_disk(source.dataset)
            return where, saved[source.split] if isinstance(saved, dict) else saved
        builder = datasets.load_dataset_builder(source.dataset, name=source.name, revision=source.revision)
        _check_data_files(builder, str(source.dataset))
        return where, builder.as_streaming_dataset(split=source.split)
    except UserError:
        raise
    except Exception as error:  # `datasets` raises many types of errors
        fix = "Check its name, split and revision, and the network."
        raise UserError(f"{where} could not be opened: {reason_of(error, 2000)}. {fix}") from None


# ------------------------------------------------------------------------------------------ which field is the text

FIELDS = ("text", "content", "body", "document", "article", "story")
"""Usual names of the field that holds a record's text, the most common first."""
_CLEARLY_LONGER = 4


def listed_names(columns: list[str]) -> str:
    """Return the first ten column names, shortened and escaped for a message."""
    few = [f"`{name[:40]}`" if name[:40].isprintable() else ascii(name[:40]) for name in columns[:10]]
    return ", ".join(few) + (f" and {len(columns) - 10:,} more" if len(columns) > 10 else "")


def text_field(rows: list[Mapping[str, Any]]) -> str:
    """Return the name of the field that is the text: a field with a usual name, the only field with words, or a field
    that is much longer than the others. Return "" if there is no such field: all fields together are the text. Raises
    UserError if there are no records, or no field has words."""
    if not rows:
        raise UserError("it holds no record")
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    strings = [name for name in names if values[name] and all(isinstance(value, str) for value in values[name])]
    usual = [name for wanted in FIELDS for name in strings if str(name).lower() == wanted]
    words = [name for name in strings if any(_WORD.search(value) for value in values[name])]
    if usual or len(words) == 1:
        return (usual or words)[0]
    if not words:
        raise UserError(
            f"no field holds words: it has {listed_names(names)}. Conversations are for `gptworks tune`; for other "
            f"records, name the text's field in a source of their type."
        )
    lengths = sorted(((sum(map(len, values[name])), name) for name in words), reverse=True)
    return lengths[0][1] if lengths[0][0] >= _CLEARLY_LONGER * lengths[1][0] else ""


_WORD = re.compile(r"[^\W\d_]{2}")


def all_fields(record: Mapping[str, Any]) -> str:
    """Return the fields of a record that are not empty, each on a line with its name."""
    return "\n".join(f"{name}: {value}" for name, value in record.items() if value not in (None, ""))
