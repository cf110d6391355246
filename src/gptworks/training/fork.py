"""Forks: runs that continue from a checkpoint of another run, in their own folder, with some settings changed.

The new folder holds the source's state at the checkpoint. `--resume` continues from there, and repeats the source's
later steps bit for bit if no setting is changed.
"""

import threading
from collections.abc import Sequence
from pathlib import Path

from gptworks.checkpoint import Checkpoint, all_checkpoints, checkpoint_of_step, checkpoints, require_full_weights
from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.files import (
    check_free,
    check_regular,
    check_sums,
    copy_file,
    copy_folder,
    fetched_path,
    link_or_copy,
    new_folder,
)
from gptworks.recipe import by_key, load_recipe, not_a_run, run_name, save_recipe
from gptworks.tokenizer import MAX_TOKENIZER_BYTES
from gptworks.training.changes import Change, History, Origin, check_changes, read_history, settings_at, write_history
from gptworks.training.objectives.base import objective_of
from gptworks.training.progress import Progress
from gptworks.training.record.metrics import LOG, MOST_LOG_BYTES, MetricsLog
from gptworks.units import whole_number

_one_at_a_time = threading.Lock()  # two forks with the same name would write to one folder


def fork(source: Path, step: int | None, into: Path, overrides: Sequence[str] = ()) -> Path:
    """Create a run folder that continues from a checkpoint of another run, and return it; `gptworks train INTO
    --resume` trains it.

    The folder appears complete or not at all, and does not depend on the source. The checkpoint's files are hard links
    where the file system allows them, because no run changes these files. All other files are copies.

    Args:
        step: the step of the checkpoint, or None for the last checkpoint from which the run can resume.
        into: the new run folder; it must be missing or empty.
        overrides: `key.path=value` settings to change. The source's own changes after that step do not apply.

    Raises:
        UserError: the checkpoint is missing, damaged, imported or quantized, or has only weights; a setting is wrong or
            cannot change; or `into` is in use, lies in the source or has no usable name.
        RunError: the disk is full, or writing fails.
    """
    checkpoint = _checkpoint_of(source, step)
    if into.name in ("", ".."):
        raise UserError(f"{into} is not a name of a new folder: give one, such as {source}-forked.")
    if into.absolute().resolve().is_relative_to(source.resolve()):
        raise UserError(f"{into} lies in {source}, and would be deleted with it: give another folder.")
    keys = by_key(overrides)
    if "run_dir" in keys:
        raise UserError(f"run_dir cannot be set: a fork's is the new folder, {into}.")
    back = settings_at(source, checkpoint.step)
    before, now = load_recipe(source, back), load_recipe(source, [*back, *overrides])
    check_changes(before, now, keys, checkpoint.step)
    check_free(into)
    checkpoint.verify()
    require_full_weights(checkpoint)
    progress = Progress.of(checkpoint)
    progress.require_training(before.run_dir)
    name = now.name if "name" in keys else run_name(into)
    with _one_at_a_time:
        check_free(into)
        with new_folder(into) as aside:
            try:
                _take_files(source, checkpoint, progress, before, aside)
            except FileNotFoundError as error:
                raise UserError(
                    f"{error.filename} is gone: the run deletes old checkpoints as it trains. Fork it again."
                ) from None
            history = _history(source, checkpoint, [*back, *overrides])
            if change := Change.between(before, now, checkpoint.step):
                history.changes.append(change)
            write_history(aside, history)
            save_recipe(now.model_copy(update={"name": name, "run_dir": into}), aside / "recipe.yaml", history.lines())
    return into


def origin_of(text: str) -> tuple[Path, int | None]:
    """Parse `RUN`, `RUN@STEP`, `RUN@best` or `RUN@last`; return the run folder, and the step or None for the last.

    Raises:
        UserError: `text` has another form; or it asks for `best`, and the run has no checkpoint or its newest
            checkpoint names no best step.
    """
    folder, at, which = text.rpartition("@")
    if not at or Path(text).is_dir():
        return fetched_path(text), None
    run = fetched_path(folder)
    if which == "last":
        return run, None
    if which == "best":
        best = next((one.best_step for one in all_checkpoints(run)), None)
        if best is None:
            raise UserError(f"{run} has no checkpoint that names the best: give RUN@STEP.")
        return run, best
    if (step := whole_number(which)) is None:
        raise UserError(f"{text}: what follows @ is a step, best or last, such as {folder}@500.")
    return run, step


def _checkpoint_of(source: Path, step: int | None) -> Checkpoint:
    """Return the checkpoint to continue from, not verified yet; raise UserError if there is none."""
    if not (source / "recipe.yaml").is_file():
        raise not_a_run(source)
    found = checkpoints(source)
    for checkpoint in found:
        if step in (None, checkpoint.step):
            return checkpoint
    weights = {one.step for one in all_checkpoints(source)}
    if not (found or weights - {0}):
        raise UserError(f"{source} has no checkpoint yet: let it train to its first one (train.checkpoint_every).")
    at = "" if step is None else f" at step {step}"
    why = "there are weights only" if step is None or step in weights else "there is no such checkpoint"
    steps = ", ".join(str(one.step) for one in reversed(found)) or "no step"
    raise UserError(
        f"{source} cannot be forked{at}: {why}. Training can continue from {steps}; initialize_from={source} and "
        f"another run_dir= start a new run from its best weights."
    )


def _take_files(source: Path, checkpoint: Checkpoint, progress: Progress, recipe: Recipe, aside: Path) -> None:
    """Copy or link the files that a fork needs into the new folder `aside`; cut the log after the checkpoint's step."""
    best = checkpoint_of_step(source, progress.best_step)
    start = Checkpoint(source / "checkpoints" / "weights-000000")
    for taken in [checkpoint, *(one for one in dict.fromkeys([best, start]) if one != checkpoint and one.is_whole)]:
        to = aside / "checkpoints" / taken.folder.name
        to.mkdir(parents=True)
        for name in (*taken.files, "manifest.json"):
            check_regular(taken.folder / name, inside=source)
            link_or_copy((taken.folder / name).resolve(), to / name)
    check_sums(source / "tokenizer", MAX_TOKENIZER_BYTES)
    for name in ("tokenizer", LOG, *objective_of(recipe.objective, recipe.train).kept_files):
        if name == "tokenizer" or (source / name).is_dir():  # without a tokenizer, copying fails
            copy_folder(source / name, aside / name, inside=source)
        elif (source / name).exists():
            copy_file(source / name, aside / name, MOST_LOG_BYTES if name == LOG else None, inside=source)
    MetricsLog(aside / LOG, checkpoint.step, resume_rollbacks=progress.rollbacks).close()


def _history(source: Path, checkpoint: Checkpoint, overrides: Sequence[str]) -> History:
    """Return the source's record of changes up to the checkpoint, plus `overrides` and the checkpoint as an origin."""
    history, step = read_history(source), checkpoint.step
    origin = Origin(source.resolve().name, step, checkpoint.weights_sha256)
    given = by_key([*history.overrides, *overrides])
    kept = [each for key, each in given.items() if key not in ("name", "run_dir")]
    earlier = [change for change in history.changes if change.step <= step]
    return History(kept, earlier, [origin, *history.origins])
