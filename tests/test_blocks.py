"""bench/blocks.py: its intervals, against Dunnett's published table and planted differences, also if seeds are added
because of what the intervals show."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    return importlib.import_module("blocks")


def _planted(
    seed: int, n_changes: int, n_blocks: int, effects: dict[int, float] | None = None, wild: int | None = None
) -> list[tuple[str, int, float]]:
    """Return runs with noise of 0.01, and of 0.1 in the change `wild`; blocks differ by much more than the noise."""
    random = np.random.Generator(np.random.PCG64(seed))
    luck = random.normal(0, 0.2, n_blocks)
    runs = []
    for change in range(n_changes + 1):
        for block in range(n_blocks):
            noise = random.normal(0, 0.1 if change == wild else 0.01)
            runs.append((f"c{change}", block, 2.5 + (effects or {}).get(change, 0.0) + luck[block] + noise))
    return runs


@pytest.mark.parametrize(
    ("n_changes", "freedom", "quantile"),
    # Dunnett (1964), Biometrics 20, table II: two-sided, 5%, of 20 and 40 degrees of freedom
    [(1, 20, 2.09), (2, 20, 2.38), (4, 20, 2.65), (5, 20, 2.73), (4, 40, 2.54), (5, 40, 2.62), (8, 40, 2.77)],
)
def test_one_look_has_the_intervals_of_dunnetts_table_or_hardly_wider_ones(
    blocks: Any, monkeypatch: pytest.MonkeyPatch, n_changes: int, freedom: int, quantile: float
) -> None:
    monkeypatch.setattr(blocks, "MOST_RUNS", blocks.FEWEST_RUNS)
    blocks._largest.cache_clear()
    blocks._multiple.cache_clear()
    found = blocks._multiple(n_changes, freedom)
    blocks._largest.cache_clear()
    blocks._multiple.cache_clear()
    assert 0.995 * quantile < found < 1.04 * quantile  # wider, because changes may share no run of the baseline


def test_the_noise_is_that_of_complete_blocks_and_intervals_narrow_with_pairs(blocks: Any) -> None:
    runs = _planted(1, 6, 3, {1: -0.05, 2: 0.03})
    losses = np.array([loss for _, _, loss in runs]).reshape(7, 3)
    left = losses - losses.mean(1, keepdims=True) - losses.mean(0) + losses.mean()
    noise = math.sqrt((left**2).sum() / (6 * 2))
    found = blocks.compare(runs, "c0")
    assert list(found) == [f"c{change}" for change in range(1, 7)]
    for change in range(1, 7):
        one = found[f"c{change}"]
        assert one.value == pytest.approx((losses[change] - losses[0]).mean(), abs=1e-12)
        assert one.spread == pytest.approx(math.sqrt(2) * noise)
        assert (one.n, one.apart) == (3, False)
        assert (one.high - one.value, one.value - one.low) == pytest.approx((one.margin(3), one.margin(3)))
        assert one.margin(12) == pytest.approx(one.margin(3) / 2 * 4**0.05)
    # later pairs move the difference; the noise stays that of the first, which decided nothing
    more = [("c0", 3, 2.0), ("c1", 3, 1.96)]
    later = blocks.compare([*runs, *more], "c0")["c1"]
    assert later.spread == found["c1"].spread
    assert later.value == pytest.approx((3 * found["c1"].value - 0.04) / 4)


def test_no_interval_misses_in_95_of_100_regimes_although_what_is_open_gets_more_seeds(blocks: Any) -> None:
    true = {1: -0.03, 2: 0.02}
    missed = found = 0
    for seed in range(60):
        rows = np.array([loss for _, _, loss in _planted(seed, 8, 10, true)]).reshape(9, 10)
        n = dict.fromkeys(range(1, 9), 3)
        wrong = False
        while True:
            runs = [("c0", block, rows[0, block]) for block in range(10)]
            runs += [(f"c{change}", block, rows[change, block]) for change in n for block in range(n[change])]
            result = blocks.compare(runs, "c0")
            wrong |= any(not one.low <= true.get(int(name[1:]), 0.0) <= one.high for name, one in result.items())
            going = [c for c in n if n[c] < 10 and result[f"c{c}"].low <= 0 <= result[f"c{c}"].high]
            if not going:
                break
            n.update((change, n[change] + 1) for change in going)
        missed += wrong
        found += result["c1"].high < 0
    assert missed <= 7  # 3 of 60 are expected, more than 7 in one of a hundred such tests; the seeds are fixed
    assert found >= 55


def test_a_change_that_scatters_is_set_apart_and_widens_no_other_interval(blocks: Any) -> None:
    calm, wild = _planted(3, 20, 3), _planted(3, 20, 3, wild=20)
    found = blocks.compare(wild, "c0")
    assert [name for name, one in found.items() if one.apart] == ["c20"]
    for name, one in blocks.compare(calm[:-3], "c0").items():
        assert (found[name].value, found[name].margin(3)) == (one.value, one.margin(3))
    differences = np.array([wild[i][2] - wild[i - 60][2] for i in (60, 61, 62)])
    assert found["c20"].spread == pytest.approx(differences.std(ddof=1))
    assert found["c20"].margin(3) > 10 * found["c20"].spread / math.sqrt(3)  # three pairs alone show little
    assert found["c20"].margin(12) < 5 * found["c20"].spread / math.sqrt(12)


def test_a_change_whose_later_runs_scatter_is_set_apart(blocks: Any) -> None:
    runs = _planted(4, 10, 8)
    runs = [run for run in runs if run[0] in ("c0", "c1") or run[1] < 3]
    assert not any(one.apart for one in blocks.compare(runs, "c0").values())
    burst = [(change, block, loss + (change == "c1" and block == 6)) for change, block, loss in runs]
    assert [name for name, one in blocks.compare(burst, "c0").items() if one.apart] == ["c1"]


def test_too_few_runs_have_a_difference_and_no_interval(blocks: Any) -> None:
    runs = [("base", 1, 2.0), ("new", 1, 1.5), ("alone", 2, 9.0)]
    assert blocks.compare(runs, "base") == {"new": blocks.Comparison(-0.5, 1)}
    assert math.isinf(blocks.compare(runs, "base")["new"].high)
    assert blocks.compare([], "base") == {}
    same = [(name, block, 2.0) for name in ("base", "new") for block in range(3)]
    assert blocks.compare(same, "base")["new"].value == pytest.approx(0)
    # with too few pairs of its own, a change has the noise of the others, but no interval yet
    young = blocks.compare([*_planted(1, 4, 3), ("young", 0, 2.0), ("young", 1, 2.1)], "c0")["young"]
    assert math.isinf(young.low) and math.isfinite(young.margin(3))
