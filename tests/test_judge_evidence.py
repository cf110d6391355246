"""The judge's statistics: the e-process, the error of whole campaigns, and what an agent gains by looking for luck."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptworks.judge.evidence import EFFECT_SCALE, Judgement, judged, level, log_e_value, spread_floor


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    return importlib.import_module("judge")


@pytest.mark.parametrize("gains", [[0.3, 1.1, -0.4], [2.0, 2.2, 1.9, 2.4, 2.1], [-1.0, -1.2, -0.7], [0.1, -0.1] * 5])
def test_the_e_value_is_the_likelihood_ratio_of_the_scale_invariant_statistic(gains: list[float]) -> None:
    """Compare with sums over a grid of effect sizes and scales."""
    x = np.array(gains)
    n, total, squares = len(x), x.sum(), (x * x).sum()
    scales = np.exp(np.linspace(-8, 5, 1500))[:, None]  # 1/σ, with the right-Haar prior dσ/σ
    effects = (np.arange(1200) + 0.5) * (8 * EFFECT_SCALE / 1200)
    prior = np.exp(-((effects / EFFECT_SCALE) ** 2) / 2)
    exponent = -(scales**2 * squares - 2 * effects * scales * total + n * effects**2) / 2
    with_effect = (scales**n * np.exp(exponent)).sum(0) @ prior / prior.sum()
    without = (scales**n * np.exp(-(scales**2) * squares / 2)).sum()
    t = x.mean() / (x.std(ddof=1) / math.sqrt(n))
    assert log_e_value(t, n) == pytest.approx(math.log(with_effect / without), abs=1e-3)


def test_levels_of_any_number_of_tries_add_up_to_the_error_and_discoveries_earn_more() -> None:
    levels = [level(0.05, "family", number, 0) for number in range(1, 50_000)]
    assert 0.0499 < sum(levels) < 0.05 and levels == sorted(levels, reverse=True)
    assert level(0.05, "family", 9, 4) == level(0.05, "family", 9, 0)
    assert level(0.05, "discoveries", 9, 4) == pytest.approx(5 * level(0.05, "discoveries", 9, 0))


def test_answers_name_a_gain_a_tie_a_harm_and_what_is_open() -> None:
    gains = [0.021, 0.024, 0.018, 0.022, 0.019]
    found = judged(gains, 0.025, 0.005)
    assert found.answer == "gain" and found.low < 0.0208 < found.high and found.pairs == 5
    assert judged(gains[:2], 0.025, 0.005).answer == "open", "two pairs never decide"
    assert judged(gains, 1e-6, 0.005).answer == "open", "a later try needs more evidence"
    assert judged(gains, 0.025, 0.03).answer == "tie", "a sure gain that is smaller than what is worthwhile"
    assert judged([-gain for gain in gains], 0.025, 0.005).answer == "harm"
    assert judged([0.0] * 3, 0.025, 0.005).answer == "tie", "a change without any effect"


def test_gains_that_agree_more_than_the_noise_of_earlier_tries_allows_prove_less() -> None:
    floor = spread_floor([judged([0.01, -0.01, 0.012, -0.009], 0.025, 0.005), judged([0.02], 0.01, 0.005), None])
    lucky = [0.0091, 0.0090, 0.0092, 0.0089]
    assert judged(lucky, 0.01, 0.001).answer == "gain"
    assert judged(lucky, 0.01, 0.001, floor).answer == "open"


def test_changes_that_do_nothing_do_not_lower_what_a_try_deviates_at_least() -> None:
    def deviating(by: float) -> Judgement:
        return judged([-by, 0.0, by], 0.025, 0.005)

    tried = [deviating(0.008 + number / 1000) for number in range(10)]
    floor = spread_floor(tried)
    assert spread_floor([*tried, *[deviating(0.0)] * 100]) == floor
    assert spread_floor([*tried, *[deviating(1e-6)] * 40]) > 0.6 * floor
    assert spread_floor([deviating(1e-6), tried[0], deviating(1e-6)]) == spread_floor(tried[:1]), "few tries too"
    assert spread_floor([*tried, *[deviating(1.0)] * 2]) < 1.2 * floor, "unstable changes do not hide all gains"
    assert spread_floor([deviating(0.0)]) == 0


def test_campaigns_without_an_effect_end_without_a_gain_and_planted_gains_are_found(bench: Any) -> None:
    assert bench.false_share(bench.frugal, "normal", 25, 50) <= 0.05
    assert bench.false_share(bench.adversary, "normal", 3, 30) == 0
    assert bench.false_share(bench.AGENTS["no-ops"], "rare large losses", 20, 25) <= 0.1
    assert bench.false_share(bench.AGENTS["flood"], "normal", 5, 20) == 0
    pairs = [needed for _, needed in bench.found(0.005, 4)]
    assert len(pairs) == 20 and all(0 < needed <= 16 for needed in pairs)
