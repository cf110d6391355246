"""`gptworks try`: does a change help this model? Pairs of runs, with and without it, from the same seed and on the same
samples, until the answer is clear or the time is over.

The folder holds `try.json` (what is tried and how), `before.yaml` and `after.yaml` (the recipe without the change and
with it), `pairs/00-before` and `pairs/00-after` (run folders, each with its recipe and its log beside it), and
`try.html`. Where a step takes another
time with the change, each pair has a third run, `00-in-time`: as many steps of the changed model as take the time of
the run before. So a try that was killed goes on where it was.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import filelock

from gptworks.config import Recipe
from gptworks.data.prepare import prepare
from gptworks.device import choose_device, choose_precision
from gptworks.errors import RunError, UserError
from gptworks.files import write_whole
from gptworks.recipe import load_recipe, save_recipe, with_vocab_size
from gptworks.runs.history import History, read_history
from gptworks.runs.sequential import FEWEST_PAIRS, MOST_PAIRS, Verdict, verdict
from gptworks.runs.settings import differences
from gptworks.runs.trials import check_comparable, evaluations, last_line, train_trial
from gptworks.train.rehearsal.measure import measure_speed
from gptworks.train.rehearsal.trace import Rehearsal
from gptworks.train.signals import stop_signals

Report = Callable[[str], None]

TRY_FILE = "try.json"
_FORMAT = 1

EVALUATIONS = 5
"""Of each run, for its curve."""

USUAL_PAIRS = 5
"""As many fit in the time: where runs of the recipe's length are too long for that, they are shorter."""

LEAST_STEPS = 20
RUN_SECONDS = 10.0
"""What a run takes beside its steps: its start, evaluations and files. An estimate, for the length of the runs."""

MEASUREMENTS = 2
"""Of each model's step, in turns; the shorter time counts."""

SAME_SPEED = 0.05
"""Steps whose times differ by less count as equally fast: at equal tokens is then at equal time too."""

_SEED_STRIDE = 10_007


@dataclass(frozen=True)
class Design:
    """What is tried, and how: fixed before the first pair."""

    format_version: int
    changes: tuple[str, ...]
    minutes: float
    worth: float
    """The smallest difference of the losses that matters."""
    most_pairs: int
    steps: int
    """Of each run."""
    steps_in_time: int | None
    """Of the changed model in the time of a run without the change; None: a step takes the same time."""

    @property
    def arms(self) -> tuple[str, ...]:
        return ("before", "after") if self.steps_in_time is None else ("before", "after", "in-time")


@dataclass(frozen=True)
class Pair:
    """The runs of one seed: their losses after their last step, and figures of the machine."""

    number: int
    seed: int
    loss: dict[str, float]
    """By arm."""
    seconds: dict[str, float]
    """Of training, by arm."""
    to_same_loss: float | None
    """Share of the time of the run without the change after which the changed one had its final loss; None: never."""


@dataclass(frozen=True)
class Try:
    """A try as far as it has come."""

    folder: Path
    recipe: Recipe
    """Without the change."""
    changed: Recipe
    design: Design
    pairs: tuple[Pair, ...]

    @property
    def loss_unit(self) -> str:
        return self.recipe.objective.loss_unit

    def differences(self, arm: str) -> list[float]:
        """Of each pair: the loss of the arm, less that without the change."""
        return [pair.loss[arm] - pair.loss["before"] for pair in self.pairs]

    def verdict(self, arm: str) -> Verdict:
        """Whether the change helps, at equal tokens (`after`) or in equal time (`in-time`)."""
        return verdict(self.differences(arm), self.design.most_pairs, self.design.worth)

    @property
    def decided(self) -> bool:
        return all(self.verdict(arm).answer != "open" for arm in self.design.arms[1:])

    @property
    def step_time(self) -> float | None:
        """Time of a step with the change, as a multiple of that without."""
        ratios = [pair.seconds["after"] / pair.seconds["before"] for pair in self.pairs if pair.seconds["before"]]
        return median(ratios) if ratios else None

    @property
    def to_same_loss(self) -> float | None:
        """Share of the time after which the changed model had the other's final loss; None: not in each pair."""
        shares = [pair.to_same_loss for pair in self.pairs]
        reached = [share for share in shares if share is not None]
        return fmean(reached) if reached and len(reached) == len(shares) else None

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        return {
            "folder": str(self.folder),
            "design": asdict(self.design),
            "pairs": [asdict(pair) for pair in self.pairs],
            "verdicts": {arm: asdict(self.verdict(arm)) for arm in self.design.arms[1:]},
            "step_time": self.step_time,
            "time_to_same_loss": self.to_same_loss,
        }


# ------------------------------------------------------------------------------------------------------------ begin


def plan_try(
    path: str | Path, changes: Sequence[str], folder: Path, minutes: float, worth: float, steps: int | None = None,
    resume: bool = False, report: Report = lambda _: None,
) -> Try:  # fmt: skip
    """What will be tried, its length measured; or the try that is in the folder.

    Args:
        path: a recipe.
        changes: `key.path=value`, which make one change together.
        steps: of each run; None: the recipe's, or fewer where too few pairs fit in the time.

    Raises:
        UserError: a change that the recipe refuses or that makes losses incomparable, too little time, or a folder that
            must not be written to.
    """
    if not changes:
        raise UserError("nothing is changed: give at least one key.path=value, such as train.optimizer=adamw.")
    recipe = load_recipe(path)
    for change in changes:
        key = change.partition("=")[0]
        if key != "seed":  # another seed is the change that does nothing
            check_comparable(recipe, key, f"change {change}")
    changed = load_recipe(path, changes)
    if not differences([recipe, changed]):
        raise UserError(f"{' '.join(changes)}: the recipe says that already. Give a value that differs.")
    if (folder / TRY_FILE).exists():
        return _found(folder, recipe, changed, tuple(changes), resume)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and holds no try: give another --folder.")
    wanted = steps or recipe.train.max_steps
    if wanted is None:
        raise UserError(f"{path} sets no train.max_steps: give --steps, the length of each run.")
    report("measuring a step without and with the change")
    times = [[_step_seconds(one) for one in (recipe, changed)] for _ in range(MEASUREMENTS)]
    seconds, seconds_changed = map(min, zip(*times, strict=True))  # what else the machine does only adds to a time
    ratio = seconds_changed / seconds
    same = abs(ratio - 1) < SAME_SPEED
    n_arms, per_step = (2, seconds + seconds_changed) if same else (3, 2 * seconds + seconds_changed)
    budget = 60 * minutes
    if steps is None:
        fitting = int((budget / USUAL_PAIRS - n_arms * RUN_SECONDS) / per_step)
        wanted = min(wanted, max(fitting, 0))
    pairs = min(MOST_PAIRS, int(budget / (wanted * per_step + n_arms * RUN_SECONDS)))
    if wanted < LEAST_STEPS or pairs < FEWEST_PAIRS:
        least = FEWEST_PAIRS * ((steps or LEAST_STEPS) * per_step + n_arms * RUN_SECONDS) / 60
        raise UserError(
            f"--minutes {minutes:g} is too short: {FEWEST_PAIRS} pairs of runs of {steps or LEAST_STEPS} steps take "
            f"about {least:.1f} minutes here. Give more minutes{', or fewer --steps' if steps else ''}."
        )
    in_time = None if same else max(1, round(wanted / ratio))
    design = Design(_FORMAT, tuple(changes), minutes, worth, pairs, wanted, in_time)
    for arm in design.arms:  # what cannot be is refused before the first run
        _arm_recipe(path, design, folder, 0, arm)
    return Try(folder, recipe, changed, design, ())


def _found(folder: Path, recipe: Recipe, changed: Recipe, changes: tuple[str, ...], resume: bool) -> Try:
    found = read_try(folder)
    if not resume:
        raise UserError(f"{folder} already holds a try: add --resume to go on with it, or give another --folder.")
    if found.design.changes != changes:
        raise UserError(
            f"{folder} tries {' '.join(found.design.changes)}, not {' '.join(changes)}: give another --folder."
        )
    for now, then in ((recipe, found.recipe), (changed, found.changed)):
        if differing := differences([then, now]):
            key, (was, is_now) = next(iter(differing.items()))
            raise UserError(
                f"{folder} was started with another `{key}`: it was {was} and is now {is_now}. Give another --folder."
            )
    return found


def _step_seconds(recipe: Recipe) -> float:
    """The time of a step, measured."""
    recipe = with_vocab_size(recipe, prepare(recipe).manifest.vocab_size)
    device = choose_device(recipe.train.device)
    precision = choose_precision(recipe.train.precision, device)
    step = Rehearsal(
        recipe.model, recipe.train, device.type, precision.name, recipe.adapter, recipe.freeze, recipe.objective,
        bool(recipe.data.records) and recipe.objective.several_texts,
    )  # fmt: skip
    rate = measure_speed(step).tokens_per_second
    return recipe.train.batch_size * recipe.model.context_length / rate


def _arm_recipe(path: str | Path, design: Design, folder: Path, number: int, arm: str) -> Recipe:
    """The recipe of a run."""
    changes = () if arm == "before" else design.changes
    steps = design.steps_in_time if arm == "in-time" else design.steps
    length = [
        f"train.max_steps={steps}", "train.epochs=null", "train.max_minutes=null", "train.loggers=[]",
        f"train.evaluate_every={max(1, (steps or 0) // EVALUATIONS)}", "train.sample_every=0", "train.keep_every=0",
        f"train.checkpoint_every={steps}", "sweep=null",
    ]  # fmt: skip
    recipe = load_recipe(path, [*changes, *length])
    seed = (recipe.seed + number * _SEED_STRIDE) % 2**32
    name = f"{number:02d}-{arm}"
    return recipe.model_copy(update={"seed": seed, "run_dir": folder / "pairs" / name, "name": name})


# -------------------------------------------------------------------------------------------------------------- run


def run_try(
    begun: Try, path: str | Path, report: Report = lambda _: None, after_pair: Callable[[Try], None] = lambda _: None
) -> Try:
    """Train pairs until the verdicts are clear, the time is over, or a signal asks to stop.

    Args:
        begun: from `plan_try`. path: its recipe.
        after_pair: called with the try after each pair, to write its page for instance.

    Raises:
        UserError: another process is at work in the folder.
        RunError: a run failed.
    """
    folder, design = begun.folder, begun.design
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = filelock.FileLock(folder / ".lock", timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise UserError(f"{folder} is in use by another try: wait for it, or give another --folder.") from None
    with lock, stop_signals() as stop_asked:
        if not (folder / TRY_FILE).exists():
            save_recipe(begun.recipe, folder / "before.yaml")
            save_recipe(begun.changed, folder / "after.yaml")
            _write(begun)
        found, started = read_try(folder), time.monotonic()
        before = sum(sum(pair.seconds.values()) for pair in found.pairs)
        while len(found.pairs) < design.most_pairs and not found.decided:
            n, taken = len(found.pairs), before + time.monotonic() - started
            if n and taken + taken / n > 60 * design.minutes * 1.1:
                report(f"the {design.minutes:g} minutes are over")
                break
            pair = _train_pair(found, path, n, stop_asked, report)
            if pair is None:
                break
            found = replace(found, pairs=(*found.pairs, pair))
            _write(found)
            after_pair(found)
            report(_line(found, pair))
    return found


def _train_pair(
    found: Try, path: str | Path, number: int, stop_asked: Callable[[], Any], report: Report
) -> Pair | None:
    """Train the runs of a pair, one after the other; every other pair in the opposite order, so that a machine that
    becomes slower or faster favours none. None where a stop was asked for."""
    folder, design = found.folder, found.design
    (folder / "pairs").mkdir(exist_ok=True)
    recipes = {arm: _arm_recipe(path, design, folder, number, arm) for arm in design.arms}
    for arm in design.arms[:: -1 if number % 2 else 1]:
        place = recipes[arm].run_dir
        save_recipe(recipes[arm], place.with_suffix(".yaml"))
        ended = train_trial(place, stop_asked, report)
        if ended is None:
            return None
        last = (evaluations(place) or [{"step": -1}])[-1]
        if ended == "failed" or last["step"] != recipes[arm].train.max_steps:
            raise RunError(
                f"pair {number}: the run {place.name} failed: {last_line(place)}. Its log is "
                f"{place.with_suffix('.log')}."
            )
    runs = {arm: read_history(recipes[arm].run_dir) for arm in design.arms}
    return Pair(
        number,
        recipes["before"].seed,
        {arm: float(evaluations(run.folder)[-1]["loss"]) for arm, run in runs.items()},
        {arm: run.seconds for arm, run in runs.items()},
        _share_to_reach(runs["after"], float(evaluations(runs["before"].folder)[-1]["loss"]), runs["before"].seconds),
    )


def _share_to_reach(run: History, loss: float, seconds: float) -> float | None:
    """Share of the seconds after which a run's validation loss is this low, between its evaluations in proportion."""
    before: tuple[float, float] | None = None
    for record in run.validation:
        at, here = run.seconds_at(record["step"]), float(record["loss"])
        if here <= loss:
            if before is not None and before[1] > here:
                at = before[0] + (at - before[0]) * (before[1] - loss) / (before[1] - here)
            return at / seconds if seconds else None
        before = at, here
    return None


def _line(found: Try, pair: Pair) -> str:
    last = "  ".join(f"{arm} {pair.loss[arm]:.4f}" for arm in found.design.arms)
    so_far = found.verdict("after")
    return f"pair {pair.number}: {last}; mean difference {so_far.value:+.4f}"


# ------------------------------------------------------------------------------------------------------------ files


def _write(found: Try) -> None:
    state = {"design": asdict(found.design), "pairs": [asdict(pair) for pair in found.pairs]}
    write_whole(found.folder / TRY_FILE, json.dumps(state, indent=1) + "\n")


def read_try(folder: Path) -> Try:
    """The try in a folder, also while it goes on.

    Raises:
        UserError: there is none, or its file is damaged.
    """
    file = folder / TRY_FILE
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        design = Design(**state["design"] | {"changes": tuple(state["design"]["changes"])})
        pairs = tuple(Pair(**pair) for pair in state["pairs"])
        known = design.format_version == _FORMAT
    except FileNotFoundError:
        raise UserError(f"{folder} holds no try: there is no {TRY_FILE}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}): give another --folder.") from None
    if not known:
        raise UserError(f"{file} has format {design.format_version} and this gptworks reads {_FORMAT}.")
    return Try(folder, load_recipe(folder / "before.yaml"), load_recipe(folder / "after.yaml"), design, pairs)
