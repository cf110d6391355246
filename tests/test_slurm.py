"""Jobs of `gptworks launch --on slurm` in a real Slurm."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm_cluster
import tiny
from gptworks.checkpoint import checkpoints
from gptworks.training.record.metrics import read_metrics
from slurm_cluster import slurm, until
from test_resume import assert_same_run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

STEPS = 300


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if (why := slurm_cluster.why_not()) is not None:
        pytest.skip(why)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('a folder, $(touch broken) \'of "runs"')
    return tiny.write_recipe(folder, optimizer="adamw", max_steps=STEPS, checkpoint_every=50, precision="fp32")


@pytest.fixture(scope="module")
def undisturbed(environment: dict[str, str], recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = Job(environment, recipe, folder)
    job.wait_for("COMPLETED")
    return job.run_dir


class Job:
    """A job of two ranks, submitted as a user does."""

    def __init__(self, environment: dict[str, str], recipe: Path, folder: Path, *options: str) -> None:
        self.environment, self.run_dir, self.output = environment, folder / "run", folder / "output"
        result = tiny.gptworks(
            "launch", recipe, f"run_dir={self.run_dir}", "--on", "slurm", "--nproc", "2", "--option",
            f"output={self.output}", "--option", "cpus-per-task=2", "--file", folder / "job", *options, cwd=folder,
            env=environment,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        found = re.fullmatch(r"Submitted batch job (\d+)", result.stdout.strip())
        assert found, result.stdout
        self.number = found[1]

    def state(self) -> dict[str, str]:
        shown = slurm(self.environment, "scontrol", "show", "job", self.number)
        return dict(pair.partition("=")[::2] for pair in shown.split() if "=" in pair)

    def wait_for(self, state: str) -> dict[str, str]:
        def is_there() -> bool:
            found = self.state().get("JobState")
            assert found == state or found not in ("FAILED", "CANCELLED", "TIMEOUT"), (found, self.said())
            return found == state

        until(is_there)
        return self.state()

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_for_step(self, step: int) -> None:
        log = self.run_dir / "metrics.jsonl"
        until(lambda: max((r["step"] for r in read_metrics(log)), default=0) >= step)

    def stopped_at(self) -> int:
        """The step of a checkpoint that was saved because a signal came."""
        until(lambda: "stopped by" in self.said())
        step = checkpoints(self.run_dir)[0].step
        assert f"at step {step}" in self.said()
        return step


def test_a_job_near_its_time_limit_saves_is_requeued_and_ends_as_an_undisturbed_one(
    environment: dict[str, str], recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Slurm sends the signal that it sends near the limit (--signal) to the batch script."""
    job = Job(environment, recipe, tmp_path)
    job.wait_for_step(20)
    slurm(environment, "scancel", "--batch", "--signal=USR1", job.number)
    step = job.stopped_at()
    found = job.wait_for("COMPLETED")
    assert found["Restarts"] == "1" and found["ExitCode"] == "0:0"
    assert "stopped by SIGUSR1" in job.said() and f"from step {step}" in job.said()
    assert_same_run(undisturbed, job.run_dir, STEPS)


def test_a_job_preempted_by_another_saves_and_continues_when_the_machine_is_free(
    environment: dict[str, str], recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """A partition of a higher tier takes the node: Slurm sends SIGTERM, waits, and requeues the job itself."""
    job = Job(environment, recipe, tmp_path)
    job.wait_for_step(20)
    script = tmp_path / "urgent"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --exclusive --partition=high --output={tmp_path / 'urgent.out'}\nsleep 1\n"
    )
    slurm(environment, "sbatch", str(script))
    step = job.stopped_at()
    found = job.wait_for("COMPLETED")
    assert found["Restarts"] == "1" and f"from step {step}" in job.said()
    assert_same_run(undisturbed, job.run_dir, STEPS)


def test_a_job_that_an_administrator_requeues_continues_from_a_checkpoint(
    environment: dict[str, str], recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = Job(environment, recipe, tmp_path)
    job.wait_for_step(60)
    slurm(environment, "scontrol", "requeue", job.number)
    found = job.wait_for("COMPLETED")
    assert found["Restarts"] == "1"
    assert_same_run(undisturbed, job.run_dir, STEPS)


def test_a_canceled_job_stays_canceled(environment: dict[str, str], recipe: Path, tmp_path: Path) -> None:
    job = Job(environment, recipe, tmp_path)
    job.wait_for_step(20)
    slurm(environment, "scancel", job.number)
    job.wait_for("CANCELLED")  # its script, which could requeue it, has ended
    until(lambda: "idle" in slurm(environment, "sinfo", "--noheader", "--format=%t"))
    assert job.state()["JobState"] == "CANCELLED" and job.state()["Restarts"] == "0"
