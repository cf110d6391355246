"""Other programs receive the records of metrics.jsonl, each step once, however often a run is resumed."""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from gptworks.errors import UserError
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from gptworks.training.record.metrics import MEASURED, Record, read_metrics
from gptworks.training.record.writers import check_writers, open_log, scalars, texts

FAKE_WANDB = '''
import json, os
from pathlib import Path

class Run:
    """Keeps what a server would: a line for each call, and the step it comes to."""
    def __init__(self, **settings):
        self.path = Path(os.environ["FAKE_WANDB"]) / (settings["id"] + ".jsonl")
        known = self.path.read_text().splitlines() if self.path.exists() else []
        self.step = json.loads(known[-1])["step"] + 1 if known else 0
        (self.path.parent / "settings.json").write_text(json.dumps(settings))
    def log(self, values, step):
        assert step >= self.step, "steps go up"
        self.step = step
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\\n")
    def finish(self):
        pass

def init(**settings):
    if "WANDB_BROKEN" in os.environ:
        raise RuntimeError("api_key not configured\\n(no-tty)")
    return Run(**settings)
'''


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in place of a wandb server."""
    module = tmp_path / "modules"
    module.mkdir()
    (module / "wandb.py").write_text(FAKE_WANDB, encoding="utf-8")
    monkeypatch.syspath_prepend(str(module))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    folder = tmp_path / "server"
    folder.mkdir()
    monkeypatch.setenv("FAKE_WANDB", str(folder))
    yield folder
    sys.modules.pop("wandb", None)


def sent(server: Path) -> list[dict[str, Any]]:
    (path,) = server.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def expected(run: Path) -> list[tuple[int, dict[str, float]]]:
    return [(record["step"], scalars(record)) for record in read_metrics(run / "metrics.jsonl") if scalars(record)]


def test_a_record_becomes_scalars() -> None:
    record: Record = {
        "kind": "train", "step": 3, "loss": 2.5, "tokens": 96, "bits_per_byte": None, "flag": True, "reason": "x",
        "seconds_by_part": {"forward": 1.0}, "grad_norm": math.inf,
    }  # fmt: skip
    assert scalars(record) == {
        "train/loss": 2.5, "train/tokens": 96, "train/seconds_by_part/forward": 1.0, "train/grad_norm": math.inf,
    }  # fmt: skip
    assert texts(record) == {}
    assert texts({"kind": "sample", "step": 1, "prompt": "a ", "text": "b"}) == {"sample/'a '": "a b"}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_what_is_not_installed_is_refused_before_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptworks.training.record.writers.find_spec", lambda _: None)
    recipe = parse_recipe(tiny.recipe_tree(tmp_path, loggers=[name]))
    with pytest.raises(UserError, match=rf"pip install 'gptworks\[{name}\]'"):
        train(recipe)
    assert not recipe.run_dir.exists() and not recipe.data.cache_dir.exists()
    check_writers(())


def test_wandb_is_sent_each_record_once(tmp_path: Path, server: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, loggers=["wandb"], max_steps=10, sample_every=5, sample_tokens=3)
    recipe = parse_recipe(tree)
    train(recipe)
    shutil.rmtree(recipe.run_dir / "checkpoints" / "step-000010")  # as after a crash: 9 and 10 are made again
    train(recipe, resume=True)
    tree["train"]["max_steps"] = 14
    train(parse_recipe(tree), resume=True, change=["train.max_steps"])
    lines = sent(server)
    got = [(line["step"], {k: v for k, v in line.items() if k in scalars_of(line)}) for line in lines]
    wanted = expected(recipe.run_dir)

    def steady(pairs: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
        return [
            (step, {k: v for k, v in values.items() if not any(m in k for m in MEASURED)}) for step, values in pairs
        ]

    assert steady([pair for pair in got if pair[1]]) == steady(wanted)
    assert [line["step"] for line in lines if "sample/''" in line] == [5, 10, 14]
    settings = json.loads((server / "settings.json").read_text(encoding="utf-8"))
    assert settings["resume"] == "allow" and settings["name"] == "run"
    assert settings["config"]["train"]["loggers"] == ["wandb"]


def scalars_of(line: dict[str, Any]) -> list[str]:
    return [key for key, value in line.items() if "/" in key and isinstance(value, int | float)]


def test_an_account_that_is_missing_is_said_clearly(
    tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BROKEN", "1")
    with pytest.raises(UserError, match=r"api_key not configured \(no-tty\)\. Run `wandb login`"):
        train(parse_recipe(tiny.recipe_tree(tmp_path, loggers=["wandb"])))


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_shows_what_the_metrics_hold(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tree = tiny.recipe_tree(tmp_path, loggers=["tensorboard"], max_steps=7, sample_every=5, sample_tokens=3)
    recipe = parse_recipe(tree)
    train(recipe)
    log = open_log(recipe, 7)  # a process that was killed: a last record that no checkpoint holds
    log.write({"kind": "train", "step": 8, "loss": 99.0})
    log.close()
    tree["train"]["max_steps"] = 12
    train(parse_recipe(tree), resume=True, change=["train.max_steps"])
    shown = events(recipe.run_dir)
    for key in ("loss", "learning_rate", "tokens", "grad_norm", "seconds"):
        wanted = [(r["step"], r[key]) for r in read_metrics(recipe.run_dir / "metrics.jsonl") if r["kind"] == "train"]
        assert [step for step, _ in shown[f"train/{key}"]] == list(range(1, 13))
        assert shown[f"train/{key}"] == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted]
    assert [step for step, _ in shown["validation/loss"]] == [5, 7, 10, 12]


def test_wandb_itself_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tree = tiny.recipe_tree(tmp_path, loggers=["wandb"], max_steps=4)
    recipe = parse_recipe(tree)
    train(recipe)
    tree["train"]["max_steps"] = 6
    train(parse_recipe(tree), resume=True, change=["train.max_steps"])
    assert len(list((recipe.run_dir / "wandb").glob("offline-run-*"))) == 1
