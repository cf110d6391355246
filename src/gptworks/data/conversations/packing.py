"""The examples of a split, packed into rows or joined into conversations, and its preference pairs.

Rows are filled once. To keep padding small, the longest examples come first, each in the row that it fills best. Every
epoch visits every row once, in a new order. An example that is longer than a row loses its end.

If `objective.packing` is `turns`, the examples in a row are the turns of one conversation, so that a model also learns
to answer later in a chat. The row has the tokens that the chat template gives for the joined conversation: text that
the template writes only at the beginning is left out of later examples. Each epoch joins different examples, because a
model that always saw the same neighbours would learn them by heart. The number of rows is constant: examples change
places only with examples of equal length, rounded up.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gptworks.chat_template import ChatTemplate, load_chat_template
from gptworks.config import IGNORED, Recipe
from gptworks.data.conversations.preferences import SHAPE
from gptworks.data.permutation import Int64s, evenly_spaced
from gptworks.data.rows import Piece, Row
from gptworks.data.shards import TOKENIZER_FOLDER, TokenShards, redo
from gptworks.errors import UserError
from gptworks.tokenizer import load_tokenizer

Text = tuple[Int64s, npt.NDArray[np.bool_], list[Piece]]
"""A text in a row: its tokens [n], whether each is learned [n], and the examples that it consists of."""

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs, targets and positions, int64 [B, T] each, and the texts' starts, int32 [B, K]; or [T] and [K] for a single
row. A start is the index of a text's first token in the row. Padding counts as a text. Rows of fewer than K texts have
T in the remaining places."""


class Examples:
    """The examples of a split in rows of at most `context_length` inputs: packed, or, without `packing`, one in a row.
    Raises UserError if the dataset holds text, not conversations."""

    def __init__(self, shards: TokenShards, context_length: int, packing: bool = True) -> None:
        if not shards.manifest.holds_examples:
            raise UserError(f"{shards.folder} holds text, not conversations: give sources of type conversations.")
        self._shards, self._context_length = shards, context_length
        self._starts, self.n_tokens = shards.document_starts(), np.diff(shards.document_bounds)
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

    def texts(self, row: int, epoch: int = 0) -> list[Text]:
        """Return the texts of a row in order. `epoch` matters only for joined examples."""
        return [(*self.text(example), [Piece(example, 0, 0)]) for example in self.rows[row]]

    def row(self, row: int, epoch: int = 0) -> Rows:
        """Return a row of `context_length` inputs; see `Rows`."""
        texts = [(ids, learned) for ids, learned, _ in self.texts(row, epoch)]
        return laid_out(texts, self._context_length, self._most_texts)

    def shown(self, row: int, epoch: int = 0) -> Row:
        """Return a row for display, with its texts and their documents."""
        texts = [(len(ids) - 1, pieces) for ids, _, pieces in self.texts(row, epoch)]
        inputs, targets, positions, _ = self.row(row, epoch)
        return Row.of(inputs, targets, positions, texts)


class Pairs(Examples):
    """The preference pairs of a split. Each pair is two examples: the conversation that ends with the chosen answer,
    then the one that ends with the rejected answer. Only these last answers are learned. Raises UserError if the
    dataset does not hold preference pairs."""

    def __init__(self, shards: TokenShards, context_length: int) -> None:
        if not shards.manifest.origins or any(origin.shape != SHAPE for origin in shards.manifest.origins):
            raise UserError(f"{shards.folder} holds no pairs of answers: give sources of type preferences.")
        super().__init__(shards, context_length, packing=False)
        self.lengths: Int64s = np.minimum(self.n_tokens - 1, context_length).reshape(-1, 2)
        """Number of inputs, within the context, of each pair's two conversations, [n, 2], chosen first."""

    def __len__(self) -> int:
        return len(self.lengths)

    def answer(self, pair: int, side: int) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return a pair's prompt with the chosen (side 0) or rejected (1) answer, as tokens and mask like `text`."""
        return self.text(2 * pair + side)

    def says_nothing(self, pair: int) -> bool:
        """Return whether a pair has no learning signal within the context: its answers are equal, or one of them has no
        learned token."""
        (chosen, learned), (rejected, other) = self.answer(pair, 0), self.answer(pair, 1)
        return np.array_equal(chosen, rejected) or not learned[1:].any() or not other[1:].any()


def evaluation_rows(examples: Examples, n_rows: int = 0) -> Iterator[Rows]:
    """Return an iterator over at most `n_rows` evenly spaced rows, in order; 0: all rows."""
    return map(examples.row, evenly_spaced(len(examples.rows), n_rows))


def held_out_rows(shards: TokenShards, recipe: Recipe) -> Iterator[Rows]:
    """Return the validation rows of a run that learns answers; for preference pairs, only the chosen conversations."""
    examples = Examples(shards, recipe.row_length, recipe.objective.packs)
    if recipe.data.preferences:  # a pair is two rows, the chosen answer first
        examples.rows = examples.rows[::2]
    return evaluation_rows(examples)


def laid_out(texts: Iterable[tuple[Int64s, npt.NDArray[np.bool_]]], width: int, n_starts: int) -> Rows:
    """Return a row of `width` inputs with these texts in sequence. Each text is given by its tokens [n] and its mask of
    learned tokens [n]; other targets are IGNORED. `n_starts` is at least the number of texts, with padding counted as a
    text."""
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
    """Pack items into few rows (best fit, longest first). Return each row's items. No length may exceed `capacity`.

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


# ---------------------------------------------------------------------- examples joined into conversations

_ROUND_TOKENS = 8
"""Lengths are rounded up to a multiple of this number. A larger number gives more padding, and more examples of equal
length."""


class Joint(NamedTuple):
    """The tokens that a chat template writes around an exchange (question and answer) that follows another exchange."""

    prefix: tuple[int, ...]
    """Tokens that begin a conversation, but not a later exchange."""
    tail: tuple[int, ...]
    """Tokens after the end token of a conversation's last answer."""
    between: tuple[int, ...]
    """Tokens between an answer's end token and the next exchange."""
    ends: frozenset[int]
    """Tokens that end an answer."""

    @property
    def growth(self) -> int:
        """Number of tokens by which a joined example is longer than its inputs alone; at least 0."""
        return max(0, 1 + len(self.between) - len(self.prefix) - len(self.tail))


_PROBES = (("What is it?", "A tree."), ("  Où?\n", "Là-bas"), ("1 + 1 =", " 2\n\n"), ("x", "### User: y"))


def find_joint(template: ChatTemplate) -> Joint:
    """Return the tokens that the template writes between exchanges. Raises UserError if the template writes no end
    token after an answer, or writes later exchanges differently."""
    joint, *others = {_joint(template, *first, *second) for first, second in permutations(_PROBES, 2)}
    if joint is None or others:
        raise UserError(
            "objective.packing=turns: the chat template writes no end token after an answer, or another text around a "
            "later question: set packing=true, which keeps examples apart."
        )
    return joint


def _joint(template: ChatTemplate, question: str, answer: str, next_question: str, next_answer: str) -> Joint | None:
    def exchange(asked: str, answered: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]

    first, second = exchange(question, answer), exchange(next_question, next_answer)
    ends = frozenset(template.end_token_ids)
    ids, alone, both = (template.encode(turns) for turns in (first, second, [*first, *second]))
    last = max((i for i, token in enumerate(ids) if token in ends), default=None)
    if last is None or both[: last + 1] != ids[: last + 1]:
        return None
    rest, n_same = both[last + 1 :], 0
    while n_same < min(len(rest), len(alone)) and rest[-1 - n_same] == alone[-1 - n_same]:
        n_same += 1
    prefix, between = alone[: len(alone) - n_same], rest[: len(rest) - n_same]
    return Joint(tuple(prefix), tuple(ids[last + 1 :]), tuple(between), ends)


def training_examples(shards: TokenShards, recipe: Recipe) -> Examples:
    """Return the training examples in the rows that a run reads. Raises UserError as `Examples` does. If the run joins
    examples, also raises UserError as `find_joint` does, or if there is no chat template."""
    if not recipe.objective.joins:
        return Examples(shards, recipe.row_length, recipe.objective.packs)
    folder = shards.folder / TOKENIZER_FOLDER
    template = load_chat_template(folder, load_tokenizer(folder))
    if template is None:
        raise UserError(f"{shards.folder} has no chat template. {redo(shards.folder)}")
    return JoinedExamples(shards, recipe.row_length, find_joint(template), recipe.seed)


class JoinedExamples(Examples):
    """The examples of a split, joined into conversations of at most `context_length` inputs."""

    def __init__(self, shards: TokenShards, context_length: int, joint: Joint, seed: int) -> None:
        super().__init__(shards, context_length, packing=False)
        self._joint, self._seed = joint, seed
        n_inputs = np.minimum(self.n_tokens - 1, context_length) + joint.growth
        rounded = np.minimum(-(-n_inputs // _ROUND_TOKENS) * _ROUND_TOKENS, context_length)
        self.rows = pack(rounded, context_length)
        self._most_texts = max(map(len, self.rows), default=0) + 1
        order = np.argsort(rounded, kind="stable")
        self._alike = np.split(order, np.flatnonzero(np.diff(rounded[order])) + 1)
        self._places = lru_cache(maxsize=2)(self._places_in)

    def _places_in(self, epoch: int) -> tuple[Int64s, Int64s]:
        """Return the example that takes each example's place in an epoch, [n], and random keys, [n], which order the
        examples in a row."""
        random = np.random.default_rng((self._seed, epoch))
        at = np.arange(len(self.n_tokens))
        for alike in self._alike:
            at[alike] = random.permutation(alike)
        return at, random.permutation(len(at))

    def texts(self, row: int, epoch: int = 0) -> list[Text]:
        at, order = self._places(epoch)
        joint, made = self._joint, list[Text]()
        between = np.array(joint.between, dtype=np.int64)
        for example in sorted((int(at[i]) for i in self.rows[row]), key=lambda i: int(order[i])):
            ids, learned = self.text(example)
            end = self._end(*made[-1][:2]) if made else None
            if end is None or tuple(ids[: len(joint.prefix)].tolist()) != joint.prefix:
                made.append((ids, learned, [Piece(example, 0, 0)]))
                continue
            before, known, pieces = made[-1]
            start = len(joint.prefix)
            piece = Piece(example, start, end + len(between))
            unlearned = np.zeros(len(between), dtype=np.bool_)
            made[-1] = (
                np.concatenate([before[:end], between, ids[start:]]),
                np.concatenate([known[:end], unlearned, learned[start:]]),
                [*pieces, piece],
            )
        return made

    def _end(self, ids: Int64s, learned: npt.NDArray[np.bool_]) -> int | None:
        """Return the number of tokens of a conversation through the end token of its last answer. Return None if the
        conversation does not end with a learned answer, so that no exchange can follow."""
        n_tail = len(self._joint.tail)
        end = len(ids) - n_tail
        ends_answer = end > 0 and bool(learned[end - 1]) and int(ids[end - 1]) in self._joint.ends
        return end if ends_answer and tuple(ids[end:].tolist()) == self._joint.tail else None
