"""Task files for SkyPilot. Submit them with `sky jobs launch`."""

from dataclasses import replace
from pathlib import Path

import yaml

from gptworks.errors import UserError, refuse_unused
from gptworks.launch.job import Job, recipe_below
from gptworks.training.signals import UNFINISHED
from gptworks.yaml_files import parse_yaml

SUFFIX = ".sky.yaml"
SUBMIT = ("sky", "jobs", "launch", "--yes")

_RENDEZVOUS = """\
# The machines meet at the first one, at a port that follows from the job's id.
first=$(head -n 1 <<< "$SKYPILOT_NODE_IPS")
port=$((20000 + $(cksum <<< "$SKYPILOT_TASK_ID" | cut -d " " -f 1) % 10000))
"""


def job_file(job: Job) -> str:
    """Return the text of a task file.

    Raises:
        UserError: an option cannot be used with SkyPilot, or the recipe lies outside the current folder.
    """
    job.refuse_elastic("skypilot", "SkyPilot starts all machines of a job, and starts them again if one is lost.")
    refuse_unused("does nothing with --on skypilot", time=job.time or None, grace=job.grace, image=job.image or None)
    if job.gpus and not job.gpu_type:
        raise UserError(
            f"--gpus {job.gpus} names no type, by which SkyPilot chooses machines: give --gpus h100:{job.gpus}."
        )
    several = job.most_nodes > 1
    command = replace(job, recipe=recipe_below(job, Path.cwd())).command(
        str(job.most_nodes), '"$first:$port"' if several else None
    )
    resources: dict[str, object] = {key: parse_yaml(value, f"--option {key}") for key, value in job.options.items()}
    if job.gpus:
        resources["accelerators"] = f"{job.gpu_type.upper()}:{job.gpus}"
    resources["job_recovery"] = {"recover_on_exit_codes": [UNFINISHED]}
    task = {
        "name": job.label,
        "num_nodes": job.most_nodes,
        "workdir": ".",
        "resources": resources,
        **({"volumes": dict(job.volumes)} if job.volumes else {}),
        "setup": job.setup or "pip install gptworks",
        "run": f"{_RENDEZVOUS if several else ''}python -m gptworks {command}\n",
    }
    return "# Written by `gptworks launch --on skypilot`.\n" + dumped(task)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines in YAML's block style, so that people can read them."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent)


def dumped(tree: dict[str, object]) -> str:
    """Return a tree as YAML."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
    return text
