"""N-grams of a text in the training data: how often each occurs, and which tokens follow."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptworks.data.batches import Tokens
from gptworks.interpret.hooks import Check, never

LONGEST = 16
"""Number of tokens of the longest n-gram counted."""

_PIECE_TOKENS = 1 << 22


@dataclass(frozen=True)
class NGram:
    """Counts of an n-gram and of its context, which is its first n − 1 tokens, in the training data."""

    n: int
    n_contexts: int
    """Number of times that the context occurs."""
    n_followed: int
    """Number of times that the last token follows the context: the n-gram's count."""
    next_tokens: tuple[tuple[int, int], ...]
    """The most frequent tokens after the context, each with its number of occurrences."""


@dataclass(frozen=True)
class NGrams:
    """The n-grams that end in one token of a text."""

    by_length: tuple[NGram, ...]
    """The n-gram for each n = 1, 2, …, up to the largest n whose context occurs in the data."""
    places: tuple[int, ...]
    """Positions in the data at which the first occurrences of the longest n-gram begin."""
    searched_tokens: int
    """Number of tokens searched, from the beginning of the data."""

    @property
    def longest(self) -> int:
        """Length of the longest n-gram that occurs in the data; 0 if the token does not occur."""
        return max((one.n for one in self.by_length if one.n_followed), default=0)


def find_ngrams(
    training: Tokens,
    ids: Sequence[int],
    *,
    most_places: int = 5,
    n_next: int = 3,
    most_tokens: int = 1 << 30,
    check: Check = never,
) -> NGrams:
    """Count the n-grams that end in the last of `ids`, in the first `most_tokens` tokens of the training data.

    The data is read once, because every match of a longer context is also a match of the shorter contexts.
    """
    *before, token = ids[-LONGEST:]
    before.reverse()
    searched = min(training.n_tokens, most_tokens)
    contexts, followed = [0] * (len(before) + 1), [0] * (len(before) + 1)
    nexts: list[Counter[int]] = [Counter() for _ in contexts]
    places: list[list[int]] = [[] for _ in contexts]
    for start in range(0, searched, _PIECE_TOKENS):
        check()
        first = max(0, start - len(before))
        tokens = training.read(first, min(start + _PIECE_TOKENS, searched) - first)
        ends = np.arange(start - first, len(tokens))  # indices in `tokens` at which n-grams end
        for i in range(len(before) + 1):
            if i:
                ends = ends[ends >= i]
                ends = ends[tokens[ends - i] == before[i - 1]]
            found = tokens[ends]
            hits = ends[found == token]
            contexts[i] += len(ends)
            followed[i] += len(hits)
            counts = np.bincount(found)
            nexts[i].update({one: int(counts[one]) for one in np.flatnonzero(counts).tolist()})
            places[i] += (hits[: most_places - len(places[i])] - i + first).tolist()
            if not len(ends):
                break
    n_found = sum(count > 0 for count in contexts)
    grams = [NGram(i + 1, contexts[i], followed[i], tuple(nexts[i].most_common(n_next))) for i in range(n_found)]
    longest = max((i for i in range(n_found) if followed[i]), default=None)
    return NGrams(tuple(grams), () if longest is None else tuple(places[longest]), searched)
