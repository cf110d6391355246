"""Whether a document repeats itself."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gptworks.data.cleaning.base import Dropped, Filter, ratio

if TYPE_CHECKING:
    from gptworks.config.cleaning import GopherRepetition

_PARAGRAPHS = re.compile("\n{2,}")
_LINES = re.compile("\n+")
Numbers = npt.NDArray[np.int64]


class GopherRepetitionFilter(Filter):
    """The repetition rules of Gopher (Rae et al. 2021, "Scaling Language Models", table A1).

    Of repeated sequences of words, each is counted but the first; sequences that overlap are counted once.
    """

    settings: "GopherRepetition"

    def apply(self, text: str) -> str | Dropped:
        rules = self.settings
        if not text.strip():
            return Dropped("empty")
        paragraphs = _PARAGRAPHS.split(text.strip())
        number, characters = repeated(paragraphs)
        if ratio(number, len(paragraphs)) > rules.max_duplicate_paragraphs:
            return Dropped("repeated paragraphs")
        if ratio(characters, len(text)) > rules.max_duplicate_paragraph_characters:
            return Dropped("characters in repeated paragraphs")
        lines = _LINES.split(text)
        number, characters = repeated(lines)
        if ratio(number, len(lines)) > rules.max_duplicate_lines:
            return Dropped("repeated lines")
        if ratio(characters, len(text)) > rules.max_duplicate_line_characters:
            return Dropped("characters in repeated lines")
        return self._ngrams(text) or text

    def _ngrams(self, text: str) -> Dropped | None:
        words, most = _Words(text.split()), self.settings
        for n, limit in enumerate((1.0, *most.max_top_ngram, *most.max_duplicate_ngrams), 1):
            if not words.extend() or (n >= 5 and not words.repeat):
                return None
            if 2 <= n <= 4 and ratio(words.top_characters(), len(text)) > limit:
                return Dropped(f"one sequence of {n} words")
            if n >= 5 and ratio(words.repeated_characters(), len(text)) > limit:
                return Dropped(f"repeated sequences of {n} words")
        return None


def repeated(parts: Sequence[str]) -> tuple[int, int]:
    """How many parts equal an earlier one, and their characters."""
    seen: set[str] = set()
    number = characters = 0
    for part in parts:
        if part in seen:
            number += 1
            characters += len(part)
        else:
            seen.add(part)
    return number, characters


class _Words:
    """The sequences of n words that occur more than once, for n from 1 on.

    A sequence that occurs once is part of no longer one that occurs twice. In most texts few are left after some words,
    so the first steps take most of the time.
    """

    def __init__(self, words: list[str]) -> None:
        known: dict[str, int] = {}
        self._ids = np.array([known.setdefault(word, len(known)) for word in words], dtype=np.int64)
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        self._ends = np.concatenate(([0], np.cumsum(lengths)))  # characters before each word
        self._n = 0
        self._starts = np.arange(len(words))  # of sequences that occur more than once, ascending
        self._groups: Numbers = np.zeros(len(words), dtype=np.int64)  # which of them are equal
        self._top = (0, 1)  # where the most frequent sequence begins first, and how often it occurs

    def extend(self) -> bool:
        """Go on to sequences that are one word longer. False: there is none of that length."""
        self._n += 1
        if len(self._ids) < self._n:
            return False
        inside = int(np.searchsorted(self._starts, len(self._ids) - self._n, side="right"))
        starts = self._starts[:inside]
        keys = (
            self._groups[:inside] * len(self._ids) + self._ids[starts + self._n - 1]
        )  # below the words' square: exact
        order = np.argsort(keys, kind="stable")
        in_order = keys[order]
        first = np.concatenate(([0], np.flatnonzero(in_order[1:] != in_order[:-1]) + 1))
        counts = np.concatenate((first[1:], [inside])) - first
        if (most := int(counts.max())) <= 1:
            self._top, self._starts, self._groups = (0, 1), starts[:0], order[:0]
            return True
        self._top = int(starts[order[np.repeat(counts == most, counts)].min()]), most
        groups = np.empty_like(order)
        groups[order] = np.repeat(np.where(counts > 1, np.arange(len(counts)), -1), counts)
        again = groups >= 0
        self._starts, self._groups = starts[again], groups[again]
        return True

    @property
    def repeat(self) -> bool:
        """Whether a sequence occurs more than once."""
        return len(self._starts) > 0

    def top_characters(self) -> int:
        """Characters of the most frequent sequence, spaces within it included, times its number; of several, the one
        that comes first."""
        start, number = self._top
        return (self._characters(start) + self._n - 1) * number

    def repeated_characters(self) -> int:
        """Characters of the words in sequences that occurred before."""
        seen: set[int] = set()
        total = free = 0
        for start, group in zip(self._starts.tolist(), self._groups.tolist(), strict=True):
            if start < free:  # inside a sequence that was counted
                continue
            if group in seen:
                total += self._characters(start)
                free = start + self._n
            else:
                seen.add(group)
        return total

    def _characters(self, start: int) -> int:
        return int(self._ends[start + self._n] - self._ends[start])
