"""Sources of records, of which one field is the text: JSONL, Parquet, datasets of the Hugging Face hub. And those whose
records are conversations or pairs of answers, which `gptworks.data.conversations` reads."""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gptworks.config import ConversationsSource, HuggingFaceSource, PreferencesSource
from gptworks.data.sources.base import PIECE_BYTES, Piece, Source, document, stamps
from gptworks.data.sources.files import walk
from gptworks.errors import UserError, not_installed

RecordsSource = ConversationsSource | PreferencesSource


class Fields(Source):
    """Files of records, of which the field that the settings name is the text."""

    def records(self, file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Each record's fields, or the one, and its place."""
        raise NotImplementedError

    def read(self, file: Path) -> Iterator[Piece]:
        for where, record in self.records(file):
            yield from record_document(where, record, self.settings.field)


class JSONL(Fields):
    """One JSON object a line."""

    endings = (".jsonl", ".jsonl.gz")

    def records(self, file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return read_jsonl(file)


class Parquet(Fields):
    """Rows of Parquet files."""

    endings = (".parquet",)

    def records(self, file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return read_parquet(file, self.settings.field)


class Records(Source):
    """Files or a dataset, whose records are conversations or pairs of answers."""

    settings: RecordsSource | HuggingFaceSource
    endings = (".jsonl", ".jsonl.gz", ".json", ".parquet")

    def signature(self) -> list[list[Any]]:
        """A dataset of the hub is identified by its name, a local folder also by its files."""
        source = self.settings
        if not source.dataset:
            return super().signature()
        name = ["huggingface", source.dataset, source.name, source.split]
        return [name, *stamps(sorted(walk(Path(source.dataset))))]


class HuggingFace(Records):
    """A dataset of the hub or a local folder, streamed, of which one field is the text."""

    settings: HuggingFaceSource

    def documents(self) -> Iterator[Piece]:
        where, rows = open_dataset(self.settings)
        for number, record in enumerate(rows):
            yield from record_document(f"{where}, row {number}", record, self.settings.field)

    def check(self) -> None:
        next(self.documents(), None)


def record_document(where: str, record: Mapping[str, Any], field: str) -> Iterator[Piece]:
    """A record's text."""
    if field not in record:
        raise UserError(f"{where}: no field `{field}`; its fields are {', '.join(record)}. Set the source's `field`.")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: field `{field}` holds {type(text).__name__}, not text. Set the source's `field`.")
    yield from document(io.BytesIO(whole_text(text).encode("utf-8")))


def whole_text(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which JSON can spell and no encoding holds."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


MOST_LINE_BYTES = 1 << 26
_COUNTED_LINES = 16
"""How many times the largest line is read on, to find the size of a line that is larger."""


def read_lines(file: Path, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Each line and its number; those of a .gz, unpacked. No more of a line than it may have is held in memory.

    Raises:
        UserError: a line is larger than `most_bytes`, its end included.
    """
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
        number = 0
        try:
            while line := stream.readline(most_bytes + 1):
                number += 1
                if len(line) > most_bytes:
                    raise UserError(
                        f"{file}:{number}: this line has {_line_size(stream, line, most_bytes)} bytes, and a line may "
                        f"have {most_bytes:,}. Divide its text into several records, or check that lines end."
                    )
                yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{file}: broken gzip data after line {number} ({error}). Get the file again.") from None


def _line_size(stream: BinaryIO | gzip.GzipFile, line: bytes, most_bytes: int) -> str:
    """The bytes of the line that begins so."""
    n_bytes = len(line)
    while line and not line.endswith(b"\n"):
        if n_bytes > _COUNTED_LINES * most_bytes:
            return f"more than {n_bytes:,}"
        line = stream.readline(PIECE_BYTES)
        n_bytes += len(line)
    return f"{n_bytes:,}"


def read_jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each line's object, and its place."""
    rule = "Each line must be one JSON object."
    for number, line in read_lines(file, MOST_LINE_BYTES):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}:{number}: not JSON ({error}). {rule}") from None
        if not isinstance(record, dict):
            raise UserError(f"{file}:{number}: a {type(record).__name__}, not an object. {rule}")
        yield f"{file}:{number}", record


def read_parquet(file: Path, field: str | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row's fields, or one of them, and its place."""
    row = 0
    with _parquet_file(file) as table:
        columns = table.schema_arrow.names
        if field is not None and field not in columns:
            raise UserError(f"{file}: no column `{field}`; it has {', '.join(columns)}. Set the source's `field`.")
        for batch in table.iter_batches(batch_size=64, columns=None if field is None else [field]):
            for record in batch.to_pylist():
                yield f"{file}, row {row}", record
                row += 1


def count_rows(file: Path) -> int:
    """Of a Parquet file, as it says."""
    with _parquet_file(file) as table:
        return int(table.metadata.num_rows)


def _parquet_file(file: Path) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise not_installed("pyarrow", "data", f"{file}: reading it") from None
    try:
        return pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise UserError(f"{file} is not a parquet file: {error}. Check the path, or use another source type.") from None


def open_dataset(source: HuggingFaceSource | RecordsSource) -> tuple[str, Iterable[Any]]:
    """What messages call a dataset of the Hugging Face hub or a local folder, and its rows.

    Raises:
        UserError: the library `datasets` is not installed, or it cannot open the dataset.
    """
    where, folder = f"dataset {source.dataset}", Path(source.dataset or "")
    try:
        import datasets
    except ImportError:
        raise not_installed("datasets", "data", f"{where}: reading it") from None
    try:
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            saved = datasets.load_from_disk(source.dataset)
            return where, saved[source.split] if isinstance(saved, dict) else saved
        return where, datasets.load_dataset(source.dataset, name=source.name, split=source.split, streaming=True)
    except Exception as error:  # the library raises many types
        reason = " ".join(str(error).split())
        raise UserError(f"{where} could not be opened: {reason}. Check its name and split, and the network.") from None
