"""Examine the texts in a file or a folder: which files can be read, how much text they hold, and a sample of it."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gptworks.config import LANGUAGES, CodeSource, SourceConfig
from gptworks.data.sources.archives import Archive
from gptworks.data.sources.base import PIECES_CHECKED, Source, document
from gptworks.data.sources.code import NEVER_READ, Code
from gptworks.data.sources.delimited import CSV, listed_names, read_table
from gptworks.data.sources.files import check_links_of, linked_folders, walk
from gptworks.data.sources.opening import (
    COMPRESSIONS,
    about_unpacked_size,
    compression,
    open_file,
    plain_name,
    unpacked_size,
)
from gptworks.data.sources.pages import HTML, PDF, WARC
from gptworks.data.sources.records import JSONL, Parquet, count_rows, read_jsonl, read_parquet, record_document
from gptworks.errors import UserError
from gptworks.units import readable

PROSE = (".txt", ".md", ".text", ".rst", ".tex", ".org", ".adoc")
CODE = tuple({ending.lower(): None for endings in LANGUAGES.values() for ending in endings})
RECORDS = {"jsonl": JSONL.endings, "csv": CSV.endings, "parquet": Parquet.endings}
"""File endings of each kind of source that reads records."""
OTHERS: dict[str, type[Source]] = {"archive": Archive, "html": HTML, "warc": WARC, "pdf": PDF}
"""Class of each kind of source that extracts the text from its files."""

FIELDS = ("text", "content", "body", "document", "article", "story")
"""Usual names of the field that holds a record's text, the most common first."""

LEAST_BYTES = 1 << 15
"""Minimum bytes of text; less cannot train a language model."""

SAMPLE_BYTES, SAMPLE_PARTS = 1 << 21, 64
"""Bytes of text to read for the sample, and the number of evenly spaced parts in which to read them."""

_LOOKED_AT_RECORDS, _LISTED = 20, 5
_RECORD_ENDINGS = tuple(ending for endings in RECORDS.values() for ending in endings)
_OTHER_ENDINGS = tuple(ending for kind in OTHERS.values() for ending in kind.endings)


@dataclass
class Texts:
    """The texts in a file or a folder that a recipe can train on."""

    path: Path
    """The file or folder that holds the texts."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Sources for a recipe's `data.sources`."""
    endings: Counter[str] = field(default_factory=Counter)
    """Number of files that are read, by file name ending."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of files that are not read, by file name ending."""
    fields: dict[str, str] = field(default_factory=dict)
    """Name of the field that holds the text, for each file of records."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Reasons for leaving out files of a readable kind, by file name or ending."""
    n_bytes: int = 0
    """Bytes of text; an estimate for compressed files, and for large archives, pages and files of records."""
    sample: list[str] = field(default_factory=list)

    @property
    def n_files(self) -> int:
        return sum(self.endings.values())

    @property
    def n_documents(self) -> int | None:
        """Number of documents, which is the number of files; None if a file may hold several documents."""
        one = ("text", "code", "html", "pdf")
        return None if any(source["type"] not in one for source in self.sources) else self.n_files

    def lines(self) -> list[str]:
        """Return lines that describe the files that are read and those that are not."""
        fields = Counter((listed_names([name]), _ending(Path(file))) for file, name in self.fields.items())
        taken = ", ".join(f"{name} of {n:,} {ending}" for (name, ending), n in fields.most_common(_LISTED))
        return [
            f"reads       {listed(self.endings)}: {readable(self.n_bytes, 'B')} of text",
            *([f"takes       {taken}"] if taken else []),
            *([f"skips       {listed(self.skipped)}"] if self.skipped else []),
            *(f"            {name}: {why}" for name, why in [*self.reasons.items()][:_LISTED]),
        ]

    def _add(self, source: dict[str, Any], files: list[Path], n_bytes: int, sample: list[str]) -> None:
        """Add a recipe's source with its files, the bytes of their text, and a sample of that text."""
        self.sources.append(source)
        self.endings.update(map(_ending, files))
        self.n_bytes += n_bytes
        self.sample += sample

    def _add_plain(self, by_ending: dict[str, list[Path]]) -> None:
        """Add plain-text files; leave out endings whose files are not UTF-8."""
        by_ending, binary = _readable(by_ending)
        self.reasons |= dict.fromkeys(binary, "not UTF-8 text")
        if not by_ending:
            return
        files = [file for those in by_ending.values() for file in those]
        extensions = {"extensions": sorted(set(map(plain_name, by_ending)))} if self.path.is_dir() else {}
        source = {"type": "text", "path": str(self.path), **extensions}
        self._add(source, files, sum(map(about_unpacked_size, files)), _sample(files))

    def _add_records(self, kind: str, files: list[Path]) -> None:
        """Add files of records that have one clear text field: as one source if this field is the same in all files,
        else as one source per file."""
        fields: dict[Path, str] = {}
        for file in files:
            name = str(file.relative_to(self.path) if self.path.is_dir() else file)
            try:
                fields[file], n_bytes, sample = _look_at_records(kind, file, SAMPLE_BYTES // len(files))
            except UserError as error:
                self.reasons[name] = str(error)
                continue
            self.fields[name] = fields[file]
            self.endings[_ending(file)] += 1
            self.n_bytes += n_bytes
            self.sample += sample
        if self.path.is_dir() and len(set(fields.values())) == 1 and len(fields) == len(files):
            fields = {self.path: fields[files[0]]}
        self.sources += [{"type": kind, "path": str(path), "field": name} for path, name in fields.items()]

    def _add_code(self, files: list[Path]) -> None:
        """Add the code of a repository, without ignored files."""
        n_bytes = sum(file.stat().st_size for file in files)
        self._add({"type": "code", "path": str(self.path)}, files, n_bytes, _sample(files))

    def _add_other(self, kind: str, files: list[Path]) -> None:
        """Add files from which text is extracted. Archives are read as texts, or as JSONL if they hold no texts."""
        errors = []
        for form in ({}, {"format": "jsonl"})[: 2 if kind == "archive" else 1]:
            source = {"type": kind, "path": str(self.path), **form}
            try:
                return self._add(source, files, *_sample_of(source, files))
            except UserError as error:
                errors.append(str(error))
        self.reasons[_ending(files[0])] = errors[0]


def look_at(path: Path) -> Texts:
    """Examine the texts in a file, or in a folder and all folders inside it.

    Raises:
        UserError: `path` has no text or too little, or a file that is not UTF-8 text.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder. Give a folder of texts, or one file.")
    files = [path] if path.is_file() else sorted(file for file in walk(path) if file.is_file())
    code = _repository(path)
    if code:
        files = [file for file in files if not NEVER_READ.intersection(file.relative_to(path).parts)]
    by_ending: dict[str, list[Path]] = {}
    for file in files:
        by_ending.setdefault(_ending(file), []).append(file)
    found = Texts(path)
    kinds = PROSE if code else (*PROSE, *CODE)
    read = (*kinds, *_RECORD_ENDINGS, *_OTHER_ENDINGS)
    check_links_of(path, (file for file in files if plain_name(file.name).lower().endswith(read) and file != path))
    plain = {ending: those for ending, those in by_ending.items() if plain_name(ending).lower() in kinds}
    if path.is_file() and not plain and plain_name(_ending(path)) not in (*_RECORD_ENDINGS, *_OTHER_ENDINGS):
        plain = {_ending(path): [path]}  # a file that the user names is read as text, whatever its ending
    found._add_plain(plain)
    if code:
        found._add_code(code)
    for kind, other in OTHERS.items():
        if of_kind := [file for file in files if plain_name(file.name).endswith(other.endings)]:
            found._add_other(kind, of_kind)
    for kind, endings in RECORDS.items():
        found._add_records(
            kind, [one for name, those in by_ending.items() if plain_name(name) in endings for one in those]
        )
    found.reasons |= {
        str(link.relative_to(path)): "a link to a folder elsewhere: give that folder as a source of its own"
        for link in linked_folders(path)
    }
    found.skipped = Counter({ending: len(those) for ending, those in by_ending.items()}) - found.endings
    why = "".join(f" {name}: {why}" for name, why in [*found.reasons.items()][:_LISTED])
    if not found.sources:
        raise UserError(f"{path} holds no text that can be read: it has {listed(found.skipped)}.{why} {_KINDS}")
    if found.n_bytes < LEAST_BYTES:
        raise UserError(
            f"{path} holds {found.n_bytes:,} bytes of text ({listed(found.endings)}), and a model needs "
            f"{LEAST_BYTES:,} or more: give more text, or fine-tune a model that is there with `gptworks tune`.{why}"
        )
    return found


_KINDS = (
    f"Read are {' '.join((*PROSE, *_RECORD_ENDINGS, *_OTHER_ENDINGS))} and the files of common programming languages, "
    f"also compressed ({' '.join(COMPRESSIONS)})."
)


def listed(endings: Counter[str]) -> str:
    """Return the numbers of files by ending as text, such as `214 .txt, 3 .md`."""
    words = [f"{n:,} {ending or 'without an ending'}" for ending, n in endings.most_common(_LISTED)]
    more = len(endings) - _LISTED
    return ", ".join(words) + (f" and {more} kinds more" if more > 0 else "") or "no files"


def _ending(file: Path) -> str:
    """Return a file's ending, with the ending of its compression, such as `.jsonl.gz`."""
    plain = plain_name(file.name)
    return Path(plain).suffix + file.name[len(plain) :]


def _readable(by_ending: dict[str, list[Path]]) -> tuple[dict[str, list[Path]], list[str]]:
    """Return the files that are UTF-8 text, by ending, and the endings without any text file.

    Raises:
        UserError: some files with an ending are text and others are not; training would stop at the others.
    """
    kept, binary = {}, []
    for ending, files in by_ending.items():
        wrong = [file for file in files if not _is_text(file)]
        if len(wrong) < len(files):
            kept[ending] = files
        else:
            binary.append(ending)
        if 0 < len(wrong) < len(files):
            some = ", ".join(map(str, wrong[:_LISTED])) + (" …" if len(wrong) > _LISTED else "")
            raise UserError(
                f"{some}: {len(wrong):,} of {len(files):,} files {ending} are not UTF-8 text. Convert them to UTF-8 or "
                f"move them away."
            )
    return kept, binary


def _repository(path: Path) -> list[Path]:
    """Return the code files of a git repository; empty for other folders, or if `.gitignore` cannot be read."""
    if not any((path / name).exists() for name in (".git", ".gitignore")):
        return []
    try:
        return Code(CodeSource(type="code", path=str(path))).files()
    except UserError:
        return []


def _sample_of(given: dict[str, Any], files: list[Path]) -> tuple[int, list[str]]:
    """Return the bytes of text in the files, estimated if there is much, and a sample from the beginning."""
    source = OTHERS[given["type"]](TypeAdapter(SourceConfig).validate_python(given))
    sizes = [file.stat().st_size for file in files]
    text_bytes = 0
    sample: list[str] = []
    for number, file in enumerate(files, 1):
        for piece in source.read(file):
            sample.append(piece.text)
            text_bytes += len(piece.text.encode("utf-8"))
            if text_bytes > SAMPLE_BYTES:
                all_bytes = round(text_bytes * sum(sizes) / sum(sizes[:number]))
                return source.size_bytes() or all_bytes, sample
    return text_bytes, sample


def _is_text(file: Path) -> bool:
    """Return whether the check before training would accept a file as text."""
    try:
        with open_file(file) as stream:
            for _ in islice(document(stream, file, n_bytes=unpacked_size(file)), PIECES_CHECKED):
                pass
    except UserError:
        return False
    return True


def _sample(files: list[Path]) -> list[str]:
    """Return the whole text if it is short; else evenly spaced parts that start at the beginning of a line."""
    sizes = [about_unpacked_size(file) for file in files]
    if sum(sizes) <= SAMPLE_BYTES:
        return [_read_text(file) for file in files]
    part, step = SAMPLE_BYTES // SAMPLE_PARTS, sum(sizes) // SAMPLE_PARTS
    parts, before = [], 0
    position = 0
    for file, size in zip(files, sizes, strict=True):
        with open_file(file) as stream:
            while position < before + size:
                if not compression(file.name):  # a compressed stream cannot seek: read its next bytes
                    stream.seek(position - before)
                text = stream.read(part).decode("utf-8", errors="ignore")
                parts.append(text if position == before else text.partition("\n")[2] or text)
                position += step
        before += size
    return [text for text in parts if text]


def _read_text(file: Path) -> str:
    with open_file(file) as stream:
        return stream.read(SAMPLE_BYTES).decode("utf-8", errors="replace")


def _look_at_records(kind: str, file: Path, most_bytes: int) -> tuple[str, int, list[str]]:
    """Return the field that holds a file's text, the bytes of all its text, and about `most_bytes` of it as a sample.

    The bytes are an estimate if the file has more text than the sample.

    Raises:
        UserError: no field is clearly the text, or a record is broken.
    """
    rows = _READ[kind](file)
    first = list(islice(rows, _LOOKED_AT_RECORDS))
    name = _text_field([row for _, row in first])
    sample, text_bytes, seen = [], 0, 0
    for where, row in chain(first, rows):
        sample.append("".join(piece.text for piece in record_document(where, row, name)))
        text_bytes += len(sample[-1].encode("utf-8"))
        written = json.dumps(row, ensure_ascii=False) if kind == "jsonl" else ",".join(map(str, row.values()))
        seen += 1 if kind == "parquet" else len(written.encode("utf-8", "replace")) + 1
        if text_bytes > most_bytes:
            size = count_rows(file) if kind == "parquet" else about_unpacked_size(file)
            return name, round(text_bytes * max(1.0, size / seen)), sample
    return name, text_bytes, sample


_READ: dict[str, Callable[[Path], Iterator[tuple[object, Mapping[str, Any]]]]] = {
    "jsonl": read_jsonl, "csv": read_table, "parquet": read_parquet
}  # fmt: skip


def _text_field(rows: list[Mapping[str, Any]]) -> str:
    """Return the field that holds the text: one with a usual name, or the only one that contains words.

    Raises:
        UserError: no field fits, or several do.
    """
    if not rows:
        raise UserError("it holds no record")
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    strings = [name for name in names if values[name] and all(isinstance(value, str) for value in values[name])]
    usual = [name for wanted in FIELDS for name in strings if name.lower() == wanted]
    words = [name for name in strings if any(_WORD.search(value) for value in values[name])]
    if usual or len(words) == 1:
        return (usual or words)[0]
    raise UserError(
        f"which field is the text is not clear among {listed_names(names)}. Name one `text`, or give the recipe a "
        f"source with this `field`; conversations are for `gptworks tune`."
    )


_WORD = re.compile(r"[^\W\d_]{2}")
