"""The examples of a split, packed into rows, and its preference pairs.

Rows are filled once. To keep padding small, the longest examples come first, each in the row that it fills best. Every
epoch visits every row once, in a new order. An example that is longer than a row loses its end.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from gptworks.config import IGNORED, Recipe
from gptworks.data.conversations.preferences import SHAPE
from gptworks.data.permutation import Int64s, evenly_spaced
from gptworks.data.rows import Piece, Row
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs, targets and positions, int64 [B, T] each, and the texts' starts, int32 [B, K]; or [T] and [K] for a single
row. A start is the index in the row of a text's first token, and padding counts as a text; rows of fewer than K texts
have T in the other places."""


class Examples:
    """The examples of a split, packed into rows of at most `context_length` inputs.

    Raises:
        UserError: the dataset holds text, not conversations.
    """

    def __init__(self, shards: TokenShards, context_length: int, packing: bool = True) -> None:
        if not shards.manifest.holds_examples:
            raise UserError(f"{shards.folder} holds text, not conversations: give sources of type conversations.")
        self._shards, self._context_length = shards, context_length
        bounds = np.append(shards.document_starts(), shards.n_tokens)
        self._starts, self.n_tokens = bounds[:-1], np.diff(bounds)
        """`n_tokens`: number of tokens of each example, [n]."""
        n_inputs = np.minimum(self.n_tokens - 1, context_length)
        self.rows = pack(n_inputs, context_length) if packing else [[i] for i in range(len(n_inputs))]
        """Indices of the examples in each row."""
        self._most_texts = max(map(len, self.rows), default=0) + 1
        """Maximum number of texts in a row, counting padding as a text. All rows have this number of starts, so one
        compiled graph fits all rows."""

    def tokens(self, example: int) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return all tokens of an example, [n], and whether each is learned, [n]."""
        start, length = int(self._starts[example]), int(self.n_tokens[example])
        return self._shards.read(start, length), self._shards.read_learned(start, length)

    def text(self, example: int) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return an example's tokens within the context, [n ≤ context_length + 1], and whether each is learned, [n]."""
        ids, learned = self.tokens(example)
        return ids[: self._context_length + 1], learned[: self._context_length + 1]

    def row(self, row: int, epoch: int = 0) -> Rows:
        """Return a row of `context_length` inputs; see `Rows`. `epoch` matters only for joined examples."""
        return laid_out([self.text(example) for example in self.rows[row]], self._context_length, self._most_texts)

    def shown(self, row: int, epoch: int = 0) -> Row:
        """Return a row for display, with its texts and their documents."""
        texts = [(min(int(self.n_tokens[i]) - 1, self._context_length), [Piece(i, 0, 0)]) for i in self.rows[row]]
        inputs, targets, positions, _ = self.row(row)
        return Row.of(inputs, targets, positions, texts)


class Pairs(Examples):
    """The preference pairs of a split. Each pair is two examples: the conversation that ends with the chosen answer,
    then the one that ends with the rejected answer. Only these last answers are learned.

    Raises:
        UserError: the dataset does not hold preference pairs.
    """

    def __init__(self, shards: TokenShards, context_length: int) -> None:
        if not shards.manifest.origins or any(origin.shape != SHAPE for origin in shards.manifest.origins):
            raise UserError(f"{shards.folder} holds no pairs of answers: give sources of type preferences.")
        super().__init__(shards, context_length, packing=False)

    def __len__(self) -> int:
        return len(self.n_tokens) // 2

    @property
    def lengths(self) -> Int64s:
        """Number of inputs, within the context, of each pair's two conversations, [n, 2], chosen first."""
        lengths: Int64s = np.minimum(self.n_tokens - 1, self._context_length).reshape(-1, 2)
        return lengths

    def answer(self, pair: int, side: int) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return a pair's prompt with the chosen (side 0) or rejected (1) answer, as tokens and mask like `text`."""
        return self.text(2 * pair + side)

    def place(self, pair: int) -> str:
        """Return the file and number of the record that a pair comes from, for messages."""
        return self._shards.manifest.where(int(self._shards.examples()[2 * pair, 0]))

    def says_nothing(self, pair: int) -> bool:
        """Return whether a pair has no learning signal in the context: equal answers, or one with no learned token."""
        (chosen, learned), (rejected, other) = self.answer(pair, 0), self.answer(pair, 1)
        return np.array_equal(chosen, rejected) or not learned[1:].any() or not other[1:].any()


def evaluation_rows(examples: Examples, n_rows: int = 0) -> Iterator[Rows]:
    """Yield the rows in order: all if `n_rows` is 0, else at most that many, evenly spaced."""
    for row in evenly_spaced(len(examples.rows), n_rows):
        yield examples.row(row)


def held_out_rows(shards: TokenShards, recipe: Recipe) -> Iterator[Rows]:
    """Return the validation rows of a run that learns answers; of preference pairs, only the chosen conversations."""
    examples = Examples(shards, recipe.row_length, recipe.objective.packs)
    if recipe.data.preferences:  # a pair is two rows, the chosen answer first
        examples.rows = examples.rows[::2]
    return evaluation_rows(examples)


def laid_out(texts: Iterable[tuple[Int64s, npt.NDArray[np.bool_]]], width: int, n_starts: int) -> Rows:
    """Return a row of `width` tokens that holds these texts in sequence.

    Args:
        texts: each text's tokens, [n], and whether each token is learned, [n]; targets not learned are IGNORED.
        n_starts: number of starts to return: at least the number of texts, plus one if there is padding.
    """
    starts = np.full(n_starts, width, dtype=np.int32)
    inputs, positions = (np.zeros(width, dtype=np.int64) for _ in range(2))
    targets = np.full(width, IGNORED, dtype=np.int64)
    at = 0
    for ids, learned in texts:
        here = slice(at, at + len(ids) - 1)
        inputs[here], targets[here] = ids[:-1], np.where(learned[1:], ids[1:], IGNORED)
        positions[here] = np.arange(len(ids) - 1)
        at += len(ids) - 1
    positions[at:] = np.arange(width - at)  # padding has positions as if it were a text
    begins = np.flatnonzero(positions == 0)
    starts[: len(begins)] = begins
    return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(positions), torch.from_numpy(starts)


def stack(rows: list[Rows]) -> Rows:
    inputs, targets, positions, starts = zip(*rows, strict=True)
    return torch.stack(inputs), torch.stack(targets), torch.stack(positions), torch.stack(starts)


def pack(lengths: Int64s, capacity: int) -> list[list[int]]:
    """Pack items into few rows (best fit, longest first); return the items of each row. No length exceeds `capacity`.

    A bit set of the free space in rows makes the search fast: a million items take seconds.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # row numbers by the rows' free space
    rooms = 0  # bit r is set if a row has r tokens of free space
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the smallest free space that suffices
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            rows[row].append(item)
        else:
            room, row = capacity, len(rows)
            rows.append([item])
        with_room.setdefault(room - length, []).append(row)
        rooms |= 1 << (room - length)
    return rows
