"""Whether a document looks like prose."""

import string
import sys
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING

from gptworks.data.cleaning.base import Dropped, Filter, ratio

if TYPE_CHECKING:
    from gptworks.config.cleaning import GopherQuality

_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_ELLIPSES = ("...", "…")
_BULLETS = ("•", "-")


class GopherQualityFilter(Filter):
    """The quality rules of Gopher (Rae et al. 2021, "Scaling Language Models", appendix A.1.1), in the paper's order.

    Words lie between white space. Those of punctuation alone count as words where symbols and letters are counted, and
    not in the number of words and their mean length, as in datatrove.
    """

    settings: "GopherQuality"

    def apply(self, text: str) -> str | Dropped:
        rules = self.settings
        words = text.split()
        n_words = len(words)
        mixed = [word for word in words if not word.isalpha()]
        symbols = [word for word in mixed if not word.strip(string.punctuation if word.isascii() else punctuation())]
        n_spoken = n_words - len(symbols)
        if n_spoken < rules.min_words:
            return Dropped("few words")
        if n_spoken > rules.max_words:
            return Dropped("many words")
        if not n_words:
            return text
        mean_length = ratio(sum(map(len, words)) - sum(map(len, symbols)), n_spoken)
        if mean_length < rules.min_mean_word_length:
            return Dropped("short words")
        if mean_length > rules.max_mean_word_length:
            return Dropped("long words")
        if ratio(text.count("#"), n_words) > rules.max_symbols_per_word:
            return Dropped("hashes")
        if ratio(sum(map(text.count, _ELLIPSES)), n_words) > rules.max_symbols_per_word:
            return Dropped("ellipses")
        lines = text.splitlines()
        if ratio(sum(line.lstrip().startswith(_BULLETS) for line in lines), len(lines)) > rules.max_bullet_lines:
            return Dropped("bullets")
        if ratio(sum(line.rstrip().endswith(_ELLIPSES) for line in lines), len(lines)) > rules.max_ellipsis_lines:
            return Dropped("lines that end in an ellipsis")
        without_letters = sum(not any(map(str.isalpha, word)) for word in mixed)
        if ratio(n_words - without_letters, n_words) < rules.min_alphabetic_words:
            return Dropped("words without letters")
        if len(_STOP_WORDS.intersection(words)) < rules.min_stop_words:
            return Dropped("few stop words")
        return text


@lru_cache
def punctuation() -> str:
    """Unicode's punctuation, and the symbols of ASCII."""
    found = (chr(code) for code in range(128, sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == "P")
    return string.punctuation + "".join(found)
