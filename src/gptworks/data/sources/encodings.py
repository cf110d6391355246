"""Read text files in any encoding as UTF-8.

A byte order mark states the encoding. A file without a mark is UTF-16 if its zero bytes show that, else UTF-8 if its
bytes are valid UTF-8. In any other file, `guessed` chooses the encoding.
"""

import codecs
import io
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from gptworks.data.sources.opening import open_file
from gptworks.errors import UserError
from gptworks.files import stamp

UTF_8 = "utf-8"
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF8, UTF_8),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
"""Byte order marks and their encodings; UTF-32 comes first, since its little-endian mark begins with UTF-16's."""
_CHUNK_BYTES = 1 << 16
_GUESSED_BYTES = 1 << 18
"""Number of bytes, around the first byte that is not UTF-8, from which an encoding is guessed."""


class Encoding(NamedTuple):
    """The encoding of a text file."""

    name: str
    guessed: bool
    """Whether the encoding was guessed from the bytes; False if a mark states it, or the file is valid UTF-8."""
    n_bytes: int
    """Bytes of the text in UTF-8, including the byte order mark of a UTF-8 file."""

    @property
    def note(self) -> str:
        """The encoding in words, for the user; empty for UTF-8."""
        return "" if self.name == UTF_8 else f"read as {self.name}{' (guessed)' if self.guessed else ''}"


def find_encoding(file: Path) -> Encoding:
    """Find the encoding of a text file, which may be compressed, by reading all of it. Raises UserError if the file is
    binary or broken, or no encoding fits; OSError if the file cannot be read."""
    return _find_encoding(file, stamp(file))


@lru_cache(maxsize=1 << 16)
def _find_encoding(file: Path, _: Any) -> Encoding:
    return _found(file, lambda: open_file(file))


def decoded(data: bytes, name: Path) -> str:
    """Decode a text in any encoding, without its byte order mark. Raises UserError if the text is binary, or no
    encoding fits; `name` names the text in the error."""
    encoding = _found(name, lambda: io.BytesIO(data)).name
    return data.decode(encoding).removeprefix("\ufeff")


Open = Callable[[], BinaryIO]
"""A function that opens a file from its beginning."""


def _found(file: Path, opened: Open) -> Encoding:
    with opened() as stream:
        head = stream.read(_CHUNK_BYTES)
    if name := next((name for mark, name in _MARKS if head.startswith(mark)), None):
        return _checked(file, opened, name, is_guessed=False)
    if b"\0" in head and (name := _wide(head)):
        return _checked(file, opened, name, is_guessed=True)
    wrong_at = _first_wrong(opened)
    if wrong_at is None:
        return _checked(file, opened, UTF_8, is_guessed=False)
    guess = guessed(_bytes_around(opened, wrong_at))
    if guess is None:
        raise UserError(f"{file} is not text: its bytes fit no encoding. Leave it out, or convert it to UTF-8.")
    return _checked(file, opened, guess, is_guessed=True)


def guessed(data: bytes) -> str | None:
    """Return the likeliest encoding of bytes that are not UTF-8; None if none fits.

    chardet ranks the encodings. An encoding that gives many words with both Latin and other letters is passed over:
    otherwise, Italian may be read as Macedonian. If chardet is unsure, as for a text of a few words, the result is
    cp1252 if the bytes fit cp1252.
    """
    import chardet

    era = chardet.EncodingEra
    eras = era.MODERN_WEB | era.LEGACY_ISO | era.LEGACY_REGIONAL
    for found in chardet.detect_all(data, encoding_era=eras, ignore_threshold=True):
        if found["encoding"] is not None:
            text = data.decode(found["encoding"], "ignore")
            n_letters = sum(character.isalpha() and not character.isascii() for character in text)
            if 5 * len(_MIXED.findall(text)) <= n_letters:
                is_sure = found["confidence"] >= _SURE or _CP1252_LACKS.search(data)
                name = codecs.lookup(found["encoding"]).name
                return name if is_sure and name != "iso8859-1" else "cp1252"  # cp1252 has all of ISO 8859-1
    return None


_SURE = 0.12
_CP1252_LACKS = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
_MIXED = re.compile(r"[A-Za-z][\u0370-\u06ff]|[\u0370-\u06ff][A-Za-z]")


def open_text(file: Path, encoding: str) -> BinaryIO:
    """Open a text file as a stream of UTF-8 bytes. Reading raises UserError at bytes that are not text in `encoding`.
    With the encoding `UTF_8`, the bytes are not checked."""
    return _as_utf_8(open_file(file), encoding, file)


def _as_utf_8(stream: BinaryIO, encoding: str, file: Path) -> BinaryIO:
    return stream if encoding == UTF_8 else io.BufferedReader(_Decoded(stream, encoding, file), _CHUNK_BYTES)


class _Decoded(io.RawIOBase):
    """A stream of the UTF-8 bytes of a text in another encoding."""

    def __init__(self, stream: BinaryIO, encoding: str, file: Path) -> None:
        self._text, self._file = io.TextIOWrapper(stream, encoding, newline=""), file
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            self._ready = self._ready or self._text.read(_CHUNK_BYTES).encode("utf-8", "replace")
        except UnicodeError as error:
            raise UserError(
                f"{self._file} is not text in {self._text.encoding}, its likeliest encoding ({error}). Leave it out, "
                f"or convert it to UTF-8."
            ) from None
        taken, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    def close(self) -> None:
        self._text.close()
        super().close()


def _checked(file: Path, opened: Open, name: str, is_guessed: bool) -> Encoding:
    """Return the encoding with the text's size, after decoding all of the text. Raises UserError if the file is not
    text in this encoding."""
    n_bytes = 0
    with _as_utf_8(opened(), name, file) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            if found := (_CONTROLS if is_guessed else _NUL).search(chunk):
                raise UserError(
                    f"{file} is binary, not text: 0x{found[0].hex()} at byte {n_bytes + found.start()}. Leave it out, "
                    f"or convert it to UTF-8."
                )
            n_bytes += len(chunk)
    if name == UTF_8 and (at_wrong := _first_wrong(opened)) is not None:
        raise UserError(
            f"{file} begins with the byte order mark of UTF-8, and byte {at_wrong} is not UTF-8. Convert it to UTF-8."
        )
    return Encoding(name, is_guessed, n_bytes)


def _first_wrong(opened: Open) -> int | None:
    """Return the offset of the first byte that is not UTF-8; None if there is none."""
    decoder, n_bytes, chunk = codecs.getincrementaldecoder(UTF_8)(), 0, b"-"
    with opened() as stream:
        while chunk:
            held = len(decoder.getstate()[0])
            chunk = stream.read(_CHUNK_BYTES)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return n_bytes - held + error.start
            n_bytes += len(chunk)
    return None


_NUL, _CONTROLS = re.compile(rb"\0"), re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
"""Bytes that show that a file is not text: `_NUL` if its encoding is known, `_CONTROLS` if the encoding is guessed."""


def _bytes_around(opened: Open, at: int) -> bytes:
    with opened() as stream:
        left = at - _CHUNK_BYTES
        while left > 0 and (skipped := stream.read(min(left, _CHUNK_BYTES))):  # the file may have become shorter
            left -= len(skipped)
        return stream.read(_GUESSED_BYTES)


def _wide(head: bytes) -> str | None:
    """Return utf-16-le or utf-16-be if the zero bytes show mostly Latin text in this encoding; else None."""
    n_even, n_odd, half = head[::2].count(0), head[1::2].count(0), len(head) // 2
    if n_even == 0 and n_odd > 0.4 * half:
        return "utf-16-le"
    return "utf-16-be" if n_odd == 0 and n_even > 0.4 * half else None
