"""Filters that repair wrongly decoded text and normalize Unicode."""

import re
import sys
import unicodedata
from functools import lru_cache
from typing import Any

from gptworks.config.cleaning import NormalizeUnicode, RepairEncoding
from gptworks.data.cleaning.base import Dropped, Filter
from gptworks.errors import importing

_LOST = "\ufffd"
_BOM = "\ufeff"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ASCII_RUN = re.compile("(?<=[\x00-\x7f]{8})[\x00-\x7f]+(?=[\x00-\x7f]{8})")
_CHECKED_CHARACTERS = 1 << 16


class EncodingFilter(Filter):
    """Repairs wrongly decoded text (mojibake) with ftfy, line by line, since lines may be broken differently.

    Removes byte order marks. Joins the halves of surrogate pairs, and replaces single halves by U+FFFD. Drops a
    document in which too many characters are lost or still wrong.
    """

    settings: RepairEncoding

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        with importing("ftfy", "clean", "The filter repair-encoding"):
            import ftfy
            from ftfy.badness import BADNESS_RE
        self._fix, self._wrong = ftfy.fix_encoding, BADNESS_RE
        self._config = ftfy.TextFixerConfig(explain=False)

    def apply(self, text: str) -> str | Dropped:
        if text.isascii():
            return text
        if _SURROGATE.search(text):
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        text = text.replace(_BOM, "")
        wrong = 0
        if self._wrong.search(_near_others(text)):
            text = "".join(map(self._line, text.splitlines(keepends=True)))
            wrong = sum(1 for _ in self._wrong.finditer(_near_others(text)))
        most = self.settings.max_lost * len(text)
        if (lost := text.count(_LOST)) > most:
            return Dropped("lost characters")
        return Dropped("wrong characters") if lost + wrong > most else text

    def _line(self, line: str) -> str:
        if line.isascii() or not self._wrong.search(line):
            return line
        parts = (line[at : at + _CHECKED_CHARACTERS] for at in range(0, len(line), _CHECKED_CHARACTERS))
        return "".join(self._fix(part, self._config) for part in parts)


def _near_others(text: str) -> str:
    """Return the characters outside ASCII with their neighbours: less text, but enough to recognize mojibake."""
    return _ASCII_RUN.sub("\n", text)


# ------------------------------------------------------------------------------------------ Unicode normalization

_LINE_ENDS = ("\r\n", "\r", "\x85", "\u2028", "\u2029")
_ASCII_CONTROL = bytes(code for code in range(128) if (code < 32 and chr(code) not in "\t\n") or code == 127)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef\ufeff\ufffe\uffff]+")
_MOST_MARKS = 30
"""Maximum number of combining marks in a row, as in Unicode's Stream-Safe Text Format. Normalization sorts the marks in
quadratic time."""


class UnicodeFilter(Filter):
    """Normalizes text to NFC or NFKC (Unicode Standard Annex 15), and line breaks to line feeds. Removes byte order
    marks, noncharacters, control characters except tabs, and combining marks after the thirtieth in a row."""

    settings: NormalizeUnicode

    def apply(self, text: str) -> str:
        for end in _LINE_ENDS:
            text = text.replace(end, "\n")
        if text.isascii():
            return text.encode("ascii").translate(None, _ASCII_CONTROL).decode("ascii")
        text = _CONTROL.sub("", text)
        return unicodedata.normalize(self.settings.form, _too_many_marks().sub(r"\1", text))


@lru_cache
def _too_many_marks() -> re.Pattern[str]:
    """Return a pattern for runs of more than _MOST_MARKS combining marks; group 1 is the part to keep."""
    marks = [code for code in range(sys.maxunicode + 1) if unicodedata.combining(chr(code))]
    starts = [code for code in marks if not unicodedata.combining(chr(code - 1))]
    ends = [code for code in marks if not unicodedata.combining(chr(code + 1))]
    ranges = "".join(f"{chr(start)}-{chr(end)}" for start, end in zip(starts, ends, strict=True))
    return re.compile(f"([{ranges}]{{{_MOST_MARKS}}})[{ranges}]+")
