"""The dataset of each sample of a run, by the datasets' weights: a function of the seed and the sample's position."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import numpy as np

from gptworks.config import Recipe
from gptworks.data.permutation import Int64s, permute, random_keys

BLOCK = 256
"""Samples whose datasets are shuffled together."""
_BLOCKS = (1 << 48) - 1


@dataclass(frozen=True)
class Weights:
    """The datasets' weights, and the first sample for which they hold."""

    first: int
    weights: tuple[float, ...]


def weights_over_run(recipe: Recipe) -> list[Weights]:
    """The weights of the recipe's datasets from sample 0 on, and later ones if it has `data.anneal`."""
    members, anneal, first = recipe.data.mixture, recipe.data.anneal, recipe.anneal_from
    weights = [Weights(0, tuple(member.weight for member in members) or (1.0,))]
    if anneal is not None and first is not None:
        weights.append(Weights(first, tuple(anneal.weights.get(member.name, 0.0) for member in members)))
    return weights


class Shares:
    """The dataset of each sample, and its number among that dataset's samples.

    Samples come in blocks. By the end of each block, each dataset has its rounded share of all samples so far. Within a
    block, the seed shuffles the order of the datasets.
    """

    def __init__(self, phases: Sequence[Weights], seed: int) -> None:
        """
        Args:
            phases: the weights from sample 0 on, then others from later samples on.
        """
        assert phases[0].first == 0 and all(a.first < b.first for a, b in pairwise(phases))
        self._seed, self._weights = seed, [_integers(phase.weights) for phase in phases]
        self._firsts = np.array([phase.first for phase in phases])
        self._before = [np.zeros(len(phases[0].weights), dtype=np.int64)]
        for phase in phases[1:]:
            self._before.append(self.before(phase.first))

    def draw(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """The dataset [n] of each sample [n], and the number of the dataset's samples before it [n]."""
        phases = np.searchsorted(self._firsts, samples, side="right") - 1
        blocks, places = np.divmod(samples - self._firsts[phases], BLOCK)
        keys, which = np.unique(phases << 48 | blocks, return_inverse=True)
        found = [_block(self._weights[key >> 48], self._seed, key >> 48, key & _BLOCKS) for key in keys.tolist()]
        datasets, numbers = (np.stack(columns)[which, places] for columns in zip(*found, strict=True))
        return datasets, numbers + np.stack(self._before)[phases, datasets]

    def before(self, position: int) -> Int64s:
        """The number of samples of each dataset [k] before a position."""
        phase = int(np.searchsorted(self._firsts[: len(self._before)], position, side="left")) - 1
        if phase < 0:
            return self._before[0]
        weights, done = self._weights[phase], position - int(self._firsts[phase])
        blocks, rest = divmod(done, BLOCK)
        begun = np.bincount(_block(weights, self._seed, phase, blocks)[0][:rest], minlength=len(weights))
        whole: Int64s = self._before[phase] + np.array(counts(weights, blocks * BLOCK))
        return whole + begun


def counts(weights: tuple[int, ...], n: int) -> list[int]:
    """The number of samples of each dataset among n: its rounded share. They add up to n, and none falls as n grows.

    The datasets are the leaves of a Huffman tree. Each inner node divides its samples between its two children in
    proportion to their weights, rounded to the nearest, so one more sample gives one child one more. Every count is
    less than 1.68 from its exact share: rounding at an ancestor of weight W adds at most w / 2W for a leaf of weight w,
    and weights from a leaf upwards grow at least as fast as Fibonacci's numbers, because a node's sibling is at least
    as heavy as each of its children. So the sum is below half the reciprocal Fibonacci constant, 3.3599. With two
    datasets the difference is at most 1/2.
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
    """The dataset of a leaf. It also orders nodes of equal weight."""
    children: "tuple[_Node, _Node] | None" = None


@lru_cache(maxsize=64)
def _huffman_tree(weights: tuple[int, ...]) -> _Node:
    """The root of the tree that joins the two lightest nodes until one is left (Huffman, 1952). Zeros have no leaf."""
    nodes = [_Node(weight, dataset) for dataset, weight in enumerate(weights) if weight]
    heapify(nodes)
    for number in range(len(weights), len(weights) + len(nodes) - 1):
        one, other = heappop(nodes), heappop(nodes)
        heappush(nodes, _Node(one.weight + other.weight, number, (one, other)))
    return nodes[0]


def windows_per_epoch(n_tokens: int, context_length: int) -> int:
    """The number of windows that fit after any of T first positions, so that it is the same in every epoch."""
    return max(1, (n_tokens - context_length) // context_length)


@lru_cache(maxsize=64)
def _block(weights: tuple[int, ...], seed: int, phase: int, block: int) -> tuple[Int64s, Int64s]:
    """The dataset [BLOCK] of each sample of a block, and the sample's number [BLOCK] among the dataset's in the
    phase."""
    first, end = (np.array(counts(weights, n * BLOCK)) for n in (block, block + 1))
    places = permute(np.arange(BLOCK), BLOCK, random_keys(seed, block, phase + 1))
    datasets = np.repeat(np.arange(len(weights)), end - first)[places]
    numbers = np.empty_like(datasets)
    for dataset in np.unique(datasets).tolist():
        here = datasets == dataset
        numbers[here] = first[dataset] + np.arange(int(here.sum()))
    return datasets, numbers


def _integers(weights: Sequence[float]) -> tuple[int, ...]:
    """Integers in the exact proportions of the decimal weights, so that rounding does not depend on the machine."""
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * scale) for fraction in fractions)
