"""Kills of one rank and of all ranks, in starts, steps, evaluations, saves and uploads: each resume begins at a
complete checkpoint, on the same or another number of ranks, and changes no bit. On a disk, which outlives the kills,
and in an S3 server that fails, where each resume is on an empty machine. `make test-kills KILLS=100 SEED=1`"""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

import tiny
from commands import Process
from gptworks.checkpoint import all_checkpoints, checkpoints
from gptworks.files import fetched_path, local_path
from gptworks.training.checkpoint_files import remove_newer
from gptworks.training.record.metrics import read_metrics
from stores import ALL_FAULTS, URL, FaultyProxy, random_faults
from test_parallel import NO_DROPOUT, started_ranks
from test_resume import assert_same_run, last_step

pytestmark = [pytest.mark.kills, pytest.mark.timeout(3600)]

KILLS, SEED = int(os.environ.get("GPTWORKS_KILLS", "50")), int(os.environ.get("GPTWORKS_KILLS_SEED", "50"))
EVALUATE_EVERY, CHECKPOINT_EVERY = 3, 2
MODEL = ["model.n_layers=4", "model.d_model=128"]  # a save of it, 10 MB, takes as long as a step
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


FIRST_REQUESTS = 25
"""Requests to a store in which a run claims it and reads what it holds, about."""
IN_STORE = ("ddp-2", "ddp-1-2-4-soap", "fsdp-2", "fsdp-1-2-4")
"""The chains that are killed in a store too."""


class Disk:
    """A run folder that outlives the machine's kills."""

    phases: tuple[str, ...] = ("step", "evaluation", "save")
    steps_per_kill = 7

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = run_dir

    @property
    def folder(self) -> Path:
        """The folder on this machine."""
        return local_path(self.run_dir)

    def phase(self) -> str:
        """Return the phase of the run, from its folder. A save, which runs during steps and evaluations, has
        priority."""
        if any((self.folder / "checkpoints").glob(".writing-*")):
            return "save"
        newest = next(reversed(list(read_metrics(self.folder / "metrics.jsonl"))), {"kind": "train", "step": 1})
        return "evaluation" if newest["kind"] == "train" and newest["step"] % EVALUATE_EVERY == 0 else "step"

    def saved(self) -> int:
        """Return the step of the newest complete checkpoint that the next start finds; 0 if there is none."""
        return max(
            (int(path.parent.name[5:]) for path in self.folder.glob("checkpoints/step-*/manifest.json")), default=0
        )

    def has_begun(self) -> bool:
        """Whether a start has come to the moment at which it is killed, if it is killed before its first step."""
        raise NotImplementedError

    def another_machine(self) -> None:
        """Continue where a new machine would: with the same folder."""


class Store(Disk):
    """A run folder in an S3 server where one request in ten fails. Each machine's files are gone after the kill."""

    phases = (*Disk.phases, "upload", "start")
    steps_per_kill = 12  # an upload takes longer than a save

    def __init__(self, s3: FaultyProxy, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(URL)
        self._s3, self._cache, self._patch, self._machines = s3, folder / "cache", monkeypatch, 0
        s3.choose = random_faults(SEED, 0.1, ALL_FAULTS)
        self._chance = random.Random(SEED)
        self.another_machine()

    def phase(self) -> str:
        if any(method in ("PUT", "POST") and "/checkpoints/" in path for method, path in [*self._s3.in_flight]):
            return "upload"
        return super().phase()

    def saved(self) -> int:
        manifests = re.findall(r"/step-(\d+)/manifest.json\b", " ".join(self._s3.stored("exp/checkpoints")))
        return max(map(int, manifests), default=0)

    def another_machine(self) -> None:
        self._s3.settle()
        shutil.rmtree(self._cache, ignore_errors=True)
        self._machines += 1
        self._cache = self._cache.with_name(f"cache-{self._machines}")
        self._patch.setenv("GPTWORKS_CACHE", str(self._cache))
        self._killed_after = self._s3.faults.total() + self._chance.randint(1, FIRST_REQUESTS)

    def has_begun(self) -> bool:
        return self._s3.faults.total() >= self._killed_after


def begun(n_ranks: int, recipe: Path, run_dir: str | Path, *settings: str) -> AbstractContextManager[list[Process]]:
    """The processes of a run that is started or resumed."""
    command = ("-m", "gptworks", "train", recipe, f"run_dir={run_dir}", "--resume", *settings)
    return started_ranks(n_ranks, *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def outputs(processes: list[Process]) -> str:
    with ThreadPoolExecutor(len(processes)) as pool:
        return "".join(pool.map(lambda process: process.communicate(timeout=600)[0], processes))


def finish(n_ranks: int, recipe: Path, run_dir: str | Path, *settings: str) -> str:
    """Run to the end without a kill, and return the output."""
    with begun(n_ranks, recipe, run_dir, *settings) as processes:
        output = outputs(processes)
        assert not any(process.returncode for process in processes), output
    return output


def wait_for(processes: list[Process], place: Disk, saved: int, step: int, wanted: str) -> None:
    """Wait until the place has a checkpoint of this step, and then the run is in the wanted phase, at any time after
    another step; a start is waited for from its first request on."""
    deadline = time.monotonic() + 600

    def wait_until(condition: Callable[[], bool], look_seconds: float) -> None:
        while not condition():
            assert all(process.poll() is None for process in processes), outputs(processes)
            assert time.monotonic() < deadline, "the run does not move"
            time.sleep(look_seconds)

    if wanted == "start":
        wait_until(place.has_begun, 0.002)
        return
    wait_until(lambda: place.saved() >= saved, 0.05)
    wait_until(lambda: last_step(place.folder) >= step and place.phase() == wanted, 0.005)


def kill(processes: list[Process], victims: list[int], grace_seconds: float, place: Disk) -> tuple[str, str]:
    """Kill these ranks and then, as a launcher does, the others; return the run's phase and all of its output."""
    for victim in victims:
        os.kill(processes[victim].pid, signal.SIGKILL)
    at = place.phase()
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
    assert_kills_change_nothing(chain, max(1, KILLS // len(CHAINS)), Disk(tmp_path / "killed"), tmp_path)


@pytest.mark.parametrize("chain", IN_STORE)
def test_kills_in_a_store_change_nothing(
    chain: str, s3: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Store(s3, tmp_path, monkeypatch)
    assert_kills_change_nothing(chain, max(1, KILLS // len(IN_STORE)), place, tmp_path)
    print(f"faults of requests: {dict(s3.faults)}")


def assert_kills_change_nothing(chain: str, n_kills: int, place: Disk, tmp_path: Path) -> None:
    counts, settings = CHAINS[chain]
    chance = random.Random(f"{SEED}, {chain}")
    steps = place.steps_per_kill * n_kills
    recipe = tiny.write_recipe(
        tmp_path, optimizer="adamw", max_steps=steps, evaluate_sequences=64, schedule="constant",
        evaluate_every=EVALUATE_EVERY, checkpoint_every=CHECKPOINT_EVERY,
    )  # fmt: skip
    whole, settings = tmp_path / "whole", [*MODEL, *settings]

    hits, of_whom = Counter[str](), Counter[str]()
    spans, reached, resumed_at, start_said = [(0, chance.choice(counts))], 0, 0, "starting from step 0"
    for n in range(n_kills):
        n_ranks = spans[-1][1]
        wanted = min(place.phases, key=lambda each: (hits[each], chance.random()))
        after, n_victims = reached + chance.randint(1, 4), chance.choice((1, 1, n_ranks))
        victims, saved = chance.sample(range(n_ranks), n_victims), resumed_at + chance.choice((0, 1))
        with begun(n_ranks, recipe, place.run_dir, *settings) as processes:
            wait_for(processes, place, saved, after, wanted)
            time.sleep(chance.random() * 0.03)
            at, output = kill(processes, victims, chance.random(), place)
        if wanted == "start":
            at = wanted
        else:
            assert start_said in output, f"kill {n}: {output}"

        reached = max(reached, last_step(place.folder))
        place.another_machine()
        assert place.saved() >= resumed_at, "a checkpoint to continue from was lost"
        for checkpoint in checkpoints(place.folder)[:1]:
            checkpoint.verify()
        resumed_at = place.saved()
        start_said = f"resuming {place.run_dir} from step {resumed_at:,}\n" if resumed_at else "starting from step 0"
        hits[at] += 1
        whom = f"rank {victims[0]}" if n_victims < n_ranks else "all"
        of_whom[f"{whom} of {n_ranks}"] += 1
        spans = [span for span in spans if span[0] < resumed_at]
        following = chance.choice(counts)
        if not spans or spans[-1][1] != following:
            spans.append((resumed_at, following))
        print(f"kill {n + 1}: in a {at}, {whom} of {n_ranks}, at step {reached:,}; step {resumed_at:,} is kept")

    assert start_said in finish(spans[-1][1], recipe, place.run_dir, *settings)
    print(f"seed {SEED}, {chain}: {n_kills} kills, {dict(hits)}, of {dict(of_whom)}; numbers of ranks from {spans}")

    undisturbed(spans, steps, recipe, whole, *settings)
    place.another_machine()
    killed = fetched_path(place.run_dir)
    assert all(checkpoint.is_whole for checkpoint in all_checkpoints(killed))
    assert_same_run(whole, killed, steps)
    assert [c.folder.name for c in all_checkpoints(killed)] == [c.folder.name for c in all_checkpoints(whole)]
    assert not list((killed / "checkpoints").glob(".*ing-*"))
    assert all(hits[each] >= n_kills // (len(place.phases) + 2) for each in place.phases), hits
