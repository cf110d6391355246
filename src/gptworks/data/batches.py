"""Training batches as a pure function of (shards, weights, seed, position), so that resuming a run needs only integers.

`Shares` chooses each sample's dataset by the datasets' weights; a permutation chooses a window of that dataset.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import lcm
from typing import NamedTuple, Protocol

import numpy as np
import torch

from gptworks.config import IGNORED, Recipe
from gptworks.data.permutation import ROUNDS, Int64s, evenly_spaced, permute, random_keys, shuffled
from gptworks.data.shards import Stretch
from gptworks.errors import UserError

BLOCK = 256
"""Number of samples in a block; the order of datasets is shuffled within each block."""
_BLOCKS = (1 << 48) - 1

Pair = tuple[torch.Tensor, torch.Tensor]


class Tokens(Protocol):
    """Interface for reading any range of tokens of a split or a text."""

    @property
    def split(self) -> str: ...

    @property
    def n_tokens(self) -> int: ...

    def read(self, start: int, length: int) -> Int64s: ...


def windows_per_epoch(n_tokens: int, context_length: int) -> int:
    """Return the number of windows in an epoch, which is the same wherever the first window of the epoch begins."""
    return max(1, (n_tokens - context_length) // context_length)


@dataclass(frozen=True)
class Weights:
    """The sampling weights of the datasets from sample `first` on."""

    first: int
    weights: tuple[float, ...]


def weights_over_run(recipe: Recipe) -> list[Weights]:
    """Return the datasets' weights from sample 0 on, then the weights of `data.anneal` if the recipe has them."""
    members, anneal, first = recipe.data.mixture, recipe.data.anneal, recipe.anneal_from
    weights = [Weights(0, tuple(member.weight for member in members) or (1.0,))]
    if anneal is not None and first is not None:
        weights.append(Weights(first, tuple(anneal.weights.get(member.name, 0.0) for member in members)))
    return weights


class Batches:
    """Batches of windows of context_length + 1 tokens, from one dataset or from several in proportion to their weights.

    An epoch of a dataset visits each of its windows once, in a shuffled order. The windows are adjacent. The first one
    begins at a random position, so the cuts between windows differ from epoch to epoch.

    For given data and weights, a sample depends only on the seed and on its position: the number of samples before it
    in the run. The sizes of batches and micro-batches only decide how many samples are read together.

    `stretches` has the token range of each dataset (None: the split is a single dataset), and `phases` the datasets'
    weights over the run. Raises UserError if a dataset is shorter than one window, or if `stretches` and `phases` have
    different numbers of datasets.
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
                f"the data holds {len(stretches)} dataset{'s' * (len(stretches) > 1)} and the recipe has {n}: it was "
                f"built with another recipe. Give that recipe."
            )
        for stretch in stretches:
            _check_length(shards.split, stretch.n_tokens, context_length, stretch.name)
        self._shards, self._context_length, self._seed = shards, context_length, seed
        self._stretches, self._shares = stretches, Shares(phases, seed)
        self._n_windows = [windows_per_epoch(stretch.n_tokens, context_length) for stretch in stretches]
        """Number of windows in an epoch of each dataset."""
        self._bounds = np.cumsum([0, *self._n_windows])
        self.windows_per_epoch = int(self._bounds[-1])
        """Number of windows of all datasets together; `train.epochs` counts this many samples as one epoch."""

    def batch(self, first: int, size: int) -> Pair:
        """Return inputs and targets, each int64 [B, T], of B = `size` samples from position `first` on."""
        starts = self.starts(np.arange(first, first + size))
        windows = torch.from_numpy(np.stack([self._shards.read(s, self._context_length + 1) for s in starts.tolist()]))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def starts(self, samples: Int64s) -> Int64s:
        """Return the position in the split of each sample's first token, [n]."""
        epochs, windows = self.items(samples)
        places = zip(epochs.tolist(), windows.tolist(), strict=True)
        return np.array([self.start(epoch, window) for epoch, window in places], dtype=np.int64)

    def items(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return two arrays [n]: each sample's epoch in its dataset, and the index of its window among the windows of
        all datasets."""
        datasets, numbers = self._shares.draw(samples)
        epochs, found = np.empty_like(samples), np.empty_like(samples)
        for dataset in np.unique(datasets).tolist():
            here, n = datasets == dataset, self._n_windows[dataset]
            epochs[here] = numbers[here] // n
            found[here] = self._bounds[dataset] + shuffled(numbers[here], n, self._seed)
        return epochs, found

    def start(self, epoch: int, window: int) -> int:
        """Return the position in the split at which a window begins. `window` is the window's index among the windows
        of all datasets, and `epoch` is the epoch of the window's dataset."""
        dataset = int(np.searchsorted(self._bounds, window, side="right")) - 1
        stretch, length, window = self._stretches[dataset], self._context_length, window - int(self._bounds[dataset])
        n_firsts = min(length, stretch.n_tokens - self._n_windows[dataset] * length)
        return stretch.first + int(random_keys(self._seed, epoch)[ROUNDS]) % n_firsts + window * length

    def epochs(self, position: int) -> list[float]:
        """Return the number of epochs of each dataset that a run has read before sample `position`."""
        read = self._shares.before(position).tolist()
        return [n / n_windows for n, n_windows in zip(read, self._n_windows, strict=True)]


def evaluation_windows(
    shards: Tokens, context_length: int, n_sequences: int = 0, stride: int | None = None, part: Stretch | None = None
) -> Iterator[Pair]:
    """Yield inputs and targets, each int64 [T] with T ≤ context_length, of windows that cover the split in order.

    If all windows are read, each token except the first is a target once. The last window may be shorter.

    Args:
        n_sequences: maximum number of windows, which are evenly spaced; 0: all windows.
        stride: tokens between the starts of windows; None: context_length. With a smaller stride, windows overlap. In
            each window after the first, targets that an earlier window also covers are IGNORED, so that every other
            target follows at least context_length - stride tokens.
        part: the dataset of a mixture to read; None: the whole split.

    Raises:
        UserError: there are fewer than two tokens, or the stride is not within 1 … context_length.
    """
    stride = context_length if stride is None else stride
    if not 1 <= stride <= context_length:
        raise UserError(f"stride={stride} is not between 1 and context_length={context_length}: choose one that is.")
    part = part or Stretch("", 0, shards.n_tokens)
    _check_length(shards.split, part.n_tokens, 1)
    n_targets = part.n_tokens - 1
    n_windows = 1 + -(-max(0, n_targets - context_length) // stride)
    for window in evenly_spaced(n_windows, n_sequences):
        start = window * stride
        tokens = torch.from_numpy(shards.read(part.first + start, min(context_length, n_targets - start) + 1))
        inputs, targets = tokens[:-1], tokens[1:].clone()
        if window:
            targets[: context_length - stride] = IGNORED
        yield inputs, targets


def _check_length(split: str, n_tokens: int, context_length: int, dataset: str = "") -> None:
    if n_tokens < context_length + 1:
        of, change = (f" of {dataset}", f", leave {dataset} out of data.mixture") if dataset else ("", "")
        raise UserError(
            f"the {split} split{of} has {n_tokens} tokens and a window needs {context_length + 1} "
            f"(context_length={context_length} and one more): the corpus is too small for the context. "
            f"Give more text{change}, or set model.context_length={max(1, n_tokens - 1)} or less."
        )


# --------------------------------------------------------------------------------------- proportions of datasets


class Shares:
    """Assigns each sample to a dataset, and numbers the samples of each dataset.

    Samples come in blocks. At the end of each block, every dataset has had its rounded share of all samples since the
    weights last changed. Within a block, the seed shuffles the order of the datasets.
    """

    def __init__(self, phases: Sequence[Weights], seed: int) -> None:
        """`phases`: the datasets' weights over the run, in order; the first phase begins at sample 0."""
        assert phases[0].first == 0 and all(a.first < b.first for a, b in pairwise(phases))
        self._seed, self._weights = seed, [_integers(phase.weights) for phase in phases]
        self._firsts = np.array([phase.first for phase in phases])
        self._before = [np.zeros(len(phases[0].weights), dtype=np.int64)]
        for phase in phases[1:]:
            self._before.append(self.before(phase.first))

    def draw(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return two arrays [n]: the dataset of each sample, and the number of earlier samples of that dataset."""
        phases = np.searchsorted(self._firsts, samples, side="right") - 1
        blocks, places = np.divmod(samples - self._firsts[phases], BLOCK)
        keys, which = np.unique(phases << 48 | blocks, return_inverse=True)
        found = [_block(self._weights[key >> 48], self._seed, key >> 48, key & _BLOCKS) for key in keys.tolist()]
        datasets, numbers = (np.stack(columns)[which, places] for columns in zip(*found, strict=True))
        return datasets, numbers + np.stack(self._before)[phases, datasets]

    def before(self, position: int) -> Int64s:
        """Return the number of samples of each dataset, [k], before sample `position`."""
        phase = int(np.searchsorted(self._firsts[: len(self._before)], position, side="left")) - 1
        if phase < 0:
            return self._before[0]
        weights, done = self._weights[phase], position - int(self._firsts[phase])
        blocks, rest = divmod(done, BLOCK)
        begun = np.bincount(_block(weights, self._seed, phase, blocks)[0][:rest], minlength=len(weights))
        whole: Int64s = self._before[phase] + np.array(counts(weights, blocks * BLOCK))
        return whole + begun


def counts(weights: tuple[int, ...], n: int) -> list[int]:
    """Return each dataset's rounded share of n samples. The shares add up to n, and no share falls as n grows.

    The datasets are the leaves of a Huffman tree. Each inner node divides its samples between its two children in
    proportion to their weights, rounded to the nearest. So each further sample goes to exactly one child. Every share
    is less than 1.68 off its exact value: rounding at an ancestor of weight W adds an error of at most w / (2W) to a
    leaf of weight w. From a leaf upwards, weights grow at least as fast as Fibonacci numbers, because a node's sibling
    is at least as heavy as each of the node's children. So the errors add up to less than half the reciprocal
    Fibonacci constant (3.3599). With two datasets the error is at most 1/2.
    """
    found = [0] * len(weights)
    todo = [(_huffman_tree(weights), n)]
    while todo:
        node, n_samples = todo.pop()
        if node.children is None:
            found[node.number] = n_samples
        else:
            one, other = node.children
            n_first = (2 * n_samples * one.weight + node.weight) // (2 * node.weight)
            todo += [(one, n_first), (other, n_samples - n_first)]
    return found


class _Node(NamedTuple):
    weight: int
    number: int
    """The dataset's index for a leaf, or a new number for an inner node. The number orders nodes of equal weight."""
    children: "tuple[_Node, _Node] | None" = None


@lru_cache(maxsize=64)
def _huffman_tree(weights: tuple[int, ...]) -> _Node:
    """Return the root of the Huffman tree (Huffman, 1952) of the weights. A weight of 0 has no leaf."""
    nodes = [_Node(weight, dataset) for dataset, weight in enumerate(weights) if weight]
    heapify(nodes)
    for number in range(len(weights), len(weights) + len(nodes) - 1):
        one, other = heappop(nodes), heappop(nodes)
        heappush(nodes, _Node(one.weight + other.weight, number, (one, other)))
    return nodes[0]


@lru_cache(maxsize=64)
def _block(weights: tuple[int, ...], seed: int, phase: int, block: int) -> tuple[Int64s, Int64s]:
    """Return two arrays [BLOCK]: each sample's dataset, and the sample's index among the phase's samples of this
    dataset."""
    first, end = (np.array(counts(weights, n * BLOCK)) for n in (block, block + 1))
    places = permute(np.arange(BLOCK), BLOCK, random_keys(seed, block, phase + 1))
    datasets = np.repeat(np.arange(len(weights)), end - first)[places]
    numbers = np.empty_like(datasets)
    for dataset in np.unique(datasets).tolist():
        here = datasets == dataset
        numbers[here] = first[dataset] + np.arange(int(here.sum()))
    return datasets, numbers


def _integers(weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers in exactly the proportions of the decimal weights, so that shares are the same on any machine."""
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * scale) for fraction in fractions)
