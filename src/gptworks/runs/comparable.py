"""Decide whether the losses of two runs can be compared, and at which point of training.

Other functions return the settings that decide a recipe's loss curve, and the settings in which recipes differ.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gptworks.config import Recipe, role_of, settings
from gptworks.errors import UserError
from gptworks.runs.history import History
from gptworks.training.record.metrics import Record

FINISHED = 0.98
"""Fraction of a run's time limit after which the run counts as finished."""


@dataclass(frozen=True)
class Comparability:
    """The measure in which two runs can be compared, or the reasons why they cannot."""

    measure: str | None
    """`loss` or `bits_per_byte`; None if the runs are not comparable."""
    reasons: tuple[str, ...] = ()
    """Reasons why the runs are not comparable; empty for comparable runs."""
    caveat: str = ""
    """A note that the runs may have been evaluated on different text; empty if this is excluded."""


def comparability(first: History, second: History) -> Comparability:
    """Return the measure in which two runs can be compared, or the reasons why they cannot.

    Losses are comparable if the held-out tokens and all settings that decide what a loss measures are equal. Bits per
    byte are comparable if the tokens differ but the held-out text is the same. Neither measure is comparable if the
    runs have rows of different lengths and one of the runs evaluated only a part of the held-out text.
    """
    ours, theirs = measured(first.recipe), measured(second.recipe)
    differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    reasons = [
        f"{key} is {text_of(ours.get(key), 80) or 'absent'} and {text_of(theirs.get(key), 80) or 'absent'}"
        for key in differing
        if not key.startswith("tokenizer")
    ]
    reason, caveat = _other_windows(first, second)
    if reason:
        reasons.append(reason)
    if reasons:
        return Comparability(None, tuple(reasons))
    tokens = (first.data_fingerprint, second.data_fingerprint)
    if differing or (None not in tokens and tokens[0] != tokens[1]):
        return _in_bits(first, second, differing)
    if None in tokens:
        name = (first if tokens[0] is None else second).name
        unknown = f"{name} has no checkpoint that says which text it was evaluated on"
        caveat = f"{unknown}; {caveat}" if caveat else unknown
    return Comparability("loss", caveat=caveat)


def _other_windows(first: History, second: History) -> tuple[str, str]:
    """Return (reason, note), at least one of them empty, about the lengths of the rows of two runs.

    The reason says that the runs were evaluated on different text because these lengths differ. The note says that this
    is unknown. An evaluation of only a part of the held-out text reads evenly spaced rows, and rows of another length
    contain other text.
    """
    lengths = [run.recipe.row_length for run in (first, second)]
    whole = [_evaluates_all(run) for run in (first, second)]
    if lengths[0] == lengths[1] or all(whole):
        return "", ""
    rows = f"rows of {lengths[0]:,} and {lengths[1]:,} tokens are evaluated on other text"
    windows = first.recipe.train.evaluate_sequences
    if windows or False in whole:
        given = "null" if windows is None else windows
        return f"with train.evaluate_sequences={given}, {rows}: set it to 0, which evaluates all of it", ""
    name = (first if whole[0] is None else second).name
    return "", f"{rows} if the held-out text is too long to be read as a whole, which {name} does not record"


def _evaluates_all(run: History) -> bool | None:
    """Return whether every evaluation of a run read all of the held-out text; None if the records do not say."""
    if run.recipe.train.evaluate_sequences == 0:
        return True
    counts = [(record.get("sequences"), record.get("sequences_held_out")) for record in run.validation]
    known = [n_read >= n for n_read, n in counts if isinstance(n_read, int) and isinstance(n, int)]
    return False if False in known else True if known else None


def _in_bits(first: History, second: History, differing: Sequence[str]) -> Comparability:
    """Return bits per byte as the measure if two runs with different tokens have bits per byte of the same held-out
    text; else the reason why the runs are not comparable."""
    texts = (first.text_fingerprint, second.text_fingerprint)
    why = f"{differing[0]} differs" if differing else "their token files differ"
    if None in texts:
        name = (first if texts[0] is None else second).name
        return Comparability(None, (f"{why}, and {name} does not record which text it was evaluated on",))
    if texts[0] != texts[1]:
        return Comparability(None, (f"{why}, and they were evaluated on different text",))
    for run in (first, second):
        if run.last is None or not isinstance(run.last["bits_per_byte"], int | float):
            return Comparability(None, (
                f"{why}, and {run.name} has no bits per byte: train.evaluate_sequences=0 and a tokenizer that keeps "
                f"the whole text give them",
            ))  # fmt: skip
    return Comparability("bits_per_byte")


def measured(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that decide what the validation loss measures, by path."""
    return {setting.path: setting.value for setting in settings(recipe) if setting.role.decides_measure}


def shared_steps(first: History, second: History) -> int:
    """Return the last step that two runs have in common because of a fork; 0 if no step is common."""
    lines = [
        {run.name: math.inf} | {origin.run: origin.step for origin in reversed(run.origins)} for run in (first, second)
    ]
    shared = max((min(line[name] for line in lines) for name in lines[0].keys() & lines[1].keys()), default=0)
    before = [[r["loss"] for r in run.validation if r["step"] <= shared][-1:] for run in (first, second)]
    return int(shared) if before[0] == before[1] else 0  # if the losses differ, another run reused the name


@dataclass(frozen=True)
class Place:
    """A point of training at which two groups of runs are compared."""

    words: str
    """Description of the point, such as `after 500 steps`."""
    step: int | None
    """The step of this point; None if the runs are compared at equal tokens or time."""
    values: tuple[tuple[float, ...], tuple[float, ...]]
    """Values of the measure in the first group's runs, and in the second group's runs."""
    caveat: str = ""


def common_place(first: Sequence[History], second: Sequence[History], measure: str) -> Place | str:
    """Return the last point at which all runs of two groups can be compared, or the reason why none exists.

    Runs with the same time limit are compared at their ends. Other runs are compared at equal steps if a step is the
    same work in all of them, else at equal tokens.
    """
    runs = [*first, *second]
    if by_clock(runs):
        minutes = runs[0].recipe.train.max_minutes
        late = next((run.name for run in runs if not finished_by_clock(run)), None)
        if late is not None:
            return f"{late} has not trained for its {minutes:g} minutes"
        ends = [run.validation[-1] for run in runs]
        words = f"after {minutes:g} minute{'s' * (minutes != 1)} of training each"
        tokens = [fmean(run.validation[-1]["tokens"] for run in group) for group in (first, second)]
        apart = max(tokens) > 1.01 * min(tokens)
        caveat = f"in that time {first[0].name} read {tokens[0]:,.0f} tokens and {second[0].name} {tokens[1]:,.0f}"
        return _place(words, None, first, second, ends, measure, caveat if apart else "")
    key = "step" if len({_step_of(run.recipe) for run in runs}) == 1 else "tokens"
    unit = "steps" if key == "step" else "tokens"
    points = [{record[key]: record for record in run.validation} for run in runs]
    common = set(points[0]).intersection(*points[1:])
    if not common:
        last = ", ".join(f"{run.name} {run.validation[-1][key]:,}" for run in (first[0], second[0]))
        return (
            f"they were never evaluated after the same number of {unit} (last: {last}): give both the same "
            f"train.evaluate_every and train them to the same length"
        )
    at, caveat = max(common), ""
    if beyond := [run for run in runs if run.validation[-1][key] > at]:
        caveat = f"{beyond[0].name} trained on to {beyond[0].validation[-1][key]:,} {unit}"
        if len({run.planned_steps for run in runs}) > 1:
            caveat += "; the runs have other lengths, so their learning rates were at other points of their schedules"
    records = [each[at] for each in points]
    return _place(f"after {at:,} {unit}", at if key == "step" else None, first, second, records, measure, caveat)


def _place(
    words: str, step: int | None, first: Sequence[History], second: Sequence[History], records: Sequence[Record],
    measure: str, caveat: str = "",
) -> Place | str:  # fmt: skip
    values = [record[measure] for record in records]
    for run, value in zip((*first, *second), values, strict=True):
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"the {measure.replace('_', ' ')} of {run.name} {words} is {value}"
    return Place(words, step, (tuple(values[: len(first)]), tuple(values[len(first) :])), caveat)


def by_clock(runs: Sequence[History]) -> bool:
    """Return whether all runs have the same time limit."""
    minutes = {run.recipe.train.max_minutes for run in runs}
    return len(minutes) == 1 and None not in minutes


def finished_by_clock(run: History) -> bool:
    """Return whether a run with a time limit has trained for 98% of the limit (`FINISHED`) or reached its last step."""
    train = run.recipe.train
    if train.max_steps is not None and run.step >= train.max_steps:
        return True
    return run.seconds >= FINISHED * 60 * (train.max_minutes or 0.0)


def _step_of(recipe: Recipe) -> tuple[Any, ...]:
    """Return a key that is equal for two runs if their steps do the same work."""
    train, tokenizer = recipe.train, measured(recipe)["tokenizer.type"]
    batches = (train.batch_size, train.smaller_batches, train.shorter_contexts)
    return (*batches, recipe.row_length, recipe.objective.type, tokenizer)


# -------------------------------------------------------------------------------------------- settings


def decisive(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that decide a loss curve and differ from their defaults, by path.

    The `gptworks.config.Role` in a setting's type says whether the setting decides the curve. The path of a tokenizer
    or of starting weights does. The seed, the run folder and the paths of text do not. Since defaults are left out, a
    setting that a new version adds changes no fingerprint.
    """
    tree = recipe.model_dump(mode="json", exclude={"sweep"}, exclude_defaults=True)
    return {key: value for key, value in flat(tree) if role_of(recipe, key).decides_curve}


def fingerprint(recipe: Recipe) -> str:
    """Return a sha256 of the settings that decide a loss curve. It is equal for runs that differ only in their seed."""
    return settings_fingerprint(decisive(recipe))


def settings_fingerprint(given: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode("utf-8")).hexdigest()


def differences(recipes: Sequence[Recipe], exclude: dict[str, Any] | None = None) -> dict[str, list[Any]]:
    """Return the settings that differ, by path, each with its value in every recipe (None if a recipe lacks it).

    exclude: settings to ignore, as pydantic's `model_dump` takes them. Default: name, run folder and sweep.
    """
    left_out = dict.fromkeys(("name", "run_dir", "sweep"), True) if exclude is None else exclude
    trees = [dict(flat(recipe.model_dump(mode="json", exclude=left_out))) for recipe in recipes]
    keys = dict.fromkeys(key for tree in trees for key in tree)
    values = {key: [tree.get(key) for tree in trees] for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def check_same(folder: Path, then: Recipe, now: Recipe, advice: str, exclude: dict[str, Any] | None = None) -> None:
    """Raise a UserError that ends with `advice` if the recipe `now` differs from `then`, with which the folder was
    started. For `exclude` see `differences`."""
    for key, (was, is_now) in differences([then, now], exclude).items():
        raise UserError(f"{folder} was started with another `{key}`: it was {was} and is now {is_now}. {advice}")


def text_of(value: Any, room: int = 40) -> str:
    """Return a setting's value as text of at most `room` characters; of a longer text, only the end."""
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= room else f"…{text[1 - room :]}"


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every leaf of a tree. A path is written as in an override, such as
    `train.batch_size`."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield path, tree
        return
    for key, value in items:
        yield from flat(value, f"{path}.{key}" if path else str(key))
