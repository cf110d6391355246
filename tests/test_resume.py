"""Killed at any moment and resumed, a run ends bit for bit as if it had never stopped."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import commands
import tiny
from commands import Process
from gptworks.checkpoint import checkpoints
from gptworks.train.record.metrics import MEASURED, read_metrics
from halves import assert_resumes_exactly

STEPS = 40
KILLS = 5


def start(recipe: Path, run_dir: Path, *arguments: str, new: bool = False) -> Process:
    command = ("-m", "gptworks", "train", recipe, f"run_dir={run_dir}", "--resume", *arguments)
    return commands.start(*command, new=new, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def last_step(run_dir: Path) -> int:
    return max((record["step"] for record in read_metrics(run_dir / "metrics.jsonl")), default=0)


def wait_for_step(process: Process, run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while last_step(run_dir) < step and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not move"
        time.sleep(0.01)


def without_timings(run_dir: Path) -> list[dict[str, Any]]:
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def assert_same_run(one: Path, other: Path, steps: int = STEPS) -> None:
    first, second = (checkpoints(run)[0] for run in (one, other))
    assert first.step == second.step == steps
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (first.folder / file).read_bytes() == (second.folder / file).read_bytes(), file
    states = [{key: value for key, value in c.state().items() if key != "seconds"} for c in (first, second)]
    assert states[0] == states[1]
    assert without_timings(one) == without_timings(other)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("resume")
    recipe = tiny.write_recipe(folder, max_steps=STEPS, sample_every=10, sample_tokens=20)
    process = start(recipe, folder / "whole", new=True)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return recipe, folder / "whole"


def test_five_kills_change_nothing(uninterrupted: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, whole = uninterrupted
    run_dir, chance = tmp_path / "killed", random.Random(20)
    for at in sorted(chance.sample(range(2, STEPS - 1), KILLS)):
        process = start(recipe, run_dir)
        wait_for_step(process, run_dir, at)
        time.sleep(chance.random() * 0.05)  # somewhere in a step, an evaluation or a save
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, "the run was over before it was killed"
    process = start(recipe, run_dir)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "resuming" in output
    assert_same_run(whole, run_dir)
    assert not list((run_dir / "checkpoints").glob(".writing-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_saves_and_the_resumed_run_is_the_same(
    uninterrupted: tuple[Path, Path], tmp_path: Path, number: signal.Signals
) -> None:
    recipe, whole = uninterrupted
    run_dir = tmp_path / "stopped"
    process = start(recipe, run_dir)
    wait_for_step(process, run_dir, 6)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert f"stopped by {number.name}" in output
    assert "Traceback" not in output
    stopped_at = checkpoints(run_dir)[0].step
    assert stopped_at == last_step(run_dir) < STEPS
    process = start(recipe, run_dir)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"from step {stopped_at}" in output
    assert_same_run(whole, run_dir)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(
    uninterrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe, whole = uninterrupted
    run_dir = tmp_path / "damaged"
    process = start(recipe, run_dir)
    wait_for_step(process, run_dir, 22)
    process.kill()
    process.communicate(timeout=60)
    newest = checkpoints(run_dir)[0].folder / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    process = start(recipe, run_dir)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert f"{newest} is damaged" in output
    assert_same_run(whole, run_dir)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "normuon", "muon_coefficients": "polar_express"},
        {"optimizer": "soap", "soap_frequency": 3, "cautious_weight_decay": True, "average_last": 0.5},
    ],
    ids=lambda settings: settings["optimizer"],
)
def test_whatever_an_optimizer_keeps_is_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes_exactly(tiny.recipe_tree(tmp_path, max_steps=8, **settings), at_step=6)


def test_metrics_are_json_without_gaps_or_repeats(uninterrupted: tuple[Path, Path]) -> None:
    _, whole = uninterrupted
    lines = (whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if record["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))


def test_a_moved_run_folder_resumes_where_it_lies_and_can_be_prolonged(
    uninterrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    import shutil

    _, whole = uninterrupted
    moved = tmp_path / "moved"
    shutil.copytree(whole, moved)
    result = tiny.gptworks("train", moved, "--resume", "--change", f"train.max_steps={STEPS + 4}")
    assert result.returncode == 0, result.stderr
    assert checkpoints(moved)[0].step == STEPS + 4
    assert checkpoints(whole)[0].step == STEPS
    assert load_file(checkpoints(moved)[0].folder / "model.safetensors")
