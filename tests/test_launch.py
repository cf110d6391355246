"""`gptworks launch --on`: what it refuses before anything starts, and what its job files say."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import tiny
from gptworks.cli import app
from gptworks.errors import RunError, UserError
from gptworks.launch import kubeflow, skypilot, slurm
from gptworks.launch.job import Job, parse_gpus, parse_nodes
from gptworks.launch.local import check_local
from gptworks.launch.submit import write_job

HOSTILE = "runs of 'me'/a \"b\"; $(touch broken) `touch broken`\n#x: {y}.yaml"
"""A recipe's path that a shell or YAML would read as more than a path, if it could."""


def job(recipe: str = "demo", **settings: Any) -> Job:
    return Job(recipe, "my run: 1", **{"nproc": 2, "restarts": 3} | settings)


def launch(*arguments: str | Path) -> str:
    """What the command prints; its error is raised."""
    result = CliRunner().invoke(app, ["launch", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def run_command(script: str, folder: Path, **environment: str) -> list[list[str]]:
    """Run a job's script with programs that only record how they are called; return these calls."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("python", "srun", "scontrol", "squeue"):
        (programs / name).write_text(
            "#!/usr/bin/env -S python3 -S\nimport json, os, sys\n"
            "with open(os.environ['CALLS'], 'a') as file:\n    file.write(json.dumps(sys.argv) + '\\n')\n"
            "print(os.environ.get('SAYS_' + os.path.basename(sys.argv[0]), 'first'))\n"
            "sys.exit(int(os.environ.get('CODE_' + os.path.basename(sys.argv[0]), 0)))\n"
        )
        (programs / name).chmod(0o755)
    calls = folder / "calls"
    subprocess.run(
        ["bash", "-c", script], cwd=folder, timeout=60, check=False,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), **environment},
    )  # fmt: skip
    assert not (folder / "broken").exists()
    return [json.loads(line) for line in calls.read_text().splitlines()]


# ---------------------------------------------------------------------------------------------- job files


def test_a_slurm_job_asks_for_what_was_asked() -> None:
    text = slurm.job_file(
        job(least_nodes=2, most_nodes=4, gpus=8, gpu_type="h100", time="1-00:00:00", grace=300,
            options={"partition": "gpu", "comment": 'a "b" # c $(x) @COMMAND@ \\'})
    )  # fmt: skip
    asked = {line for line in text.splitlines() if line.startswith("#SBATCH")}
    assert asked == {
        "#SBATCH --job-name=my-run-1", "#SBATCH --nodes=2-4", "#SBATCH --ntasks-per-node=1", "#SBATCH --no-kill",
        "#SBATCH --gpus-per-node=h100:8", "#SBATCH --time=1-00:00:00", "#SBATCH --signal=B:USR1@300",
        "#SBATCH --requeue", "#SBATCH --open-mode=append", "#SBATCH --partition=gpu",
        '#SBATCH --comment="a \\"b\\" # c $(x) @COMMAND@ \\\\"',
    }  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "met"), [((1, 1), []), ((2, 3), ["--nodes", "2:3", "--rendezvous"])], ids=["one machine", "several"]
)
def test_a_slurm_job_starts_each_machine_with_the_recipe_as_it_was_given(
    nodes: tuple[int, int], met: list[str], tmp_path: Path
) -> None:
    text = slurm.job_file(
        job(HOSTILE, least_nodes=nodes[0], most_nodes=nodes[1], overrides=["name=$(touch broken)'\"\n;touch broken"])
    )
    names = "no-such-machine\nnor-this\n127.0.0.1"
    calls = run_command(text, tmp_path, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n", SLURM_NNODES="3", SAYS_scontrol=names)
    [started] = [call for call in calls if call[0].endswith("srun")]
    words = started[started.index("gptworks") + 1 :]
    assert words[: words.index("--resume") + 1] == [
        "launch", "--on", "local", "--nproc", "2", "--restarts", "3", "--resume"
    ]  # fmt: skip
    assert words[-3:] == ["--", HOSTILE, "name=$(touch broken)'\"\n;touch broken"]
    between = words[words.index("--resume") + 1 : -3]
    assert between[:3] == met
    if met:
        host, _, port = between[3].partition(":")
        assert host == "127.0.0.1" and 1024 <= int(port) < 1 << 16


@pytest.mark.parametrize(
    ("code", "state", "requeued"),
    [(75, "RUNNING", True), (75, "COMPLETING", False), (0, "RUNNING", False), (1, "RUNNING", False)],
)
def test_a_slurm_job_is_requeued_if_it_is_unfinished_and_not_canceled(
    code: int, state: str, requeued: bool, tmp_path: Path
) -> None:
    text = slurm.job_file(job())
    calls = run_command(text, tmp_path, SLURM_JOB_ID="7", CODE_srun=str(code), SAYS_squeue=state)
    assert (["requeue", "7"] in [call[1:] for call in calls]) == requeued


def test_a_skypilot_task_starts_each_machine_with_the_recipe_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = skypilot.job_file(
        job(
            HOSTILE,
            least_nodes=2,
            most_nodes=2,
            gpus=8,
            gpu_type="h100",
            options={"use_spot": "true", "disk_size": "256"},
        )
    )
    tree = yaml.safe_load(text)
    assert tree["name"] == "my-run-1" and tree["num_nodes"] == 2
    assert tree["resources"] == {
        "use_spot": True, "disk_size": 256, "accelerators": "H100:8", "job_recovery": {"recover_on_exit_codes": [75]}
    }  # fmt: skip
    [words] = run_command(tree["run"], tmp_path, SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_TASK_ID="sky-1")
    assert words[1:5] == ["-m", "gptworks", "launch", "--on"] and words[-2:] == ["--", HOSTILE]
    assert words[words.index("--rendezvous") + 1].startswith("10.0.0.1:2")


def test_a_trainjob_starts_each_machine_with_the_recipe_as_it_was_given(tmp_path: Path) -> None:
    text = kubeflow.job_file(
        job(HOSTILE, least_nodes=2, most_nodes=2, gpus=8, image="registry/image:1", volumes={"/data": "claim"},
            time="60", options={"memory": "64Gi"})
    )  # fmt: skip
    spec = yaml.safe_load(text)["spec"]
    assert spec["activeDeadlineSeconds"] == 60
    trainer = spec["trainer"]
    assert trainer["numNodes"] == 2 and trainer["image"] == "registry/image:1"
    assert trainer["resourcesPerNode"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "8"}
    assert trainer["command"][:2] == ["bash", "-c"]
    script = trainer["command"][2].replace("$$", "$")  # as Kubernetes does, which also reads $(NAME)
    assert "$" not in trainer["command"][2].replace("$$", "")
    [words] = run_command(script, tmp_path, PET_MASTER_ADDR="job-node-0-0.job", PET_MASTER_PORT="29400")
    assert words[words.index("--rendezvous") + 1] == "job-node-0-0.job:29400" and words[-2:] == ["--", HOSTILE]


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "slurm", "--nproc", "3"], "train.batch_size=8 is not a multiple of 3 ranks"),
        (["--on", "slurm", "--nodes", "2:4"], "with 3 of 2:4 machines: train.batch_size=8 is not a multiple of 3"),
        (["--on", "slurm", "--nodes", "4:2"], "--nodes 4:2 is not a number of machines"),
        (["--on", "slurm", "--gpus", "0"], "--gpus 0 is not a number of GPUs"),
        (["--on", "slurm", "--time", "1h; x"], "--time '1h; x' does not have the form"),
        (["--on", "slurm", "--partition", "a\n#SBATCH --uid=0"], "use printable characters"),
        (["--on", "slurm", "--option", "a b=c"], "--option 'a b=c' is not of the form KEY=VALUE"),
        (["--on", "slurm", "--option", "comment=a\nb"], "is not of the form KEY=VALUE, in printable characters"),
        (["--on", "slurm", "--image", "x"], "--image is for containers"),
        (["--on", "slurm", "--rendezvous", "a"], "--rendezvous does nothing with --on slurm"),
        (["--on", "skypilot", "--gpus", "8"], "give --gpus h100:8"),
        (["--on", "skypilot", "--nodes", "1:2"], "--nodes 1:2 does not work with --on skypilot"),
        (["--on", "kubeflow"], "--on kubeflow needs --image"),
        (["--on", "kubeflow", "--image", "x", "--nodes", "1:2"], "a TrainJob has a fixed number of machines"),
        (["--on", "kubeflow", "--image", "x", "--partition", "gpu"], "--partition is for --on slurm"),
        (["--nodes", "2"], "--nodes 2 needs --rendezvous HOST:PORT"),
        (["--nodes", "2", "--rendezvous", "10.0.0.1"], "--nodes 2 needs --resume"),
        (["--nodes", "2", "--resume", "--rendezvous", "localhost:1"], "a loopback address"),
        (["--nodes", "2", "--resume", "--rendezvous", "10.0.0.1:x"], "is not HOST:PORT"),
        (["--rendezvous", "10.0.0.1"], "--rendezvous is for several machines"),
        (["--gpus", "2"], "--gpus is for a job"),
        (["--grace", "300"], "--grace is for a job"),
        (["--on", "skypilot", "--grace", "120"], "--grace does nothing with --on skypilot"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_it_waits_in_a_queue(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("submitted"))
    recipe = tiny.write_recipe(tmp_path, optimizer="adamw", micro_batch_size=1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as raised:
        launch(recipe.name, *arguments)
    assert message in str(raised.value)
    assert sorted(tmp_path.iterdir()) == before


def test_an_elastic_job_that_gets_one_machine_trains_on_it() -> None:
    assert check_local(job(), "1:1", "10.0.0.1:29400", resume=True) == ("", 0)
    assert check_local(job(least_nodes=1, most_nodes=2), "1:2", "10.0.0.1", resume=True) == ("10.0.0.1", 29400)
    assert check_local(job(least_nodes=2, most_nodes=2), "2", "[fe80::1]:7", resume=True) == ("fe80::1", 7)


def test_a_recipe_outside_the_folder_that_is_copied_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="does not lie in"):
        launch(tiny.write_recipe(tmp_path), "--on", "skypilot", "--dry-run")


def test_a_run_that_exists_is_continued_only_if_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's own command always has --resume, so that a first start and a later one are the same."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    recipe = tiny.write_recipe(tmp_path)
    shutil.copy(recipe, tmp_path / "run" / "recipe.yaml")
    with pytest.raises(UserError, match="already holds a run"):
        launch(recipe.name, "--on", "slurm", "--dry-run")


@pytest.mark.parametrize("text", ["", "0", "2:", ":2", "1:2:3", "-1", "２", "2:4 "])
def test_only_numbers_of_machines_are_read(text: str) -> None:
    with pytest.raises(UserError, match="--nodes"):
        parse_nodes(text)
    with pytest.raises(UserError, match="--gpus"):
        parse_gpus(text.replace("1:2:3", "a b:1").replace("2:4 ", "x"))


# -------------------------------------------------------------------------------------------------- submitting


def test_a_job_is_printed_written_or_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tiny.write_recipe(tmp_path, optimizer="adamw").name
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no sbatch
    printed = launch(recipe, "--on", "slurm", "--nproc", "2", "--dry-run")
    assert printed.startswith("#!/bin/bash\n") and not (tmp_path / "tiny.slurm").exists()
    said = launch(recipe, "--on", "slurm", "--nproc", "2")
    assert "Submit the job with: sbatch tiny.slurm" in said
    assert (tmp_path / "tiny.slurm").read_text() == printed
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text('#!/bin/sh\necho "Submitted batch job $1"\n')
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    assert launch(recipe, "--on", "slurm", "--file", "again") == "Submitted batch job again\n"
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    with pytest.raises(RunError, match="`sbatch again` failed: invalid partition"):
        launch(recipe, "--on", "slurm", "--file", "again")


def test_a_file_that_is_no_job_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("#!/bin/bash\necho mine\n")
    with pytest.raises(UserError, match="is not a job file of gptworks"):
        write_job("slurm", job(), tmp_path / "mine")
    assert "echo mine" in (tmp_path / "mine").read_text()
    write_job("slurm", job(nproc=2), tmp_path / "job")
    write_job("slurm", job(nproc=4), tmp_path / "job")
    assert "--nproc 4" in (tmp_path / "job").read_text()
