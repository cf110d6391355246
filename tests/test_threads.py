"""CPU threads: how they wait, how many compute, and the advice if other programs use their cores."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import commands
import tiny
from gptworks.config import Recipe
from gptworks.device import BusyCores, advice_on_threads, cpu_threads, free_threads
from gptworks.kernels.build import Unavailable
from gptworks.kernels.library import library
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.training.changes import load_to_resume
from gptworks.training.loop import Run, train
from gptworks.training.record.display import Display

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"KMP_BLOCKTIME": "1"}, {"KMP_BLOCKTIME": "1"}),
    ],
)
def test_waiting_threads_give_up_their_core_unless_the_user_says_otherwise(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    """Set in the environment before torch is loaded, when OpenMP reads it."""
    environment = {key: value for key, value in os.environ.items() if key not in WAITING} | given
    found = f"{{k: os.environ[k] for k in {WAITING} if k in os.environ}}"
    code = f"import gptworks.cli, os, sys; print('torch' in sys.modules, {found})"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"False {expected}"


IDLE = """
import asyncio, sys, time, torch
from gptworks.infer.engine import load
from gptworks.infer.loop import EngineLoop

async def ask(loop):
    stream = loop.open()
    stream.submit("line", max_tokens=20)
    async for _ in stream.batches():
        pass

torch.set_num_threads(2)
with EngineLoop(load(sys.argv[1], backend=sys.argv[2])) as loop:
    asyncio.run(ask(loop))
    before = time.process_time()
    time.sleep(0.5)
    print(time.process_time() - before)
"""


def test_an_idle_engine_uses_no_core(trained_run: Path) -> None:
    """Its own thread waits for requests, and the threads that computed the last one soon sleep."""
    try:
        backend = library() and "native"
    except Unavailable:
        backend = "torch"
    done = commands.run("-c", IDLE, trained_run, backend)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.02, "seconds of processors, of half a second"


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_run_computes_with_the_threads_that_its_recipe_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    seen: list[int] = []
    step = Run.training_step
    monkeypatch.setattr(Run, "training_step", lambda run: (seen.append(torch.get_num_threads()), step(run))[1])
    torch.set_num_threads(2)
    recipe: Recipe = parse_recipe(tiny.recipe_tree(tmp_path, max_steps=2, warmup_steps=0, threads=3))
    train(recipe)
    assert seen == [3, 3] and torch.get_num_threads() == 2


def test_a_new_run_takes_the_threads_that_others_leave_and_keeps_them_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None
) -> None:
    seen: list[int] = []
    step = Run.training_step
    monkeypatch.setattr(Run, "training_step", lambda run: (seen.append(torch.get_num_threads()), step(run))[1])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(BusyCores, "soon_by_others", lambda _: 2.1)
    torch.set_num_threads(4)
    path, out = tiny.write_recipe(tmp_path, max_steps=2, warmup_steps=0, schedule="constant"), io.StringIO()
    train(load_recipe(path), display=Display(Console(file=out, width=200)))
    assert "other programs keep 2.1 of 4 cores busy: computing with 2 threads" in out.getvalue()
    assert load_recipe(tmp_path / "run").train.threads == 2
    monkeypatch.setattr(BusyCores, "soon_by_others", lambda _: pytest.fail("asked of a run that goes on"))
    recipe, kept = load_to_resume(path, ["train.max_steps=3"])
    assert kept == ["train.threads=2"]
    train(recipe, resume=True)
    assert seen == [2, 2, 2]


@pytest.mark.parametrize(("n_threads", "given"), [(1, None), (4, "4")])
def test_a_run_takes_the_threads_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, threads: None, n_threads: int, given: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(BusyCores, "soon_by_others", lambda _: pytest.fail("nothing is to be decided"))
    torch.set_num_threads(n_threads)
    assert free_threads(BusyCores(), torch.device("cpu")) is None
    assert free_threads(BusyCores(), torch.device("cuda")) is None


def test_threads_are_as_before_after_an_error(threads: None) -> None:
    torch.set_num_threads(2)
    with pytest.raises(KeyError), cpu_threads(1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("n_threads", "n_cores", "by_others", "fewer"),
    [
        (2, 2, 0.9, 1), (2, 2, 0.2, None), (2, 2, None, None), (1, 2, 1.0, None), (8, 8, 1.0, 7), (8, 8, 3.6, 4),
        (4, 8, 3.0, None), (4, 8, 7.0, 1), (2, 2, 9.0, 1),
    ],
)  # fmt: skip
def test_advice_follows_the_cores_that_others_keep_busy(
    monkeypatch: pytest.MonkeyPatch, n_threads: int, n_cores: int, by_others: float | None, fewer: int | None
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    monkeypatch.setattr(os, "cpu_count", lambda: n_cores)
    advice = advice_on_threads(by_others, torch.device("cpu"))
    assert advice_on_threads(by_others, torch.device("cuda")) is None
    assert advice is None if fewer is None else advice is not None and f"train.threads={fewer} may" in advice


def test_busy_cores_are_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Any = iter([(0.0, 10.0, 5.0), (10.0, 28.0, 14.0), (10.5, 29.0, 14.0), None, (20.0, 30.0, 15.0)])
    monkeypatch.setattr(BusyCores, "_counts", staticmethod(lambda: next(counts)))
    cores = BusyCores()
    assert cores.by_others() == pytest.approx(0.9)  # 18 seconds of work in 10, 9 of them our own
    assert cores.by_others() is None  # half a second tells nothing
    assert cores.by_others() is None and cores.by_others() is None


@pytest.mark.parametrize(("own_niceness", "busy_ticks"), [(0, 100 + 10 + 4 + 1), (5, 100 + 50 + 10 + 4 + 1)])
def test_programs_that_give_way_to_this_one_keep_no_core_busy(
    monkeypatch: pytest.MonkeyPatch, own_niceness: int, busy_ticks: int
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "cpu  100 50 10 999 9 4 1 0 0 0\ncpu0 1 1 1\n")
    monkeypatch.setattr(os, "nice", lambda _: own_niceness)
    found = BusyCores._counts()
    assert found is not None and found[1] * os.sysconf("SC_CLK_TCK") == pytest.approx(busy_ticks)
