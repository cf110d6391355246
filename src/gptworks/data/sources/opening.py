"""Open files as streams of bytes, unpacked if their names say that they are compressed.

A file may unpack to far more bytes than it has. So files are read as streams, and a decompression bomb is an error.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from gptworks.errors import UserError, importing
from gptworks.files import open_regular

COMPRESSIONS = {".gz": "gzip", ".xz": "xz", ".bz2": "bzip2", ".zst": "zstandard"}
"""Kinds of compression by the ending of a file's name."""
_TARS = {"tgz": "gz", "txz": "xz", "tbz2": "bz2", "tzst": "zst"}

FREE_BYTES = 1 << 28
MOST_RATIO = 1000
"""Maximum ratio of unpacked to packed bytes if over FREE_BYTES are unpacked. The ratio is about 10 for
text, and about 100 for repeated lines."""

_USUAL_RATIO = 3
_CHUNK_BYTES = 1 << 16
_XZ_MEMORY_BYTES = 1 << 28
"""Maximum memory for unpacking xz: four times the needs of files made by `xz -9`."""


def compression(name: str) -> str | None:
    """Return the kind of compression that a file's name states; None if it states none."""
    return COMPRESSIONS.get(Path(_full(name).lower()).suffix)


def plain_name(name: str) -> str:
    """Return the name without the ending of its compression; `.tgz` and the like become `.tar`."""
    return _full(name).rpartition(".")[0] if compression(name) else name


def has_ending(name: str, endings: tuple[str, ...]) -> bool:
    """Return whether a file's name, without the ending of its compression, has one of these endings, ignoring case."""
    return plain_name(name).lower().endswith(tuple(ending.lower() for ending in endings))


def _full(name: str) -> str:
    """Return the name with an ending like `.tgz` written as `.tar.gz`."""
    stem, dot, ending = name.rpartition(".")
    return f"{stem}.tar.{packed}" if dot and (packed := _TARS.get(ending.lower())) else name


def open_file(file: Path) -> BinaryIO:
    """Open a file as a stream of its unpacked bytes. Raises UserError if the file is not a regular file, or the package
    that unpacks it is not installed. Reading raises UserError if the compressed data is broken or a bomb."""
    return unpacked(open_regular(file), file)


def unpacked(stream: BinaryIO, name: Path) -> BinaryIO:
    """Return a stream of the bytes, unpacked if `name` says that they are compressed; see `open_file`."""
    what = compression(name.name)
    return stream if what is None else io.BufferedReader(_Unpacked(stream, what, name), _CHUNK_BYTES)


def read_bounded(stream: BinaryIO, most_bytes: int, where: str, what: str) -> bytes:
    """Return all bytes of a stream. Raises the UserError of `check_size` if there are more than `most_bytes`."""
    data = stream.read(most_bytes + 1)
    check_size(len(data), most_bytes, where, what)
    return data


def check_size(n_bytes: int, most_bytes: int, where: str, what: str) -> None:
    """Raise a UserError, which begins with `where`, if `n_bytes` is above `most_bytes`, the limit for `what`."""
    if n_bytes > most_bytes:
        raise UserError(f"{where}larger than {most_bytes:,} bytes, the limit for {what}. Divide it, or leave it out.")


def unpacked_size(file: Path) -> int:
    """Return the number of bytes that `open_file` yields of a compressed file, by reading it."""
    with open_file(file) as stream:
        return sum(len(chunk) for chunk in iter(lambda: stream.read(_CHUNK_BYTES), b""))


def about_unpacked_size(file: Path) -> int:
    """Return the number of bytes that `open_file` yields, without reading them; estimated if the file is compressed."""
    return file.stat().st_size * (_USUAL_RATIO if compression(file.name) else 1)


def check_ratio(name: Path | str, unpacked_bytes: int, packed_bytes: int) -> None:
    """Raise a UserError at a decompression bomb, whose ratio of unpacked to packed bytes is too high."""
    if unpacked_bytes > max(FREE_BYTES, MOST_RATIO * packed_bytes):
        raise UserError(
            f"{name}: its first {packed_bytes:,} bytes unpack to {unpacked_bytes:,}, and text unpacks to at most "
            f"{MOST_RATIO:,} times its size: this is a bomb, or not text. Leave it out, or unpack it yourself."
        )


class _Unpacked(io.RawIOBase):
    def __init__(self, packed: BinaryIO, what: str, name: Path) -> None:
        self._packed, self._what, self._name = packed, what, name
        self._unpacked_bytes = 0
        self._stream = _OPENERS[what](packed, name)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            n_bytes: int = self._stream.readinto(buffer) or 0
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and error.errno:  # the disk failed, not the data
                raise
            raise UserError(
                f"{self._name}: broken {self._what} data after {self._unpacked_bytes:,} bytes unpacked "
                f"({error}). Get the file again."
            ) from None
        self._unpacked_bytes += n_bytes
        check_ratio(self._name, self._unpacked_bytes, self._packed.tell())
        return n_bytes

    def close(self) -> None:
        if not self.closed:
            self._packed.close()
        super().close()


class _Blocks(io.RawIOBase):
    """A stream of the unpacked bytes of an xz or bzip2 file, which may contain several compressed streams. `new` makes
    a decompressor for each, with a memory limit for xz. The standard library's `LZMAFile` has no memory limit."""

    def __init__(self, packed: BinaryIO, new: Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor]) -> None:
        self._packed, self._new = packed, new
        self._one = new()
        self._begun = False

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._one.eof:
                data = self._one.unused_data or self._packed.read(_CHUNK_BYTES)
                data = data.lstrip(b"\0")  # zeros may follow each compressed stream
                self._one = self._new()
                self._begun = False
            else:
                data = self._packed.read(_CHUNK_BYTES) if self._one.needs_input else b""
            if not data and self._one.needs_input:
                if self._begun:
                    raise EOFError("it ends too early")
                return 0
            self._begun = True
            given = self._one.decompress(data, len(buffer))
            if given:
                buffer[: len(given)] = given
                return len(given)


def _zstandard(packed: BinaryIO, name: Path) -> Any:
    """Return pyarrow's reader, which detects truncated files and takes at most 128 MiB."""
    with importing("pyarrow", "data", f"{name}: unpacking zstandard"):
        import pyarrow as pa
    return pa.CompressedInputStream(pa.PythonFile(packed, "r"), "zstd")


_OPENERS: dict[str, Callable[[BinaryIO, Path], Any]] = {
    "gzip": lambda packed, _: gzip.GzipFile(fileobj=packed),
    "xz": lambda packed, _: _Blocks(packed, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)),
    "bzip2": lambda packed, _: _Blocks(packed, bz2.BZ2Decompressor),
    "zstandard": _zstandard,
}
