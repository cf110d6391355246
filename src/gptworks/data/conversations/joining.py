"""Rows in which examples are the turns of one conversation, so that a model also learns to answer later in a chat.

A row has the tokens that the chat template gives for the joined conversation: text that the template writes only at the
beginning is left out of later examples. Each epoch joins different examples, because a model that always saw the same
neighbours would learn them by heart. The number of rows is constant: examples change places only with examples of equal
length, rounded up.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gptworks.chat_template import ChatTemplate, load_chat_template
from gptworks.config import Recipe
from gptworks.data.conversations.packing import Examples, Rows, laid_out, pack
from gptworks.data.permutation import Int64s
from gptworks.data.rows import Piece, Row
from gptworks.data.shards import TOKENIZER_FOLDER, TokenShards, redo
from gptworks.errors import UserError
from gptworks.tokenizer import load_tokenizer

_ROUND_TOKENS = 8
"""Lengths are rounded up to a multiple of this. A larger value gives more padding and more examples of equal length."""


class Joint(NamedTuple):
    """The tokens that a chat template writes around an exchange (question and answer) that follows another one."""

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
    """Return the tokens that the template writes between exchanges.

    Raises:
        UserError: the template writes no end token after an answer, or writes later exchanges differently.
    """
    found = {_joint(template, *first, *second) for first in _PROBES for second in _PROBES if first != second}
    if len(found) != 1 or None in found:
        raise UserError(
            "objective.packing=turns: the chat template writes no end token after an answer, or another text around a "
            "later question: set packing=true, which keeps examples apart."
        )
    [joint] = found
    assert joint is not None
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
    """Return the training examples in the rows that a run reads.

    Raises:
        UserError: see `Examples` and, for a run that joins examples, `find_joint`; or there is no chat template.
    """
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

    def row(self, row: int, epoch: int = 0) -> Rows:
        texts = [(ids, learned) for ids, learned, _ in self._conversations(row, epoch)]
        return laid_out(texts, self._context_length, self._most_texts)

    def shown(self, row: int, epoch: int = 0) -> Row:
        texts = [(len(ids) - 1, pieces) for ids, _, pieces in self._conversations(row, epoch)]
        inputs, targets, positions, _ = self.row(row, epoch)
        return Row.of(inputs, targets, positions, texts)

    def _places_in(self, epoch: int) -> tuple[Int64s, Int64s]:
        """Return the example that takes each example's place in an epoch, [n], and random keys, [n], which order the
        examples in a row."""
        random = np.random.default_rng((self._seed, epoch))
        at = np.arange(len(self.n_tokens))
        for alike in self._alike:
            at[alike] = random.permutation(alike)
        return at, random.permutation(len(at))

    def _conversations(self, row: int, epoch: int) -> list[tuple[Int64s, npt.NDArray[np.bool_], list[Piece]]]:
        """Return the conversations of a row: tokens [n], whether each is learned [n], and the examples' pieces."""
        at, order = self._places(epoch)
        joint, made = self._joint, list[tuple[Int64s, npt.NDArray[np.bool_], list[Piece]]]()
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
        """Return the number of tokens of a conversation through the end token of its last answer; None if it does not
        end with a learned answer, so that no exchange can follow."""
        n_tail = len(self._joint.tail)
        end = len(ids) - n_tail
        ends_answer = end > 0 and bool(learned[end - 1]) and int(ids[end - 1]) in self._joint.ends
        return end if ends_answer and tuple(ids[end:].tolist()) == self._joint.tail else None
