"""Find the run folders below the given folders. The name and contents of a run may be hostile: a requested id is looked
up among the runs found, and never used as a path.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.chat_template import TEMPLATE_FILE
from gptworks.checkpoint import Checkpoint, all_checkpoints
from gptworks.choices import SAMPLING
from gptworks.errors import UserError
from gptworks.infer.defaults import sampling_of
from gptworks.planning.params import count_parameters
from gptworks.runs.quantized import FILE as QUANTIZATION
from gptworks.runs.report import has_ended
from gptworks.serve.errors import APIError
from gptworks.studio.recipes import Recipes
from gptworks.training.record.outcome import read_outcome
from gptworks.training.run_folder import CONSOLE, is_in_use

MOST_DEPTH = 6
MOST_FOLDERS = 20_000
"""Maximum number of folders that are searched for runs."""
MOST_RUNS = 2_000
_FEWER = "are listed: give the studio a folder with fewer of them, such as gptworks studio runs/sweep."
_READ = ("recipe.yaml", "changes.json", "metrics.jsonl", "outcome.json", "tokenizer", "checkpoints", CONSOLE)
"""Entries of a run folder that the studio reads."""
_READ_SECONDS = 10.0
"""Seconds for which one description of the runs reads recipes. The next description reads the remaining recipes."""
_FRESH_SECONDS = 2.0
"""Seconds for which the list of runs is reused before folders are searched again."""


@dataclass(frozen=True)
class RunFolder:
    """A run: a folder that holds a recipe.yaml."""

    id: str
    """The run's path below the given folder, or its name if the run itself was given, made unique if necessary."""
    folder: Path
    root: Path
    """The given folder that contains the run. No link in the run's folder may lead out of the given folder."""
    started: float = 0.0
    """Time at which recipe.yaml was written (at the run's start or last resumption), in seconds since the epoch."""

    def checkpoints(self) -> list[Checkpoint]:
        """Return the run's checkpoints, newest first, one for each step."""
        by_step: dict[int, Checkpoint] = {}
        for checkpoint in all_checkpoints(self.folder):
            by_step.setdefault(checkpoint.step, checkpoint)
        return list(by_step.values())

    def choose(self, which: str | int | None) -> Checkpoint:
        """Return the best checkpoint ("best" or None), the last one ("last"), or the checkpoint of a step (its number).
        The files are not verified.

        Raises:
            APIError: the run has no such checkpoint.
        """
        found = self.checkpoints()
        trained = _trained(found)
        if not (found if isinstance(which, int) else trained):
            raise APIError(404, f"{self.id} has no checkpoint yet: let it train to its first one.", param="checkpoint",
                           code="no_checkpoint")  # fmt: skip
        step = which if isinstance(which, int) else trained[0].step if which == "last" else best_step(trained)
        for checkpoint in found:
            if checkpoint.step == step:
                return checkpoint
        there = ", ".join(str(one.step) for one in found[:50])
        raise APIError(404, f"{self.id} has no checkpoint of step {step}; there are {there}.", param="checkpoint",
                       code="no_checkpoint")  # fmt: skip

    def check_inside(self) -> None:
        """Raise a UserError if an entry that the studio reads is a link that leads out of the given folder."""
        root = self.root.resolve()
        below = (self.folder / "tokenizer", self.folder / "checkpoints", *(one.folder for one in self.checkpoints()))
        entries = [one for one in _entries(self.folder) if one.name in _READ]
        for entry in (*entries, *(one for folder in below for one in _entries(folder))):
            if entry.is_symlink() and not Path(os.path.realpath(entry.path)).is_relative_to(root):
                name, there = printable(entry.name), printable(str(self.root))
                raise UserError(f"{name} of {self.id} is a link that leads out of {there}: put the files there.")


def _trained(found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints except the initial weights, which never count as the best or the last checkpoint."""
    return [checkpoint for checkpoint in found if not checkpoint.is_start]


def best_step(found: Sequence[Checkpoint]) -> int:
    """Return the best step that the newest checkpoint, `found[0]`, records, or the newest step if `found` lacks it."""
    best = found[0].best_step
    return best if best is not None and any(one.step == best for one in found) else found[0].step


class Library:
    """Lists and describes the runs below the given folders. Thread-safe."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self.most_runs, self.most_folders = MOST_RUNS, MOST_FOLDERS
        self._lock = threading.Lock()
        self._found: dict[str, RunFolder] = {}
        self._looked_at = -math.inf
        self.notice: str | None = None
        """A notice that the list omits runs, since there are too many runs or folders; None if the list is complete."""
        self.recipes = Recipes()

    @property
    def missing(self) -> Path | None:
        """The folder into which new runs go, if it does not exist yet; else None."""
        return None if self.roots[0].is_dir() else self.roots[0]

    def runs(self) -> dict[str, RunFolder]:
        """Return the runs by id, newest first, then in the order of the given folders and of the runs' paths."""
        with self._lock:
            if time.monotonic() - self._looked_at > _FRESH_SECONDS:
                found = sorted(self._look().values(), key=lambda run: -run.started)
                self._found, self._looked_at = {run.id: run for run in found}, time.monotonic()
            return self._found

    def get(self, name: str) -> RunFolder:
        """Return the run with this id, after checking its links and reading its recipe within limits.

        Raises:
            APIError: no run has this id.
            UserError: a link leads out of the given folder, or the recipe is rejected.
        """
        run = self.find(name)
        self.recipes.of(run.folder)
        return run

    def find(self, name: str) -> RunFolder:
        """Return the run with this id, after checking its links but not its recipe.

        Raises:
            APIError: no run has this id.
            UserError: a link leads out of the given folder.
        """
        run = self._found.get(name) or self.runs().get(name)
        if run is None or not (run.folder / "recipe.yaml").is_file():
            raise APIError(
                404,
                f"there is no run {name[:128]!r} here: it was moved or deleted, or never was. Choose another.",
                param="model",
                code="model_not_found",
            )
        run.check_inside()
        return run

    def describe_all(self) -> list[dict[str, Any]]:
        """Return the runs as /studio/state shows them. Reads files."""
        until = time.monotonic() + _READ_SECONDS
        return [self.describe(run, reads=time.monotonic() < until) for run in self.runs().values()]

    def describe(self, run: RunFolder, *, reads: bool = True) -> dict[str, Any]:
        """Return a run as /studio/state shows it.

        Args:
            reads: whether to read the run's recipe if it was never read.
        """
        made: dict[str, Any] = {
            "id": run.id, "run": printable(str(run.folder)), "started": run.started, "chat": False, "context": None,
            "parameters": None, "vocab_size": None, "prompts": [], "checkpoints": [], "state": "stopped",
            "problem": None, "sampling": SAMPLING._asdict(),
        }  # fmt: skip
        try:
            run.check_inside()
            if not reads and not self.recipes.knows(run.folder):
                raise UserError(
                    "its recipe is not read yet, since those of other runs take long: it is read in a moment."
                )
            tokenizer = run.folder / "tokenizer"
            made |= {"checkpoints": _checkpoints(run), "state": state_of(run.folder),
                     "chat": (tokenizer / TEMPLATE_FILE).is_file(),
                     "sampling": sampling_of(tokenizer)._asdict()}  # fmt: skip
            recipe = self.recipes.of(run.folder)
            made |= {"context": recipe.model.context_length, "vocab_size": recipe.model.vocab_size,
                     "parameters": count_parameters(recipe.model).total,
                     "prompts": recipe.train.offered_prompts}  # fmt: skip
        except (UserError, OSError) as error:  # OSError: the folder was deleted
            made["problem"] = printable(str(error)[:600])
        if made["problem"] is None and not any(one["last"] for one in made["checkpoints"]):
            made["problem"] = "it has no checkpoint yet: let it train to its first one (train.checkpoint_every)."
        return made

    def _look(self) -> dict[str, RunFolder]:
        found: dict[str, RunFolder] = {}
        left = [self.most_folders]
        self.notice = None
        for root in self.roots:
            for folder in _run_folders(root, MOST_DEPTH, left):
                if len(found) == self.most_runs:
                    self.notice = f"There are more than {self.most_runs:,} runs, of which the first {_FEWER}"
                    return found
                below = folder.relative_to(root).as_posix()
                name = printable(root.resolve().name if below == "." else below)
                name = f"{printable(root.resolve().name)}/{name}" if name in found else name
                n = 2
                while name in found:
                    name, n = f"{name.rpartition(' ~')[0] or name} ~{n}", n + 1
                found[name] = RunFolder(name, folder, root, _written(folder / "recipe.yaml"))
        if left[0] < 0:
            self.notice = f"There are more than {self.most_folders:,} folders, and runs in the first {_FEWER}"
        return found


def _run_folders(folder: Path, depth: int, left: list[int]) -> Iterator[Path]:
    """Yield the runs in a folder and below it, but none inside a run, a hidden folder or a linked folder.

    Args:
        depth: number of levels to search below the folder.
        left: `[n]`, the number of folders left to search, which is counted down in place.
    """
    left[0] -= 1
    if (folder / "recipe.yaml").is_file():
        yield folder
        return
    if depth == 0 or left[0] < 0:
        return
    inside = [one.name for one in _entries(folder) if one.is_dir(follow_symlinks=False)]
    for name in sorted(name for name in inside if not name.startswith(".")):
        yield from _run_folders(folder / name, depth - 1, left)


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # the folder was deleted
        return 0.0


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # the folder does not exist
        return []


def _checkpoints(run: RunFolder) -> list[dict[str, Any]]:
    """Return a run's checkpoints for /studio/state, oldest first. Only a checkpoint that was the best so far has a
    `loss`. A checkpoint is `resumable` if it has the optimizer's state."""
    found = run.checkpoints()
    made = []
    for checkpoint in reversed(found):
        try:
            state = checkpoint.state()
        except (OSError, UserError):  # the checkpoint is damaged or being deleted
            state = {}
        loss = state.get("best_loss") if state.get("best_step") == checkpoint.step else None
        known = isinstance(loss, float) and math.isfinite(loss)
        made.append({"step": checkpoint.step, "best": False, "last": False, "loss": loss if known else None,
                     "resumable": not checkpoint.weights_only})  # fmt: skip
    if trained := _trained(found):
        best = best_step(trained)
        made[-1]["last"] = True
        for one in made:
            one["best"] = one["step"] == best
    return made


def state_of(folder: Path) -> str:
    """Return the state of a run: quantized (`gptworks quantize` made it), running, finished, killed (its log goes
    beyond its last recorded end, and no process has the run open), or stopped (by a signal, or before any record).

    On Windows, it is unknown whether a process has a run open. There, running and killed runs also count as stopped.
    """
    if (folder / QUANTIZATION).is_file():
        return "quantized"
    if has_ended(folder):
        outcome = read_outcome(folder)
        return "stopped" if isinstance(outcome, str) or outcome.reason.startswith("stopped") else "finished"
    if is_in_use(folder):
        return "running"
    return "killed" if sys.platform != "win32" and _written(folder / "metrics.jsonl") else "stopped"


def printable(name: str) -> str:
    """Return a name or message for JSON. Bytes of a file's name that are not UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")
