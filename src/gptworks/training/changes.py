"""The settings that a resumed run may change, and `changes.json`: the run folder's record of the changes made.

Some settings can never change. The user must allow each change that affects the loss curve (`--change SETTING`); other
changes are only recorded. The record also holds the checkpoints from which the run was forked, and the overrides of its
command lines, which a resumed run uses again.
"""

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from gptworks.checkpoint import checkpoints
from gptworks.config import ENDS, Recipe, Role, role_of, settings
from gptworks.errors import UserError, did_you_mean
from gptworks.files import fetched_path, read_regular, sealed_json, unsealed_json, write_whole
from gptworks.overrides import as_typed
from gptworks.recipe import RecipeLike, by_key, is_folder, load_recipe
from gptworks.training.progress import Progress, rate_factor

CHANGES = "changes.json"
_MOST_BYTES = 1 << 24

Changes = dict[str, tuple[Any, Any]]
"""Old and new value of each changed setting, by its path, such as `train.max_steps`; None for an unset value."""


@dataclass(frozen=True)
class Origin:
    """A checkpoint of another run, from which this run was forked."""

    run: str
    """Name of the other run's folder."""
    step: int
    weights_sha256: str
    """The sha256 of the checkpoint's `model.safetensors`."""

    def __str__(self) -> str:
        return f"the run {self.run} at step {self.step:,} (sha256 of its weights: {self.weights_sha256[:12]}…)"


@dataclass(frozen=True)
class Change:
    """The settings changed when a run was resumed or forked at a step."""

    step: int
    """Number of steps done before the change."""
    settings: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]
    """Old and new value of each changed setting, by its path."""
    exact: bool
    """Whether the steps before the change would have been the same with the new settings."""

    @classmethod
    def between(cls, before: Recipe, now: Recipe, step: int) -> Self | None:
        """Return the record of the settings that differ between two recipes of a run; None if no setting differs."""
        changes = changed(before, now)
        exact = not inexact(before, now, changes, step)
        return cls(step, {path: list(pair) for path, pair in changes.items()}, exact) if changes else None


@dataclass
class History:
    """The contents of `changes.json`: a run's origins, its command lines' settings, and its changes of settings."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    overrides: list[str] = field(default_factory=list)
    """`key.path=value` settings of the run's command lines, in the order given; each key appears once, with its last
    value."""
    changes: list[Change] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    """The checkpoints from which the run was forked, nearest first: a fork of a fork has two."""

    @property
    def exact(self) -> bool:
        """Whether a new run with this run's present settings would repeat all of its steps."""
        return all(change.exact for change in self.changes)

    def origin_rows(self) -> dict[str, str]:
        """Return the origins as table rows, text by label; empty if the run is not a fork."""
        names = list(map(str, self.origins))
        rows = {"forked from": "".join(names[:1]), "and that one from": ", and that one from ".join(names[1:])}
        return {key: words for key, words in rows.items() if words}

    def change_rows(self) -> dict[str, str]:
        """Return the changes as table rows, text by label. Changes made at the same step share a row."""
        rows: dict[str, str] = {}
        for change in self.changes:
            step, words = f"from step {change.step:,}", change_words(change.settings)
            rows[step] = f"{rows[step]}, then {words}" if step in rows else words
        return rows

    def lines(self) -> list[str]:
        """Return the origins and the changes as lines of text."""
        return [
            *(f"{key} {origin}" for key, origin in self.origin_rows().items()),
            *(f"{key}: {words}" for key, words in self.change_rows().items()),
        ]


def read_history(run_dir: Path) -> History:
    """Read the run folder's record of changes; return an empty record if the file is missing. Raise UserError if the
    file is damaged."""
    path = run_dir / CHANGES
    try:
        return TypeAdapter(History).validate_python(unsealed_json(read_regular(path, _MOST_BYTES, inside=run_dir)))
    except FileNotFoundError:
        return History()
    except ValueError as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        problem = error if first is None else f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(
            f"{path} is damaged ({problem}): restore it from a copy, or delete it and give again the settings that "
            f"{run_dir / 'recipe.yaml'} has and your recipe file lacks."
        ) from None


def settings_at(run_dir: Path, step: int) -> list[str]:
    """Return overrides that undo a run's changes of settings after `step`. Changes made at `step` itself stay."""
    later = [change.settings for change in read_history(run_dir).changes if change.step > step]
    undone = [(path, old) for settings in reversed(later) for path, (old, _) in settings.items()]
    return [f"{path}={as_typed(old)}" for path, old in undone if path.partition(".")[0] != "sweep"]  # runs ignore sweep


def load_to_resume(source: RecipeLike, overrides: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """Load the recipe of a resumed run: `source`, changed by the run's earlier command lines, then by `overrides`.
    Settings of `model` and `train` that all three leave out keep the run's values, even if the defaults have changed.
    `model.vocab_size` and `train.micro_batch_size` are derived again.

    Returns the recipe, and the earlier command lines' settings that it uses again. If `source` is a folder, or the run
    has not started yet, returns `load_recipe(source, overrides)` and an empty list.

    Raises:
        UserError: the recipe is wrong (see `gptworks.recipe.load_recipe`), or the run folder's record is damaged.
    """
    recipe = load_recipe(source, overrides)
    if is_folder(source) or not (fetched_path(recipe.run_dir) / "recipe.yaml").exists():
        return recipe, []
    earlier, given = by_key(read_history(recipe.run_dir).overrides), by_key(overrides)
    kept = [override for key, override in earlier.items() if key not in given]
    run = load_recipe(recipe.run_dir).model_dump(mode="json", include={"model", "train"})
    del run["model"]["vocab_size"], run["train"]["micro_batch_size"]  # derived again
    now = load_recipe(source, [*kept, *overrides], unsaid=run)
    return now.model_copy(update={"run_dir": recipe.run_dir}), kept


def changed(before: Recipe, now: Recipe) -> Changes:
    """Return the settings that differ between two recipes of a run, except its name and folder."""
    old, new = ({s.path: to_jsonable_python(s.value) for s in settings(recipe)} for recipe in (before, now))
    if now.model.vocab_size == 0:  # 0 means unknown: the data is not prepared yet
        new["model.vocab_size"] = old["model.vocab_size"]
    for one, other in ((old, new), (new, old)):  # treat a section that one recipe lacks as one setting
        for path in [path for path, value in one.items() if value is None and path not in other]:
            inside = {key.removeprefix(f"{path}."): other.pop(key) for key in [*other] if key.startswith(f"{path}.")}
            other[path] = inside or None
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path) and path not in ("name", "run_dir")]
    return {path: (old.get(path), new.get(path)) for path in paths}


def check_changes(before: Recipe, now: Recipe, asked: Collection[str] = (), forked_at: int | None = None) -> Changes:
    """Return the changes of settings that a resumed or forked run makes, after checking that they are allowed.

    Args:
        asked: paths of settings or sections that may change although the loss curve depends on them.
        forked_at: the step from which a fork continues; None if a run resumes from its newest checkpoint.

    Raises:
        UserError: a changed setting may never change, or affects the loss curve and is not in `asked`;
            `train.max_steps` or a changed `train.max_minutes` is below what the run has done; `data.anneal` would
            change the mixture weights of samples already read; `train.batch_size` changes although `data.anneal.share`
            is set; or `asked` contains an unknown setting.
    """
    changes, folder = changed(before, now), now.run_dir
    known = {setting.path for recipe in (before, now) for setting in settings(recipe)}
    for name in asked:
        if not _covers([name], known):
            last = did_you_mean(name.rpartition(".")[2], {path.rpartition(".")[2] for path in known})
            raise UserError(f"--change {name}: there is no such setting{did_you_mean(name, known, last)}")
    for path, (old, new) in changes.items():
        recipe = now if path in {setting.path for setting in settings(now)} else before
        why = now.objective.fixed_settings.get(path)
        if why or _role(recipe, path) == "refused":
            why = why or role_of(recipe, path).value
            raise UserError(
                f"{folder} was started with {path}={_text(old)}, and it is now {_text(new)}: {why}, so a run cannot "
                f"change it. Resume with {path}={_text(old)}, or start a new run with another run_dir=."
            )
    done = next((checkpoint.step for checkpoint in checkpoints(folder)), 0) if forked_at is None else forked_at
    _check_length(now, changes, done, is_fork=forked_at is not None)
    _check_anneal(before, now, done)
    if unasked := [path for path in inexact(before, now, changes, done) if not _covers(asked, [path])]:
        lines = "\n".join(f"  {change_words({path: changes[path]})}: {_why(before, path)}" for path in unasked)
        asking = " ".join(f"--change {path}" for path in unasked)
        keeping = " ".join(f"{path}={_text(changes[path][0])}" for path in unasked)
        raise UserError(
            f"{folder} has done {done:,} steps with other settings than these:\n{lines}\n"
            f"To change this from here on, add {asking}; changes.json and the model card will say so. "
            f"To continue as before, resume with {keeping}."
        )
    return changes


def _check_length(now: Recipe, changes: Changes, done: int, *, is_fork: bool) -> None:
    """Raise UserError if `max_steps`, or a changed `max_minutes`, limits the run to less than it has done."""
    train, too_short = now.train, ""
    has_done = "the fork begins after" if is_fork else f"{now.run_dir} has done"
    if train.max_steps is not None and train.max_steps < done:
        too_short = f"train.max_steps={train.max_steps} and {has_done} {done:,} steps"
    elif train.max_minutes is not None and "train.max_minutes" in changes:
        reached = _progress_at(now.run_dir, done)
        seconds = 0.0 if reached is None else reached.seconds
        if seconds > 60 * train.max_minutes:
            too_short = f"train.max_minutes={train.max_minutes:g} and {has_done} {seconds / 60:.1f} minutes"
    if too_short:
        raise UserError(f"{too_short}: give more to continue, or use its checkpoints as they are.")


def _progress_at(run_dir: Path, step: int) -> Progress | None:
    """Return the progress at the newest checkpoint up to `step` whose progress can be read; None if there is none."""
    for checkpoint in checkpoints(run_dir):
        if checkpoint.step <= step:
            with contextlib.suppress(OSError, UserError):  # a resumed run passes over damaged checkpoints too
                return Progress.of(checkpoint)
    return None


def _check_anneal(before: Recipe, now: Recipe, done: int) -> None:
    """Raise UserError if a change of `data.anneal` would change the weights with which samples were already drawn, or
    if `batch_size` changes while `data.anneal.share` is set."""
    old, new = (None if r.data.anneal is None else (r.anneal_from, r.data.anneal.weights) for r in (before, now))
    shared = [r.data.anneal for r in (before, now) if r.data.anneal is not None and r.data.anneal.share is not None]
    if shared and before.train.batch_size != now.train.batch_size:
        raise UserError(
            f"train.batch_size={now.train.batch_size} and {now.run_dir} has {before.train.batch_size}, by which "
            f"data.anneal.share={shared[0].share:g} is counted. Go on with data.anneal.share=null "
            f"data.anneal.from_sample={before.anneal_from or now.anneal_from} to change it."
        )
    if old == new:
        return
    reached = _progress_at(now.run_dir, done)
    position = done * before.train.batch_size if reached is None else reached.position
    first = min(place for place, _ in filter(None, (old, new)) if place is not None)
    if position > first:
        was = "no data.anneal" if old is None else f"data.anneal from sample {old[0]:,} on"
        raise UserError(
            f"{now.run_dir} was started with {was} and has read {position:,} samples, and data.anneal now "
            f"changes the weights from sample {first:,} on. They can change only from sample {position:,} on; to keep "
            f"them in a longer run, set data.anneal.share=null data.anneal.from_sample="
            f"{old[0] if old else position}."
        )


def inexact(before: Recipe, now: Recipe, changes: Iterable[str], done: int) -> list[str]:
    """Return the settings in `changes` that would have changed the first `done` steps."""
    return [
        path
        for path in changes
        if done
        and _role(now, path) == "recorded"
        and not (path in _LENGTH and _same_rates(before, now, done))
        and not path.startswith("data.anneal")  # `_check_anneal` refuses changes that affect samples already read
    ]


_LENGTH = {f"train.{name}" for name in ENDS}


def _same_rates(before: Recipe, now: Recipe, done: int) -> bool:
    """Whether the new run length would leave the learning rates and the weights of future tokens in the first `done`
    steps unchanged; False if unknown."""
    trains, step = (before.train, now.train), done - 1
    if any(train.future_weights_fall for train in trains):
        return False
    if all(train.schedule == "constant" or done <= train.warmup_steps for train in trains):
        return True
    ends = [train.max_steps for train in trains if train.epochs is None and train.max_minutes is None]
    factors = {rate_factor(train, step, step / end) for train, end in zip(trains, ends, strict=False) if end}
    return before.train.schedule == now.train.schedule and len(ends) == 2 and len(factors) == 1


def _why(recipe: Recipe, path: str) -> str:
    if path in _LENGTH:
        if recipe.train.future_weights_fall:
            return "with train.future_weights_fall, the weights of tokens beyond the next depend on the run's length"
        return f"with train.schedule={recipe.train.schedule}, the learning rate depends on the run's length"
    return Role.STEERING.value


def _covers(asked: Iterable[str], paths: Collection[str]) -> bool:
    """Whether `asked` names any of the paths, a section around any of them, or a setting inside any of them."""
    pairs = ((f"{one}.", f"{path}.") for one in asked for path in paths)
    return any(one.startswith(path) or path.startswith(one) for one, path in pairs)


def record(run_dir: Path, step: int, change: Change | None, overrides: Sequence[str], before: Recipe | None) -> History:
    """Add the change made at `step`, and `overrides`, to the run folder's record; return the record. Call this before
    recipe.yaml is written.

    If a crash kept the last recorded change out of recipe.yaml (`before`), the change is removed. Changes at later
    steps are moved to `step`, because the steps after `step` will run again.
    """
    history = read_history(run_dir)
    values = {} if before is None else {s.path: to_jsonable_python(s.value) for s in settings(before)}
    entries = [
        replace(earlier, step=min(earlier.step, step))
        for n, earlier in enumerate(history.changes)
        if n < len(history.changes) - 1 or all(values.get(k) == new for k, (_, new) in earlier.settings.items())
    ]
    entries += [] if change is None else [change]
    given = by_key([*history.overrides, *overrides])
    given.pop("run_dir", None)
    now = replace(history, overrides=list(given.values()), changes=entries)
    if now != history:
        write_history(run_dir, now)
    return now


def write_history(run_dir: Path, history: History) -> None:
    """Replace the run folder's record of changes; empty parts of `history` are left out of the file."""
    write_whole(run_dir / CHANGES, sealed_json({key: value for key, value in asdict(history).items() if value}))


def change_words(settings: Mapping[str, Sequence[Any]]) -> str:
    """Return changed settings as text: `path old → new, …`."""
    return ", ".join(f"{path} {_text(old)} → {_text(new)}" for path, (old, new) in settings.items())


def _role(recipe: Recipe, path: str) -> str:
    try:
        return role_of(recipe, path).on_resume
    except KeyError:  # the recipe no longer has the setting's section
        return "recorded"


def _text(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if text.isprintable() else repr(text)
