"""Batches as a pure function of (shards, seed, position): nothing to restore but integers, the same on any machine."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gptworks.config import IGNORED
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]
Pair = tuple[torch.Tensor, torch.Tensor]

_ROUNDS = 8


class Tokens(Protocol):
    """Tokens with random access: those of a split, or of a text."""

    @property
    def split(self) -> str: ...

    @property
    def n_tokens(self) -> int: ...

    def read(self, start: int, length: int) -> Int64s: ...


class Batches:
    """Windows of context_length + 1 tokens, in an order that is shuffled anew each epoch.

    An epoch lays windows side by side over the split from a random first position, so that from one epoch to the next
    the cuts fall elsewhere, and visits each window once. A sample is a function of the seed and of its position alone,
    which counts samples from the start of the run: batch and micro-batch size decide only how many are taken at once.

    Raises:
        UserError: the split is shorter than one window.
    """

    def __init__(self, shards: TokenShards, context_length: int, seed: int) -> None:
        _check_length(shards, context_length)
        self._shards, self._context_length, self._seed = shards, context_length, seed
        targets = shards.n_tokens - 1
        # As many windows as fit behind the last of T first positions, so that every epoch has the same number.
        self.windows_per_epoch = max(1, (targets - (context_length - 1)) // context_length)
        self._phases = min(context_length, targets - self.windows_per_epoch * context_length + 1)

    def batch(self, first: int, size: int) -> Pair:
        """Inputs and targets, each int64 [B, T], of the `size` samples from position `first` on."""
        starts = self.starts(np.arange(first, first + size))
        windows = torch.from_numpy(np.stack([self._shards.read(s, self._context_length + 1) for s in starts.tolist()]))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def starts(self, samples: Int64s) -> Int64s:
        """Position [n] in the split of the first token of each sample [n]."""
        windows = shuffled(samples, self.windows_per_epoch, self._seed)
        places = zip((samples // self.windows_per_epoch).tolist(), windows.tolist(), strict=True)
        return np.array([self.start(epoch, window) for epoch, window in places], dtype=np.int64)

    def start(self, epoch: int, window: int) -> int:
        """Position in the split of the first token of a window of an epoch, both counted from 0."""
        return int(_keys(self._seed, epoch)[_ROUNDS]) % self._phases + window * self._context_length


def shuffled(samples: Int64s, n: int, seed: int) -> Int64s:
    """The item [k], of 0 … n-1, of each sample [k]: every epoch visits each item once, in an order of its own."""
    epochs, places = np.divmod(samples, n)
    items = np.empty_like(samples)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        items[here] = permute(places[here], n, _keys(seed, epoch)[:_ROUNDS])
    return items


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> Uint64s:
    """Random numbers [_ROUNDS + 1] of an epoch: the keys of its permutation, and one more."""
    return np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS + 1, np.uint64).astype(np.uint64)


def permute(places: Int64s, n: int, keys: Uint64s) -> Int64s:
    """The image [k] of each place [k] under a pseudo-random permutation of 0 … n-1, held in no memory.

    A Feistel network permutes the numbers below a power of four, at most 4n; a number that falls outside n goes through
    again until it is inside (cycle walking: Black & Rogaway, 2002).
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> shift, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        values[outside] = left << shift | right
        outside = values >= n
    return values.astype(np.int64)


def _mix(values: Uint64s) -> Uint64s:
    """SplitMix64's finalizer (Steele, Lea & Flood, 2014): every input bit changes about half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


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
    _check_length(shards, 1)
    n_targets = shards.n_tokens - 1
    n_windows = 1 + -(-max(0, n_targets - context_length) // stride)
    chosen = min(n_sequences or n_windows, n_windows)
    for window in (place * n_windows // chosen for place in range(chosen)):
        start = window * stride
        tokens = torch.from_numpy(shards.read(start, min(context_length, n_targets - start) + 1))
        inputs, targets = tokens[:-1], tokens[1:].clone()
        if window:
            targets[: context_length - stride] = IGNORED
        yield inputs, targets


def _check_length(shards: Tokens, context_length: int) -> None:
    if shards.n_tokens < context_length + 1:
        raise UserError(
            f"the {shards.split} split has {shards.n_tokens} tokens and a window needs {context_length + 1} "
            f"(context_length={context_length} and one more): too small a corpus for the context. "
            f"Give more text, or set model.context_length={max(1, shards.n_tokens - 1)} or less."
        )
