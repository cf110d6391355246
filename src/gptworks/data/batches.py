"""Batches as a pure function of (shards, seed, position): nothing to restore but integers, the same on any machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from gptworks.config import IGNORED
from gptworks.data.permutation import ROUNDS, Int64s, evenly_spaced, random_keys, shuffled
from gptworks.data.shards import Stretch
from gptworks.data.shares import Shares, Weights, windows_per_epoch
from gptworks.errors import UserError

Pair = tuple[torch.Tensor, torch.Tensor]


class Tokens(Protocol):
    """Tokens with random access: those of a split, or of a text."""

    @property
    def split(self) -> str: ...

    @property
    def n_tokens(self) -> int: ...

    def read(self, start: int, length: int) -> Int64s: ...


@dataclass(frozen=True)
class OneDataset:
    """The tokens of one dataset of a split."""

    tokens: Tokens
    part: Stretch

    @property
    def split(self) -> str:
        return self.tokens.split

    @property
    def n_tokens(self) -> int:
        return self.part.n_tokens

    def read(self, start: int, length: int) -> Int64s:
        assert 0 <= start <= start + length <= self.part.n_tokens
        return self.tokens.read(self.part.first + start, length)


class _Windows:
    """The windows of one dataset, in an order that is shuffled anew each epoch.

    An epoch lays windows side by side over the tokens from a random first position, so that from one epoch to the next
    the cuts fall elsewhere, and visits each window once.
    """

    def __init__(self, stretch: Stretch, context_length: int, seed: int) -> None:
        self.first, self._context_length, self._seed = stretch.first, context_length, seed
        self.n = windows_per_epoch(stretch.n_tokens, context_length)
        self._phases = min(context_length, stretch.n_tokens - self.n * context_length)

    def start(self, epoch: int, window: int) -> int:
        """Position in the split of the first token of a window of an epoch, both counted from 0."""
        phase = int(random_keys(self._seed, epoch)[ROUNDS]) % self._phases
        return self.first + phase + window * self._context_length


class Batches:
    """Windows of context_length + 1 tokens, of one dataset or of several in the shares that their weights give.

    A sample is a function of the seed and of its position alone, which counts samples from the start of the run: batch
    and micro-batch size decide only how many are taken at once.

    Args:
        stretches: the tokens of each dataset; None: the split is one.
        phases: the datasets' weights over the run.

    Raises:
        UserError: a dataset is shorter than one window, or there are others than weights.
    """

    def __init__(
        self,
        shards: Tokens,
        context_length: int,
        seed: int,
        stretches: Sequence[Stretch] | None = None,
        phases: Sequence[Weights] = (Weights(0, (1.0,)),),
    ) -> None:
        stretches = stretches or [Stretch("", 0, shards.n_tokens)]
        if len(stretches) != (n := len(phases[0].weights)):
            raise UserError(
                f"the data holds {len(stretches)} dataset{'s' * (len(stretches) > 1)} and the recipe has {n}: it is "
                f"not this recipe's. Give the recipe with which it was made."
            )
        for stretch in stretches:
            _check_length(shards.split, stretch.n_tokens, context_length, stretch.name)
        self._shards, self._context_length, self._seed = shards, context_length, seed
        self._windows = [_Windows(stretch, context_length, seed) for stretch in stretches]
        self._shares = Shares(phases, seed)
        self._bounds = np.cumsum([0, *(windows.n for windows in self._windows)])
        self.windows_per_epoch = int(self._bounds[-1])
        """Windows of all datasets: the samples of an epoch, as `train.epochs` counts."""

    def batch(self, first: int, size: int) -> Pair:
        """Inputs and targets, each int64 [B, T], of the `size` samples from position `first` on."""
        starts = self.starts(np.arange(first, first + size))
        windows = torch.from_numpy(np.stack([self._shards.read(s, self._context_length + 1) for s in starts.tolist()]))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def starts(self, samples: Int64s) -> Int64s:
        """Position [n] in the split of the first token of each sample [n]."""
        epochs, windows = self.items(samples)
        places = zip(epochs.tolist(), windows.tolist(), strict=True)
        return np.array([self.start(epoch, window) for epoch, window in places], dtype=np.int64)

    def items(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """The epoch of its dataset [n] that each sample [n] is in, and the window's number [n] among those of all
        datasets."""
        datasets, numbers = self._shares.draw(samples)
        epochs, found = np.empty_like(samples), np.empty_like(samples)
        for dataset in np.unique(datasets).tolist():
            here, n = datasets == dataset, self._windows[dataset].n
            epochs[here] = numbers[here] // n
            found[here] = self._bounds[dataset] + shuffled(numbers[here], n, self._seed)
        return epochs, found

    def start(self, epoch: int, window: int) -> int:
        """Position in the split of the first token of a window of an epoch of its dataset, both counted from 0."""
        dataset = int(np.searchsorted(self._bounds, window, side="right")) - 1
        return self._windows[dataset].start(epoch, window - int(self._bounds[dataset]))

    def epochs(self, position: int) -> list[float]:
        """How often the samples before a position read each dataset."""
        read = self._shares.before(position).tolist()
        return [n / windows.n for n, windows in zip(read, self._windows, strict=True)]


def evaluation_windows(
    shards: Tokens, context_length: int, n_sequences: int = 0, stride: int | None = None
) -> Iterator[Pair]:
    """Inputs and targets, each int64 [T] with T ≤ context_length, that cover the split in order.

    Each token but the very first is a target once. The last window may be shorter.

    Args:
        n_sequences: this many of the windows, evenly spaced. 0: all.
        stride: tokens from one window's start to the next. Below context_length, windows overlap, each token is
            predicted from at least context_length - stride tokens, and only the new ones count: other targets are
            IGNORED. None: context_length.

    Raises:
        UserError: fewer than two tokens, or a stride that is not within 1 … context_length.
    """
    stride = context_length if stride is None else stride
    if not 1 <= stride <= context_length:
        raise UserError(f"stride={stride} is not within 1 and context_length={context_length}: choose one that is.")
    _check_length(shards.split, shards.n_tokens, 1)
    n_targets = shards.n_tokens - 1
    n_windows = 1 + -(-max(0, n_targets - context_length) // stride)
    for window in evenly_spaced(n_windows, n_sequences):
        start = window * stride
        tokens = torch.from_numpy(shards.read(start, min(context_length, n_targets - start) + 1))
        inputs, targets = tokens[:-1], tokens[1:].clone()
        if window:
            targets[: context_length - stride] = IGNORED
        yield inputs, targets


def _check_length(split: str, n_tokens: int, context_length: int, dataset: str = "") -> None:
    if n_tokens < context_length + 1:
        of, change = (f" of {dataset}", f", leave {dataset} out of data.mixture") if dataset else ("", "")
        raise UserError(
            f"the {split} split{of} has {n_tokens} tokens and a window needs {context_length + 1} "
            f"(context_length={context_length} and one more): too small a corpus for the context. "
            f"Give more text{change}, or set model.context_length={max(1, n_tokens - 1)} or less."
        )
