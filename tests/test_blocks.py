"""bench/blocks.py: its simultaneous intervals, against Dunnett's published table and planted differences."""

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
    ("n_changes", "n_blocks", "quantile"),
    # Dunnett (1964), Biometrics 20, table II: two-sided, 5%, of 20 and 40 degrees of freedom
    [(2, 11, 2.38), (4, 6, 2.65), (5, 5, 2.73), (4, 11, 2.54), (5, 9, 2.62), (8, 6, 2.77)],
)
def test_whole_blocks_get_the_intervals_of_dunnetts_table(
    blocks: Any, n_changes: int, n_blocks: int, quantile: float
) -> None:
    runs = _planted(1, n_changes, n_blocks, {1: -0.05, 2: 0.03})
    losses = np.array([loss for _, _, loss in runs]).reshape(n_changes + 1, n_blocks)
    left = losses - losses.mean(1, keepdims=True) - losses.mean(0) + losses.mean()
    noise = math.sqrt((left**2).sum() / (n_changes * (n_blocks - 1)))
    found = blocks.compare(runs, "c0")
    assert list(found) == [f"c{change}" for change in range(1, n_changes + 1)]
    for change in range(1, n_changes + 1):
        one = found[f"c{change}"]
        assert one.value == pytest.approx((losses[change] - losses[0]).mean(), abs=1e-12)
        margin = quantile * noise * math.sqrt(2 / n_blocks)
        assert (one.value - one.low, one.high - one.value) == pytest.approx((margin, margin), rel=0.012)
        assert one.n == n_blocks and not one.apart


def test_all_intervals_of_a_regime_hold_together_in_95_of_100(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_DRAWN", 2_000)
    true = {1: -0.03, 2: 0.02}
    missed = found = 0
    for seed in range(200):
        runs = _planted(seed, 10, 3, true)
        del runs[7]  # a change that has no run in one of the blocks
        result = blocks.compare([*runs, ("c5", 3, 9.0)], "c0")  # nor does a block without a baseline disturb
        missed += any(not one.low <= true.get(int(name[1:]), 0.0) <= one.high for name, one in result.items())
        found += result["c1"].high < 0
    assert missed <= 18  # 10 of 200 are expected, more than 17 in one of a hundred such tests; the seeds are fixed
    assert found >= 60


def test_a_change_that_scatters_is_set_apart_and_widens_no_other_interval(blocks: Any) -> None:
    calm, wild = _planted(3, 20, 3), _planted(3, 20, 3, wild=20)
    widths = [
        {name: one.high - one.low for name, one in blocks.compare(runs, "c0").items()} for runs in (calm[:-3], wild)
    ]
    found = blocks.compare(wild, "c0")
    assert [name for name, one in found.items() if one.apart] == ["c20"]
    for name, width in widths[0].items():
        assert widths[1][name] == pytest.approx(width, rel=1e-9)
    differences = np.array([wild[i][2] - wild[i - 60][2] for i in (60, 61, 62)])
    margin = 4.303 * differences.std(ddof=1) / math.sqrt(3)  # Student's t of 2 degrees for 95%
    assert (found["c20"].low, found["c20"].high) == pytest.approx(
        (differences.mean() - margin, differences.mean() + margin), abs=1e-4
    )


def test_too_few_runs_have_a_difference_and_no_interval(blocks: Any) -> None:
    runs = [("base", 1, 2.0), ("new", 1, 1.5), ("alone", 2, 9.0)]
    assert blocks.compare(runs, "base") == {"new": blocks.Comparison(-0.5, -math.inf, math.inf, 1)}
    assert blocks.compare([], "base") == {}
    same = [(name, block, 2.0) for name in ("base", "new") for block in range(3)]
    assert blocks.compare(same, "base")["new"].value == pytest.approx(0)
