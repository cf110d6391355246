"""Writes a job file, and submits it if the scheduler's program is installed."""

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

from gptworks.errors import RunError, UserError
from gptworks.files import read_text, write_whole
from gptworks.launch import kubeflow, skypilot, slurm
from gptworks.launch.job import Job

TARGETS: dict[str, ModuleType] = {"slurm": slurm, "skypilot": skypilot, "kubeflow": kubeflow}

_MARK = "# Written by `gptworks launch"
_MOST_BYTES = 1 << 20


def write_job(target: str, job: Job, path: Path | None) -> Path:
    """Write the job file for a target; return its path.

    Args:
        path: the file to write; None for a file named after the run, in the current folder.

    Raises:
        UserError: an option cannot be used with the target, or the file exists and is not an earlier job file.
        RunError: the file cannot be written.
    """
    text = TARGETS[target].job_file(job)
    path = path or Path(job.label + TARGETS[target].SUFFIX)
    if path.exists() and not any(line.startswith(_MARK) for line in read_text(path, _MOST_BYTES).splitlines()[:2]):
        raise UserError(f"{path} exists and is not a job file of gptworks: give another --file.")
    try:
        write_whole(path, text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def submit(target: str, path: Path) -> str | None:
    """Submit a job file; return the scheduler's answer, or None if its program is not installed here.

    Raises:
        RunError: the scheduler refuses the job.
    """
    words = TARGETS[target].SUBMIT
    if shutil.which(words[0]) is None:
        return None
    result = subprocess.run([*words, str(path)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RunError(f"`{' '.join(words)} {path}` failed: {(result.stderr or result.stdout).strip()[-2000:]}")
    return result.stdout.strip()
