"""Find the changed settings and the remaining training of a run, or its fork, that resumes with a given recipe."""

from dataclasses import dataclass
from typing import Any

from gptworks.checkpoint import checkpoints
from gptworks.config import ENDS, Recipe
from gptworks.errors import UserError
from gptworks.overrides import as_typed
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.studio.checking import read_text
from gptworks.studio.library import RunFolder
from gptworks.training.changes import changed, check_changes, inexact, settings_at
from gptworks.training.record.outcome import read_outcome

Changes = list[dict[str, Any]]


@dataclass(frozen=True)
class Resumption:
    """The effect of resuming a run, or a fork of it, with a recipe."""

    changes: Changes
    """The changed settings, each with `path`, `old`, `new` and `recorded` (whether the run folder records the change,
    because the loss curve depends on it)."""
    problem: str | None
    """The reason why the run cannot resume; None if it can."""
    steps_left: int | None
    """Number of steps left until train.max_steps; None if train.max_steps is not set."""


def allowed_changes(run: RunFolder, text: str, forked_at: int | None = None) -> Changes:
    """Return the settings that change if a run, or its fork from step `forked_at`, resumes with the recipe `text`.

    Raises:
        UserError: the run cannot resume with this recipe.
    """
    found = resumption(run, text, forked_at)
    if found.problem is not None:
        raise UserError(found.problem)
    return found.changes


def resumption(run: RunFolder, text: str, forked_at: int | None = None) -> Resumption:
    """Return the effect of resuming a run, or its fork from step `forked_at`, with the recipe `text`."""
    before = load_recipe(run.folder, [] if forked_at is None else settings_at(run.folder, forked_at))
    tree = read_text(text) | {"name": before.name, "run_dir": str(run.folder)}
    now = parse_recipe(tree)
    found = changed(before, now)
    done = _newest_step(run) if forked_at is None else forked_at
    recorded = inexact(before, now, found, done)
    made = [
        {"path": path, "old": as_typed(old), "new": as_typed(new), "recorded": path in recorded}
        for path, (old, new) in found.items()
    ]
    problem, most = None, now.train.max_steps
    try:
        check_changes(before, now, found, forked_at)
        _check_said(before, now, made)
        _check_left(run, now, done, is_fork=forked_at is not None)
    except UserError as error:
        problem = str(error)
    return Resumption(made, problem, None if most is None else max(0, most - done))


@dataclass(frozen=True)
class Extension:
    """The length that a run, or a fork of it, needs in order to train further."""

    edits: list[tuple[str, str]]
    """Each setting that limits the run's length, paired with its value as typed: the run's own, or a larger value."""
    why: str | None
    """A sentence on why the run's own length is too short; None if that length suffices."""


def extension(run: RunFolder, forked_at: int | None = None) -> Extension:
    """Return a length with which a run, or its fork from step `forked_at`, has training left.

    This is the run's own length, unless no training is left or a fork has less than a tenth of `train.max_steps` left.
    Then the length is raised so that about the run's own length is left.
    """
    recipe, last = load_recipe(run.folder), _last_step(run)
    done = forked_at if forked_at is not None else last if last is not None else _newest_step(run)
    ends, steps = _ends(recipe), recipe.train.max_steps
    longer: dict[str, int | float] = {}
    if done in (last, steps):
        longer = {name: done + value if name == "max_steps" else 2 * value for name, value in ends.items()}
    elif forked_at is not None and steps is not None and 10 * (steps - done) < steps:
        longer = {"max_steps": done + steps}
    what = " and ".join(f"train.{name} is raised from {ends[name]} to {value}" for name, value in longer.items())
    at = f"Step {done:,} is the run's last" if done in (last, steps) else f"After step {done:,} little of it is left"
    edits = [(f"train.{name}", as_typed(value)) for name, value in (ends | longer).items()]
    return Extension(edits, f"{at}: {what}, to train as long again." if longer else None)


def _newest_step(run: RunFolder) -> int:
    return next((checkpoint.step for checkpoint in checkpoints(run.folder)), 0)


def _last_step(run: RunFolder) -> int | None:
    """Return the last step of a finished run; None for other runs."""
    outcome = read_outcome(run.folder)
    return outcome.step if not isinstance(outcome, str) and outcome.reason == "finished" else None


def _ends(recipe: Recipe) -> dict[str, int | float]:
    """Return the settings that limit a run's length, by name."""
    return {name: value for name in sorted(ENDS) if (value := getattr(recipe.train, name)) is not None}


def _check_said(before: Recipe, now: Recipe, made: Changes) -> None:
    """Raise a UserError if the changes, as arguments of `gptworks train`, do not produce the new recipe."""
    if rest := changed(load_recipe(before, [f"{one['path']}={one['new']}" for one in made]), now):
        raise UserError(f"{', '.join(rest)} cannot be changed from here: use gptworks train --resume.")


def _check_left(run: RunFolder, now: Recipe, done: int, *, is_fork: bool) -> None:
    """Raise a UserError if no training is left after step `done`."""
    ends = _ends(now)
    if done == now.train.max_steps:
        ends = {"max_steps": done}
    elif _last_step(run) != done or _ends(load_recipe(run.folder)) != ends:
        return
    words = " and ".join(f"{name}={value if isinstance(value, int) else f'{value:g}'}" for name, value in ends.items())
    more = f"raise {' or '.join(f'train.{name}' for name in ends)}{' or choose an earlier checkpoint' * is_fork}"
    raise UserError(f"Checkpoint {done} is the last of {words}: {more}.")
