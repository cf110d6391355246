"""Records a training run as a line of a results file: its figures, and where it was trained."""

import json
import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import gptworks
from gptworks.config import Recipe
from gptworks.device import choose_device, choose_precision
from gptworks.errors import UserError
from gptworks.files import sync
from gptworks.machine import cpu_name
from gptworks.runs.history import read_history
from gptworks.runs.trials import evaluations, train_to_end
from gptworks.runs.try_results import step_seconds

Result = dict[str, Any]

Place = tuple[str, str, str]
"""The circumstances that the runs of a pair share: the processor, the text, and the source's numerics (a hash of a loss
of the baseline, see `experiments.Session.numerics`)."""

REPOSITORY = Path(__file__).resolve().parents[1]


def provenance(threads: int) -> Result:
    """Return the circumstances of a run that is trained here. Runs of a recipe are equal if all circumstances but the
    date are equal."""
    return {
        "processor": cpu_name() or platform.machine(),
        "threads": threads,
        "precision": choose_precision("auto", choose_device("cpu")).name,
        "torch": torch.__version__,
        "gptworks": gptworks.__version__,
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def place_of(line: Result) -> Place:
    """Return the place of a run. Runs before 2026-11-27 have no numerics on record, so they share a place."""
    return line["processor"], line.get("data", ""), line.get("numerics", "")


def _commit() -> str:
    """Return the repository's commit, with `-dirty` if gptworks' source has changes; empty if git fails."""
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", REPOSITORY, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def all_threads() -> int:
    """Return the default number of threads: one for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def train_recorded(recipe: Recipe, stop_asked: Callable[[], Any], report: Callable[[str], None]) -> Result | None:
    """Train a recipe to its last step in a new process, or continue its run folder; return its figures. None if a stop
    was asked for.

    Raises:
        RunError: the run failed.
    """
    if not train_to_end(recipe, stop_asked, report):
        return None
    run = read_history(recipe.run_dir)
    found = evaluations(recipe.run_dir)
    last = found[-1]
    return {
        "steps": run.step,
        "tokens": run.tokens,
        "parameters": run.parameters,
        "losses": {str(record["step"]): record["loss"] for record in found},
        "loss": last["loss"],
        "bits_per_byte": last["bits_per_byte"],
        "seconds": round(run.seconds, 2),
        "step_seconds": step_seconds(run),
        "data": run.data_fingerprint,
        "held_out": run.text_fingerprint,
    }


def read_results(file: Path) -> list[Result]:
    """Read the lines of a results file, oldest first; empty if the file does not exist.

    Raises:
        UserError: a line is no JSON object.
    """
    if not file.exists():
        return []
    results = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            results.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            raise UserError(f"{file}, line {number} is no JSON object: mend it, or remove the line.") from None
    return results


def add_result(file: Path, result: Result) -> None:
    """Append a line and sync it to disk."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(result, ensure_ascii=False) + "\n")
    sync(file)
