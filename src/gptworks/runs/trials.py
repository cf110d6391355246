"""Train trials for sweeps and `gptworks try`. A trial is a run in its own process, which can be watched and stopped.

The recipe and the log of a trial are next to its run folder, under the same name plus `.yaml` and `.log`.
"""

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock

from gptworks.config import Recipe, Role, settings
from gptworks.errors import RunError, UserError
from gptworks.files import check_links, file_lock, make_folder, open_regular, open_to_append
from gptworks.recipe import save_recipe
from gptworks.training.record.metrics import Record, read_metrics
from gptworks.training.signals import ASK, OWN_GROUP, stop_signals

Report = Callable[[str], None]

TRAIN = (sys.executable, "-m", "gptworks", "train")
"""The command that trains a trial, without its last arguments: the recipe and --resume."""

POLL_SECONDS = 0.1
STOP_SECONDS = 120.0
"""Seconds that a stopping trial has to finish its step and checkpoint before it is killed."""


def train_trial(
    place: Path,
    stop_asked: Callable[[], Any],
    report: Report,
    watch: Callable[[], str | None] = lambda: None,
) -> str | None:
    """Train the recipe next to the run folder `place`. Return `done` or `failed`; or None if a stop was requested.

    `watch` is called repeatedly, and once after training ends. If it returns a word, the trial stops with this result.
    """
    if not _alone(place, stop_asked, report):
        return None
    command = [*TRAIN, str(place.with_suffix(".yaml")), "--resume"]
    with open_to_append(place.with_suffix(".log"), inside=place.parent) as log:
        # give the trial its own session, so that Ctrl-C reaches only the parent, which then stops the trial
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, creationflags=OWN_GROUP
        )
        try:
            while True:
                code = process.poll()
                if (word := watch()) is not None:
                    return word
                if code is not None:
                    return "done" if code == 0 else "failed"
                if stop_asked():
                    return None
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.send_signal(ASK)
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def train_to_end(recipe: Recipe, stop_asked: Callable[[], Any], report: Report) -> bool:
    """Write a recipe next to its run folder and train it to its last step. Return whether it reached this step; False
    means that a stop was requested. Raise a RunError if the run failed, or its last loss is not finite."""
    place = recipe.run_dir
    place.parent.mkdir(parents=True, exist_ok=True)
    save_recipe(recipe, place.with_suffix(".yaml"))
    ended = train_trial(place, stop_asked, report)
    if ended is None:
        return False
    log = f"Its log is {place.with_suffix('.log')}."
    if ended == "failed":
        raise RunError(f"the run {place.name} failed: {last_line(place)}. {log}")
    if (evaluations(place) or [{"step": -1}])[-1]["step"] != recipe.train.max_steps:
        raise RunError(f"the run {place.name} has no finite loss after step {recipe.train.max_steps}. {log}")
    return True


def evaluations(folder: Path) -> list[Record]:
    """Return the trial's evaluations so far, without those whose loss is not finite."""
    records = read_metrics(folder / "metrics.jsonl")
    return [record for record in records if record.get("kind") == "validation" and math.isfinite(record["loss"])]


_TAIL_BYTES = 1 << 16


def last_line(place: Path) -> str:
    """Return the last line that a failed trial printed, which is the reason of the failure."""
    with open_regular(place.with_suffix(".log"), inside=place.parent) as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
        lines = log.read(_TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it printed nothing"


def check_comparable(recipe: Recipe, key: str, named: str) -> None:
    """Raise a UserError that begins with `named` if the setting `key` must be the same in all trials.

    These settings are the seed, the name, the run folder, the sweep, the data, the tokenizer, and all settings that
    decide what the loss measures. If trials varied such a setting, their losses would not show which value is better.
    Lengths of rows may vary only if evaluations read all of the held-out text.
    """
    if key.partition(".")[0] in ("name", "run_dir", "sweep", "data", "tokenizer"):
        raise UserError(f"{named}: `{key}` is the same in all trials, so that their losses compare.")
    # an unknown key has no role here; it raises an error later, when a recipe is loaded with a value for it
    roles = [
        one.role
        for one in settings(recipe)
        if f"{one.path}.".startswith(f"{key}.") or f"{key}.".startswith(f"{one.path}.")
    ]
    if any(role.decides_measure or role is Role.REPEAT for role in roles):
        raise UserError(
            f"{named}: `{key}` is the same in all trials. It decides what the validation loss measures, or is the "
            f"seed, so that the losses of other values would not say which is better."
        )
    if key in ("model", "model.context_length", "train", "train.row_tokens") and recipe.train.evaluate_sequences != 0:
        shown = "null" if recipe.train.evaluate_sequences is None else recipe.train.evaluate_sequences
        raise UserError(
            f"{named}: with train.evaluate_sequences={shown}, each length may be evaluated on other text: set it to 0, "
            f"which evaluates all of the held-out text."
        )


def _alone(place: Path, stop_asked: Callable[[], Any], report: Report) -> bool:
    """Wait until no other process uses `place`, such as a process that a killed parent left running. Return False if a
    stop was requested, else True."""
    if not place.exists():
        return True
    reported = False
    while not stop_asked():
        try:
            with file_lock(place / ".lock", timeout=0.5):
                return True
        except filelock.Timeout:
            if not reported:
                report(f"waiting for the process that is at work in {place}")
            reported = True
    return False


@contextlib.contextmanager
def open_folder(folder: Path, named: str, setting: str) -> Iterator[Callable[[], Any]]:
    """Lock a folder of trials, made if it is missing, for this process. Yield a function that returns whether to stop.

    Args:
        named, setting: words for the error's message; see `locked`.

    Raises:
        UserError: the folder is a URL, a link leads out of it, or another process uses it.
    """
    check_links(folder)
    make_folder(folder)
    lock = locked(folder, named, setting)
    try:
        with stop_signals() as stop_asked:
            yield stop_asked
    finally:
        lock.release()


def locked(folder: Path, named: str, setting: str) -> filelock.BaseFileLock:
    """Lock a folder for this process and return the lock. Raise a UserError if another process uses the folder.

    The error's message names the kind of process, `named`, and the setting that chooses another folder, `setting`.
    """
    lock = file_lock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError(f"{folder} is in use by another {named}: wait for it, or give another {setting}.") from None
    return lock
