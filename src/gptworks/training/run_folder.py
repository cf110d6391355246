"""Opens run folders: for one process at a time, and without overwriting a run."""

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

import filelock

from gptworks.config import Recipe
from gptworks.errors import RunError, UserError
from gptworks.files import check_links, check_sums, file_lock, is_locked, make_folder, shown
from gptworks.files.mirror import OWN_SESSION, VERSIONS
from gptworks.recipe import load_recipe
from gptworks.tokenizer import MAX_TOKENIZER_BYTES
from gptworks.training.changes import check_changes
from gptworks.training.distributed.agreed import SHARED

CONSOLE = "console.log"
"""File with the output of a run that the studio started; it may exist before the run begins."""
_NOT_OF_A_RUN = (".lock", SHARED, CONSOLE, OWN_SESSION, VERSIONS)
"""Files that a folder may have before its run begins, in addition to those that another rank is writing."""


@contextlib.contextmanager
def open_run_folder(recipe: Recipe, resume: bool, change: Collection[str] = ()) -> Iterator[None]:
    """Return a context in which this process has locked the run folder, which is created for a new run.

    Raises:
        UserError: another process uses the folder, or `check_run_folder` refuses it.
        RunError: the folder cannot be written.
    """
    folder = recipe.run_dir
    check_run_folder(recipe, resume, change)
    try:
        make_folder(folder)
        lock = file_lock(folder / ".lock", timeout=0.3).acquire()  # `is_in_use` may hold the lock for a moment
    except filelock.Timeout:
        raise UserError(
            f"run folder {shown(folder)} is in use by another process: wait for it, or give another run_dir=."
        ) from None
    except OSError as error:
        raise RunError(f"run folder {folder} cannot be written: {error.strerror}.") from error
    with lock:
        yield


def is_in_use(folder: Path) -> bool:
    """Whether a process has opened the run folder; False if unknown, as on Windows. Does not write or follow links."""
    return is_locked(folder / ".lock")


def check_run_folder(recipe: Recipe, resume: bool, change: Collection[str] = ()) -> None:
    """Check that the recipe's run may write to its run folder, before any work is done.

    Raises:
        UserError: the folder is a file or contains a link to a path outside of it; it holds a run and `resume` is
            false; it holds files that are not a run's; a changed setting is fixed or must be listed in `change`; or the
            tokenizer's files have changed.
    """
    folder = recipe.run_dir
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run_dir={folder} is a file: give another run_dir=.")
    check_links(folder)
    if (folder / "recipe.yaml").exists():
        if not resume:
            raise UserError(
                f"{shown(folder)} already holds a run, and a run is never overwritten: add --resume to continue it, "
                f"give another run_dir=, or delete the folder."
            )
        check_changes(load_recipe(folder), recipe, change)
        check_sums(folder / "tokenizer", MAX_TOKENIZER_BYTES)
    elif folder.is_dir() and any(
        path.name not in _NOT_OF_A_RUN and not path.name.startswith(".writing-.") for path in folder.iterdir()
    ):
        raise UserError(f"run_dir={shown(folder)} exists and holds other files, not a run: give another run_dir=.")
