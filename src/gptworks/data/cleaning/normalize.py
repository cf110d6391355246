"""One spelling of the same text."""

import re
import sys
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING

from gptworks.data.cleaning.base import Filter

if TYPE_CHECKING:
    from gptworks.config.cleaning import NormalizeUnicode

_LINE_ENDS = ("\r\n", "\r", "\x85", "\u2028", "\u2029")
_ASCII_CONTROL = bytes(code for code in range(128) if (code < 32 and chr(code) not in "\t\n") or code == 127)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef\ufeff\ufffe\uffff]+")
_MOST_MARKS = 30
"""On one character, as in Unicode's Stream-Safe Text Format: sorting a longer run takes quadratic time."""


class UnicodeFilter(Filter):
    """NFC or NFKC (Unicode Standard Annex 15). Control characters but tabs and line breaks are removed, and byte order
    marks; of more than 30 combining marks in a row, those after the thirtieth."""

    settings: "NormalizeUnicode"

    def apply(self, text: str) -> str:
        for end in _LINE_ENDS:
            text = text.replace(end, "\n")
        if text.isascii():
            return text.encode("ascii").translate(None, _ASCII_CONTROL).decode("ascii")
        text = _CONTROL.sub("", text)
        return unicodedata.normalize(self.settings.form, _too_many_marks().sub(r"\1", text))


@lru_cache
def _too_many_marks() -> re.Pattern[str]:
    """A run of combining marks, the first group of which is kept."""
    marks = [code for code in range(sys.maxunicode + 1) if unicodedata.combining(chr(code))]
    starts = [code for code in marks if not unicodedata.combining(chr(code - 1))]
    ends = [code for code in marks if not unicodedata.combining(chr(code + 1))]
    ranges = "".join(f"{chr(start)}-{chr(end)}" for start, end in zip(starts, ends, strict=True))
    return re.compile(f"([{ranges}]{{{_MOST_MARKS}}})[{ranges}]+")
