"""Rows of a batch for display: each text's tokens, the mask of learned tokens, and the tokens' documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.data.permutation import Int64s


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document, as a part of a `Row`."""

    document: int
    """Index of the document in the split, from 0."""
    first: int
    """Index of the first token in the document."""
    at: int
    """Index of the first token in `Row.ids`."""
    begins_text: bool = True
    """Whether the piece begins a text. Attention does not reach from a text to the tokens before it."""


@dataclass(frozen=True)
class Row:
    """A row of a batch. `ids` are the inputs of each text, and the text's last target if the target is learned."""

    inputs: Tensor
    """Input tokens, int64 [T]; targets and positions have the same type and shape."""
    targets: Tensor
    positions: Tensor | None
    ids: Int64s
    """The tokens to show, [n]."""
    target_of: Int64s
    """Index of each token among the targets, [n]; −1: the token is not predicted."""
    pieces: tuple[Piece, ...]
    padding: int
    """Number of padding inputs at the end of the row."""
    answer: Literal["chosen", "rejected"] | None = None
    """The answer that ends the row; None: the row is not from a preference pair."""

    @property
    def learned(self) -> npt.NDArray[np.bool_]:
        """Whether each token is a target that counts in the loss, [n]."""
        counts: npt.NDArray[np.bool_] = self.targets.numpy()[self.target_of] != IGNORED
        return counts & (self.target_of >= 0)

    @classmethod
    def of(
        cls,
        inputs: Tensor,
        targets: Tensor,
        positions: Tensor | None,
        texts: Sequence[tuple[int, Sequence[Piece]]],
        answer: Literal["chosen", "rejected"] | None = None,
    ) -> Self:
        """Return a row of these texts in order. `texts` has the number of inputs and the pieces of each text. Here, a
        piece's `at` is an index in its text."""
        ids, places = [inputs[:0]], [np.empty(0, dtype=np.int64)]
        pieces: list[Piece] = []
        at = shown = 0
        for n_inputs, of_text in (text for text in texts if text[0] > 0):
            pieces += [Piece(one.document, one.first, shown + one.at, one.at == 0) for one in of_text]
            end = at + n_inputs
            ends_learned = bool(targets[end - 1] != IGNORED)
            ids += [inputs[at:end], *([targets[end - 1 : end]] if ends_learned else [])]
            places += [np.array([-1]), np.arange(at, end - 1 + ends_learned)]
            at, shown = end, shown + n_inputs + ends_learned
        return cls(
            inputs, targets, positions, torch.cat(ids).numpy(), np.concatenate(places), tuple(pieces),
            len(inputs) - at, answer,
        )  # fmt: skip

    def part(self, first: int, n: int) -> Self:
        """Return n inputs from `first` on as a new row. The original row must hold a single text."""
        ends = [*(one.at for one in self.pieces[1:]), len(self.ids)]
        pieces = [
            Piece(one.document, one.first + max(first - one.at, 0), max(one.at - first, 0))
            for one, end in zip(self.pieces, ends, strict=True)
            if first < end and one.at <= first + n
        ]
        part = slice(first, first + n)
        return self.of(self.inputs[part], self.targets[part], None, [(n, pieces)])


def pieces_of(starts: Int64s, first: int, n: int) -> list[Piece]:
    """Return the pieces of documents in n tokens of a split from `first` on, given the documents' starts."""
    begin, end = np.searchsorted(starts, [first, first + n - 1], side="right").tolist()
    return [
        Piece(number, max(first - int(starts[number]), 0), max(int(starts[number]) - first, 0))
        for number in range(begin - 1, end)
    ]
