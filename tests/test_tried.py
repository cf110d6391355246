"""Third runs in equal time: when a try adds them to its pairs, in simulations with noisy step times."""

import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

import tiny
from gptworks.config import Recipe
from gptworks.runs.history import History
from gptworks.runs.try_page import words
from gptworks.runs.try_results import Design, Pair, Try, step_seconds

STEPS = 1000


def simulated(seed: int, noise: float, ratio: float = 1.0, most_pairs: int = 8, worth: float = 0.005) -> Try:
    """Return a try of a change that does not affect the loss at equal tokens; longer runs have lower losses.

    Args:
        noise: deviation of the logarithm of a run's step time. ratio: how long a step takes with the change.
    """
    source = random.Random(seed)
    recipe = Recipe(**tiny.recipe_tree(Path("/tmp")))
    found = Try(Path("try"), recipe, recipe, Design(("seed=1",), 30, worth, most_pairs, STEPS, 1.0), ())
    while (due := found.due(found.decided)) is not None:
        number, arms = due
        pair = found.pairs[number] if number < len(found.pairs) else Pair(number, number, {}, {}, {}, None)
        for arm in arms:
            steps = (found.steps_in_time or 0) if arm == "in-time" else STEPS
            pair.loss[arm] = 3 - 0.3 * math.log(steps / STEPS) + source.gauss(0, 0.01)
            slower = 1 if arm == "before" else ratio
            pair.step_seconds[arm] = 0.1 * slower * math.exp(source.gauss(0, noise))
        found = replace(found, pairs=(*found.pairs[:number], pair, *found.pairs[number + 1 :]))
    return found


def answers(found: Try) -> set[str]:
    return {found.verdict(arm).answer for arm in found.arms[1:]}


@pytest.mark.parametrize("noise", [0.01, 0.04, 0.15])
def test_a_change_that_does_nothing_gets_a_verdict_in_at_most_5_percent_of_tries_however_noisy_the_times(
    noise: float,
) -> None:
    """Counts all verdicts of a try. The step times of the first pair alone differ by 5% in most tries, enough for a
    false verdict in equal time."""
    tries = [simulated(seed, noise) for seed in range(400)]
    wrong = [bool(answers(found) & {"lower", "higher"}) for found in tries]
    assert sum(wrong[:200]) <= 10
    assert fmean(wrong) <= 0.05
    assert fmean(len(found.arms) == 3 for found in tries) <= 0.01
    if noise > 0.01:
        assert fmean(abs(math.log(found.time_of(found.pairs[0]))) > 0.05 for found in tries) > 0.3


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_a_change_of_the_step_time_is_found_and_its_verdict_in_equal_time_too(ratio: float) -> None:
    tries = [simulated(seed, 0.02, ratio) for seed in range(100)]
    answer = "lower" if ratio < 1 else "higher"
    assert fmean(found.verdict("in-time").answer == answer for found in tries if len(found.arms) == 3) > 0.95
    assert fmean(len(found.arms) == 3 for found in tries) > 0.95
    steps = [found.steps_in_time or 0 for found in tries if found.steps_in_time]
    assert fmean(steps) == pytest.approx(STEPS / ratio, rel=0.01)


def test_equal_step_times_end_a_try_with_its_verdict() -> None:
    tries = [simulated(seed, 0.005, worth=0.05) for seed in range(100)]
    assert all(len(found.arms) == 2 for found in tries)
    assert fmean(answers(found) == {"same"} for found in tries) > 0.9
    needed = [replace(found, pairs=found.pairs[:-1]).verdict("after").answer == "open" for found in tries]
    assert all(needed), "the step times ask for no pair"


def test_the_third_runs_are_as_long_as_the_first_look_that_found_a_difference_said() -> None:
    found = simulated(1, 0.02, 1.25)
    assert found.steps_in_time is not None
    at = next(n for n in range(1, 9) if replace(found, pairs=found.pairs[:n]).steps_in_time)
    assert replace(found, pairs=found.pairs[:at]).steps_in_time == found.steps_in_time
    assert at < len(found.pairs) or found.decided


def run(step_times: list[float]) -> History:
    seconds = 0.0
    records = []
    for step, taken in enumerate(step_times, 1):
        seconds += taken
        records.append({"kind": "train", "step": step, "tokens": step, "seconds": round(seconds, 3), "loss": 1.0})
    return History(Path("run"), Recipe(**tiny.recipe_tree(Path("/tmp"))), tuple(records))


def test_a_runs_step_time_is_that_of_its_undisturbed_steps() -> None:
    """Slow first steps, a paused machine, or a third of slow steps do not change it."""
    usual = [0.02] * 300
    assert step_seconds(run(usual)) == pytest.approx(0.02, rel=0.01)
    disturbed = [0.5] * 2 + usual[2:150] + [60.0] + [0.05] * 90 + usual[241:]
    assert step_seconds(run(disturbed)) == pytest.approx(0.02, rel=0.01)
    assert step_seconds(run([0.004] * 30)) == pytest.approx(0.004, rel=0.05), "a log has milliseconds"
    assert step_seconds(run([0.004] * 3)) == pytest.approx(0.004, rel=0.05)


def tried(differences: list[float], step_times: list[float], worth: float = 0.005) -> Try:
    """Return a try whose pairs have these differences and these step times with the change."""
    recipe = Recipe(**tiny.recipe_tree(Path("/tmp")))
    pairs = tuple(
        Pair(i, i, {"before": 3.0, "after": 3.0 + one}, {"before": 9.0, "after": 9.0 * taken},
             {"before": 0.1, "after": 0.1 * taken}, None)
        for i, (one, taken) in enumerate(zip(differences, step_times, strict=True))
    )  # fmt: skip
    return Try(Path("try"), recipe, recipe, Design(("seed=1",), 30, worth, 8, STEPS, 1.0), pairs)


def test_each_question_that_is_open_is_named_and_no_other() -> None:
    noisy, same = [1.02, 1.3, 1.02, 1.3, 1.16], [1.0, 1.001, 0.999, 1.0, 1.001]
    clear, unclear = [0.44, 0.45, 0.45, 0.44, 0.452], [0.4, -0.4, 0.3, -0.3, 0.1]
    time, loss = "in equal time: whether the same tokens take another time", "at equal tokens: whether the loss differs"
    for differences, times, questions in (
        (clear, same, ()), (clear, noisy, (time,)), (unclear, same, (loss,)), (unclear, noisy, (loss, time)),
    ):  # fmt: skip
        found = tried(differences, times)
        assert found.open_questions == questions and found.decided == (not questions)
        assert words(found, "after").startswith("hurts" if differences == clear else "not decided")


@pytest.mark.parametrize(
    ("worth", "said"),
    [(0.005, "5 pairs"), (0.447, "; the direction is clear, whether it is the 0.447 that matters is open"),
     (2.0, "; that is less than the 2 that matters")],
)  # fmt: skip
def test_a_clear_direction_is_not_called_a_difference_that_matters(worth: float, said: str) -> None:
    found = tried([0.44, 0.45, 0.45, 0.44, 0.452], [1.0] * 5, worth)
    assert words(found, "after").startswith("hurts: the loss is 0.4464 higher (0.4") and words(found, "after").endswith(
        said
    )
