"""Find documents that are equal or nearly equal to earlier ones."""

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gptworks.config.cleaning import ExactDuplicates, FilterConfig, NearDuplicates
from gptworks.data.cleaning.ngrams import Hashes, combine, hash_ngrams, hash_words, words_of
from gptworks.errors import importing

_SEED = 1
Verdicts = npt.NDArray[np.uint8]
REASONS = {1: "exact-duplicates", 2: "near-duplicates"}
"""Maps the verdict on a dropped document to the filter that drops it; a kept document has the verdict 0."""


class Duplicates:
    """Finds duplicates by comparing fixed-size signatures of all documents. The first of several duplicates is kept.

    Exact duplicates have the same 16-byte hash of their text. Near duplicates share a band: a group of `rows` MinHashes
    (Broder 1997) of their word sequences. Each band is hashed to 8 bytes, as for FineWeb (Penedo et al. 2024). Two
    documents with the Jaccard similarity s share a band with probability 1 − (1 − s^rows)^bands.
    """

    def __init__(self, settings: tuple[FilterConfig, ...]) -> None:
        """Take a recipe's filters; those that look at one document are ignored. Raises UserError if the library that
        finds near duplicates is not installed."""
        self.exact = any(isinstance(one, ExactDuplicates) for one in settings)
        self.near = next((one for one in settings if isinstance(one, NearDuplicates)), None)
        self._rensa: Any = None
        if self.near:
            with importing("rensa", "clean", "The filter near-duplicates"):
                import rensa
            self._rensa = rensa

    def __bool__(self) -> bool:
        return self.exact or self.near is not None

    @property
    def types(self) -> tuple[str, ...]:
        """Types of the recipe's duplicate filters."""
        return ("exact-duplicates",) * self.exact + ("near-duplicates",) * (self.near is not None)

    @property
    def columns(self) -> int:
        """Number of little-endian uint64 values in a signature; all signatures form an array [documents, columns]."""
        return 2 * self.exact + (self.near.bands if self.near else 0)

    def signature(self, text: str) -> bytes:
        """Return a document's signature, 8 × `columns` bytes, by which it is compared with other documents."""
        found = b""
        if self.exact:
            found = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return found + self._bands(text, self.near).astype("<u8").tobytes() if self.near else found

    def _bands(self, text: str, near: NearDuplicates) -> Hashes:
        words = hash_words(words_of(text))
        sequences = hash_ngrams(words, min(near.ngram, max(len(words), 1)))
        if not len(sequences):
            sequences = np.zeros(1, dtype=np.uint64)
        ends = np.array([0, len(sequences)], dtype=np.uint64)
        permutations = near.bands * near.rows
        matrix = self._rensa.RMinHash.digest_matrix_from_flat_token_hashes(sequences, ends, permutations, _SEED)
        rows = np.array(matrix.to_rows()[0], dtype=np.uint64).reshape(near.bands, near.rows)
        return combine(list(rows.T))

    def verdicts(self, signatures: Hashes) -> Verdicts:
        """Return 0 for each document to keep, else a key of REASONS. A document is dropped if an earlier kept one has
        the same text or shares a band with it.

        Args:
            signatures: [documents, columns]. A memory map suffices: memory holds three columns and the shared hashes.
        """
        verdicts = np.zeros(len(signatures), dtype=np.uint8)
        rows, groups, near_from = self._shared(signatures)
        starts = np.flatnonzero(np.diff(rows, prepend=-1)).tolist()
        taken = bytearray(int(groups.max()) + 1 if len(groups) else 0)
        for start, end in itertools.pairwise([*starts, len(rows)]):
            own = groups[start:end].tolist()
            met = next((group for group in own if taken[group]), None)
            if met is None:
                for group in own:
                    taken[group] = 1
            else:
                verdicts[rows[start]] = 1 if met < near_from else 2
        return verdicts

    def _shared(self, signatures: Hashes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Return two arrays [n], of documents and of the groups that contain them, ascending by document, and the first
        group of near duplicates. Earlier groups have documents with the same hash of the text; this group and all later
        groups have documents with the same hash of a band."""
        rows, groups, number, near_from = [], [], 0, 0
        for columns in self._keys():
            order = np.lexsort([signatures[:, column] for column in columns])
            same = np.ones(max(len(order) - 1, 0), dtype=np.bool_)
            for column in columns:
                values = signatures[:, column][order]
                same &= values[1:] == values[:-1]
            shared = np.concatenate((same, [False])) | np.concatenate(([False], same))
            first = shared & ~np.concatenate(([False], same))
            rows.append(order[shared[: len(order)]])
            groups.append(number + (np.cumsum(first) - 1)[shared])
            number += int(first.sum())
            if len(columns) == 2:
                near_from = number
        if not rows:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0
        all_rows = np.concatenate(rows)
        by_row = np.argsort(all_rows, kind="stable")
        return all_rows[by_row], np.concatenate(groups)[by_row], near_from

    def _keys(self) -> Iterator[tuple[int, ...]]:
        """Yield the columns to compare together: both columns of the text's hash, then each band's single column."""
        if self.exact:
            yield 0, 1
        for column in range(2 * self.exact, self.columns):
            yield (column,)
