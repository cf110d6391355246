"""A run on two machines, each a network namespace with an agent of its own, through faults: each ends as an undisturbed
run does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tiny
from gptworks.checkpoint import checkpoints
from gptworks.training.record.metrics import read_metrics
from test_parallel import launch, two_nodes
from test_resume import assert_same_run

__all__ = ["two_nodes"]

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]

STEPS, SAVE_EVERY = 60, 5
SETTINGS = {
    "optimizer": "adamw", "max_steps": STEPS, "checkpoint_every": SAVE_EVERY, "precision": "fp32",
    "parallel": {"timeout_seconds": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The recipe, and a run of it on two ranks of one machine."""
    folder = tmp_path_factory.mktemp("machines")
    recipe = tiny.write_recipe(folder, **SETTINGS)
    process = launch(2, recipe, f"run_dir={folder / 'whole'}")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return recipe, folder / "whole"


class Machines:
    """Two machines that train one run, with an agent on each."""

    def __init__(self, nodes: list[list[str]], recipe: Path, run_dir: Path, *options: str) -> None:
        self.names = [node[3] for node in nodes]
        self.interfaces = [node[-1].partition("=")[2] for node in nodes]
        self.run_dir, self.agents = run_dir, dict[int, "subprocess.Popen[str]"]()
        self._words = [
            sys.executable, "-m", "gptworks", "launch", "--nproc", "1", "--nodes", "2", "--rendezvous",
            "10.77.0.1:29519", "--restarts", "2", "--resume", *options, str(recipe), f"run_dir={run_dir}",
        ]  # fmt: skip

    def start(self, machine: int) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
        self.agents[machine] = subprocess.Popen(
            ["ip", "netns", "exec", self.names[machine], *self._words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: self.last_step() >= step, f"no step {step}")

    def last_step(self) -> int:
        return max((record["step"] for record in read_metrics(self.run_dir / "metrics.jsonl")), default=0)

    def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + 400
        while not condition():
            assert time.monotonic() < deadline, otherwise
            time.sleep(0.01)

    def rank(self, machine: int) -> int:
        """The process of the machine's only rank, whatever its number."""
        agent = self.agents[machine].pid
        return int(Path(f"/proc/{agent}/task/{agent}/children").read_text(encoding="ascii").split()[0])

    def connect(self, connected: bool) -> None:
        command = ["ip", "-n", self.names[1], "link", "set", self.interfaces[1], "up" if connected else "down"]
        subprocess.run(command, check=True)

    def finish(self) -> str:
        """What the agents say, which end well."""
        said = {machine: agent.communicate(timeout=600)[0] for machine, agent in self.agents.items()}
        assert [agent.returncode for agent in self.agents.values()] == [0] * len(said), said
        text = "".join(said.values())
        (self.run_dir.parent / "said").write_text(text)
        assert "Traceback" not in text, text.partition("Traceback")[2]
        return text


@pytest.fixture
def machines(two_nodes: list[list[str]], undisturbed: tuple[Path, Path], tmp_path: Path) -> Iterator[Machines]:
    found = Machines(two_nodes, undisturbed[0], tmp_path / "run")
    try:
        for machine in (0, 1):
            found.start(machine)
        found.wait_for_step(2 * SAVE_EVERY + 1)
        yield found
    finally:
        for agent in found.agents.values():
            for child in subprocess.run(
                ["pgrep", "-P", str(agent.pid)], capture_output=True, text=True, check=False
            ).stdout.split():
                os.kill(int(child), signal.SIGKILL)
            agent.kill()
            agent.wait()


def test_a_killed_rank_is_named_and_both_machines_continue_from_the_last_save(
    machines: Machines, undisturbed: tuple[Path, Path]
) -> None:
    os.kill(machines.rank(1), signal.SIGKILL)
    said = machines.finish()
    assert "was ended by SIGKILL" in said and "start again from the last checkpoint" in said
    assert_same_run(undisturbed[1], machines.run_dir, STEPS)


def test_a_killed_agent_takes_its_rank_with_it_and_another_machine_takes_its_place(
    machines: Machines, undisturbed: tuple[Path, Path]
) -> None:
    rank, agent = machines.rank(1), machines.agents[1]
    agent.kill()
    agent.wait()
    machines.until(lambda: not Path(f"/proc/{rank}").exists(), "the rank goes on without its agent")
    machines.start(1)
    machines.finish()
    assert_same_run(undisturbed[1], machines.run_dir, STEPS)


def test_machines_that_lose_their_network_meet_again(machines: Machines, undisturbed: tuple[Path, Path]) -> None:
    ranks = [machines.rank(machine) for machine in (0, 1)]
    machines.connect(False)
    machines.until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), "a rank waits for ever")
    machines.connect(True)
    said = machines.finish()
    assert "does not answer" in said
    assert_same_run(undisturbed[1], machines.run_dir, STEPS)


def test_a_preempted_machine_loses_no_step_and_another_takes_its_place(
    machines: Machines, undisturbed: tuple[Path, Path]
) -> None:
    agent = machines.agents[1]
    agent.terminate()
    assert agent.wait(240) == 75, agent.communicate()[0]
    assert checkpoints(machines.run_dir)[0].step == machines.last_step()
    machines.start(1)
    said = machines.finish()
    assert "start again" in said
    assert_same_run(undisturbed[1], machines.run_dir, STEPS)


def test_an_elastic_run_continues_without_a_preempted_machine(
    two_nodes: list[list[str]], undisturbed: tuple[Path, Path], tmp_path: Path
) -> None:
    machines = Machines(two_nodes, undisturbed[0], tmp_path / "run", "--nodes", "1:2")
    for machine in (0, 1):
        machines.start(machine)
    machines.wait_for_step(SAVE_EVERY + 1)
    agent = machines.agents.pop(1)
    agent.terminate()
    assert agent.wait(240) == 75, agent.communicate()[0]
    assert "2 ranks" in (said := machines.finish()) and "start again" in said
    assert checkpoints(machines.run_dir)[0].step == STEPS
    losses = [
        [record["loss"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
        for run in (machines.run_dir, undisturbed[1])
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
