"""Runs side by side: statistics against closed forms and published figures, bands against numpy."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gptworks.cli import app
from gptworks.errors import UserError
from gptworks.recipe import load_recipe
from gptworks.runs.bands import Band, find_band, judge, make_band, read_band, shipped_bands, write_band
from gptworks.runs.compare import Comparison, compare
from gptworks.runs.compare_page import to_html
from gptworks.runs.history import History, read_history
from gptworks.runs.settings import decisive, fingerprint, settings_fingerprint
from gptworks.runs.statistics import binomial_quantile, known_spread, t_quantile, t_two_sided, welch
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
    """Eight points with a normal spread, independent of one another or one and the same."""
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
        (with_a_seed_twice, "seed 1 is there twice"),
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
    recipes = {fingerprint(load_recipe(path)): path.stem for path in ROOT.glob("recipes/*.yaml")}
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
    assert find_band(first) is None


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
    assert unknown.difference is None and "no band" in str(unknown)


def test_a_run_counts_once_and_to_its_end(tmp_path: Path) -> None:
    runs = repeats(tmp_path)
    again = write_run(tmp_path / "again", curve(CURVES[0]), 1, train={"device": "auto"})
    short = write_run(tmp_path / "short", curve([9.0]), 77)
    comparison = plain(*runs, again, short)
    (group,) = comparison.groups
    assert [run.name for run in group.runs] == ["seed-1", "seed-2", "seed-3", "seed-4"]
    assert set(comparison.uncounted) == {"again", "short"}


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", curve([2.0]), 1)
    second = write_run(tmp_path / "b", curve([2.0]), 2, model={"d_ff": 64}, train={"schedule": "wsd"})
    assert plain(first, second).differing == {
        "seed": [1, 2], "model.d_ff": [128, 64], "train.schedule": ["cosine", "wsd"],
    }  # fmt: skip


def test_other_tokens_are_compared_in_bits_or_not_at_all(tmp_path: Path) -> None:
    words = {"type": "bpe", "vocab_size": 300}
    first = write_run(tmp_path / "a", [training(1, 3.0), validation(1, 3.0, 1.5)])
    bits = write_run(tmp_path / "b", [training(1, 5.0), validation(1, 5.0, 1.25)])
    tree = (bits.folder / "recipe.yaml").read_text(encoding="utf-8")
    tree = tree.replace("type: char", "type: bpe\n  vocab_size: 300").replace("vocab_size: 43", "vocab_size: 300")
    (bits.folder / "recipe.yaml").write_text(tree, encoding="utf-8")
    bits = read_history(bits.folder)
    assert bits.recipe.tokenizer.type == words["type"]
    (finding,) = plain(first, bits).findings
    assert (finding.measure, finding.value) == ("bits_per_byte", -0.25)
    elsewhere = write_run(tmp_path / "c", curve([2.0]), data={"validation": {"fraction": 0.3, "by": "tail"}})
    assert plain(first, elsewhere).findings == []
    assert any("not compared" in note for note in plain(first, elsewhere).notes)


def test_time_lies_between_that_of_the_records(tmp_path: Path) -> None:
    records = [training(10, 1.0) | {"seconds": 4.0}, training(20, 1.0) | {"seconds": 10.0}]
    run = write_run(tmp_path / "run", records)
    assert [run.seconds_at(step) for step in (0, 5, 10, 15, 20, 25)] == [0, 2, 4, 7, 10, 10]


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
    assert "no band has this recipe's settings" in CliRunner().invoke(app, ["compare", str(new.folder)]).output
    two = json.loads(CliRunner().invoke(app, ["compare", *runs[:2], "--json"]).output)
    assert two["differing_settings"] == {"seed": {"seed-1": 1, "seed-2": 2}}
    assert two["findings"] == []
    with pytest.raises(UserError, match="is there twice"):
        CliRunner().invoke(app, ["compare", runs[0], runs[0]], catch_exceptions=False)


def test_a_band_is_found_by_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = repeats(tmp_path)
    band = make_band(runs)
    bands: list[Band] = [band]
    monkeypatch.setattr("gptworks.runs.bands.shipped_bands", lambda: bands)
    assert find_band(runs[0]) is band
    assert find_band(write_run(tmp_path / "odd", [], 1, model={"d_ff": 64})) is None
