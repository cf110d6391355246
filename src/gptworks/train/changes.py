"""What a resumed run may change, and the run folder's record of what it has changed: `changes.json`.

The record also keeps the settings of the command line, so that a resumed run has them though they are not given again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from gptworks.checkpoint import checkpoints
from gptworks.config import Recipe, role_of, settings
from gptworks.errors import UserError
from gptworks.files import sealed_json, unsealed_json, write_whole
from gptworks.recipe import load_recipe

CHANGES = "changes.json"

Changes = dict[str, tuple[Any, Any]]
"""Old and new value by the setting's path; None where there was or is none."""


@dataclass
class History:
    """What a run's command lines have set, and what its settings were changed to on the way."""

    overrides: list[str] = field(default_factory=list)
    """`key.path=value` in the order in which they were given, each key once."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """`step`: from which step on; `settings`: path → [old, new]."""

    def steering(self, recipe: Recipe) -> bool:
        """Whether a change was made on which the loss curve depends."""
        return any(_role(recipe, key) == "recorded" for change in self.changes for key in change["settings"])


def read_history(run_dir: Path) -> History:
    """What the run folder has recorded; empty where nothing was changed.

    Raises:
        UserError: the record is damaged.
    """
    path = run_dir / CHANGES
    try:
        return History(**unsealed_json(path.read_bytes()))
    except FileNotFoundError:
        return History()
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}): restore it from a copy, or delete it and give again the settings that "
            f"{run_dir / 'recipe.yaml'} has and your recipe file has not."
        ) from None


def load_to_resume(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """The recipe of a run that goes on: the file's, with the settings of the run's earlier command lines, then these.

    Returns the recipe, and the earlier settings that are used again.

    Raises:
        UserError: as `gptworks.recipe.load_recipe`; or the run folder's record is damaged.
    """
    recipe = load_recipe(path, overrides)
    if Path(path).is_dir() or not (recipe.run_dir / "recipe.yaml").exists():
        return recipe, []
    given = {_key(override) for override in overrides}
    kept = [override for override in read_history(recipe.run_dir).overrides if _key(override) not in given]
    if not kept:
        return recipe, []
    return load_recipe(path, [*kept, *overrides]).model_copy(update={"run_dir": recipe.run_dir}), kept


def changed(before: Recipe, now: Recipe) -> Changes:
    """The settings in which a run's recipe differs from what it was. Where the folder lies is none of them."""
    old, new = ({s.path: to_jsonable_python(s.value) for s in settings(recipe)} for recipe in (before, now))
    if now.model.vocab_size == 0:  # not known before the data is prepared
        new["model.vocab_size"] = old["model.vocab_size"]
    for one, other in ((old, new), (new, old)):  # a section that only one of them has is one setting
        for path in [path for path, value in one.items() if value is None and path not in other]:
            inside = {key.removeprefix(f"{path}."): other.pop(key) for key in [*other] if key.startswith(f"{path}.")}
            other[path] = inside or None
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path) and path not in ("name", "run_dir")]
    return {path: (old.get(path), new.get(path)) for path in paths}


def check_changes(before: Recipe, now: Recipe) -> Changes:
    """What a resumed run changes.

    Raises:
        UserError: a setting that a run may not change; or it ends before the step that it has reached.
    """
    changes, folder = changed(before, now), now.run_dir
    for path, (old, new) in changes.items():
        recipe = now if path in {setting.path for setting in settings(now)} else before
        why = now.objective.fixed_settings.get(path)
        if why or _role(recipe, path) == "refused":
            why = why or role_of(recipe, path).words
            raise UserError(
                f"{folder} was started with {path}={_text(old)}, and it is now {_text(new)}: {why}, so a run cannot "
                f"change it. Resume with {path}={_text(old)}, or start anew with another run_dir=."
            )
    done = next((checkpoint.step for checkpoint in checkpoints(folder)), 0)
    if now.train.max_steps is not None and now.train.max_steps < done:
        raise UserError(
            f"train.max_steps={now.train.max_steps} and {folder} has done {done:,} steps: give more than those to go "
            f"on, or use its checkpoints as they are."
        )
    return changes


def record(run_dir: Path, step: int, changes: Changes, overrides: Sequence[str], before: Recipe | None) -> History:
    """Add to the run folder's record what holds from a step on; written before the new recipe.yaml.

    Changes that a crash kept from `recipe.yaml` are taken out, and those of steps that are run again hold from here.
    """
    history = read_history(run_dir)
    values = {} if before is None else {s.path: to_jsonable_python(s.value) for s in settings(before)}
    entries = [
        {"step": min(change["step"], step), "settings": change["settings"]}
        for n, change in enumerate(history.changes)
        if n < len(history.changes) - 1 or all(values.get(k) == new for k, (_, new) in change["settings"].items())
    ]
    if changes:
        entries.append({"step": step, "settings": {path: list(pair) for path, pair in changes.items()}})
    given = {_key(override): override for override in (*history.overrides, *overrides) if _key(override) != "run_dir"}
    now = History(list(given.values()), entries)
    if now != history:
        write_whole(run_dir / CHANGES, sealed_json(asdict(now)))
    return now


def change_words(settings: Mapping[str, Sequence[Any]]) -> str:
    """Changed settings in words."""
    return ", ".join(f"{path} {_text(old)} → {_text(new)}" for path, (old, new) in settings.items())


def _role(recipe: Recipe, path: str) -> str:
    try:
        return role_of(recipe, path).on_resume
    except KeyError:  # of a section that is not there any more
        return "recorded"


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
