"""The run folder: opened by one process at a time, and never overwritten silently."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from gptworks.config import DataConfig, Recipe
from gptworks.errors import RunError, UserError
from gptworks.recipe import load_recipe

FIXED_FOR_A_RUN = ("seed", "model", "tokenizer", "data", "objective", "adapter", "freeze")
"""Recipe sections a resumed run may not change: its weights or the order of its samples depend on them."""


@contextlib.contextmanager
def open_run_folder(recipe: Recipe, resume: bool) -> Iterator[None]:
    """Lock the run folder for this process, creating it for a new run.

    Raises:
        UserError: another process is using it; or it holds a run and `resume` is false; or it holds something else;
            or the run in it was started with other settings.
    """
    folder = recipe.run_dir
    check_run_folder(recipe, resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock", timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise UserError(
            f"run folder {folder} is in use by another process: wait for it, or give another run_dir=."
        ) from None
    except OSError as error:
        raise RunError(f"run folder {folder} cannot be written: {error.strerror}.") from error
    try:
        yield
    finally:
        lock.release()


def check_run_folder(recipe: Recipe, resume: bool) -> None:
    """Refuse a run folder that this recipe must not write to, before any work is done.

    Raises:
        UserError: see `open_run_folder`.
    """
    folder = recipe.run_dir
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run_dir={folder} is a file: give another run_dir=.")
    if (folder / "recipe.yaml").exists():
        if not resume:
            raise UserError(
                f"{folder} already holds a run, and a run is never overwritten: add --resume to go on with it, "
                f"give another run_dir=, or delete the folder."
            )
        before = load_recipe(folder)
        for section in FIXED_FOR_A_RUN:
            ours, theirs = getattr(recipe, section), getattr(before, section)
            if section == "model" and ours.vocab_size == 0:  # not known before the data is prepared
                ours = ours.model_copy(update={"vocab_size": theirs.vocab_size})
            if section == "data":
                ours, theirs = _without_places(ours), _without_places(theirs)
            if ours != theirs:
                raise UserError(
                    f"{folder} was started with another `{section}`: {_difference(ours, theirs)}. "
                    f"Resume with the same settings, or start anew with another run_dir=."
                )
    elif folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir()):
        raise UserError(f"run_dir={folder} exists and holds other files, not a run: give another run_dir=.")


def _without_places(data: DataConfig) -> DataConfig:
    """The settings less where text and shards lie and how they are made; that the text is the same, its tokens tell."""
    sources = tuple(
        source.model_copy(update={"path": None}) if hasattr(source, "path") else source for source in data.sources
    )
    return data.model_copy(update={"cache_dir": Path(), "processes": 0, "sources": sources})


def _difference(ours: object, theirs: object) -> str:
    if not hasattr(ours, "model_dump") or not hasattr(theirs, "model_dump"):
        return f"it was {theirs} and is now {ours}"
    new, old = ours.model_dump(mode="json"), theirs.model_dump(mode="json")
    key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
    return f"`{key}` was {old.get(key)} and is now {new.get(key)}"
