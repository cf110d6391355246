"""What a kind of source is, and the documents that it gives: a stream of pieces of bounded size.

To add one, write its settings in `gptworks.config.data`, a subclass of `Source` in a file here, and an entry in
`choose.SOURCES`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from gptworks.data.sources.files import local_files
from gptworks.errors import UserError
from gptworks.files import sha256_file

PIECE_BYTES = 1 << 20
PIECES_CHECKED = 20
"""Of each file, before long work."""
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document, at most 2 × PIECE_BYTES long and never empty. Most documents are one piece."""

    text: str
    starts_document: bool
    ends_document: bool
    document_bytes: int
    """UTF-8 size of the whole document."""


class Source:
    """Local files, or a download with a stated sha256. Others override what differs."""

    settings: Any
    endings: ClassVar[tuple[str, ...]] = ()
    """Of the files that are read of a folder."""
    whole_files = False
    """Whether each file is one document."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def files(self) -> list[Path]:
        """At least one, sorted; a download is fetched first.

        Raises:
            UserError: there are none.
            RunError: a download failed.
        """
        return local_files(self.settings, self.endings)

    def read(self, file: Path) -> Iterator[Piece]:
        """The documents of one of the files.

        Raises:
            UserError: it is broken; the message names the file and the place.
        """
        raise NotImplementedError

    def documents(self) -> Iterator[Piece]:
        """The documents of all files."""
        for file in self.files():
            yield from self.read(file)

    def check(self) -> None:
        """Find mistakes before long work: what is missing, and what is wrong near the beginning of each file.

        Raises:
            UserError: there is one, such as a local file whose sha256 is not the one stated.
        """
        for file in self.files():
            stated = self.settings.sha256
            if self.settings.path and stated and (actual := sha256_file(file)) != stated:
                raise UserError(
                    f"{file}: its sha256 is {actual} and the recipe states {stated}. "
                    f"These are other bytes: get the right file, or correct the recipe."
                )
            for _ in islice(self.read(file), PIECES_CHECKED):
                pass

    def signature(self) -> list[list[Any]]:
        """What shows, without reading the text, whether it has changed, as JSON."""
        return [["sha256", self.settings.sha256]] if self.settings.sha256 else stamps(self.files())

    def size_bytes(self) -> int | None:
        """Of the files; None where it is unknown before they are fetched."""
        return total_size(self.files()) if getattr(self.settings, "path", None) else None


def stamps(files: list[Path]) -> list[list[Any]]:
    """(path, size, mtime_ns) of each file."""
    stats = ((file, file.stat()) for file in files)
    return [[file.as_posix(), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def total_size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def document(stream: BinaryIO, file: Path | None = None) -> Iterator[Piece]:
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
