"""The interface of sources, which read documents as streams of pieces of bounded size.

To add a kind of source, write its settings class in `gptworks.config.sources`, and a subclass of `Source` in a
module of this package.
"""

import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from gptworks.data.sources.files import contents, local_files
from gptworks.data.sources.opening import about_unpacked_size
from gptworks.data.workers import batches_of
from gptworks.errors import UserError
from gptworks.files import sha256_file

PIECE_BYTES = 1 << 20
UNIT_BYTES = 1 << 24
"""Approximate size of the units in which a large file is read; a multiple of PIECE_BYTES."""
PIECES_CHECKED = 20
"""Number of pieces of each file that `check` reads."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document, at least one character and at most 2 × PIECE_BYTES of UTF-8. Most documents are a single
    piece."""

    text: str
    starts_document: bool
    ends_document: bool
    document_bytes: int
    """UTF-8 size of the whole document."""
    before_bytes: int = 0
    """UTF-8 size of the document's pieces before this one."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a source that can be read separately: whole documents of a file, or neighbouring pieces of a file that
    is one document."""

    file: Path
    size_bytes: int = 0
    """Approximate size of the unit's text, or of the part of the file that holds the text; 0 if neither is known."""
    start: int = 0
    """Index of the unit's first byte, row group or archive member in the file, or of its first file in a dataset,
    depending on the source."""
    end: int | None = None
    """One after the unit's last byte, row group, member or file; None if the unit ends with the file or dataset."""


class Source:
    """A source of records or text: local files, downloads with stated sha256, or a dataset of the Hugging Face hub.

    A subclass annotates `settings` with its settings class, and overrides `read_unit`. It also overrides `units_of` if
    it reads files in parts.
    """

    settings: Any
    endings: ClassVar[tuple[str, ...]] = ()
    """File name endings to read in a folder."""
    whole_files: ClassVar[bool] = False
    """Whether each whole file is one document, so that documents are counted without reading files."""
    size_known: ClassVar[bool] = True
    """Whether the files' sizes determine the amount of text."""
    files_checked: ClassVar[int | None] = None
    """Number of files that `check` reads; None for all."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def files(self) -> list[Path]:
        """Return the local files, sorted, or fetch the downloads and return their files. The list is empty only if the
        source leaves out files that cannot be read. Raises UserError if the source has no file, or a link in its folder
        leads out of the folder; RunError if a download failed."""
        return local_files(self.settings, self.endings)

    def units(self) -> list[Unit]:
        """Return the units of all files, in order; several processes may read them in parallel. The units depend only
        on the files and the settings."""
        return [unit for file in self.files() for unit in self.units_of(file)]

    def units_of(self, file: Path) -> Iterable[Unit]:
        return [Unit(file, about_unpacked_size(file))]

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        """Yield the documents of a unit, in pieces. Raises a UserError that names the broken file and the place."""
        raise NotImplementedError

    def read(self, file: Path) -> Iterator[Piece]:
        """Yield the documents of a file, in pieces. Raises UserError like `read_unit`."""
        return self.read_unit(Unit(file))

    def opening(self, unit: Unit) -> Piece:
        """Return the first piece of a unit's file. Call this only if the file is one document and the unit begins
        inside it. Raises UserError if the file cannot be read."""
        opening = next(self.read(unit.file), None)
        if opening is None:
            raise UserError(f"{unit.file} changed while it was read. Run it again.")
        return opening

    def documents(self) -> Iterator[Piece]:
        """Yield the documents of all units, in pieces."""
        for unit in self.units():
            yield from self.read_unit(unit)

    def check(self) -> None:
        """Find mistakes before long work: missing files, and errors near the beginning of each file, or of the first
        `files_checked` files. Raises UserError if the source has a mistake, such as a local file whose sha256 is not
        the stated one; RunError if a download failed."""
        for file in self.files()[: self.files_checked]:
            self.check_sum(file)
            for _ in islice(self.read(file), PIECES_CHECKED):
                pass

    def check_sum(self, file: Path) -> None:
        """Raise a UserError if a local file's sha256 is not the stated one."""
        stated = self.settings.sha256
        if self.settings.path and stated and (actual := sha256_file(file)) != stated:
            raise UserError(
                f"{file}: its sha256 is {actual} and the recipe states {stated}. "
                f"These are other bytes: get the right file, or correct the recipe."
            )

    def signature(self) -> list[list[Any]]:
        """Return lists, for JSON, that identify the source's text without the files' paths, usually by their sha256."""
        return [["sha256", one] for one in getattr(self.settings, "sums", ())] or contents(self.files())

    def size_bytes(self) -> int | None:
        """Return the approximate size of the text in bytes; None if it is unknown before files are fetched or read."""
        is_local = self.size_known and getattr(self.settings, "path", "") is not None
        return sum(map(about_unpacked_size, self.files())) if is_local else None


def document(
    stream: BinaryIO, file: Path | None = None, start: int = 0, end: int | None = None, n_bytes: int | None = None
) -> Iterator[Piece]:
    """Yield the UTF-8 bytes of a stream as the pieces of one document, without a byte order mark.

    Args:
        file: the file to name in errors; None if the bytes are known to be text.
        start, end: read only the pieces between these two offsets, which are from `borders`. A stream with `n_bytes`
            is read from its beginning, whatever `start` is.
        n_bytes: the number of bytes; required if the stream cannot seek.

    Raises:
        UserError: the bytes are not text, or their number is not `n_bytes`.
    """
    head = stream.read(len(_BOM))
    first = len(_BOM) if head == _BOM else 0
    if n_bytes is None:
        n_bytes = stream.seek(0, os.SEEK_END)
        offset_bytes = stream.seek(max(start, first))
        data = stream.read((first - offset_bytes) % PIECE_BYTES + PIECE_BYTES)
    else:
        offset_bytes, head = first, head[first:]
        data = head + stream.read(PIECE_BYTES - len(head))
        _check_size(file, n_bytes, first + len(data), not data)
    document_bytes = n_bytes - first
    while data and (end is None or offset_bytes < end):
        following = stream.read(PIECE_BYTES)
        _check_size(file, n_bytes, offset_bytes + len(data) + len(following), not following)
        cut = _cut(data) if following else len(data)
        text = data[:cut].decode("utf-8") if file is None else decoded(data[:cut], offset_bytes, file)
        yield Piece(text, offset_bytes == first, not following, document_bytes, offset_bytes - first)
        data, offset_bytes = data[cut:] + following, offset_bytes + cut


def _check_size(file: Path | None, stated: int, found: int, ends: bool) -> None:
    if found > stated or (ends and found < stated):
        raise UserError(
            f"{file}: its stated size is {stated:,} bytes, and it has {'only' if found < stated else 'at least'} "
            f"{found:,}. Get it again."
        )


def text_document(text: str) -> Iterator[Piece]:
    """Yield a text as the pieces of one document, like `document`."""
    data = text.encode("utf-8")
    if len(data) > PIECE_BYTES:
        yield from document(io.BytesIO(data))
    elif rest := text.removeprefix(_BOM.decode("utf-8")):
        yield Piece(rest, True, True, len(data) - len(_BOM) * (len(rest) < len(text)))


def borders(stream: BinaryIO) -> Iterator[int]:
    """Yield byte offsets, about UNIT_BYTES apart, at which pieces of `document` begin. Each offset follows the last
    line break in a block of PIECE_BYTES bytes; `document` ends a piece there, wherever the reading began."""
    first = len(_BOM) if stream.read(len(_BOM)) == _BOM else 0
    for at in range(first + UNIT_BYTES, stream.seek(0, os.SEEK_END), UNIT_BYTES):
        stream.seek(at - PIECE_BYTES)
        if newline := stream.read(PIECE_BYTES).rfind(b"\n") + 1:
            yield at - PIECE_BYTES + newline


def units_between(file: Path, places: Iterable[int]) -> Iterator[Unit]:
    """Yield the units of a file, given the byte offsets at which all units but the first begin."""
    for start, end in pairwise((0, *places, None)):
        assert start is not None
        yield Unit(file, (file.stat().st_size if end is None else end) - start, start, end)


def grouped(file: Path, sizes: Iterable[int]) -> Iterator[Unit]:
    """Yield units of neighbouring parts of a file, about UNIT_BYTES each, given the parts' sizes in bytes."""
    for parts in batches_of(enumerate(sizes), lambda part: part[1], UNIT_BYTES):
        yield Unit(file, sum(size for _, size in parts), parts[0][0], parts[-1][0] + 1)


def _cut(data: bytes) -> int:
    """Return the length in bytes of the piece at the beginning of `data`. The piece ends after the last line break, or,
    without a line break, before the last character, which may be incomplete."""
    if newline := data.rfind(b"\n") + 1:
        return newline
    last = len(data) - 1
    while last > len(data) - 4 and data[last] & 0xC0 == 0x80:  # this byte continues a character
        last -= 1
    return last


def decoded(data: bytes, offset_bytes: int, file: Path) -> str:
    """Decode UTF-8 bytes, which begin at `offset_bytes` of a file. Raises UserError if the bytes are not text."""
    fix = "Leave it out, convert it to UTF-8 text, or use a source of type files, which reads any encoding."
    if (nul := data.find(0)) >= 0:
        raise UserError(f"{file} is binary, not text: a NUL byte at byte {offset_bytes + nul}. {fix}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = offset_bytes + error.start
        raise UserError(f"{file} is not UTF-8 text: byte 0x{data[error.start]:02x} at byte {at}. {fix}") from None
