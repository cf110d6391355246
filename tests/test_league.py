"""bench/league.py: contenders keep the rules, a replay gives the same score, and the page ranks the entries."""

import hashlib
import importlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import tiny
from gptworks.errors import RunError, UserError
from gptworks.recipe import load_recipe
from gptworks.training.loop import train

BENCH = Path(__file__).parents[1] / "bench"
MODEL_FLOPS_PER_TOKEN = 3 * 2 * (2 * (4 * 32 * 32 + 2 * 32 * 128 + 2 * 32 * 32) + 32 * 43)
"""Of the tiny model: four projections of attention, two of the MLP, and scores and weighted values over a context of 32
in each of two blocks; a head over 42 characters and a separator. A multiply-add is two; three times forward."""


@pytest.fixture
def league_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("league")


@pytest.fixture
def league(league_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A league of two tiny contenders, whose runs train in this process."""

    def train_here(place: Path, *_: object) -> str:
        train(load_recipe(place.with_suffix(".yaml")))
        return "done"

    monkeypatch.setattr("gptworks.runs.trials.train_trial", train_here)
    folder = tmp_path / "contenders"
    folder.mkdir()
    tree = tiny.recipe_tree(tmp_path)
    del tree["train"]["max_steps"], tree["run_dir"], tree["data"]["cache_dir"]
    tree["train"] = {"batch_size": 4, "max_minutes": 5}
    sha256 = hashlib.sha256((tmp_path / "text.txt").read_bytes()).hexdigest()
    tree["data"]["sources"][0] |= {"sha256": sha256, "url": "https://127.0.0.1:9/text.txt"}
    del tree["data"]["sources"][0]["path"]
    for name, rate in (("fast", 0.02), ("slow", 1e-5)):
        tree["train"] |= {"learning_rate": rate, "muon_learning_rate": rate}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    flops = 10.5 * 4 * 32 * MODEL_FLOPS_PER_TOKEN  # of ten steps and a half
    return league_module.League(folder, tmp_path / "work", tmp_path / "text.txt", 1, flops, sha256)


def test_an_entry_is_trained_again_to_the_same_number(
    league_module: Any, league: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, reports = tmp_path / "league.jsonl", list[str]()
    for name in league.names():
        entry = league_module.compete(league, name, 3, lambda: None, reports.append)
        league_module.add_result(results, entry)
    fast, slow = entries = league_module.read_results(results)
    assert (fast["contender"], fast["seed"], fast["steps"], fast["tokens"]) == ("fast", 3, 10, 10 * 4 * 32)
    assert fast["flops"] == 10 * 4 * 32 * MODEL_FLOPS_PER_TOKEN and fast["budget"] == f"{league.flops:.3g} FLOPs"
    assert fast["bits_per_byte"] < slow["bits_per_byte"] and fast["held_out"] == slow["held_out"]
    assert fast["recipe"]["train"]["warmup_steps"] == slow["recipe"]["train"]["warmup_steps"] == 0
    assert str(tmp_path) not in json.dumps(entries), "an entry names no folder of a machine"
    assert league_module.has_entry(entries, league, "fast", 3)
    assert not league_module.has_entry(entries, league, "fast", 4)
    assert not league_module.has_entry(entries, replace(league, flops=None), "fast", 3)

    (league.contenders / "fast.yaml").unlink()  # an entry holds all that its replay needs
    assert league_module.replay(league, entries, "fast", lambda: None, reports.append) is True
    assert reports[-1] == "equal; on the same kind of machine"
    other = [fast | {"loss": fast["loss"] + 1e-9, "torch": "1.0"}]
    assert league_module.replay(league, other, "fast", lambda: None, reports.append) is False
    assert reports[-1].startswith("not equal: +0.000000 bits per byte; torch was 1.0 and is ")
    with pytest.raises(UserError, match="has no entry"):
        league_module.replay(league, entries, "nobody", lambda: None, reports.append)
    (tmp_path / "text.txt").write_text("another text")
    with pytest.raises((UserError, RunError), match="sha256"):
        league_module.replay(replace(league, work=tmp_path / "new"), entries, "fast", lambda: None, reports.append)


def test_steps_that_fit_in_the_time_follow_from_the_least_of_three_measurements(
    league_module: Any, league: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([0.5, 0.3, 0.4])
    monkeypatch.setattr(league_module, "measured_step_seconds", lambda recipe: next(measured))
    assert replace(league, flops=None).fitting_steps(None) == 950  # 300 s, of which 95% are planned
    with pytest.raises(UserError, match="not one step fits"):
        small = replace(league, flops=1.0)
        small.fitting_steps(small.run_recipe(small.contender("fast"), "fast", 1, 1000))


RULES: list[tuple[Callable[[Any], object], str]] = [
    (lambda tree: tree["data"]["sources"][0].update(sha256="0" * 64), "read one text"),
    (lambda tree: tree["data"].update(sources=[{"type": "python-stdlib"}]), "read one text"),
    (lambda tree: tree["data"].update(sources=2 * tree["data"]["sources"]), "read one text"),
    (lambda tree: tree["data"]["validation"].update(fraction=0.2), "the last 10% of the text"),
    (lambda tree: tree["data"].update(clean=[{"type": "repair-encoding"}]), "the last 10% of the text"),
    (lambda tree: tree.update(tokenizer={"type": "word"}), "tokenizer.type=word"),
    (lambda tree: tree.update(initialize_from="runs/other"), "from random weights"),
    (lambda tree: tree["train"].update(max_steps=100), "the league sets the length"),
    (lambda tree: tree["train"].update(epochs=1), "the league sets the length"),
]


@pytest.mark.parametrize(("change", "message"), RULES, ids=[message for _, message in RULES])
def test_a_contender_that_breaks_a_rule_is_refused(league: Any, change: Callable[[Any], object], message: str) -> None:
    file = league.contenders / "fast.yaml"
    tree = yaml.safe_load(file.read_text())
    change(tree)
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match=re.escape(message)):
        league.contender("fast")


def test_the_contenders_keep_to_the_rules(league_module: Any, tmp_path: Path) -> None:
    league = league_module.League(BENCH / "league", tmp_path, None, 2)
    assert len(league.names()) >= 5
    for name in league.names():
        recipe = league.run_recipe(league.contender(name), name, 7, 900)
        assert (recipe.name, recipe.seed, recipe.train.max_steps, recipe.train.max_minutes) == (name, 7, 900, None)
        assert recipe.train.evaluate_every == 900 and recipe.train.evaluate_sequences == 0


def _entry(contender: str, bits: float, **more: Any) -> dict[str, Any]:
    return {
        "contender": contender, "budget": "300 s", "seed": 1, "bits_per_byte": bits, "loss": bits, "parameters": 1000,
        "steps": 20, "tokens": 3000, "flops": 4e13, "seconds": 290.0, "over": False, "processor": "P", "threads": 2,
        "precision": "bf16", "torch": "2.13", "gptworks": "0.1", "commit": "abc", "date": "2026-11-23",
    } | more  # fmt: skip


def test_the_page_ranks_what_compares(league_module: Any) -> None:
    entries = [
        _entry("second", 2.2), _entry("late", 1.9, over=True, seconds=321.0), _entry("first", 2.5),
        _entry("first", 2.1), _entry("elsewhere", 1.5, processor="Q"), _entry("counted", 2.0, budget="1e+14 FLOPs"),
        _entry("counted too", 1.8, budget="1e+14 FLOPs", processor="Q"),
    ]  # fmt: skip
    page = importlib.import_module("league_page").page(entries)
    ranks = {
        part.partition("\n")[0]: re.findall(r"^\| (\w+) \| ([\w ]+) \| ([\d.]+) \|", part, re.M)
        for part in page.split("## ")[1:]
    }
    assert ranks == {
        "300 s, 2 threads of P": [("1", "first", "2.1000"), ("2", "second", "2.2000"), ("over", "late", "1.9000")],
        "300 s, 2 threads of Q": [("1", "elsewhere", "1.5000")],
        "1e+14 FLOPs": [("1", "counted too", "1.8000"), ("2", "counted", "2.0000")],
    }
    assert "| 1,000 | 20 | 3,000 | 4.00e+13 | 290 | P, 2 threads, bf16 | 2.13 | 0.1 (abc) | 2026-11-23 |" in page
