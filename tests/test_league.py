"""bench/league.py: contenders keep the rules, runs end in time, a replay gives the same score, the page ranks."""

import hashlib
import importlib
import json
import re
import string
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


@pytest.fixture
def league_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("league")


@pytest.fixture
def league(league_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A league of two tiny contenders, whose runs train in this process; a step is measured to take 30 s."""

    def train_here(place: Path, *_: object) -> str:
        train(load_recipe(place.with_suffix(".yaml")))
        return "done"

    monkeypatch.setattr("gptworks.runs.trials.train_trial", train_here)
    monkeypatch.setattr("recorded._commit", lambda: "0123456789")
    monkeypatch.setattr(league_module, "measured_step_seconds", lambda recipe: 30.0)
    folder = tmp_path / "contenders"
    folder.mkdir()
    tree = {key: tiny.recipe_tree(tmp_path)[key] for key in ("model", "tokenizer")}
    for name, rate in (("fast", 0.02), ("slow", 1e-5)):
        tree["train"] = {"batch_size": 4, "learning_rate": rate, "muon_learning_rate": rate}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    sha256 = hashlib.sha256((tmp_path / "text.txt").read_bytes()).hexdigest()
    return league_module.League(folder, tmp_path / "work", tmp_path / "text.txt", 5, sha256)


def test_generations_of_a_processor_differ_although_their_name_is_one(league_module: Any, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert league_module.cpu_generation(cpuinfo) == ""
    cpuinfo.write_text("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n")
    assert league_module.cpu_generation(cpuinfo) == "family 26, model 2"


def _changed(league: Any, change: Callable[[Any], object]) -> None:
    file = league.contenders / "fast.yaml"
    tree = yaml.safe_load(file.read_text())
    change(tree)
    file.write_text(yaml.safe_dump(tree))


def test_an_entry_is_trained_again_to_the_same_number(league_module: Any, league: Any, tmp_path: Path) -> None:
    results, reports = tmp_path / "league.jsonl", list[str]()
    for name in league.names():
        entry = league_module.compete(league, name, 3, lambda: None, reports.append)
        league_module.add_result(results, entry.model_dump())
    fast, slow = entries = league_module.read_entries(results)
    assert (fast.contender, fast.minutes, fast.seed, fast.steps, fast.tokens) == ("fast", 5, 3, 9, 9 * 4 * 32)
    assert fast.bits_per_byte < slow.bits_per_byte and fast.held_out == slow.held_out
    assert str(tmp_path) not in results.read_text(), "an entry names no folder of a machine"
    assert league_module.has_entry(entries, league, "fast", 3)
    assert not league_module.has_entry(entries, league, "fast", 4)
    assert not league_module.has_entry(entries, replace(league, minutes=60), "fast", 3)

    def again(changes: dict[str, Any] | None = None, name: str = "fast", at: Any = league) -> bool | None:
        changed = [entry.model_copy(update=changes or {}) for entry in entries]
        found: bool | None = league_module.replay(at, changed, name, lambda: None, reports.append)
        return found

    (league.contenders / "fast.yaml").unlink()  # an entry holds all that its replay needs
    assert again() is True and reports[-1] == "equal"
    assert again({"loss": 0.5, "parameters": 7, "torch": "1.0"}) is False
    assert re.fullmatch(
        r"not equal: loss was 0.5 and is \S+, parameters was 7 and is [\d]+; torch was 1.0 and is .*", reports[-1]
    )
    with pytest.raises(UserError, match="no entry of 60 minutes"):
        again(at=replace(league, minutes=60))
    with pytest.raises(UserError, match="nobody has no entry"):
        again(name="nobody")
    old = {"recipe": fast.recipe | {"train": fast.recipe["train"] | {"warmup_of_old": 3}}}
    with pytest.raises(UserError, match=r"commit 0123456789, is not valid here: .*warmup_of_old.*Replay it at that"):
        again(old)
    (tmp_path / "text.txt").write_text("another text")
    with pytest.raises((UserError, RunError), match="sha256"):
        again(at=replace(league, work=tmp_path / "new"))


@pytest.mark.parametrize(
    "section", [{"data": {"sources": [{"type": "text", "path": "/etc"}]}}, {"initialize_from": "runs/other"}]
)
def test_an_entry_from_elsewhere_reads_no_other_file(league_module: Any, league: Any, section: Any) -> None:
    entry = league_module.Entry.model_validate(_line("fast", 2.0) | {"recipe": league.contender("fast") | section})
    with pytest.raises(UserError, match=f"`{next(iter(section))}` is not a contender's to set"):
        league_module.replay(league, [entry], "fast", lambda: None, lambda _: None)


FIGURES = {
    "tokens": 1000, "parameters": 1000, "loss": 1.0, "bits_per_byte": 2.0, "data": "a" * 64, "held_out": "b" * 64,
}  # fmt: skip


def _at_speeds(monkeypatch: pytest.MonkeyPatch, league_module: Any, speeds: list[Callable[[int], float]]) -> list[int]:
    """Let runs, in turn, take these seconds for their steps; return the list of their lengths, which grows."""
    lengths = list[int]()

    def train_recorded(recipe: Any, stop_asked: Callable[[], Any], _: object) -> dict[str, Any] | None:
        speed, steps, seconds = speeds[len(lengths)], recipe.train.max_steps, 0.0
        lengths.append(steps)
        recipe.run_dir.mkdir(parents=True)
        for step in range(1, steps + 1):
            seconds += speed(step)
            if step % recipe.train.log_every == 0 or step == steps:
                record = {"kind": "train", "step": step, "tokens": step, "loss": 1.0, "seconds": seconds}
                with (recipe.run_dir / "metrics.jsonl").open("a") as log:
                    log.write(json.dumps(record) + "\n")
                if stop_asked():
                    return None
        return FIGURES | {"steps": steps, "seconds": seconds}

    monkeypatch.setattr(league_module, "train_recorded", train_recorded)
    return lengths


def test_a_run_that_would_be_late_begins_again_with_fewer_steps(
    league_module: Any, league: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.5, 0.3, 0.4])  # of measured steps: 95% of 300 s is planned for 950 steps at the least
    monkeypatch.setattr(league_module, "measured_step_seconds", lambda recipe: next(times))
    lengths = _at_speeds(
        monkeypatch, league_module, [lambda step: 0.36, lambda step: 0.36 if step < 600 else 0.5, lambda step: 0.36]
    )
    entry = league_module.compete(league, "fast", 1, lambda: None, lambda _: None)
    assert lengths[:2] == [950, 791] and lengths[2] < 791
    assert entry.steps == lengths[2] and entry.seconds == pytest.approx(0.36 * lengths[2]) and entry.seconds < 300


def test_a_run_that_is_never_in_time_has_no_entry(
    league_module: Any, league: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = _at_speeds(
        monkeypatch, league_module, [lambda step: 40.0, lambda step: 60.0, lambda step: 90.0, lambda step: 1.0]
    )
    with pytest.raises(RunError, match="none was in time: run it when the machine"):
        league_module.compete(league, "fast", 1, lambda: None, lambda _: None)
    assert lengths == [9, 7, 4]
    assert league_module.compete(replace(league, minutes=60), "fast", 1, lambda: True, lambda _: None) is None
    assert lengths[3:] == [114], "a stop that was asked for begins no other run"


def test_steps_with_smaller_batches_take_less_of_the_time(league_module: Any, league: Any) -> None:
    _changed(league, lambda tree: tree["train"].update(smaller_batches=[[4, 2]]))
    recipe = league.run_recipe(league.contender("fast"), "fast", 1, 1000)
    assert league.fitting_steps(recipe) == 11  # 9 of four samples, of which two are four of two


def test_source_without_a_commit_trains_no_entry(
    league_module: Any, league: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recorded._commit", lambda: "0123456789-dirty")
    with pytest.raises(UserError, match="commit first"):
        league_module.compete(league, "fast", 1, lambda: None, lambda _: None)


RULES: list[tuple[Callable[[Any], object], str]] = [
    (lambda tree: tree.update(data={"sources": []}), "`data` is not a contender's to set"),
    (lambda tree: tree.update(objective={"type": "next_token"}), "`objective` is not a contender's to set"),
    (lambda tree: tree.update(tokenizer={"type": "word"}), "tokenizer.type=word"),
    (lambda tree: tree["train"].update(max_steps=100), "leave out train.max_steps"),
    (lambda tree: tree["train"].update(epochs=1), "leave out train.epochs"),
    (lambda tree: tree["model"].update(d_model=1024), "the largest class of the league holds 10,000,000"),
]


@pytest.mark.parametrize(("change", "message"), RULES, ids=[message for _, message in RULES])
def test_a_contender_that_breaks_a_rule_is_refused(league: Any, change: Callable[[Any], object], message: str) -> None:
    _changed(league, change)
    with pytest.raises(UserError, match=re.escape(message)):
        league.contender("fast")


def test_a_class_holds_models_up_to_its_size(league_module: Any) -> None:
    sizes = {n: league_module.size_class("x", n) for n in (1, 10**6, 10**6 + 1, 3 * 10**6, 3 * 10**6 + 1, 10**7)}
    assert [*sizes.values()] == ["1M", "1M", "3M", "3M", "10M", "10M"]
    with pytest.raises(UserError, match="x has 10,000,001 parameters"):
        league_module.size_class("x", 10**7 + 1)


@pytest.mark.parametrize("minutes", [5, 60])
def test_the_contenders_keep_to_the_rules(league_module: Any, tmp_path: Path, minutes: int) -> None:
    text = tmp_path / "text.txt"
    text.write_text(100 * (string.ascii_letters + "\n !$&',-.3:;?"))  # as many characters as TinyShakespeare has
    folder, sha256 = BENCH / "league" / f"{minutes}-minutes", hashlib.sha256(text.read_bytes()).hexdigest()
    league = league_module.League(folder, tmp_path, text, minutes, sha256)
    sizes = {league.size(league.run_recipe(league.contender(name), name, 7, 900)) for name in league.names()}
    assert sizes == {"1M", "3M", "10M"}, "each class has contenders"


def _line(contender: str, bits: float, **more: Any) -> dict[str, Any]:
    return FIGURES | {
        "contender": contender, "minutes": 5, "seed": 1, "bits_per_byte": bits, "steps": 20, "seconds": 290.0,
        "processor": "P", "precision": "bf16", "torch": "2.13", "gptworks": "0.1", "commit": "abcdef0",
        "date": "2026-11-23", "recipe": {},
    } | more  # fmt: skip


def test_the_page_ranks_what_compares(league_module: Any, tmp_path: Path) -> None:
    lines = [
        _line("second", 2.2), _line("first", 2.5), _line("first", 2.1), _line("elsewhere", 1.5, processor="Q"),
        _line("larger", 1.9, parameters=1_000_001), _line("longer", 1.8, minutes=60, seconds=3500),
    ]  # fmt: skip
    for line in lines:
        league_module.add_result(tmp_path / "league.jsonl", line)
    page = importlib.import_module("league_page").page(league_module.read_entries(tmp_path / "league.jsonl"))
    found = [part.partition("\n") for part in page.split("## ")[1:]]
    ranks = {
        heading: re.findall(r"cores of (\w+):|^\| (\d+) \| (\w+) \| ([\d.]+) \|", part, re.M)
        for heading, _, part in found
    }
    assert ranks == {
        "At most 1M parameters, 5 minutes": [
            ("P", "", "", ""), ("", "1", "first", "2.1000"), ("", "2", "second", "2.2000"), ("Q", "", "", ""),
            ("", "1", "elsewhere", "1.5000"),
        ],
        "At most 3M parameters, 5 minutes": [("P", "", "", ""), ("", "1", "larger", "1.9000")],
        "At most 10M parameters, 5 minutes": [],
        "At most 1M parameters, 60 minutes": [("P", "", "", ""), ("", "1", "longer", "1.8000")],
        "At most 3M parameters, 60 minutes": [],
        "At most 10M parameters, 60 minutes": [],
    }  # fmt: skip
    assert "| first | 2.1000 | 1 | 1,000 | 20 | 1,000 | 290 | 0.1 (abcdef0) | 2.13 | bf16 | 2026-11-23 |" in page
    assert page.count("No entry yet") == 3


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"contender": "../../home"}, "`contender`='../../home'"),
    ({"processor": "P | <img src=x>"}, "`processor`="),
    ({"commit": "abc-dirty"}, "`commit`="),
    ({"torch": "2\n| 1 | mine | 0.1 |"}, "`torch`="),
    ({"minutes": 7}, "`minutes`=7"),
    ({"bits_per_byte": float("nan")}, "`bits_per_byte`=nan"),
    ({"bits_per_byte": "0.1"}, "`bits_per_byte`='0.1'"),
    ({"steps": 1e300}, "`steps`="),
    ({"parameters": 10**7 + 1}, "10,000,000"),
    ({"seconds": 300.5}, "took 300.5 s of 300 s"),
    ({"recipe": "x"}, "`recipe`='x'"),
    ({"note": 1}, "`note`=1"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=[message for _, message in HOSTILE])
def test_a_line_that_is_no_entry_is_refused(
    league_module: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "league.jsonl"
    file.write_text(f"{json.dumps(_line('good', 2.0))}\n{json.dumps(_line('bad', 2.0) | change)}\n")
    with pytest.raises(UserError, match=rf"league.jsonl, line 2 is no entry .*{re.escape(message)}"):
        league_module.read_entries(file)


@pytest.mark.parametrize("line", [b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"seed": 1, "seed": 2}'])
def test_a_line_that_is_no_mapping_is_refused(league_module: Any, tmp_path: Path, line: bytes) -> None:
    (tmp_path / "league.jsonl").write_bytes(line)
    with pytest.raises(UserError, match=r"line 1 is no entry"):
        league_module.read_entries(tmp_path / "league.jsonl")
