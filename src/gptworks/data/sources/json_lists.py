"""Sources of JSON files that hold a list of objects. One field of each object is the text. Files are streamed: memory
holds one object."""

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gptworks.config.sources import JSONSource
from gptworks.data.sources.base import Unit
from gptworks.data.sources.opening import open_file
from gptworks.data.sources.records import MOST_LINE_BYTES, Fields
from gptworks.errors import UserError
from gptworks.json_files import without_repeats

_CHUNK_BYTES = 1 << 16
_SPACE = " \t\r\n"
_LONGEST_WORD = 16
"""A JSON error within this many characters of the end of the text read so far may come from a token cut off there."""


class JSON(Fields):
    """A source of JSON files that hold a list of objects, or an object with such a list under a key."""

    settings: JSONSource
    endings = (".json",)

    def records(self, unit: Unit) -> Iterator[tuple[str, Mapping[str, Any]]]:
        return read_json(unit.file, self.settings.records)


def read_json(
    file: Path, key: str | None = None, opened: BinaryIO | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place (file and number) of each object in the list under `key`, and the object. If `key` is None, the
    file is the list. `read_lines` describes `opened`. Raises UserError if the file is not JSON or has no such list, or
    an item is not an object or is too large."""
    with opened or open_file(file) as stream:
        text = _Text(file, stream)
        if key is not None or text.peek() == "{":
            text.take("{", "an object" if key is not None else "a list of objects")
            _find(text, file, key)
        text.take("[", "a list of objects")
        number = 0
        while text.peek() != "]":
            if number:
                text.take(",", "a comma or the end of the list")
            where = f"{file}, record {number + 1}"
            record = text.value(where)
            if not isinstance(record, dict):
                raise UserError(f"{where}: a {type(record).__name__}, not an object. The list must hold objects.")
            yield where, record
            number += 1
        text.take("]", "the end of the list")
        if key is None and text.peek():
            raise UserError(f"{file}: there is more text after the list. {_LINES}")


def _find(text: "_Text", file: Path, key: str | None) -> None:
    """Move `text` to the value of `key` in the file's object, whose `{` has been taken. Raises UserError if the object
    lacks `key`, or `key` is None."""
    names: list[str] = []
    while text.peek() != "}":
        if names:
            text.take(",", "a comma or the end of the object")
        names.append(text.value(f"{file}, the name of a key"))
        text.take(":", "a colon")
        if names[-1] == key:
            return
        if key is None and text.peek() == "[":
            raise UserError(
                f"{file} holds an object, not a list. A source of type json reads the list in it if its `records` is "
                f"`{names[-1]}`."
            )
        text.value(f"{file}, the value of `{names[-1]}`")
    listed = ", ".join(map(str, names[:10])) or "none"
    raise UserError(
        f"{file} holds an object with the keys {listed}, not a list. A source of type json reads the list under a key "
        f"if its `records` names the key. {_LINES}"
    )


_LINES = "If each line is a record, name the file .jsonl, and use type=jsonl for texts."


class _Text:
    """The text of a JSON file, read as a stream. Memory holds one value."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream
        self._held, self._at = "", 0
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._ended = False
        self._json = json.JSONDecoder(object_pairs_hook=without_repeats)

    def peek(self) -> str:
        """Return the next character that is not white space, without taking it; empty at the end."""
        while True:
            while self._at < len(self._held) and self._held[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._held) or self._ended:
                return self._held[self._at : self._at + 1]
            self._read()

    def take(self, character: str, what: str) -> None:
        found = self.peek()
        if found != character:
            raise UserError(f"{self._file}: {what} is expected instead of {found!r}. Check that it is JSON.")
        self._at += 1

    def value(self, where: str) -> Any:
        """Read and return the next JSON value."""
        self.peek()
        self._held, self._at = self._held[self._at :], 0
        while True:
            try:
                value, end = self._json.raw_decode(self._held)
                if end < len(self._held) or self._ended:  # else, a number may continue in unread text
                    self._at = end
                    return value
            except RecursionError:
                raise UserError(f"{where}: values are nested too deeply.") from None
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated") or error.pos > len(self._held) - _LONGEST_WORD
                if self._ended or not cut_off:
                    raise UserError(f"{where}: not JSON: {error.msg}, at its character {error.pos:,}.") from None
            except ValueError as error:
                raise UserError(f"{where}: {error}.") from None
            if len(self._held) > MOST_LINE_BYTES:
                raise UserError(
                    f"{where}: larger than {MOST_LINE_BYTES:,} characters, the limit for a value, or a quotation mark "
                    f"is never closed. Divide its text into several records."
                )
            self._read(len(self._held))  # doubles the held text, so that a large value is parsed only a few times

    def _read(self, n_bytes: int = 0) -> None:
        """Read more of the file: at least `n_bytes`, unless the file ends."""
        data = self._stream.read(max(n_bytes, _CHUNK_BYTES))
        self._ended = not data
        try:
            self._held += self._decode(data, self._ended)
        except UnicodeDecodeError as error:
            raise UserError(f"{self._file} is not UTF-8 text ({error}). Convert it to UTF-8.") from None
