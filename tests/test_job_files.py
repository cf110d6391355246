"""Job files against what their schedulers read: SkyPilot's own parser, and the models of Kubeflow Trainer's API."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gptworks.launch import kubeflow, skypilot
from test_launch import HOSTILE, job

pytestmark = [pytest.mark.job_files, pytest.mark.timeout(600)]

PYTHON = Path(os.environ.get("GPTWORKS_SCHEDULERS", ".venv/schedulers")).absolute() / "bin" / "python"
"""A Python of its own, since the schedulers' packages need other versions of libraries than gptworks does."""

READ = """
import json, sys
import yaml

def dropped(given, kept, path):
    \"\"\"Keys of a file that the model of its API does not have.\"\"\"
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{path}.{key}"
            else:
                yield from dropped(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list):
        for i, pair in enumerate(zip(given, kept, strict=True)):
            yield from dropped(*pair, f"{path}[{i}]")

kind, path = sys.argv[1:]
tree = yaml.safe_load(open(path))
if kind == "kubeflow":
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
    problems = list(dropped(tree, TrainerV1alpha1TrainJob.from_dict(tree).to_dict(), ""))
    print(json.dumps({"problems": problems}))
else:
    from sky import Task
    task = Task.from_yaml(path)
    [resources] = task.resources
    print(json.dumps({"problems": [], "nodes": task.num_nodes, "run": task.run, "spot": resources.use_spot,
                      "accelerators": resources.accelerators,
                      "again": resources.job_recovery["recover_on_exit_codes"]}))
"""


def read(kind: str, text: str, folder: Path) -> dict[str, Any]:
    """What the scheduler's package makes of a job file; its error if it refuses the file."""
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    result = subprocess.run(
        [PYTHON, "-c", READ, kind, folder / "job.yaml"], capture_output=True, text=True, check=False,
        env={**os.environ, "HOME": str(folder)}, timeout=300,
    )  # fmt: skip
    if result.returncode:
        return {"problems": [result.stderr[-2000:]]}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_skypilot_reads_a_task_as_it_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = skypilot.job_file(
        job(HOSTILE, least_nodes=2, most_nodes=2, gpus=8, gpu_type="h100", options={"use_spot": "true"})
    )
    found = read("skypilot", text, tmp_path)
    assert found["problems"] == []
    assert (found["nodes"], found["spot"], found["accelerators"], found["again"]) == (2, True, {"H100": 8}, [75])
    assert shlex.quote(HOSTILE) in found["run"]
    assert read("skypilot", text.replace("num_nodes", "nodes"), tmp_path)["problems"]
    assert read("skypilot", text.replace("- 75", "- 750"), tmp_path)["problems"]


def test_kubeflow_knows_every_field_of_a_trainjob(tmp_path: Path) -> None:
    text = kubeflow.job_file(
        job(HOSTILE, least_nodes=2, most_nodes=2, gpus=8, image="registry/image:1", volumes={"/data": "claim"},
            time="60", options={"memory": "64Gi"})
    )  # fmt: skip
    assert read("kubeflow", text, tmp_path)["problems"] == []
    assert read("kubeflow", text.replace("numNodes", "nodes"), tmp_path)["problems"] == [".spec.trainer.nodes"]
    assert read("kubeflow", text.replace("numNodes: 2", "numNodes: two"), tmp_path)["problems"]
