"""Text that was decoded wrongly."""

import re
from typing import TYPE_CHECKING, Any

from gptworks.data.cleaning.base import Dropped, Filter
from gptworks.errors import not_installed

if TYPE_CHECKING:
    from gptworks.config.cleaning import RepairEncoding

LOST = "\ufffd"
_BOM = "\ufeff"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ASCII_RUN = re.compile("(?<=[\x00-\x7f]{8})[\x00-\x7f]+(?=[\x00-\x7f]{8})")
_CHECKED_CHARACTERS = 1 << 16


class EncodingFilter(Filter):
    """Repairs mojibake with ftfy, line by line, since the lines of a page may be broken in different ways.

    Byte order marks are removed, halves of surrogate pairs joined or replaced by U+FFFD. A document with too much that
    is lost or still wrong is dropped.
    """

    settings: "RepairEncoding"

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        try:
            import ftfy
            from ftfy.badness import BADNESS_RE
        except ImportError:
            raise not_installed("ftfy", "clean", "The filter repair-encoding") from None
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
        if (lost := text.count(LOST)) > most:
            return Dropped("lost characters")
        return Dropped("wrong characters") if lost + wrong > most else text

    def _line(self, line: str) -> str:
        if line.isascii() or not self._wrong.search(line):
            return line
        parts = (line[at : at + _CHECKED_CHARACTERS] for at in range(0, len(line), _CHECKED_CHARACTERS))
        return "".join(self._fix(part, self._config) for part in parts)


def _near_others(text: str) -> str:
    """The characters outside ASCII and those near them: all that mojibake is recognized by, in much less text."""
    return _ASCII_RUN.sub("\n", text)
