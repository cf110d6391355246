"""The samples that a run reads: windows of text, rows of conversations, preference pairs, or prompts.

Batches depend only on (shards, settings, seed, position), so a run can resume exactly. Prompts are an exception: the
model writes their answers. A position counts samples from the start of the run, including those that rollbacks have
skipped.

Shapes: B samples, T tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptworks.config import Recipe
from gptworks.data.batches import Batches, evaluation_windows, weights_over_run
from gptworks.data.conversations.packing import Examples, Pairs, evaluation_rows, laid_out, stack, training_examples
from gptworks.data.permutation import Int64s, shuffled
from gptworks.data.rows import Piece, Row, pieces_of
from gptworks.data.shards import SPLITS, TokenShards
from gptworks.errors import UserError

Batch = tuple[Tensor, ...]
"""Inputs and targets, int64 [B, T] each. An input's target is the next token, or −100 where the next token is not
learned. If rows hold several texts, two tensors follow: each token's position in its own text, int64 [B, T], and the
index at which each text starts, int32 [B, K] (see `GPT.features`). An objective may add further tensors."""


class Samples(ABC):
    """The training samples and validation sequences of a recipe's run. `train.batch_size` counts these samples."""

    item_name: ClassVar[str]
    """The noun that messages use for an item of the training split."""
    per_epoch: int
    """Number of samples in an epoch."""
    n_validation: int
    """Number of samples in the validation split: windows, rows, pairs or prompts."""
    held_out_bytes: int | None = None
    """Bytes of the text in the whole validation split; None: unknown."""

    def __init__(self, recipe: Recipe, folder: Path, verify: bool = False) -> None:
        """Open the shards in a dataset's folder, made by `prepare`; `verify` as for `TokenShards`. Raises UserError if
        files are missing or changed, there is too little text, or the data does not fit the objective."""
        self.recipe, self.context_length = recipe, recipe.row_length
        self._shards = {split: TokenShards(folder, split, verify=verify) for split in SPLITS}
        self.train_shards, self.validation_shards = self._shards.values()
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Arrange the tokens of both splits as samples; set `per_epoch`, `n_validation` and, if known,
        `held_out_bytes`."""

    @property
    def n_items(self) -> int:
        """Number of items in the training split, each a window, row, pair or prompt. The method `rows` takes an item's
        index."""
        return self.per_epoch

    @abstractmethod
    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        """Return micro-batch `micro_step` (`size` samples, on the CPU) of the step that begins at sample `position`."""

    @abstractmethod
    def rows(self, number: int, epoch: int = 0) -> list[Row]:
        """Return item `number` of the training split as rows for display. The epoch decides where a window begins, and
        which examples are joined in a row."""

    def item(self, position: int) -> tuple[int, int]:
        """Return the epoch and the item index of the sample at `position`; datasets of a mixture have their own epochs.
        Raises UserError if the sample was made during the run and was not kept."""
        return position // self.per_epoch, int(self._shuffled(position, 1)[0])

    def _shuffled(self, first: int, size: int) -> Int64s:
        """Return the item indices of `size` samples from position `first` on; each epoch visits every item once."""
        return shuffled(np.arange(first, first + size), self.per_epoch, self.recipe.seed)

    def epochs(self, position: int) -> dict[str, float]:
        """Return the number of epochs read before sample `position`, by dataset name; empty without a mixture."""
        return {}

    def held_out(self, n_sequences: int) -> Iterator[Batch]:
        """Yield at most `n_sequences` (0: all) evenly spaced sequences [T] of the validation split. Raises
        NotImplementedError if the samples are preference pairs or prompts."""
        raise NotImplementedError


class Windows(Samples):
    """Samples that are windows of text."""

    item_name = "window"

    def _open(self) -> None:
        shards, held_out, phases = self.train_shards, self.validation_shards, weights_over_run(self.recipe)
        self._batches = Batches(shards, self.context_length, self.recipe.seed, shards.stretches, phases)
        self.per_epoch = self._batches.windows_per_epoch
        self.n_validation = max(1, -(-(held_out.n_tokens - 1) // self.context_length))
        self.held_out_bytes = held_out.text_bytes if held_out.manifest.round_trips else None

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        return self._batches.batch(position + micro_step * size, size)

    def item(self, position: int) -> tuple[int, int]:
        epochs, windows = self._batches.items(np.array([position]))
        return int(epochs[0]), int(windows[0])

    def epochs(self, position: int) -> dict[str, float]:
        names = [member.name for member in self.recipe.data.mixture]
        return dict(zip(names, self._batches.epochs(position), strict=True)) if names else {}

    def rows(self, number: int, epoch: int = 0) -> list[Row]:
        start = self._batches.start(epoch, number)
        window = torch.from_numpy(self.train_shards.read(start, self.context_length + 1))
        pieces = pieces_of(self.train_shards.document_starts(), start, len(window))
        return [Row.of(window[:-1], window[1:], None, [(self.context_length, pieces)])]

    def held_out(self, n_sequences: int) -> Iterator[Batch]:
        return evaluation_windows(self.validation_shards, self.context_length, n_sequences)


class Conversations(Samples):
    """Samples that are rows of conversations. A row holds several conversations if the objective packs them."""

    item_name = "row"

    def _open(self) -> None:
        self._train = training_examples(self.train_shards, self.recipe)
        self._held_out = Examples(self.validation_shards, self.context_length, self.recipe.objective.packs)
        self.per_epoch, self.n_validation = len(self._train.rows), len(self._held_out.rows)

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        """Return inputs, targets, positions and starts; see `gptworks.data.conversations.packing.Rows`."""
        first = position + micro_step * size
        rows = self._shuffled(first, size).tolist()
        return stack([self._train.row(row, (first + i) // self.per_epoch) for i, row in enumerate(rows)])

    def rows(self, number: int, epoch: int = 0) -> list[Row]:
        return [self._train.shown(number, epoch)]

    def held_out(self, n_sequences: int) -> Iterator[Batch]:
        return evaluation_rows(self._held_out, n_sequences)


class AnswerPairs(Samples):
    """Samples that are preference pairs."""

    item_name = "pair"

    def _open(self) -> None:
        self.pairs: dict[str, Pairs] = {split: Pairs(one, self.context_length) for split, one in self._shards.items()}
        self.per_epoch, self.n_validation = map(len, self.pairs.values())

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        """Return inputs and targets, int64 [2B, T]: the chosen conversations, then the rejected ones."""
        return self.of("train", self.chosen(position, micro_step, size))

    def chosen(self, position: int, micro_step: int, size: int) -> list[int]:
        """Return the indices of the pairs in a micro-batch."""
        numbers: list[int] = self._shuffled(position + micro_step * size, size).tolist()
        return numbers

    def of(self, split: str, pairs: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the pairs with these indices, in the order of `batch`."""
        answers = [self.pairs[split].answer(pair, side) for side in (0, 1) for pair in pairs]
        return padded(answers, self.context_length)

    def tokens_read(self, n_samples: int, micro_batch_size: int) -> int:
        """Return the number of tokens, with padding, in a run's first `n_samples` samples."""
        lengths, order, tokens = self.pairs["train"].lengths, self._shuffled(0, n_samples), 0
        for first in range(0, n_samples, micro_batch_size):
            chosen = lengths[order[first : first + micro_batch_size]]
            tokens += chosen.size * padded_width(int(chosen.max()), self.context_length)
        return tokens

    def rows(self, number: int, epoch: int = 0) -> list[Row]:
        """Return two rows: the chosen conversation, then the rejected one."""
        inputs, targets = self.of("train", [number])
        lengths = [len(self.pairs["train"].answer(number, side)[0]) - 1 for side in (0, 1)]
        texts = [[(n, [Piece(2 * number + side, 0, 0)])] for side, n in enumerate(lengths)]
        return [
            Row.of(inputs[0], targets[0], None, texts[0], "chosen"),
            Row.of(inputs[1], targets[1], None, texts[1], "rejected"),
        ]


class Prompts(Samples):
    """Samples that are prompts. The model writes the answers, and the objective makes the batches."""

    item_name = "prompt"

    def _open(self) -> None:
        self.examples: dict[str, Examples] = {
            split: Examples(one, self.context_length, False) for split, one in self._shards.items()
        }
        rollouts = self.recipe.objective.rollouts
        assert rollouts is not None
        self.per_epoch = self.n_items * rollouts.group_size * rollouts.steps
        self.n_validation = len(self.examples["validation"].rows)

    @property
    def n_items(self) -> int:
        return len(self.examples["train"].rows)

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        raise NotImplementedError

    def item(self, position: int) -> tuple[int, int]:
        raise UserError(
            "a step of objective.type=reward trains on answers that the model wrote in it, and they are not kept. "
            "The windows show the conversations that its prompts are from."
        )

    def rows(self, number: int, epoch: int = 0) -> list[Row]:
        """Return the conversation that a prompt comes from, with the answer in the data."""
        return [self.examples["train"].shown(number)]


def open_samples(recipe: Recipe, folder: Path, verify: bool = False) -> Samples:
    """Open the samples of a recipe's run; arguments and errors as for `Samples`."""
    objective = recipe.objective
    if objective.rollouts is not None:
        return Prompts(recipe, folder, verify)
    if "preferences" in objective.sources:
        return AnswerPairs(recipe, folder, verify)
    if recipe.several_texts:
        return Conversations(recipe, folder, verify)
    return Windows(recipe, folder, verify)


_ROUND_TOKENS = 32
"""The width of a padded batch is a multiple of this number, or the context length, so that kernels see fewer shapes."""


def padded_width(longest: int, context_length: int) -> int:
    """Return the width in tokens of a batch whose longest row has `longest` inputs."""
    return min(context_length, -(-longest // _ROUND_TOKENS) * _ROUND_TOKENS)


def padded(rows: Sequence[tuple[Int64s, npt.NDArray[np.bool_]]], context_length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 [B, T]. Each row is one text: its tokens [n] and its loss mask [n]."""
    width = padded_width(max(len(ids) for ids, _ in rows) - 1, context_length)
    inputs, targets, *_ = stack([laid_out([row], width, 2) for row in rows])
    return inputs, targets
