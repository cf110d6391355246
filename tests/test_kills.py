"""Fifty kills, in steps, in evaluations and in saves: each resume is from a whole checkpoint, and nothing differs."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tiny
from commands import Process
from gptworks.checkpoint import all_checkpoints, checkpoints
from gptworks.training.record.metrics import read_metrics
from test_parallel import launch, needs_proc, process_of
from test_resume import assert_same_run, last_step, start

pytestmark = [pytest.mark.kills, pytest.mark.timeout(1200)]

EVALUATE_EVERY, CHECKPOINT_EVERY = 3, 2
FIRST_KILL_AFTER = 2 * CHECKPOINT_EVERY  # a save waits for the one before it, so by then one is whole
STEPS_PER_KILL = 10
MODEL = ["model.n_layers=4", "model.d_model=128"]  # a save of it, 10 MB, takes as long as a step
PHASES = ("step", "evaluation", "save")


def phase(run_dir: Path) -> str:
    """What the run is at, by its folder. A save goes on beside steps and evaluations, and counts before them."""
    if any((run_dir / "checkpoints").glob(".writing-*")):
        return "save"
    newest = list(read_metrics(run_dir / "metrics.jsonl"))[-1]
    return "evaluation" if newest["kind"] == "train" and newest["step"] % EVALUATE_EVERY == 0 else "step"


@contextmanager
def begun(n_ranks: int, recipe: Path, run_dir: Path, *settings: str) -> Iterator[Process]:
    if n_ranks == 1:
        process = start(recipe, run_dir, *settings)
    else:
        process = launch(n_ranks, recipe, f"run_dir={run_dir}", "--resume", *settings)
    try:
        yield process
    finally:
        process.terminate()  # where the test has failed, its run ends too


def finish(n_ranks: int, recipe: Path, run_dir: Path, *settings: str) -> str:
    """What a run says that nobody kills."""
    with begun(n_ranks, recipe, run_dir, *settings) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def wait_for(process: Process, run_dir: Path, step: int, wanted: str) -> None:
    """Until the run is at the wanted phase, at some time after a step."""
    deadline = time.monotonic() + 240
    while last_step(run_dir) < step or phase(run_dir) != wanted:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run does not move"
        time.sleep(0.005)


def kill(process: Process, n_ranks: int, rank: int, run_dir: Path) -> tuple[str, str]:
    """Kill one process of the run, and see the others end; what the run was at, and all that it has said."""
    ids = [process.pid] if n_ranks == 1 else [process_of(process, each) for each in range(n_ranks)]
    os.kill(ids[rank], signal.SIGKILL)
    at = phase(run_dir)
    output, _ = process.communicate(timeout=60)
    if n_ranks == 1:
        assert process.returncode == -signal.SIGKILL, output
    else:
        assert process.returncode == 128 + signal.SIGKILL, output
        assert f"rank {rank} was ended by SIGKILL" in output
        assert not any(Path(f"/proc/{each}").exists() for each in ids), "a rank is still there"
    assert "Traceback" not in output, output
    return at, output


@pytest.mark.parametrize(
    ("n_ranks", "n_kills", "settings"),
    [
        pytest.param(1, 30, ["train.optimizer=muon"], id="one process"),
        pytest.param(2, 10, ["train.parallel.strategy=ddp"], id="two ranks, ddp", marks=needs_proc),
        pytest.param(2, 10, ["train.parallel.strategy=fsdp"], id="two ranks, fsdp", marks=needs_proc),
    ],
)
def test_kills_change_nothing(
    n_ranks: int, n_kills: int, settings: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    steps = STEPS_PER_KILL * n_kills
    recipe = tiny.write_recipe(
        tmp_path, optimizer="adamw", max_steps=steps, evaluate_sequences=64,
        evaluate_every=EVALUATE_EVERY, checkpoint_every=CHECKPOINT_EVERY,
    )  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(n_ranks, recipe, whole, *MODEL, *settings)

    chance = random.Random(50)
    hits, of_rank = Counter[str](), Counter[int]()
    reached, start_said = FIRST_KILL_AFTER, "has no checkpoint to go on from: starting from step 0"
    for n in range(n_kills):
        wanted = min(PHASES, key=lambda each: (hits[each], chance.random()))
        after, rank = reached + chance.randint(1, 4), chance.randrange(n_ranks)
        with begun(n_ranks, recipe, killed, *MODEL, *settings) as process:
            wait_for(process, killed, after, wanted)
            time.sleep(chance.random() * 0.03)
            at, output = kill(process, n_ranks, rank, killed)
        assert start_said in output, f"kill {n}: {output}"

        newest = checkpoints(killed)[0]
        newest.verify()
        start_said = f"resuming {killed} from step {newest.step:,}\n"
        reached = last_step(killed)
        hits[at] += 1
        of_rank[rank] += 1

    assert start_said in finish(n_ranks, recipe, killed, *MODEL, *settings)
    print(f"{request.node.callspec.id}: {n_kills} kills, {dict(hits)}, of rank {dict(of_rank)}")

    assert_same_run(whole, killed, steps)
    assert [c.folder.name for c in all_checkpoints(killed)] == [c.folder.name for c in all_checkpoints(whole)]
    assert all(checkpoint.is_whole for checkpoint in all_checkpoints(killed))
    assert not list((killed / "checkpoints").glob(".writing-*"))
    assert all(hits[each] >= n_kills // 5 for each in PHASES), hits
    assert len(of_rank) == n_ranks, of_rank
