"""Runs compared: statistics against closed forms and published figures, bands against numpy."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tiny
from gptworks.cli import app
from gptworks.config import settings
from gptworks.data.prepare import prepare
from gptworks.errors import UserError
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.recipes import shipped_paths
from gptworks.runs.bands import Band, find_band, judge, make_band, read_band, shipped_bands, write_band
from gptworks.runs.comparable import comparability, decisive, fingerprint, settings_fingerprint
from gptworks.runs.compare import Comparison, compare, to_html
from gptworks.runs.history import History, read_history
from gptworks.runs.statistics import binomial_quantile, known_spread, t_quantile, t_two_sided, welch
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.progress import Progress
from histories import curve, training, validation, write_run
from test_html import Reader

ROOT = Path(__file__).parents[1]
CURVES = ([3.0, 2.5, 2.21], [3.1, 2.45, 2.2], [3.02, 2.6, 2.17], [2.9, 2.55, 2.24])


def repeats(
    folder: Path, losses: tuple[list[float], ...] = CURVES, first_seed: int = 1, **sections: Any
) -> list[History]:
    seeds = range(first_seed, first_seed + len(losses))
    return [
        write_run(folder / f"seed-{seed}", curve(run), seed, **sections)
        for seed, run in zip(seeds, losses, strict=True)
    ]


def plain(*runs: History) -> Comparison:
    return compare(runs, [None] * len(runs))


# -------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("t", [0.01, 0.5, 1.0, 2.0, 10.0, 1000.0])
def test_students_t_has_its_closed_forms(t: float) -> None:
    assert t_two_sided(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-9, abs=1e-14)
    assert t_two_sided(t, 2) == pytest.approx(1 - t / math.sqrt(t * t + 2), rel=1e-7, abs=1e-14)
    assert t_two_sided(t, 1e9) == pytest.approx(math.erfc(t / math.sqrt(2)), rel=1e-5, abs=1e-14)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (10, 2.228), (30, 2.042)])
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=5e-4)


PUBLISHED = {
    0.021378: (
        [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4],
        [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4],
    ),
    0.010752: ([3.0, 4.0, 1.0, 2.1], [490.2, 340.0, 433.9]),
}
"""Worked examples of Welch's test that many texts and programs share, by their p."""


@pytest.mark.parametrize("p", PUBLISHED)
def test_welch_on_published_examples(p: float) -> None:
    first, second = PUBLISHED[p]
    found = welch(first, second)
    assert found.p == pytest.approx(p, abs=1e-6)
    assert found.value == pytest.approx(np.mean(second) - np.mean(first))
    assert found.high - found.value == pytest.approx(found.value - found.low)


def test_welch_finds_no_more_than_its_share_of_what_is_not_there() -> None:
    random = np.random.default_rng(0)
    found = [welch(random.normal(size=4).tolist(), random.normal(size=5).tolist()).p < 0.05 for _ in range(1000)]
    assert 0.02 < np.mean(found) < 0.06


def test_a_known_spread_serves_single_values() -> None:
    found = known_spread([2.0], [2.1], 0.05, 2)
    assert found.value == pytest.approx(0.1)
    assert found.high - found.value == pytest.approx(4.30265 * 0.05 * math.sqrt(2), rel=1e-5)
    assert known_spread([2.0], [2.0], 0.0, 2).p == 1.0


def test_binomial_quantiles_leave_at_most_a_twentieth() -> None:
    for n, below in pairwise([0, 1, 5, 8, 20, 100]):
        for trials in (n, below):
            k = binomial_quantile(trials, 0.05)
            tail = [math.comb(trials, i) * 0.05**i * 0.95 ** (trials - i) for i in range(trials + 1)]
            assert sum(tail[k + 1 :]) <= 0.05 < sum(tail[k:]) + 1e-12


# ------------------------------------------------------------------------------------------------- bands


def test_a_band_is_what_numpy_makes_of_the_curves(tmp_path: Path) -> None:
    band = make_band(repeats(tmp_path))
    losses = np.array(CURVES)
    assert [p.step for p in band.points] == [5, 10, 15]
    assert [p.tokens for p in band.points] == [5 * 256, 10 * 256, 15 * 256]
    assert [p.mean for p in band.points] == pytest.approx(losses.mean(axis=0).tolist())
    assert [p.standard_deviation for p in band.points] == pytest.approx(losses.std(axis=0, ddof=1).tolist())
    assert [p.min for p in band.points] == losses.min(axis=0).tolist()
    assert [p.max for p in band.points] == losses.max(axis=0).tolist()
    assert {p.n for p in band.points} == {4}
    assert band.seeds == (1, 2, 3, 4)
    assert band.margin(band.points[0]) == pytest.approx(3.18245 * losses[:, 0].std(ddof=1) * math.sqrt(1.25), rel=1e-5)
    write_band(band, tmp_path / "tiny.json")
    assert read_band(tmp_path / "tiny.json") == band


def test_another_run_lies_inside_or_outside(tmp_path: Path) -> None:
    band = make_band(repeats(tmp_path))
    inside = judge(write_run(tmp_path / "inside", curve([3.0, 2.5, 2.2]), 9), band)
    outside = judge(write_run(tmp_path / "outside", curve([3.6, 3.0, 2.9]), 9), band)
    begun = judge(write_run(tmp_path / "begun", curve([3.0]), 9), band)
    diverged = judge(write_run(tmp_path / "diverged", curve([3.0, math.nan, math.nan]), 9), band)
    assert inside and inside.inside and inside.n_outside == 0 and inside.n_points == 3
    assert outside and not outside.inside and outside.n_outside == 3
    assert begun and begun.inside and begun.last.step == 5
    assert diverged and not diverged.inside and diverged.n_outside == 2
    assert judge(write_run(tmp_path / "none", []), band) is None


@pytest.mark.parametrize("together", [False, True])
def test_a_run_of_the_same_recipe_is_called_outside_in_a_twentieth_of_cases(tmp_path: Path, together: bool) -> None:
    """Eight points of normal losses that are either independent or all the same number."""
    band = make_band(repeats(tmp_path))
    random, outside = np.random.default_rng(1), []
    for _ in range(1500):
        draws = random.normal(size=(4, 1 if together else 8)) * np.ones((4, 8))
        points = [
            band.points[0].model_copy(update={"step": i, "mean": d.mean(), "standard_deviation": d.std(ddof=1), "n": 3})
            for i, d in enumerate(draws[:3].T)
        ]
        n_outside = sum(abs(new - p.mean) > band.margin(p) for new, p in zip(draws[3], points, strict=True))
        outside.append(n_outside > binomial_quantile(8, 0.05))
    assert np.mean(outside) < 0.06
    if together:
        assert np.mean(outside) > 0.04


def with_minutes(tmp_path: Path) -> list[History]:
    return repeats(tmp_path, train={"max_minutes": 1.0})


def with_another_rate(tmp_path: Path) -> list[History]:
    return [*repeats(tmp_path), write_run(tmp_path / "odd", curve(CURVES[0]), 9, train={"learning_rate": 0.5})]


def with_a_seed_twice(tmp_path: Path) -> list[History]:
    return [*repeats(tmp_path), write_run(tmp_path / "odd", curve(CURVES[0]), 1)]


def with_a_short_run(tmp_path: Path) -> list[History]:
    return [*repeats(tmp_path), write_run(tmp_path / "odd", curve([3.0, 2.5]), 9)]


def with_a_diverged_run(tmp_path: Path) -> list[History]:
    return [*repeats(tmp_path), write_run(tmp_path / "odd", curve([3.0, 2.5, math.nan]), 9)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: repeats(folder)[:2], "give at least 3"),
        (with_minutes, "max_minutes"),
        (with_another_rate, "train.learning_rate is 0.5 and not 0.003"),
        (with_a_seed_twice, "seed 1 is given twice"),
        (with_a_short_run, "not evaluated at the same steps"),
        (with_a_diverged_run, "not finite"),
    ],
)
def test_runs_that_make_no_band_are_refused(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_band(make(tmp_path))


def test_what_is_no_band_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such band"):
        read_band(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"name": "x"}', encoding="utf-8")
    with pytest.raises(UserError, match="is not a band"):
        read_band(tmp_path / "bad.json")


def test_shipped_bands_belong_to_shipped_recipes() -> None:
    recipes = {fingerprint(load_recipe(name)): name for name in shipped_paths() if "/" not in name}
    for band in shipped_bands():
        assert band.fingerprint == settings_fingerprint(band.settings)
        assert band.name == recipes.get(band.fingerprint), f"the recipe {band.name} has changed: run `make bands`"
        assert len(band.seeds) >= 3


def test_only_what_decides_a_curve_counts(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [], 1)
    same = write_run(
        tmp_path / "b", [], 2, train={"device": "auto", "precision": "fp32", "log_every": 3, "micro_batch_size": 2}
    )
    other = write_run(tmp_path / "c", [], 1, model={"d_ff": 64})
    assert fingerprint(first.recipe) == fingerprint(same.recipe) != fingerprint(other.recipe)
    assert decisive(other.recipe)["model.d_ff"] == 64
    assert find_band(first.recipe) is None


# --------------------------------------------------------------------------------------------- comparing


def test_groups_of_seeds_are_told_apart_by_welch(tmp_path: Path) -> None:
    ours = repeats(tmp_path / "ours")
    theirs = repeats(tmp_path / "theirs", ([3, 2.3, 1.9], [3, 2.2, 1.91], [3, 2.2, 1.89]), 11, model={"d_ff": 64})
    (finding,) = plain(*ours, *theirs).findings
    a, b = [losses[-1] for losses in CURVES], [1.9, 1.91, 1.89]
    assert finding.difference == welch(a, b)
    assert finding.difference.value == pytest.approx(np.mean(b) - np.mean(a))
    assert finding.difference.p < 0.05
    assert "p = " in str(finding) and "a difference" in str(finding)
    shuffled = repeats(tmp_path / "same", ([3, 2.3, 2.19], [3, 2.2, 2.23], [3, 2.2, 2.2]), 21, model={"d_ff": 96})
    (finding,) = plain(*ours, *shuffled).findings
    assert finding.difference is not None and finding.difference.p > 0.05
    assert "within noise" in str(finding)


def test_single_runs_take_their_spread_from_the_band(tmp_path: Path) -> None:
    band = make_band(repeats(tmp_path))
    first = write_run(tmp_path / "first", curve([3.0, 2.5, 2.2]), 8)
    second = write_run(tmp_path / "second", curve([3.0, 2.5, 1.7]), 8, model={"d_ff": 64})
    (finding,) = compare([first, second], [band, None]).findings
    deviation = float(np.std([losses[-1] for losses in CURVES], ddof=1))
    assert finding.difference == known_spread([2.2], [1.7], deviation, 3)
    (unknown,) = plain(first, second).findings
    assert unknown.difference is None
    assert "One run each gives no interval" in str(unknown) and "seed=1" in str(unknown)


def test_a_run_counts_once_and_to_its_end(tmp_path: Path) -> None:
    runs = repeats(tmp_path)
    again = write_run(tmp_path / "again", curve(CURVES[0]), 1, train={"device": "auto"})
    short = write_run(tmp_path / "short", curve([9.0]), 77)
    comparison = plain(*runs, again, short)
    (group,) = comparison.groups
    assert [run.name for run in group] == ["seed-1", "seed-2", "seed-3", "seed-4"]
    assert set(comparison.uncounted) == {"again", "short"}


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", curve([2.0]), 1)
    second = write_run(tmp_path / "b", curve([2.0]), 2, model={"d_ff": 64}, train={"schedule": "wsd"})
    assert plain(first, second).differing == {
        "seed": [1, 2], "model.d_ff": [128, 64], "train.schedule": ["cosine", "wsd"],
    }  # fmt: skip


def evaluated_on(run: History, tokens: str, text: str = "") -> History:
    """Return the run with a checkpoint that names the tokenizer files and the held-out text of its evaluation."""
    progress = asdict(Progress(data_fingerprint=tokens, validation_text_sha256=text))
    save_checkpoint(run.folder, 0, {"w": torch.zeros(1)}, {"w": torch.zeros(1)}, progress)
    return read_history(run.folder)


def with_words(folder: Path, bits_per_byte: float | None) -> History:
    """Return a run with a byte-level BPE, evaluated on all of the held-out text."""
    run = write_run(folder, [training(1, 5.0), validation(1, 5.0, bits_per_byte)], train={"evaluate_sequences": 0})
    path = run.folder / "recipe.yaml"
    tree = path.read_text(encoding="utf-8").replace("type: char", "type: bpe\n  vocab_size: 300")
    path.write_text(tree.replace("vocab_size: 43", "vocab_size: 300"), encoding="utf-8")
    return read_history(folder)


def test_other_tokens_are_compared_in_bits_per_byte_of_the_same_text(tmp_path: Path) -> None:
    records = [training(1, 3.0), validation(1, 3.0, 1.5)]
    letters = evaluated_on(write_run(tmp_path / "a", records, train={"evaluate_sequences": 0}), "t1", "same")
    words = evaluated_on(with_words(tmp_path / "b", 1.25), "t2", "same")
    (finding,) = plain(letters, words).findings
    assert (finding.measure, finding.value, finding.unit) == ("bits_per_byte", -0.25, "bits per byte")
    assert "after 256 tokens" in str(finding)  # a step of other tokens is other work

    (refusal,) = plain(letters, evaluated_on(with_words(tmp_path / "c", 1.25), "t3", "other")).refusals
    assert "evaluated on different text" in str(refusal)
    (refusal,) = plain(letters, evaluated_on(with_words(tmp_path / "d", 1.25), "t4")).refusals
    assert "d does not record which text it was evaluated on" in str(refusal)
    (refusal,) = plain(letters, evaluated_on(with_words(tmp_path / "e", None), "t5", "same")).refusals
    assert "e has no bits per byte: train.evaluate_sequences=0" in str(refusal)


def test_the_held_out_text_has_one_sum_whatever_the_tokenizer(tmp_path: Path) -> None:
    trees = [tiny.recipe_tree(tmp_path) for _ in range(3)]
    trees[1]["tokenizer"] = {"type": "bpe", "vocab_size": 300}
    trees[2]["data"]["sources"] = [{"type": "text", "path": str(tmp_path / "other.txt")}]
    (tmp_path / "other.txt").write_text(tiny.TEXT.replace("fox", "cat"), encoding="utf-8")
    sums = [prepare(parse_recipe(tree)).manifest.validation_text_sha256 for tree in trees]
    assert sums[0] == sums[1] != sums[2]
    assert sums[0] is not None


def preference(folder: Path, **objective: Any) -> History:
    run = write_run(folder, curve([0.6, 0.5]))
    tree = run.recipe.model_dump(mode="json", exclude_defaults=True)
    tree["objective"] = {"type": "preference", **objective}
    tree["data"] = {"sources": [{"type": "preferences", "path": "x.jsonl"}]}
    return replace(run, recipe=parse_recipe(tree))


INCOMPARABLE: dict[str, tuple[Callable[[Path], History], Callable[[Path], History], str]] = {
    "another text, the same recipe": (
        lambda folder: evaluated_on(write_run(folder / "a", curve([2.0])), "t1", "x"),
        lambda folder: evaluated_on(write_run(folder / "b", curve([2.0])), "t2", "y"),
        "evaluated on different text",
    ),
    "another validation split": (
        lambda folder: write_run(folder / "a", curve([2.0])),
        lambda folder: write_run(folder / "b", curve([2.0]), data={"validation": {"fraction": 0.3, "by": "tail"}}),
        "data.validation.fraction is 0.1 and 0.3",
    ),
    "dpo and ipo": (
        lambda folder: preference(folder / "a"),
        lambda folder: preference(folder / "b", loss="ipo"),
        "objective.loss is dpo and ipo",
    ),
    "another beta": (
        lambda folder: preference(folder / "a"),
        lambda folder: preference(folder / "b", beta=0.5),
        "objective.beta is 0.1 and 0.5",
    ),
    "another objective": (
        lambda folder: write_run(folder / "a", curve([2.0])),
        lambda folder: preference(folder / "b"),
        "objective.type is next_token and preference",
    ),
    "another context over a part of the text": (
        lambda folder: write_run(folder / "a", curve([2.0])),
        lambda folder: write_run(folder / "b", curve([2.0]), model={"context_length": 16}),
        "rows of 32 and 16 tokens are evaluated on other text",
    ),
    "another part of the text": (
        lambda folder: write_run(folder / "a", curve([2.0])),
        lambda folder: write_run(folder / "b", curve([2.0]), train={"evaluate_sequences": 16}),
        "train.evaluate_sequences is 8 and 16",
    ),
    "never evaluated at the same point": (
        lambda folder: write_run(folder / "a", curve([3.0, 2.0], every=5)),
        lambda folder: write_run(folder / "b", curve([3.0, 2.0], every=7), model={"d_ff": 64}),
        "never evaluated after the same number of steps (last: a 10, b 14)",
    ),
    "a run that diverged": (
        lambda folder: write_run(folder / "a", curve([2.0])),
        lambda folder: write_run(folder / "b", curve([math.nan]), model={"d_ff": 64}),
        "the loss of b after 5 steps is nan",
    ),
}


@pytest.mark.parametrize("case", INCOMPARABLE)
def test_what_is_not_comparable_is_refused_with_its_reason(tmp_path: Path, case: str) -> None:
    make_first, make_second, reason = INCOMPARABLE[case]
    comparison = plain(make_first(tmp_path), make_second(tmp_path))
    assert comparison.findings == []
    assert any("is not compared with" in note and reason in note for note in comparison.notes), comparison.notes
    assert json.loads(json.dumps(comparison.to_json()))["refusals"]


def test_every_setting_that_decides_the_measure_stops_a_comparison(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", curve([2.0]))
    measured = [one.path for one in settings(run.recipe) if one.role.decides_measure]
    assert len(measured) > 5
    for path in measured:
        assert comparability(run, replace(run, recipe=changed(run.recipe, path))).measure is None, path


def changed(recipe: Any, path: str) -> Any:
    """Return the recipe with another value at a path, for any type of setting."""
    key, _, rest = path.partition(".")
    if isinstance(recipe, tuple):
        return tuple(changed(item, rest) if i == int(key) and rest else item for i, item in enumerate(recipe))
    value = changed(getattr(recipe, key), rest) if rest else "something else"
    return recipe.model_copy(update={key: value})


def test_a_longer_context_over_all_of_the_text_is_compared(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", curve([2.0]), train={"evaluate_sequences": 0})
    second = write_run(tmp_path / "b", curve([1.9]), train={"evaluate_sequences": 0}, model={"context_length": 16})
    (finding,) = plain(first, second).findings
    assert finding.value == pytest.approx(-0.1)
    assert finding.after == "after 1,280 tokens"  # a step of another context is other work


def evaluated_rows(folder: Path, n_read: int | None, n: int = 300, **model: Any) -> History:
    """Return a run with the default train.evaluate_sequences that evaluated `n_read` of n held-out rows."""
    counts = {} if n_read is None else {"sequences": n_read, "sequences_held_out": n}
    records = [record | (counts if record["kind"] == "validation" else {}) for record in curve([2.0])]
    return write_run(folder, records, train={"evaluate_sequences": None}, model=model)


def test_other_rows_are_compared_exactly_if_they_read_the_same_text(tmp_path: Path) -> None:
    all_read, part, unknown = (evaluated_rows(tmp_path / f"a{n}", n) for n in (300, 200, None))
    others = [evaluated_rows(tmp_path / f"b{n}", n, 600, context_length=16) for n in (600, 400, None)]
    assert [comparability(all_read, one).measure for one in others] == ["loss", None, "loss"]
    assert [comparability(part, one).measure for one in others] == [None] * 3
    assert "evaluate_sequences=null, rows of 32 and 16 tokens" in str(comparability(part, others[0]).reasons)
    for run, other, name in ((all_read, others[2], "bNone"), (unknown, others[0], "aNone")):
        assert f"which {name} does not record" in comparability(run, other).caveat
    assert "does not record" not in comparability(all_read, others[0]).caveat
    same = evaluated_rows(tmp_path / "same", 200)
    assert comparability(part, same).measure == "loss", "equal rows are the same text"
    few = []
    for n in (8, 4):
        records = [record | {"sequences": n, "sequences_held_out": n} for record in curve([2.0])]
        few.append(write_run(tmp_path / f"few{n}", records, model={"context_length": 256 // n}))
    assert comparability(*few).measure == "loss", "8 sequences are asked for, and there are no more"


def test_finished_runs_are_compared_with_unfinished_ones_where_both_were_evaluated(tmp_path: Path) -> None:
    """Equal losses at equal steps are no difference, even if one run is longer."""
    ours = repeats(tmp_path / "ours")
    theirs = repeats(tmp_path / "theirs", tuple([losses[0]] for losses in CURVES), 11, model={"d_ff": 64})
    (finding,) = plain(*ours, *theirs).findings
    assert finding.value == pytest.approx(0.0) and finding.after == "after 5 steps"
    assert finding.difference is not None and finding.difference.p == pytest.approx(1.0)
    assert "trained on to 15 steps" in str(finding)


def test_runs_of_other_lengths_are_compared_at_equal_tokens_and_say_so(tmp_path: Path) -> None:
    short = write_run(tmp_path / "short", curve([3.0, 2.5]), train={"max_steps": 10})
    long = write_run(tmp_path / "long", curve([3.0, 2.6, 2.0, 1.5]), train={"max_steps": 20})
    (finding,) = plain(short, long).findings
    assert finding.value == pytest.approx(0.1) and finding.after == "after 10 steps"
    assert "the runs have other lengths" in str(finding)


def test_all_seeds_of_runs_that_end_by_the_clock_count(tmp_path: Path) -> None:
    def by_the_clock(name: str, losses: list[float], seed: int, **model: Any) -> History:
        records = curve(losses)
        for record in records:
            if "seconds" in record:
                record["seconds"] = 60.0 * record["step"] / (5 * len(losses))
        return write_run(tmp_path / name, records, seed, train={"max_minutes": 1.0, "max_steps": None}, model=model)

    ours = [by_the_clock(f"a{i}", [3.0, 2.5, 2.0][: 2 + i % 2], i) for i in range(1, 4)]
    theirs = [by_the_clock(f"b{i}", [3.0, 2.0, 1.0][: 2 + i % 2], i, d_ff=64) for i in range(1, 4)]
    comparison = plain(*ours, *theirs)
    assert comparison.uncounted == []
    (finding,) = comparison.findings
    assert finding.n_runs == (3, 3) and "after 1 minute of training each" in finding.after
    assert finding.difference == welch([2.0, 2.5, 2.0], [1.0, 2.0, 1.0]) and "in that time" not in str(finding)
    further = by_the_clock("c1", [3.0, 2.0, 1.0, 0.9, 0.8, 0.7], 1, d_ff=48)
    (finding,) = plain(ours[1], further).findings
    assert "in that time a2 read 2,560 tokens and c1 7,680" in str(finding)


def test_runs_of_one_recipe_on_other_text_are_no_repeats(tmp_path: Path) -> None:
    runs = [evaluated_on(run, f"t{i}", f"x{i}") for i, run in enumerate(repeats(tmp_path))]
    assert [len(group) for group in plain(*runs).groups] == [1] * 4


def test_the_table_is_printed_beside_the_page(tmp_path: Path) -> None:
    runs = [str(run.folder) for run in repeats(tmp_path)[:2]]
    result = CliRunner().invoke(app, ["compare", *runs, "--html", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").exists()
    assert "tokens/s" in result.output and "seed-2" in result.output


def test_time_lies_between_that_of_the_records(tmp_path: Path) -> None:
    records = [training(10, 1.0) | {"seconds": 4.0}, training(20, 1.0) | {"seconds": 10.0}]
    run = write_run(tmp_path / "run", records)
    assert run.seconds_at((0, 5, 10, 15, 20, 25)) == [0, 2, 4, 7, 10, 10]


def test_the_page_has_the_numbers_and_the_band(tmp_path: Path) -> None:
    band = make_band(repeats(tmp_path))
    run = write_run(tmp_path / "run", curve([3.01, 2.51, 2.234567]), 9)
    page = to_html(compare([run, read_history(tmp_path / "seed-1")], [band, band]))
    reader = Reader(page)
    assert {2.234567, float(run.parameters), run.seconds} <= {value for value, _ in reader.data}
    assert page.count("<polygon") == 1
    assert "inside the band of tiny (4 seeds)" in reader.text


def test_the_commands(tmp_path: Path) -> None:
    runs = [str(run.folder) for run in repeats(tmp_path)]
    made = CliRunner().invoke(app, ["compare", *runs, "--make-band", str(tmp_path / "tiny.json")])
    assert made.exit_code == 0 and "4 seeds" in made.output
    new = write_run(tmp_path / "new", curve([3.0, 2.5, 2.2]), 9)
    arguments = ["compare", str(new.folder), "--against", str(tmp_path / "tiny.json")]
    result = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert result["runs"][0]["verdict"]["inside"] is True
    assert result["runs"][0]["last_validation_loss"] == 2.2
    assert "inside the band of tiny" in CliRunner().invoke(app, arguments).output.replace("\n", " ")
    assert "No band has this recipe's settings" in CliRunner().invoke(app, ["compare", str(new.folder)]).output
    two = json.loads(CliRunner().invoke(app, ["compare", *runs[:2], "--json"]).output)
    assert two["differing_settings"] == {"seed": {"seed-1": 1, "seed-2": 2}}
    assert two["findings"] == []
    with pytest.raises(UserError, match="is given twice"):
        CliRunner().invoke(app, ["compare", runs[0], runs[0]], catch_exceptions=False)


def test_a_band_is_found_by_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = repeats(tmp_path)
    band = make_band(runs)
    bands: list[Band] = [band]
    monkeypatch.setattr("gptworks.runs.bands.shipped_bands", lambda: bands)
    assert find_band(runs[0].recipe) is band
    assert find_band(write_run(tmp_path / "odd", [], 1, model={"d_ff": 64}).recipe) is None
