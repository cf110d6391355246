"""JSON files that hold one list of objects, each of which has a field that is the text. They are read as they are
needed: what is in memory is one object."""

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gptworks.config import JSONSource
from gptworks.data.sources.opening import open_file
from gptworks.data.sources.records import MOST_LINE_BYTES, Fields
from gptworks.errors import UserError

_CHUNK_BYTES = 1 << 16
_SPACE = " \t\r\n"
_LONGEST_WORD = 16
"""Longer than what JSON can be cut off in, but for a string."""


class JSON(Fields):
    """One list of objects, or an object that has the list under a key."""

    settings: JSONSource
    endings = (".json",)

    def records(self, file: Path) -> Iterator[tuple[object, Mapping[str, Any]]]:
        return read_json(file, self.settings.records)


def read_json(file: Path, key: str | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object of the list, and its place.

    Args:
        key: the list is under it; None: the file is the list.

    Raises:
        UserError: there is no such list, or something in it is no object.
    """
    with open_file(file) as stream:
        text = _Text(file, stream)
        first = text.peek()
        if key is not None or first == "{":
            text.take("{", "an object" if key is not None else "a list of objects")
            _find(text, file, key)
        text.take("[", "a list of objects")
        number = 0
        while text.peek() != "]":
            if number:
                text.take(",", "a comma or the end of the list")
            where = f"{file}, record {number}"
            record = text.value(where)
            if not isinstance(record, dict):
                raise UserError(f"{where}: a {type(record).__name__}, not an object. The list must hold objects.")
            yield where, record
            number += 1
        if key is None:
            text.take("]", "the end of the list")
            if text.peek():
                raise UserError(f"{file}: something follows the list. If each line is a record, use type=jsonl.")


def _find(text: "_Text", file: Path, key: str | None) -> None:
    """Go to the value of an object's key."""
    names: list[str] = []
    while text.peek() != "}":
        if names:
            text.take(",", "a comma or the end of the object")
        name = text.value(f"{file}, the name of a key")
        text.take(":", "a colon")
        if name == key:
            return
        if key is None and text.peek() == "[":
            raise UserError(f"{file} holds an object, not a list: set the source's `records` to `{name}`, its list.")
        text.value(f"{file}, the value of `{name}`")
        names.append(str(name))
    listed = ", ".join(names[:10]) or "none"
    raise UserError(f"{file} holds an object whose keys are {listed}: set the source's `records` to that of the list.")


class _Text:
    """The text of a JSON file, of which no more than one value is held."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream
        self._held, self._at = "", 0
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._ended = False
        self._json = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self._at < len(self._held) and self._held[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._held) or not self._read():
                return self._held[self._at : self._at + 1]

    def take(self, character: str, what: str) -> None:
        found = self.peek()
        if found != character:
            raise UserError(f"{self._file}: {what} is expected where {found!r} stands. Check that it is JSON.")
        self._at += 1

    def value(self, where: str) -> Any:
        """The next value, whole."""
        self.peek()
        self._held, self._at = self._held[self._at :], 0
        tried = 0
        while True:
            if len(self._held) >= 2 * tried or self._ended:  # so that a large value is not tried too often
                tried = len(self._held)
                try:
                    value, end = self._json.raw_decode(self._held)
                    if end < len(self._held) or self._ended:  # else a number may go on
                        self._at = end
                        return value
                except RecursionError:
                    raise UserError(f"{where}: values inside values, too deep to be read.") from None
                except json.JSONDecodeError as error:
                    cut_off = error.msg.startswith("Unterminated") or error.pos > len(self._held) - _LONGEST_WORD
                    if self._ended or not cut_off:
                        raise UserError(f"{where}: not JSON: {error.msg}, at its character {error.pos:,}.") from None
            if len(self._held) > MOST_LINE_BYTES:
                raise UserError(
                    f"{where}: larger than {MOST_LINE_BYTES:,} characters, which is what a value may have, or a "
                    f"quotation mark is never closed. Divide its text into several records."
                )
            self._read()

    def _read(self) -> bool:
        """Hold more of the file; False at its end."""
        if self._ended:
            return False
        data = self._stream.read(_CHUNK_BYTES)
        self._ended = not data
        try:
            self._held += self._decode(data, self._ended)
        except UnicodeDecodeError as error:
            raise UserError(f"{self._file} is not UTF-8 text ({error}). Convert it to UTF-8.") from None
        return not self._ended
