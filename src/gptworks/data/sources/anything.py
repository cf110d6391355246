"""The source of a folder of any files: each file is read by its kind, or left out with the reason."""

import fnmatch
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, Literal

from gptworks.config.sources import LANGUAGES, ArchiveSource, CodeSource, FilesSource, WARCSource
from gptworks.data.sources import base
from gptworks.data.sources.archives import Archive
from gptworks.data.sources.base import Piece, Source, Unit, borders, document, text_document, units_between
from gptworks.data.sources.code import NEVER_READ, Code
from gptworks.data.sources.delimited import CSV, read_table
from gptworks.data.sources.encodings import UTF_8, find_encoding, open_text
from gptworks.data.sources.extraction import HTML, PACKAGES, WARC, extracted, missing_packages
from gptworks.data.sources.files import contents, given_path, is_made_here, local_files
from gptworks.data.sources.json_lists import JSON, read_json
from gptworks.data.sources.opening import about_unpacked_size, compression, has_ending, plain_name
from gptworks.data.sources.records import (
    JSONL,
    Parquet,
    Skip,
    all_fields,
    listed_names,
    read_jsonl,
    read_parquet,
    record_document,
    text_field,
)
from gptworks.data.sources.report import HIDDEN, Item, count_left_out, lines, reasons, table
from gptworks.data.sources.text import spoken_text
from gptworks.errors import RunError, UserError
from gptworks.files import open_regular, stamp
from gptworks.machine import usable_cpus

PROSE = (".txt", ".md", ".text", ".rst", ".tex", ".org", ".adoc", ".markdown", ".log", "")
CODE = tuple({ending.lower(): None for endings in LANGUAGES.values() for ending in endings})
_ENDINGS: dict[str, Iterable[str]] = {
    "text": (*PROSE, *CODE), "subtitles": (".srt", ".vtt"), "jsonl": JSONL.endings, "json": JSON.endings,
    "csv": CSV.endings, "parquet": Parquet.endings, "archive": Archive.endings, "html": HTML.endings,
    "warc": WARC.endings, **{kind: (f".{kind}",) for kind in PACKAGES if kind != "html"},
}  # fmt: skip
KINDS = {ending: kind for kind, endings in _ENDINGS.items() for ending in endings}
"""The kind of file by the ending of its name, in lower case and without the ending of a compression."""

_READING_VERSION = 1
"""Raise this number when the same files give another text."""
_KIND_VERSIONS = {"archive": 2}
"""Version of each kind; kinds that are not listed have version 1. Raise a kind's version when only files of this kind
give another text."""
_LOOKED_AT_RECORDS = 20


class Files(Source):
    """A source of files of any kind. A file that cannot be read is left out."""

    settings: FilesSource
    size_known = False

    @cached_property
    def folder(self) -> Path | None:
        """The folder, fetched if it is in an object store; None if the settings name files."""
        path = None if self.settings.path is None else given_path(self.settings.path)
        return path if path is not None and path.is_dir() else None

    def entries(self) -> Iterator[tuple[Path, str]]:
        """Yield each file, and each folder that is not entered, with the reason why it is not read ("" for a file to
        read). Paths in a folder are sorted."""
        files = local_files(self.settings, tuple(KINDS)) if self.folder is None else sorted(_walk(self.folder))
        for path in files:
            yield path, self._outside(path) or _unreadable(path, self.folder)

    def files(self) -> list[Path]:
        return [file for file, why in self.entries() if not why]

    def units(self) -> list[Unit]:
        units: list[Unit] = []
        for file in self.files():
            try:
                units += [*self.units_of(file)]  # if an error comes late, no unit of the file is added
            except Exception as error:
                _of_the_file(error, file)  # raises an error that is not about the file
        return units

    def units_of(self, file: Path) -> Iterable[Unit]:
        kind, is_packed = self.kind(file), compression(file.name) is not None
        if kind in _WITH_ENCODING and (is_packed or find_encoding(file).name != UTF_8):
            size = find_encoding(file).n_bytes if kind == "text" else about_unpacked_size(file)
            return [Unit(file, size)]
        if kind == "text":
            with open_regular(file) as stream:
                return [*units_between(file, borders(stream))]
        divided: dict[str, type[Source]] = {"jsonl": JSONL, "parquet": Parquet}
        return divided[kind](None).units_of(file) if kind in divided else [Unit(file, about_unpacked_size(file))]

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        """Yield the documents of a unit without those that cannot be read. An error ends a document that has begun."""
        return self._read(unit, lambda error: None)

    def check(self) -> None:
        """Look at all files, and warn about files that are left out, wholly or in part. Raises UserError if no file can
        be read, or a file's sha256 is not the stated one."""
        for file in self.files() if self.settings.sha256 else ():
            self.check_sum(file)
        items = self.look()
        if all(item.why for item in items):
            raise UserError(
                f"source {self.settings.path}: no file can be read. {'; '.join(reasons(items)) or 'There is none.'}"
            )
        if reasons(items):
            what = f"{count_left_out(items)} are left out, wholly or in part:"
            kinds = [kind for kind in table(items) if kind.reasons and kind.kind != HIDDEN]
            warnings.warn("\n".join([what, *lines(kinds)]), stacklevel=2)

    def signature(self) -> list[list[Any]]:
        sums = [["sha256", one] for one in self.settings.sums]
        files = [Path(url) for url, _ in self.settings.downloads] if sums else self.files()
        kinds = {kind for kind in map(self.kind, files) if kind is not None}
        versions = ([kind, version] for kind, version in _KIND_VERSIONS.items() if kind in kinds)
        missing = missing_packages(kinds & PACKAGES.keys())
        return [["files", _READING_VERSION, *missing, *versions], *(sums or contents(files))]

    def may_divide_texts(self) -> bool:
        """Return whether a text file may have several units: an uncompressed file that is larger than a unit, or an
        uncompressed download, whose size is unknown."""
        downloads = [Path(url) for url, _ in self.settings.downloads]
        texts = (file for file in downloads or self.files() if self.kind(file) == "text" and not compression(file.name))
        return any(downloads or file.stat().st_size > base.UNIT_BYTES for file in texts)

    def kind(self, file: Path) -> str | None:
        """Return the kind of a file: text if the settings' `extensions` have its ending, else its kind in `KINDS`. Any
        other ending gives None in a folder, and text if the settings name files."""
        if has_ending(file.name, self.settings.extensions):
            return "text"
        return KINDS.get(Path(plain_name(file.name)).suffix.lower()) or ("text" if self.folder is None else None)

    def look(
        self, most_bytes: int | None = None, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> list[Item]:
        """Read all files. Return an `Item` for each file, and for each folder that is not entered.

        Args:
            most_bytes: bytes of text after which to stop reading a file that is not plain text, at the end of a unit;
                the rest is estimated. If None, read all.
            progress: called with the numbers of files done and of all files.
        """
        entries = [*self.entries()]
        items: list[Item] = []
        with ThreadPoolExecutor(max(1, min(4, usable_cpus()))) as threads:
            for item in threads.map(lambda entry: self._item(entry[0], entry[1], most_bytes), entries):
                items.append(item)
                progress(len(items), len(entries))
        return items

    def name(self, file: Path) -> str:
        """Return a file's path relative to the folder; its path as it is if the settings name files."""
        return (file if self.folder is None else file.relative_to(self.folder)).as_posix()

    def _outside(self, path: Path) -> str:
        """Return the reason why a path of the folder is not read; "" if it is a file to read, or the settings name
        files."""
        if self.folder is None:
            return ""
        name = path.relative_to(self.folder).as_posix()
        if path.name.startswith((".", "~$")):
            return HIDDEN if path.name.startswith(".") else "a lock file of an office program"
        if any(fnmatch.fnmatchcase(one, pattern) for one in (name, path.name) for pattern in self.settings.exclude):
            return "named by the source's `exclude`"
        if path.is_dir():
            if path.is_symlink():
                return "a link to a folder elsewhere: give that folder as a source of its own"
            return "made by gptworks" if is_made_here(path) else "a folder that cannot be opened"
        return "" if self.kind(path) else "not a kind that is read; if it is text, list it in the source's `extensions`"

    def _read(self, unit: Unit, skip: Skip) -> Iterator[Piece]:
        """Yield the pieces of a unit, and end a document where an error cuts it off."""
        held: Piece | None = None
        try:
            for piece in self._pieces(unit, skip):
                if held is not None:
                    yield _ended(held) if piece.starts_document and not held.ends_document else held
                held = piece
        except Exception as error:
            skip(_of_the_file(error, unit.file))
            held = _ended(held) if held is not None and not held.ends_document else held
        if held is not None:
            yield held

    def _pieces(self, unit: Unit, skip: Skip) -> Iterator[Piece]:
        file, kind = unit.file, self.kind(unit.file)
        if kind == "text":
            encoding = find_encoding(file)
            n_bytes = None if encoding.name == UTF_8 and not compression(file.name) else encoding.n_bytes
            with open_text(file, encoding.name) as stream:
                yield from document(stream, file, unit.start, unit.end, n_bytes)
        elif kind == "subtitles":
            yield from text_document(spoken_text(file))
        elif kind in _RECORDS:
            name = _text_field(file, kind, stamp(file))
            for where, record in _records(file, kind, unit, skip):
                try:
                    yield from record_document(where, record if name else {"": all_fields(record)}, name)
                except UserError as error:
                    skip(error)
        elif kind == "archive":
            yield from _archive(file, stamp(file)).read_unit(unit, skip)
        elif kind == "warc":
            yield from WARC(WARCSource(type="warc", path=str(file))).read_unit(unit, skip)
        else:
            assert kind is not None
            yield from text_document(extracted(file, kind))

    def _item(self, file: Path, why: str, most_bytes: int | None) -> Item:
        name, ending = self.name(file), _ending(file)
        if why:
            is_folder = file.is_dir()
            return Item(name, why if why == HIDDEN else "folder" if is_folder else ending, why=why, is_folder=is_folder)
        errors = _Errors(file)
        n_bytes = documents = 0
        is_sampled, lacks = False, ""
        notes: list[str] = []
        try:
            kind = self.kind(file)
            if kind in _WITH_ENCODING and (note := find_encoding(file).note):
                notes.append(note)
            if kind == "text":
                n_bytes = find_encoding(file).n_bytes
                documents = 1
            units = () if kind == "text" else tuple(self.units_of(file))
            seen_bytes = 0
            for unit in units:
                for piece in self._read(unit, errors.add):
                    n_bytes += len(piece.text.encode("utf-8"))
                    documents += piece.starts_document
                seen_bytes += unit.size_bytes
                if most_bytes is not None and n_bytes > most_bytes and unit is not units[-1]:
                    n_bytes = round(n_bytes * sum(one.size_bytes for one in units) / seen_bytes)
                    notes.append(f"its first {seen_bytes:,} bytes looked at")
                    is_sampled = True
                    break
            if kind in _RECORDS and n_bytes:
                field = _text_field(file, kind, stamp(file))
                notes.append(f"takes {listed_names([field]) if field else 'all fields'}")
        except Exception as error:
            errors.add(_of_the_file(error, file))
        if not n_bytes:
            return Item(name, ending, why=errors.first or "it holds no text")
        if errors.n:
            lacks = f"{errors.n:,} part{'s' * (errors.n > 1)} of it left out: {errors.first}"
        return Item(name, ending, n_bytes, None if is_sampled else documents, "", tuple(notes), lacks)

    def excerpts(self, item: Item, offsets: list[int], n_bytes: int) -> Iterator[list[str]]:
        """Yield an excerpt of about `n_bytes` for each byte offset in a file's text. An excerpt begins with the next
        line, and is a list with one part per document. The offsets must ascend and be below the item's `n_bytes`."""
        file = Path(item.file) if self.folder is None else self.folder / item.file
        units = [*self.units_of(file)]
        scale = item.n_bytes / max(1, sum(unit.size_bytes for unit in units))
        left, start = [*offsets], 0.0
        for unit in units:
            end = inf if unit is units[-1] else start + unit.size_bytes * scale
            inside = [offset for offset in left if offset < end]
            left = left[len(inside) :]
            yield from _excerpts(self.read_unit(unit), [int(offset - start) for offset in inside], n_bytes)
            start = end


def _excerpts(pieces: Iterator[Piece], offsets: list[int], n_bytes: int) -> Iterator[list[str]]:
    found: list[list[str]] = [[] for _ in offsets]
    first = at = 0  # the first excerpt that has not ended, and the bytes before the piece
    while first < len(offsets) and (piece := next(pieces, None)) is not None:
        data = piece.text.encode("utf-8")
        for offset, parts in zip(offsets[first:], found[first:], strict=True):
            if offset >= at + len(data):
                break
            part = data[max(0, offset - at) : offset + n_bytes - at].decode("utf-8", "ignore")
            if offset > at:
                part = part.partition("\n")[2] or part
            if parts and not piece.starts_document:
                parts[-1] += part
            else:
                parts.append(part)
        at += len(data)
        while first < len(offsets) and offsets[first] + n_bytes <= at:
            first += 1
    yield from filter(None, found)


# -------------------------------------------------------------------------------------------------------- one file


def _ended(piece: Piece) -> Piece:
    """Return the piece as the last one of its document."""
    return replace(piece, ends_document=True, document_bytes=piece.before_bytes + len(piece.text.encode("utf-8")))


class _Errors:
    """Counts errors about a file, and keeps the reason of the first."""

    def __init__(self, file: Path) -> None:
        self._file, self.n, self.first = file, 0, ""

    def add(self, error: UserError) -> None:
        self.n += 1
        self.first = self.first or _reason(error, self._file)


def _of_the_file(error: Exception, file: Path) -> UserError:
    """Return any error as a UserError about the file: libraries raise many types of errors for broken files. A
    MemoryError or a RunError is not about the file, and is raised."""
    if isinstance(error, MemoryError | RunError):
        raise error
    known = isinstance(error, UserError | OSError)
    return UserError(_reason(error, file) if known else f"broken data ({type(error).__name__}: {error})")


def _unreadable(path: Path, folder: Path | None) -> str:
    """Return the reason why a file is not read: it cannot be opened, or it is empty. Return "" if it can be read."""
    try:
        with open_regular(path, inside=folder) as stream:
            return "" if stream.read(1) else "it is empty"
    except (UserError, OSError) as error:
        return _reason(error, path)


def _reason(error: Exception, file: Path) -> str:
    """Return an error's message without the file's name, which the table shows already. For a link that cannot be
    followed, return a message about the link."""
    if file.is_symlink() and "leads out of" in str(error):
        return "a link out of the folder: give the file that it leads to as a source of its own"
    if isinstance(error, OSError):
        return "a link that leads nowhere" if file.is_symlink() and not file.exists() else error.strerror or str(error)
    return re.sub(r"^:(\d+)", r"line \1", str(error).removeprefix(str(file))).lstrip(": ,")


def _ending(file: Path) -> str:
    """Return a file's ending, with the ending of its compression, such as `.jsonl.gz`."""
    plain = plain_name(file.name)
    return Path(plain).suffix + file.name[len(plain) :]


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, and the folders that are not entered, except folders in `NEVER_READ`. If the
    folder has a `.git` or a `.gitignore`, leave out ignored files, folders of other people's code, folders made by
    gptworks, and links. If a `.gitignore` cannot be read, or pathspec is not installed, warn with the reason, and use
    no `.gitignore` at all."""
    if any((folder / name).exists() for name in (".git", ".gitignore")):
        try:
            yield from [*Code(CodeSource(type="code", path=str(folder))).walk()]
        except UserError as error:
            _warn_once(f"source {folder}: the files that `.gitignore` names are read too. {error}")
            yield from Code(CodeSource(type="code", path=str(folder), gitignore=False)).walk()
        return
    closed: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=lambda error: closed.append(Path(error.filename))):
        entered = []
        for name in folders:
            path = Path(parent, name)
            if path.is_symlink() or name.startswith(".") or is_made_here(path):
                yield path
            elif name not in NEVER_READ:
                entered.append(name)
        folders[:] = entered
        yield from (Path(parent, name) for name in names)
    yield from closed


@lru_cache(maxsize=1 << 8)
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


# --------------------------------------------------------------------------------------------------------- records

Record = Mapping[str, Any]
_RECORDS = {"jsonl", "json", "csv", "parquet"}
_WITH_ENCODING = {"text", "subtitles", "jsonl", "json", "csv"}


def _records(file: Path, kind: str, unit: Unit, skip: Skip) -> Iterator[tuple[object, Record]]:
    if kind == "parquet":
        return read_parquet(file, None, unit.start, unit.end)
    encoding = find_encoding(file).name
    opened = None if encoding == UTF_8 else open_text(file, encoding)
    if kind == "jsonl":
        return read_jsonl(file, unit.start, unit.end, opened, skip)
    return read_json(file, None, opened) if kind == "json" else read_table(file, opened=opened, skip=skip)


@lru_cache(maxsize=1 << 12)
def _text_field(file: Path, kind: str, _: object) -> str:
    """Return the field that is the text of a file's records; "" if all fields together are the text."""
    errors: list[UserError] = []
    rows: list[Record] = []
    try:
        rows.extend(row for _, row in islice(_records(file, kind, Unit(file), errors.append), _LOOKED_AT_RECORDS))
    except UserError as error:
        errors.append(error)
    if errors and not rows:
        raise errors[0]
    return text_field(rows)


# -------------------------------------------------------------------------------------------------------- archives


@lru_cache(maxsize=1 << 12)
def _archive(file: Path, _: object) -> Archive:
    """Return the source that reads an archive: as texts and documents if it has any, else as records."""
    forms: tuple[Literal["text", "jsonl", "csv"], ...] = ("text", "jsonl", "csv")
    archives = [Archive(ArchiveSource(type="archive", path=str(file), format=form), KINDS) for form in forms]
    best = len(archives)
    try:
        for name in archives[0].names(file):
            best = min([best, *(n for n, one in enumerate(archives) if one.wants(name))])
            if not best:
                break
    except UserError:  # a tar archive may break after some members
        if best == len(archives):
            raise
    if best == len(archives):
        raise UserError("none of its members is a text, a document or a file of records: unpack it")
    return archives[best]
