"""The dataset of each sample in a mixture: exact shares, at any position, as a function of seed and position."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gptworks.data.batches import BLOCK, Batches, Shares, Weights, counts
from gptworks.data.permutation import ROUNDS, random_keys, shuffled
from gptworks.data.shards import Stretch
from gptworks.errors import UserError
from gptworks.training.distributed.parallel import ManyDevices
from test_batches import Counting
from tiny import plain_training

WEIGHTS = (0.7, 0.2, 0.1)


def shares(*weights: float, seed: int = 0, anneal: tuple[int, tuple[float, ...]] | None = None) -> Shares:
    phases = [Weights(0, weights)] + ([] if anneal is None else [Weights(*anneal)])
    return Shares(phases, seed)


def of_rank(rank: int, ranks: int, batch_size: int) -> ManyDevices:
    """Return a rank's `ManyDevices`, without communication, to see how it divides the batch."""
    data = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)
    mesh = {"data": data, "tensor": SimpleNamespace(size=lambda: 1)}
    layout = SimpleNamespace(sharding="none", sums_in_backward=False)
    train = plain_training(max_steps=1, batch_size=batch_size, micro_batch_size=4)
    return ManyDevices(train, SimpleNamespace(is_rank_zero=rank == 0), mesh, layout)  # type: ignore[arg-type]


def mixed(seed: int = 0, anneal: tuple[int, tuple[float, ...]] | None = None) -> Batches:
    """Return batches from three datasets of 1,000, 300 and 150 tokens; the token at position i is i."""
    stretches = [Stretch("a", 0, 1000), Stretch("b", 1000, 300), Stretch("c", 1300, 150)]
    phases = [Weights(0, WEIGHTS)] + ([] if anneal is None else [Weights(*anneal)])
    return Batches(Counting(1450), 8, seed, stretches, phases)


# ------------------------------------------------------------------------------------------------------- quotas


def test_a_million_samples_are_within_a_thousandth_and_each_block_within_one_sample() -> None:
    n = 1_000_000
    datasets, numbers = shares(*WEIGHTS).draw(np.arange(n))
    found = np.bincount(datasets, minlength=3)
    assert found.sum() == n and np.abs(found / n - WEIGHTS).max() < 0.001 * min(WEIGHTS)
    ends = np.arange(1, n // BLOCK + 1) * BLOCK
    for dataset, weight in enumerate(WEIGHTS):
        mine = datasets == dataset
        assert np.abs(np.cumsum(mine)[ends - 1] - weight * ends).max() <= 1
        assert np.array_equal(numbers[mine], np.arange(mine.sum()))  # each number once, in order


RECIPROCAL_FIBONACCI = 3.359885666243178


@example([1, 1, 1, 1, 13, 1, 1], 392)
@example([1, 2, 4, 8, 16, 32, 64, 128, 256], 255)
@example([340, 478, 695, 22], 4564)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=16).filter(any), st.integers(0, 5000))
def test_counts_add_up_never_fall_and_are_the_share_rounded(weights: list[int], n: int) -> None:
    """The bound of the distance is proved in the docstring of `counts`."""
    now, following = counts(tuple(weights), n), counts(tuple(weights), n + 1)
    assert sum(now) == n
    assert all(b - a in (0, 1) for a, b in zip(now, following, strict=True))
    n_weights = sum(weight > 0 for weight in weights)
    for weight, count in zip(weights, now, strict=True):
        distance = abs(count - Fraction(weight * n, sum(weights)))
        assert distance <= (0, 0.5, 1)[n_weights - 1] if n_weights <= 3 else distance < RECIPROCAL_FIBONACCI / 2
        assert weight or not count


def test_a_tiny_weight_has_exactly_its_samples() -> None:
    found = shares(1.0, 1e-5, seed=3).before(10_000_000)
    assert found.tolist() == [9_999_900, 100]


def test_the_counts_before_a_position_are_those_drawn() -> None:
    for one in (shares(*WEIGHTS), shares(*WEIGHTS, anneal=(1111, (0.1, 0.0, 0.9)))):
        datasets, _ = one.draw(np.arange(3000))
        for position in (0, 1, BLOCK - 1, BLOCK, 1000, 1110, 1111, 1112, 1111 + BLOCK, 3000):
            assert one.before(position).tolist() == np.bincount(datasets[:position], minlength=3).tolist()


def test_the_order_within_a_block_is_shuffled_and_depends_on_seed_and_block() -> None:
    first, other = (shares(0.5, 0.5, seed=seed).draw(np.arange(2 * BLOCK))[0] for seed in (0, 1))
    assert not np.array_equal(first[:BLOCK], np.sort(first[:BLOCK]))
    assert not np.array_equal(first[:BLOCK], first[BLOCK:])
    assert not np.array_equal(first, other)
    runs = np.diff(np.flatnonzero(np.diff(first)))
    assert runs.max() > 2 > runs.min()  # neither blocks of one dataset nor strict turns


# ------------------------------------------------------------------------------------------------------- samples


def test_one_dataset_gives_the_samples_of_a_split_without_weights() -> None:
    for seed, n_tokens in ((0, 1000), (7, 30)):
        samples = np.arange(0, 3000, 7)
        n = max(1, (n_tokens - 8) // 8)
        starts = []
        for epoch, window in zip((samples // n).tolist(), shuffled(samples, n, seed).tolist(), strict=True):
            starts.append(int(random_keys(seed, epoch)[ROUNDS]) % min(8, n_tokens - n * 8) + window * 8)
        assert Batches(Counting(n_tokens), 8, seed).starts(samples).tolist() == starts
        only_one = Batches(Counting(n_tokens), 8, seed, [Stretch("web", 0, n_tokens)], [Weights(0, (0.3,))])
        assert only_one.starts(samples).tolist() == starts


def test_each_dataset_is_read_as_without_the_others() -> None:
    source, samples = mixed(seed=5), np.arange(4000)
    starts = source.starts(samples)
    for first, n_tokens in ((0, 1000), (1000, 300), (1300, 150)):
        mine = starts[(starts >= first) & (starts < first + n_tokens)]
        assert np.array_equal(mine - first, Batches(Counting(n_tokens), 8, 5).starts(np.arange(len(mine))))
        assert mine.max() + 9 <= first + n_tokens  # no window goes over into the next dataset
    assert source.windows_per_epoch == 124 + 36 + 17
    assert source.epochs(4000) == pytest.approx([2800 / 124, 800 / 36, 400 / 17], rel=0.01)


def test_items_name_the_window_and_its_datasets_epoch() -> None:
    source, samples = mixed(), np.arange(500)
    epochs, windows = source.items(samples)
    assert windows.min() >= 0 and windows.max() < source.windows_per_epoch
    starts = [source.start(epoch, window) for epoch, window in zip(epochs.tolist(), windows.tolist(), strict=True)]
    assert starts == source.starts(samples).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_and_a_resume_with_another_batch_size_read_the_same_samples(ranks: int) -> None:
    """12 steps of 32 samples, then 24 of 16, in micro-batches of 4, as the ranks divide them."""
    source = mixed(anneal=(500, (0.2, 0.4, 0.4)))
    read, position = [], 0
    for batch_size, steps in ((32, 12), (16, 24)):
        for _ in range(steps):
            parts = {}
            for rank in range(ranks):
                mine = of_rank(rank, ranks, batch_size)
                for micro in mine.micro_steps(batch_size):
                    size = mine.micro_batch_size
                    parts[micro] = source.batch(position + micro * size, size)[0]
            read += [int(row[0]) for micro in sorted(parts) for row in parts[micro]]
            position += batch_size
    assert read == source.starts(np.arange(32 * 12 + 16 * 24)).tolist()


# -------------------------------------------------------------------------------------------------------- anneal


def test_the_weights_of_the_end_hold_from_their_sample_on_exactly() -> None:
    one = shares(1.0, 0.0, anneal=(1000, (0.25, 0.75)))
    datasets, _ = one.draw(np.arange(3000))
    assert not datasets[:1000].any()
    assert np.bincount(datasets[1000 : 1000 + BLOCK]).tolist() == [64, 192]
    assert one.before(1000 + 8 * BLOCK).tolist() == [1000 + 2 * BLOCK, 6 * BLOCK]
    before = shares(1.0, 0.0).draw(np.arange(1000))
    assert all(np.array_equal(a, b[:1000]) for a, b in zip(before, one.draw(np.arange(3000)), strict=True))


def test_a_dataset_shorter_than_a_window_is_named() -> None:
    with pytest.raises(UserError, match=r"train split of code has 8 tokens and a window needs 9.*leave code out of"):
        Batches(Counting(1000), 8, 0, [Stretch("web", 0, 992), Stretch("code", 992, 8)], [Weights(0, (0.5, 0.5))])
