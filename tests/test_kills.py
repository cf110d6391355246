"""Kills of one rank and of all ranks, in steps, evaluations and saves: each resume starts from a complete checkpoint,
on the same or another number of ranks, and changes no bit. `make test-kills KILLS=100 SEED=1`"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

import tiny
from commands import Process
from gptworks.checkpoint import all_checkpoints, checkpoints
from gptworks.training.record.metrics import read_metrics
from gptworks.training.saving import remove_newer
from test_parallel import NO_DROPOUT, started_ranks
from test_resume import assert_same_run, last_step

pytestmark = [pytest.mark.kills, pytest.mark.timeout(3600)]

KILLS, SEED = int(os.environ.get("GPTWORKS_KILLS", "50")), int(os.environ.get("GPTWORKS_KILLS_SEED", "50"))
EVALUATE_EVERY, CHECKPOINT_EVERY = 3, 2
STEPS_PER_KILL = 7
MODEL = ["model.n_layers=4", "model.d_model=128"]  # a save of it, 10 MB, takes as long as a step
PHASES = ("step", "evaluation", "save")
FSDP, TENSOR = "train.parallel.strategy=fsdp", ["train.parallel.tensor_parallel=2", *NO_DROPOUT]


class Chain(NamedTuple):
    """A run that is killed several times, and resumed each time on a drawn number of ranks."""

    n_ranks: tuple[int, ...]
    settings: list[str]


CHAINS = {
    "1-muon": Chain((1,), ["train.optimizer=muon"]),
    "ddp-2": Chain((2,), ["train.parallel.strategy=ddp"]),
    "ddp-1-2-4-soap": Chain((1, 2, 4), ["train.parallel.strategy=ddp", "train.optimizer=soap"]),
    "fsdp-2": Chain((2,), [FSDP]),
    "fsdp-4-muon": Chain((4,), [FSDP, "train.optimizer=muon"]),
    "fsdp-1-2-4": Chain((1, 2, 4), [FSDP]),
    "fsdp-1-2-4-soap": Chain((1, 2, 4), [FSDP, "train.optimizer=soap"]),
    "fsdp-2-4-normuon-averages": Chain((2, 4), [FSDP, "train.optimizer=normuon", "train.ema_decay=0.9"]),
    "tensor-2-4": Chain((2, 4), ["train.parallel.strategy=ddp", *TENSOR]),
    "fsdp-tensor-2-4-muon": Chain((2, 4), [FSDP, "train.optimizer=muon", *TENSOR]),
}


def phase(run_dir: Path) -> str:
    """Return the phase of the run, from its folder. A save, which runs during steps and evaluations, has priority."""
    if any((run_dir / "checkpoints").glob(".writing-*")):
        return "save"
    newest = next(reversed(list(read_metrics(run_dir / "metrics.jsonl"))), {"kind": "train", "step": 1})
    return "evaluation" if newest["kind"] == "train" and newest["step"] % EVALUATE_EVERY == 0 else "step"


def begun(n_ranks: int, recipe: Path, run_dir: Path, *settings: str) -> AbstractContextManager[list[Process]]:
    """The processes of a run that is started or resumed."""
    command = ("-m", "gptworks", "train", recipe, f"run_dir={run_dir}", "--resume", *settings)
    return started_ranks(n_ranks, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def outputs(processes: list[Process]) -> str:
    with ThreadPoolExecutor(len(processes)) as pool:
        return "".join(pool.map(lambda process: process.communicate(timeout=600)[0], processes))


def finish(n_ranks: int, recipe: Path, run_dir: Path, *settings: str) -> str:
    """Run to the end without a kill, and return the output."""
    with begun(n_ranks, recipe, run_dir, *settings) as processes:
        output = outputs(processes)
        assert not any(process.returncode for process in processes), output
    return output


def wait_for(processes: list[Process], run_dir: Path, step: int, wanted: str) -> None:
    """Wait until the run is in the wanted phase, at any time after a step."""
    deadline = time.monotonic() + 240
    while last_step(run_dir) < step or phase(run_dir) != wanted:
        assert all(process.poll() is None for process in processes), outputs(processes)
        assert time.monotonic() < deadline, "the run does not move"
        time.sleep(0.005)


def kill(processes: list[Process], victims: list[int], grace_seconds: float, run_dir: Path) -> tuple[str, str]:
    """Kill these ranks and then, as a launcher does, the others; return the run's phase and all of its output."""
    for victim in victims:
        os.kill(processes[victim].pid, signal.SIGKILL)
    at = phase(run_dir)
    time.sleep(grace_seconds)
    for process in processes:
        process.kill()
    output = outputs(processes)
    assert all(processes[victim].returncode == -signal.SIGKILL for victim in victims), output
    assert "Traceback" not in output, output
    return at, output


def undisturbed(spans: list[tuple[int, int]], steps: int, recipe: Path, run_dir: Path, *settings: str) -> None:
    """Train with nobody killed, on these numbers of ranks from these steps on."""
    ends = [begin for begin, _ in spans[1:]] + [steps]
    for (_, n_ranks), end in zip(spans, ends, strict=True):
        longer = min(end + 1, steps)  # the last step is always evaluated, so it comes after the end and is removed
        finish(n_ranks, recipe, run_dir, *settings, f"train.max_steps={longer}")
        remove_newer(run_dir, end)
        assert checkpoints(run_dir)[0].step == end


@pytest.mark.parametrize("chain", CHAINS)
def test_kills_change_nothing(chain: str, tmp_path: Path) -> None:
    counts, settings = CHAINS[chain]
    chance, n_kills = random.Random(f"{SEED}, {chain}"), max(1, KILLS // len(CHAINS))
    steps = STEPS_PER_KILL * n_kills
    recipe = tiny.write_recipe(
        tmp_path, optimizer="adamw", max_steps=steps, evaluate_sequences=64, schedule="constant",
        evaluate_every=EVALUATE_EVERY, checkpoint_every=CHECKPOINT_EVERY,
    )  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = [*MODEL, *settings]

    hits, of_whom = Counter[str](), Counter[str]()
    spans, reached, start_said = [(0, chance.choice(counts))], 0, "starting from step 0"
    for n in range(n_kills):
        n_ranks = spans[-1][1]
        wanted = min(PHASES, key=lambda each: (hits[each], chance.random()))
        after, n_victims = reached + chance.randint(1, 4), chance.choice((1, 1, n_ranks))
        victims = chance.sample(range(n_ranks), n_victims)
        with begun(n_ranks, recipe, killed, *settings) as processes:
            wait_for(processes, killed, after, wanted)
            time.sleep(chance.random() * 0.03)
            at, output = kill(processes, victims, chance.random(), killed)
        assert start_said in output, f"kill {n}: {output}"

        newest = checkpoints(killed)[:1]
        for checkpoint in newest:
            checkpoint.verify()
        resumed_at = newest[0].step if newest else 0
        start_said = f"resuming {killed} from step {resumed_at:,}\n" if newest else "starting from step 0"
        reached = last_step(killed)
        hits[at] += 1
        whom = f"rank {victims[0]}" if n_victims < n_ranks else "all"
        of_whom[f"{whom} of {n_ranks}"] += 1
        spans = [span for span in spans if span[0] < resumed_at]
        following = chance.choice(counts)
        if not spans or spans[-1][1] != following:
            spans.append((resumed_at, following))

    assert start_said in finish(spans[-1][1], recipe, killed, *settings)
    print(f"seed {SEED}, {chain}: {n_kills} kills, {dict(hits)}, of {dict(of_whom)}; numbers of ranks from {spans}")

    undisturbed(spans, steps, recipe, whole, *settings)
    assert_same_run(whole, killed, steps)
    assert [c.folder.name for c in all_checkpoints(killed)] == [c.folder.name for c in all_checkpoints(whole)]
    assert all(checkpoint.is_whole for checkpoint in all_checkpoints(killed))
    assert not list((killed / "checkpoints").glob(".*ing-*"))
    assert all(hits[each] >= n_kills // 5 for each in PHASES), hits
