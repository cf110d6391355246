"""Hashes of word sequences, the same in every process."""

import re
from collections.abc import Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(f"[{_CJK}]|[^\\W{_CJK}]+")
_ASCII = {code: " " for code in range(128) if not (chr(code).isalnum() or chr(code) == "_")}
_KNOWN_WORDS = 1 << 20
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_TABLE_BITS = 20
_TABLE_SHIFT = np.uint64(64 - _TABLE_BITS)


def words_of(text: str) -> list[str]:
    """Return the words in lower case, without punctuation; each Chinese character or Japanese kana is a word."""
    return text.lower().translate(_ASCII).split() if text.isascii() else _WORD.findall(text.lower())


def hash_words(words: list[str]) -> Hashes:
    return np.fromiter(map(_HASHES.__getitem__, words), dtype=np.uint64, count=len(words))


def hash_ngrams(words: Hashes, n: int) -> Hashes:
    """Return a hash of each sequence of n neighbouring words; empty if there are fewer than n words."""
    count = max(len(words) - n + 1, 0)
    return combine([words[at : at + count] for at in range(n)])


def combine(columns: Sequence[Hashes]) -> Hashes:
    """Return a hash of each row of a table, [n], given the columns of the table, [n] each."""
    mixed = columns[0].copy()
    for column in columns[1:]:
        mixed *= _FACTOR
        mixed += column
    for shift in (30, 27):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= _MIX
    return mixed ^ (mixed >> np.uint64(31))


class HashSet:
    """A nonempty set of hashes. A table of their highest bits rules out most other hashes without a search."""

    def __init__(self, hashes: Hashes) -> None:
        self.hashes: Hashes = np.unique(hashes)
        self._maybe = np.zeros(1 << _TABLE_BITS, dtype=np.bool_)
        self._maybe[self.hashes >> _TABLE_SHIFT] = True

    def places(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """Return the indices, [k] ascending, of the given hashes, [n], that are in the set."""
        places = np.flatnonzero(self._maybe[hashes >> _TABLE_SHIFT])
        near = hashes[places]
        found: npt.NDArray[np.int64] = places[self.hashes[np.searchsorted(self.hashes[:-1], near)] == near]
        return found


class _WordHashes(dict[str, int]):
    """Computes hashes of words; the first million words of fewer than 32 characters are cached."""

    def __missing__(self, word: str) -> int:
        number = crc32(word.encode("utf-8", "surrogatepass"))
        if len(self) < _KNOWN_WORDS and len(word) < 32:
            self[word] = number
        return number


_HASHES = _WordHashes()
