"""The sequential test of paired differences: its error rate and its power."""

import math
import random
from statistics import fmean, stdev

import pytest

from gptworks.runs.statistics import FEWEST_PAIRS, Verdict, level, t_two_sided, verdict

TRIES = 200


def one_try(differences: list[float], most_pairs: int, worth: float = 0.0) -> tuple[Verdict, int]:
    """Test after each pair and stop at a clear verdict; return it and the number of pairs."""
    for n in range(1, most_pairs + 1):
        found = verdict(differences[:n], most_pairs, worth)
        if found.answer != "open":
            break
    return found, n


def draws(seed: int, n: int, shift: float = 0.0, heavy: bool = False) -> list[float]:
    source = random.Random(seed)
    return [shift + (source.uniform(-1, 1) ** 3 if heavy else source.gauss()) for _ in range(n)]


@pytest.mark.parametrize("most_pairs", [3, 5, 10, 20])
def test_a_change_that_does_nothing_is_called_one_that_does_in_at_most_5_percent_of_tries(most_pairs: int) -> None:
    """2,000 tries, whose error rate has a standard error of 0.5%. The errors in the first 200 tries alone are limited
    too."""
    wrong = [one_try(draws(i, most_pairs), most_pairs)[0].answer in ("lower", "higher") for i in range(10 * TRIES)]
    assert fmean(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / len(wrong))
    assert fmean(wrong) >= 0.03, "a test that never finds anything errs as rarely"
    assert sum(wrong[:TRIES]) <= 0.05 * TRIES + 3 * math.sqrt(0.05 * 0.95 * TRIES)


def test_the_same_looks_at_an_uncorrected_level_err_several_times_as_often() -> None:
    def wrong(differences: list[float]) -> bool:
        return any(
            t_two_sided(fmean(d) / stdev(d) * math.sqrt(len(d)), len(d) - 1) < 0.05
            for d in (differences[:n] for n in range(FEWEST_PAIRS, len(differences) + 1))
        )

    assert fmean(wrong(draws(i, 10)) for i in range(1000)) > 0.1


def test_differences_that_are_not_normal_do_not_raise_the_errors_much() -> None:
    wrong = [one_try(draws(i, 10, heavy=True), 10)[0].answer in ("lower", "higher") for i in range(1000)]
    assert fmean(wrong) <= 0.08


def test_one_look_has_the_whole_level_and_more_looks_less_each() -> None:
    assert level(FEWEST_PAIRS) == 0.05
    looks = (FEWEST_PAIRS, 4, 6, 10)
    assert [level(n) for n in looks] == sorted(map(level, looks), reverse=True)
    assert all(0.05 / (n - FEWEST_PAIRS + 1) < level(n) for n in looks[1:]), "Bonferroni's is stricter"


def test_a_large_difference_is_found_at_the_first_look() -> None:
    found = [one_try(draws(i, 5, shift=-30), 5) for i in range(50)]
    assert {one.answer for one, _ in found} == {"lower"}
    assert fmean(n for _, n in found) < 3.2


def test_the_interval_holds_the_true_difference_at_all_looks_together() -> None:
    def held(seed: int) -> bool:
        d = draws(seed, 8, shift=0.7)
        looks = (verdict(d[:n], 8, 0) for n in range(FEWEST_PAIRS, 9))
        return all(one.low <= 0.7 <= one.high for one in looks)

    assert fmean(held(i) for i in range(1000)) >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / 1000)


def test_a_difference_below_what_matters_ends_the_try() -> None:
    found, n = one_try([x / 100 for x in draws(1, 10)], 10, worth=0.5)
    assert found.answer == "same" and n == FEWEST_PAIRS
    assert verdict([], 5, 1).answer == verdict([0.1, 0.1], 5, 1).answer == "open"
