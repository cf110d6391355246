"""Where text comes from: files, downloads, datasets. Documents stream in a fixed order, in pieces of bounded size."""

import glob
import gzip
import hashlib
import io
import json
import os
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from gptworks.config import (
    ConversationsSource,
    HuggingFaceSource,
    JSONLSource,
    ParquetSource,
    PreferencesSource,
    PythonStdlibSource,
    SourceConfig,
    TextSource,
)
from gptworks.errors import RunError, UserError, not_installed
from gptworks.files import sha256_file

PIECE_BYTES = 1 << 20
_PIECES_CHECKED = 20
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_BOM = b"\xef\xbb\xbf"

_RECORD_FILES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_EXTENSIONS = {
    "jsonl": (".jsonl", ".jsonl.gz"),
    "parquet": (".parquet",),
    "conversations": _RECORD_FILES,
    "preferences": _RECORD_FILES,
}
"""The files that are read of a folder, by the source's type; sources of text state their own."""

FileSource = TextSource | JSONLSource | ParquetSource
TextualSource = PythonStdlibSource | FileSource | HuggingFaceSource
RecordsSource = ConversationsSource | PreferencesSource


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document, at most 2 × PIECE_BYTES long and never empty. Most documents are one piece."""

    text: str
    starts_document: bool
    ends_document: bool
    document_bytes: int
    """UTF-8 size of the whole document."""


def iter_documents(sources: Iterable[TextualSource]) -> Iterator[Piece]:
    """All the text of the sources, in the order given and files sorted by path. Empty documents are left out.

    Raises:
        UserError: a missing or binary file, a broken record. The message names the file and the place.
        RunError: a download failed.
    """
    for source in sources:
        if isinstance(source, HuggingFaceSource):
            yield from _read_hub(source)
        else:
            for file in _files(source):
                yield from _read_file(source, file)


def check_sources(sources: Iterable[TextualSource]) -> None:
    """Find mistakes before long work: what is missing, and what is wrong near the beginning of each file.

    Raises:
        UserError: as `iter_documents`, and a local file whose sha256 is not the one stated.
    """
    for source in sources:
        if isinstance(source, HuggingFaceSource):
            next(_read_hub(source), None)
            continue
        for file in _files(source):
            if isinstance(source, PythonStdlibSource):
                break  # there, and right by construction
            if source.path and source.sha256 and (actual := sha256_file(file)) != source.sha256:
                raise UserError(
                    f"{file}: its sha256 is {actual} and the recipe states {source.sha256}. "
                    f"These are other bytes: get the right file, or correct the recipe."
                )
            for _ in islice(_read_file(source, file), _PIECES_CHECKED):
                pass


def count_documents(sources: Iterable[TextualSource], limit: int) -> int:
    """The number of documents, counted no further than `limit`."""
    count = 0
    for source in sources:
        if isinstance(source, TextSource | PythonStdlibSource):
            count += len(_files(source))
        else:
            count += sum(1 for _ in islice((p for p in iter_documents([source]) if p.starts_document), limit))
        if count >= limit:
            return limit
    return count


def total_bytes(sources: Iterable[TextualSource]) -> int | None:
    """Bytes of text that `iter_documents` reads, for a progress bar; None where they are known only after reading."""
    total = 0
    for source in sources:
        if not isinstance(source, TextSource | PythonStdlibSource):
            return None
        total += sum(file.stat().st_size for file in _files(source))
    return total


def source_signature(sources: Iterable[SourceConfig]) -> list[list[Any]]:
    """What shows, without reading the text, whether it has changed: as JSON, (path, size, mtime_ns) of each file.

    A file with a stated sha256 is identified by that; a dataset of the hub by its name.
    """
    signature: list[list[Any]] = []
    for source in sources:
        if isinstance(source, HuggingFaceSource) or (isinstance(source, RecordsSource) and source.dataset):
            signature.append(["huggingface", source.dataset, source.name, source.split])
            files = sorted(_walk(Path(source.dataset or "")))
        elif not isinstance(source, PythonStdlibSource) and source.sha256:
            signature.append(["sha256", source.sha256])
            files = []
        else:
            files = _files(source)
        for file in files:
            stat = file.stat()
            signature.append([file.as_posix(), stat.st_size, stat.st_mtime_ns])
    return signature


# ---------------------------------------------------------------------------------------------------- files


def _files(source: PythonStdlibSource | FileSource | RecordsSource) -> list[Path]:
    """The files of a source, at least one, sorted; a download is fetched first."""
    return stdlib_files() if isinstance(source, PythonStdlibSource) else local_files(source)


def stdlib_files() -> list[Path]:
    """The standard library's own sources, tests left out, sorted.

    Raises:
        UserError: there are none.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _walk(root, _NOT_LIBRARY) if file.suffix == ".py"]
    if not files:
        raise UserError(f"source python-stdlib: {root} holds no .py files (a zipped Python?). Use type=text.")
    return sorted(files)


def local_files(source: FileSource | RecordsSource) -> list[Path]:
    """The files that a source's path names, those of a folder by their endings; or its download."""
    if source.path is None:
        assert source.url and source.sha256
        return [_download(source.url, source.sha256)]
    extensions = source.extensions if isinstance(source, TextSource) else _EXTENSIONS[source.type]
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    if source.sha256:
        raise UserError(f"source {source.path}: sha256 is that of one file, and there is no file here. Check the path.")
    if path.is_dir():
        return _files_of_folder(path, extensions)
    matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
    files = [file for file in matches if file.is_file()]
    if not files:
        kind = "no file matches this pattern" if glob.has_magic(source.path) else "no such file or folder"
        raise UserError(f"source {source.path}: {kind} (looked from {Path.cwd()}). Check the path.")
    return sorted(files)


def _files_of_folder(folder: Path, extensions: tuple[str, ...]) -> list[Path]:
    everything = list(_walk(folder))
    files = [file for file in everything if file.name.endswith(extensions) and file.is_file()]
    if not files:
        found = Counter(file.suffix or "(none)" for file in everything).most_common(5)
        listed = ", ".join(f"{suffix} ({count})" for suffix, count in found) or "no files at all"
        raise UserError(
            f"source {folder}: no file ends in {' or '.join(extensions)}; found {listed}. "
            f"Give another folder, or for a source of type text list its `extensions`."
        )
    return sorted(files)


def unread_files(sources: Iterable[TextualSource]) -> Counter[str]:
    """How many files of each ending are in the folders of the sources and are not read, by their names."""
    found: Counter[str] = Counter()
    for source in sources:
        if isinstance(source, TextSource) and source.path is not None:  # of a file, there is nothing to walk
            names = (file.name for file in _walk(Path(source.path).expanduser()) if not file.name.startswith("."))
            found.update(Path(name).suffix or name for name in names if not name.endswith(source.extensions))
    return found


def _walk(folder: Path, skipped_folders: Collection[str] = ()) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped_folders]
        yield from (Path(parent, name) for name in names)


def cache_folder() -> Path:
    """Where downloads are kept: $GPTWORKS_CACHE, else $XDG_CACHE_HOME/gptworks, else ~/.cache/gptworks."""
    if chosen := os.environ.get("GPTWORKS_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gptworks"


def _download(url: str, sha256: str) -> Path:
    """The file at `url`, fetched once. It gets its name only when its bytes are the right ones."""
    file = cache_folder() / f"{sha256[:16]}-{Path(urlsplit(url).path).name or 'download'}"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".partial-", delete=False) as aside:
        partial = Path(aside.name)
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                while chunk := response.read(PIECE_BYTES):
                    aside.write(chunk)
                    digest.update(chunk)
            aside.flush()
            os.fsync(aside.fileno())
            if digest.hexdigest() != sha256:
                raise UserError(
                    f"{url}: the sha256 of what came is {digest.hexdigest()} and the recipe states {sha256}. "
                    f"Nothing was kept. It changed or the download was altered; correct the recipe if you trust it."
                )
            partial.replace(file)
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            fix = "Try again, or fetch it yourself and set `path` to it."
            raise RunError(f"{url} could not be downloaded: {error}. {fix}") from error
        finally:
            partial.unlink(missing_ok=True)
    return file


# -------------------------------------------------------------------------------------------------- reading


def _read_file(source: PythonStdlibSource | FileSource, file: Path) -> Iterator[Piece]:
    if isinstance(source, PythonStdlibSource):
        content = file.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            return
        yield from _document(io.BytesIO(content))
    elif isinstance(source, TextSource):
        with file.open("rb") as stream:
            yield from _document(stream, file)
    else:
        records = read_jsonl(file) if isinstance(source, JSONLSource) else read_parquet(file, source.field)
        for where, record in records:
            yield from _record_document(where, record, source.field)


def _document(stream: BinaryIO, file: Path | None = None) -> Iterator[Piece]:
    """The UTF-8 bytes of a seekable stream as the pieces of one document, without a byte order mark.

    `file` names the bytes of a file, which may turn out not to be text.
    """
    offset_bytes = 0 if stream.read(len(_BOM)) != _BOM else len(_BOM)
    document_bytes = stream.seek(0, os.SEEK_END) - offset_bytes
    stream.seek(offset_bytes)
    data, starts = stream.read(PIECE_BYTES), True
    while data:
        following = stream.read(PIECE_BYTES)
        cut = _cut(data) if following else len(data)
        text = data[:cut].decode("utf-8") if file is None else _decode(data[:cut], offset_bytes, file)
        yield Piece(text, starts, not following, document_bytes)
        data, offset_bytes, starts = data[cut:] + following, offset_bytes + cut, False


def _cut(data: bytes) -> int:
    """Where to end a piece: after the last line, else before the last character, whose bytes may not all be here."""
    if newline := data.rfind(b"\n") + 1:
        return newline
    last = len(data) - 1
    while last > len(data) - 4 and data[last] & 0xC0 == 0x80:  # a continuation byte
        last -= 1
    return last


def _decode(data: bytes, offset_bytes: int, file: Path) -> str:
    fix = "Leave it out, or convert it to UTF-8 text."
    if (nul := data.find(0)) >= 0:
        raise UserError(f"{file} is binary, not text: a NUL byte at byte {offset_bytes + nul}. {fix}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset_bytes + error.start
        raise UserError(f"{file} is not UTF-8 text: byte 0x{data[error.start]:02x} at byte {at}. {fix}") from None


def _record_document(where: str, record: Mapping[str, Any], field: str) -> Iterator[Piece]:
    if field not in record:
        raise UserError(f"{where}: no field `{field}`; its fields are {', '.join(record)}. Set the source's `field`.")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: field `{field}` holds {type(text).__name__}, not text. Set the source's `field`.")
    yield from _document(io.BytesIO(whole_text(text).encode("utf-8")))


def whole_text(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which JSON can spell and no encoding holds."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each line's object, and its place."""
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
        number, rule = 0, "Each line must be one JSON object."
        try:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{file}:{number}: not JSON ({error}). {rule}") from None
                if not isinstance(record, dict):
                    raise UserError(f"{file}:{number}: a {type(record).__name__}, not an object. {rule}")
                yield f"{file}:{number}", record
        except (EOFError, gzip.BadGzipFile) as error:
            raise UserError(f"{file}: broken gzip data after line {number} ({error}). Get the file again.") from None


def read_parquet(file: Path, field: str | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row's fields, or one of them, and its place."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise not_installed("pyarrow", "data", f"{file}: reading it") from None
    try:
        table = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise UserError(f"{file} is not a parquet file: {error}. Check the path, or use another source type.") from None
    columns = table.schema_arrow.names
    row = 0
    with table:
        if field is not None and field not in columns:
            raise UserError(f"{file}: no column `{field}`; it has {', '.join(columns)}. Set the source's `field`.")
        for batch in table.iter_batches(batch_size=64, columns=None if field is None else [field]):
            for record in batch.to_pylist():
                yield f"{file}, row {row}", record
                row += 1


def _read_hub(source: HuggingFaceSource) -> Iterator[Piece]:
    where, rows = open_dataset(source)
    for number, record in enumerate(rows):
        yield from _record_document(f"{where}, row {number}", record, source.field)


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
