from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptworks.config import IGNORED
from gptworks.data.batches import Batches, evaluation_windows
from gptworks.data.permutation import permute
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from test_shards import TOKENS, write


class Counting:
    """A split whose token at position i is i."""

    split = "train"

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens

    def read(self, start: int, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        assert 0 <= start <= start + length <= self.n_tokens
        return np.arange(start, start + length)


def batches(n_tokens: int = 1000, context_length: int = 8, seed: int = 0) -> Batches:
    return Batches(Counting(n_tokens), context_length, seed)  # type: ignore[arg-type]


def windows(n_tokens: int, context_length: int, **settings: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(evaluation_windows(Counting(n_tokens), context_length, **settings))  # type: ignore[arg-type]


def keys(seed: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.random.default_rng(seed).integers(0, 2**64, 8, dtype=np.uint64)


# ------------------------------------------------------------------------------------------------------ training


def test_targets_are_the_inputs_shifted_once() -> None:
    inputs, targets = batches().batch(12, 4)
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))


@pytest.mark.parametrize(("n_tokens", "context_length"), [(1000, 8), (9, 8), (16, 8), (17, 8), (24, 8), (500, 1)])
def test_each_epoch_visits_each_window_once(n_tokens: int, context_length: int) -> None:
    source = batches(n_tokens, context_length)
    n = source.windows_per_epoch
    phases = set()
    for epoch in range(20):
        starts = np.sort(source.starts(np.arange(epoch * n, (epoch + 1) * n)))
        assert np.all(np.diff(starts) == context_length)
        assert starts[0] < context_length
        assert starts[-1] + context_length + 1 <= n_tokens
        assert n >= n_tokens // context_length - 2  # all the text, but for less than one window at either end
        phases.add(int(starts[0]))
    if n_tokens >= 3 * context_length > 3:
        assert len(phases) > 3  # windows are cut elsewhere in each epoch


def test_epochs_and_seeds_differ_and_a_new_object_does_not() -> None:
    source = batches(seed=1)
    n = source.windows_per_epoch
    first, second = source.starts(np.arange(n)), source.starts(np.arange(n, 2 * n))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, batches(seed=2).starts(np.arange(n)))
    for first in (0, 28, 4000):
        assert torch.equal(source.batch(first, 4)[0], batches(seed=1).batch(first, 4)[0])


@pytest.mark.parametrize("size", [1, 2, 3, 6, 12])
def test_micro_batches_join_to_the_batch(size: int) -> None:
    source = batches()
    for position in (0, 120, 132, 144):  # 123 windows in an epoch: a batch lies over its end
        parts = [source.batch(position + first, size) for first in range(0, 12, size)]
        for part, whole in zip(zip(*parts, strict=True), source.batch(position, 12), strict=True):
            assert torch.equal(torch.cat(part), whole)


def test_a_batch_may_be_larger_than_an_epoch() -> None:
    source = batches(n_tokens=30)
    assert source.windows_per_epoch == 2
    assert source.batch(0, 10)[0].shape == (10, 8)


def test_too_small_a_corpus_says_so() -> None:
    with pytest.raises(UserError, match=r"has 8 tokens and a window needs 9.*context_length=7 or less"):
        batches(n_tokens=8)
    batches(n_tokens=8, context_length=7).batch(0, 4)


# --------------------------------------------------------------------------------------------------- permutation


@given(st.integers(1, 3000), st.integers(0, 2**32))
def test_permute_is_a_permutation(n: int, seed: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, keys(seed))), np.arange(n))


def test_permute_needs_no_memory_for_a_large_range() -> None:
    n = 10**12
    images = permute(np.arange(10_000), n, keys(0))
    assert len(np.unique(images)) == 10_000
    assert 0 <= images.min() < n / 100 and n * 0.99 < images.max() < n


@pytest.mark.parametrize("n", [2, 5, 16, 100])
def test_each_place_maps_to_every_place_equally_often(n: int) -> None:
    trials = 4000
    counts = np.zeros((n, n))
    for seed in range(trials):
        source = batches(n + 1, context_length=1, seed=seed)
        counts[np.arange(n), source.starts(np.arange(n))] += 1
    chi_square = ((counts - trials / n) ** 2 / (trials / n)).sum() * (n - 1) / n  # rows and columns both sum to trials
    degrees = (n - 1) ** 2
    assert abs(chi_square - degrees) < 5 * (2 * degrees) ** 0.5


def test_neighbours_are_not_kept_together() -> None:
    images = permute(np.arange(10_000), 10_000, keys(3))
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.05
    assert np.abs(np.diff(images)).mean() == pytest.approx(10_000 / 3, rel=0.05)


# ---------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("n_tokens", [2, 3, 8, 9, 10, 16, 17, 18, 100])
@pytest.mark.parametrize("stride", [None, 1, 3, 8])
def test_evaluation_counts_each_token_once(n_tokens: int, stride: int | None) -> None:
    found = windows(n_tokens, 8, stride=stride)
    counted = torch.cat([targets[targets != IGNORED] for _, targets in found])
    assert counted.tolist() == list(range(1, n_tokens))
    for index, (inputs, targets) in enumerate(found):
        assert 1 <= len(inputs) == len(targets) <= 8
        counts = targets != IGNORED
        assert torch.equal(targets[counts], inputs[counts] + 1)
        if index and stride:
            assert int(counts.long().argmax()) >= 8 - stride  # what each counted token is predicted from


def test_evaluation_of_some_windows_spaces_them_evenly() -> None:
    found = windows(8 * 100 + 1, 8, n_sequences=4)
    assert [int(inputs[0]) for inputs, _ in found] == [0, 200, 400, 600]
    assert len(windows(17, 8, n_sequences=50)) == 2


def test_evaluation_refuses_impossible_strides_and_sizes() -> None:
    with pytest.raises(UserError, match="stride=9 is not between 1 and context_length=8"):
        windows(100, 8, stride=9)
    with pytest.raises(UserError, match="has 1 tokens"):
        windows(1, 8)


def test_batches_of_real_shards(tmp_path: Path) -> None:
    shards = TokenShards(write(tmp_path), "train")
    source = Batches(shards, context_length=6, seed=0)
    inputs, targets = source.batch(0, 3)
    for row, start in enumerate(source.starts(np.arange(3)).tolist()):
        assert inputs[row].tolist() == TOKENS[start : start + 6].tolist()
        assert targets[row].tolist() == TOKENS[start + 1 : start + 7].tolist()
    first, _ = next(islice(evaluation_windows(shards, 6), 1))
    assert first.tolist() == TOKENS[:6].tolist()
