"""The job that `gptworks launch` starts or submits, and the checks of its options before that."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.files import fetched_path
from gptworks.training.setup import check_parallel, check_train

_COUNT = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?", re.ASCII)
_GPUS = re.compile(r"(?:([A-Za-z0-9][A-Za-z0-9_.-]*):)?([0-9]{1,4})", re.ASCII)
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*", re.ASCII)

GRACE_SECONDS = 120
"""Seconds to save a checkpoint before a job ends, unless the job sets `grace`."""


@dataclass(frozen=True)
class Job:
    """A run to be started on one machine or several."""

    recipe: str
    """A recipe file, a run folder or a shipped recipe's name, as given."""
    name: str
    overrides: Sequence[str] = ()
    change: Sequence[str] = ()
    force: bool = False
    least_nodes: int = 1
    most_nodes: int = 1
    nproc: int = 1
    """Processes on each machine."""
    gpus: int = 0
    """GPUs of each machine."""
    gpu_type: str = ""
    restarts: int = 0
    grace: int | None = None
    """Seconds between the signal to save a checkpoint and the end of the job; None for `GRACE_SECONDS`."""
    time: str = ""
    options: dict[str, str] = field(default_factory=dict)
    """Further requests to the scheduler, by the target's own option names."""
    image: str = ""
    volumes: dict[str, str] = field(default_factory=dict)
    """Path in the container → name of the volume."""
    setup: str = ""

    @property
    def label(self) -> str:
        """The job's name: at most 40 characters, which every scheduler accepts; `gptworks` if none is left."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].rstrip("-") or "gptworks"

    @property
    def grace_seconds(self) -> int:
        return GRACE_SECONDS if self.grace is None else self.grace

    @property
    def is_elastic(self) -> bool:
        return self.least_nodes != self.most_nodes

    def command(self, nodes: str, rendezvous: str | None) -> str:
        """Return the arguments of `gptworks` on each machine, as shell text, the same for a first and a resumed start.

        Args:
            nodes: number of machines, as a shell word.
            rendezvous: address at which the machines meet, as a shell word; None if there is only one machine.
        """
        words = ["--on", "local", "--nproc", str(self.nproc), "--restarts", str(self.restarts), "--resume"]
        words += ["--force"] if self.force else []
        words += [word for key in self.change for word in ("--change", key)]
        met = "" if rendezvous is None else f" --nodes {nodes} --rendezvous {rendezvous}"
        return f"{shlex.join(['launch', *words])}{met} {shlex.join(['--', self.recipe, *self.overrides])}"

    def refuse_elastic(self, target: str, why: str) -> None:
        """Raise a UserError, with the reason `why`, if the number of machines may change."""
        if self.is_elastic:
            raise UserError(
                f"--nodes {self.least_nodes}:{self.most_nodes} does not work with --on {target}: {why} Give one number."
            )


def check_job(job: Job, recipe: Recipe, resume: bool) -> None:
    """Check that the recipe can train on every number of machines that the job allows.

    Raises:
        UserError: see `check_train`; or the recipe cannot train on one of these numbers.
    """
    fetched_path(recipe.run_dir)  # fetches a run in a store, so that `check_train` notices it
    check_train(recipe, resume, job.least_nodes * job.nproc, job.change)
    for n_nodes in range(job.least_nodes + 1, job.most_nodes + 1):
        try:
            check_parallel(recipe, n_nodes * job.nproc)
        except UserError as error:
            raise UserError(f"with {n_nodes} of {job.least_nodes}:{job.most_nodes} machines: {error}") from None


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of machines in `N` or `MIN:MAX`.

    Raises:
        UserError: the text has another form.
    """
    found = _COUNT.fullmatch(text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"--nodes {text} is not a number of machines from 1 on, or MIN:MAX: give 2, or 2:4.")
    return least, most


def parse_gpus(text: str) -> tuple[str, int]:
    """Return the type ("" if not given) and the number of GPUs in `N` or `TYPE:N`.

    Raises:
        UserError: the text has another form.
    """
    found = _GPUS.fullmatch(text)
    if found is None or not int(found[2]):
        raise UserError(
            f"--gpus {text} is not a number of GPUs of each machine from 1 on, or TYPE:N: give 8, or h100:8."
        )
    return found[1] or "", int(found[2])


def parse_pairs(option: str, texts: Sequence[str], separator: str = "=") -> dict[str, str]:
    """Return the keys and values of an option that is given as `KEY=VALUE`, or with another separator than `=`.

    Raises:
        UserError: a text has another form.
    """
    pairs = {}
    for text in texts:
        key, found, value = text.partition(separator)
        if not (found and value and _KEY.fullmatch(key) and value.isprintable()):
            raise UserError(f"{option} {text!r} is not of the form KEY{separator}VALUE, in printable characters.")
        pairs[key] = value
    return pairs


def check_time(text: str, pattern: str, example: str) -> None:
    """Raise a UserError if a job's time limit has another form than `pattern`."""
    if not re.fullmatch(pattern, text, re.ASCII):
        raise UserError(f"--time {text!r} does not have the form {example}.")


def recipe_below(job: Job, folder: Path) -> str:
    """Return the recipe's path relative to the folder that is copied to the machines, or a shipped recipe's name.

    Raises:
        UserError: the recipe lies outside the folder.
    """
    path = Path(job.recipe)
    if not path.exists():
        return job.recipe
    try:
        return str(path.absolute().relative_to(folder.absolute()))
    except ValueError:
        raise UserError(
            f"{job.recipe} does not lie in {folder.absolute()}, which is copied to the machines: run the command in a "
            f"folder that holds the recipe."
        ) from None
