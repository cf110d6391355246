"""The state of a try, stored in `try.json`: its design, its pairs of runs so far, the verdicts, and the runs to do.

Each pair gives a ratio: the time of the same tokens with the change, divided by the time without it. Other work on the
machine can slow down single steps, whole runs, or only one of the two runs. On a CPU, steps of both models therefore
take turns after each pair of runs, so that other work slows down both models. On other devices, or if the steps of a
run differ by design, the times come from the runs: the median over parts of a run, or the mean of all steps. The spread
between pairs measures the noise of the ratio. The test of pairs uses the ratios' logarithms.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, FiniteFloat
from pydantic_core import to_jsonable_python

from gptworks.config import PositiveInt, Recipe
from gptworks.errors import UserError
from gptworks.files import read_regular, write_whole
from gptworks.recipe import load_recipe
from gptworks.runs.history import History
from gptworks.runs.statistics import FEWEST_PAIRS, MOST_PAIRS, Verdict, verdict

TRY_FILE = "try.json"
_MOST_BYTES = 1 << 26

PLACES = {"after": "at equal tokens", "in-time": "in equal time"}
"""Words for the point at which the run `after` or `in-time` is compared with the run without the change."""

LOSS_ERROR, SPEED_ERROR = 0.04, 0.01
"""False-positive rates of the test of losses, and of the test of step times. The test of step times decides whether
pairs get a third run. If a change has no effect, at least one of the tests is wrong in at most 5% of tries."""

SAME_SPEED = 0.05
"""Times that differ by less than this fraction count as equal. A verdict at equal tokens then also holds in equal
time."""

CHUNKS = 50
"""Maximum number of parts of a run. The run's step time is the median over its parts."""

LEAST_SECONDS = 0.1
"""Minimum duration of a part of a run in seconds, because logs round times to milliseconds."""


def step_seconds(run: History) -> float:
    """Return a run's seconds per step: the median over its parts, except the first, in which the machine warms up."""
    least, times, at, since = run.step / CHUNKS, list[float](), 0, 0.0
    for record in run.train:
        steps, seconds = record["step"] - at, record["seconds"] - since
        if steps >= least and seconds >= LEAST_SECONDS:
            times.append(seconds / steps)
            at, since = record["step"], record["seconds"]
    return median(times[1:] or times or [run.seconds / max(1, run.step)])


@dataclass(frozen=True)
class StepTime:
    """Time of the same tokens with a change, divided by the time without it."""

    ratio: float
    low: float
    high: float
    """`low` to `high` is the ratio's confidence interval, valid after every pair with probability 1 − `error`."""

    def __str__(self) -> str:
        interval = f" ({self.interval})" if self.interval else ""
        return f"the same tokens take {self.ratio:.2f} times as long with the change{interval}"

    @property
    def interval(self) -> str:
        """The interval as text, such as `0.97 to 1.04`; empty if it is unbounded."""
        return f"{self.low:.2f} to {self.high:.2f}" if math.isfinite(self.high) else ""

    @property
    def is_distinct(self) -> bool:
        """Whether the ratio differs from 1 by 5% or more."""
        return abs(math.log(self.ratio)) >= math.log1p(SAME_SPEED)

    @property
    def differs(self) -> bool:
        """Whether the ratio differs from 1 by 5% or more and the interval excludes 1."""
        return self.is_distinct and not self.low <= 1 <= self.high

    @property
    def is_same(self) -> bool:
        """Whether the whole interval is within 5% of 1."""
        return self.low > 1 / (1 + SAME_SPEED) and self.high < 1 + SAME_SPEED


def step_time(ratios: Sequence[float], most_pairs: int, error: float) -> StepTime:
    """Return the ratio after one or more pairs, with its interval, which is unbounded for fewer than `FEWEST_PAIRS`."""
    found = verdict([math.log(ratio) for ratio in ratios], most_pairs, 0, error)
    return StepTime(*(math.exp(value) for value in (found.value, found.low, found.high)))


@dataclass(frozen=True)
class Design:
    """The design of a try, fixed before its first pair."""

    changes: tuple[str, ...]
    minutes: float
    worth: float
    """The smallest difference in loss that matters."""
    most_pairs: Annotated[int, Field(ge=FEWEST_PAIRS, le=MOST_PAIRS)]
    steps: PositiveInt
    """Number of steps of each run without the change."""
    estimated_step_time: float
    """Time of the same tokens with the change, divided by the time without it, from a brief measurement that only
    serves to choose the length of the runs."""
    steps_after: PositiveInt | None = None
    """Number of steps in which a run with the change reads as many tokens; None if it equals `steps`."""
    threads: PositiveInt | None = None
    """CPU threads of each run; None leaves the recipe's setting."""
    format_version: Literal[1] = 1


@dataclass(frozen=True)
class Pair:
    """Results of the runs with one seed, by arm: `before` (without the change), `after` (with the change, at equal
    tokens) and `in-time` (with the change, in equal time)."""

    number: int
    seed: int
    loss: dict[str, FiniteFloat]
    """Last validation loss, by arm."""
    seconds: dict[str, float]
    """Seconds of training, by arm."""
    step_seconds: dict[str, Annotated[float, Field(gt=0, lt=1e9)]]
    """Seconds per step, by arm, measured so that other work on the machine disturbs them as little as possible."""
    share_to_same_loss: float | None
    """Fraction of the steps of `after` at which it reached the final loss of `before`; None if it never did."""


@dataclass(frozen=True)
class Try:
    """A try: pairs of runs with and without a change, and their results so far."""

    folder: Path
    recipe: Recipe
    """The recipe without the change."""
    changed: Recipe
    design: Design
    pairs: tuple[Pair, ...]

    @property
    def loss_unit(self) -> str:
        return self.recipe.objective.loss_unit

    def differences(self, arm: str) -> list[float]:
        """Return the loss of the run `arm` minus the loss without the change, for each pair that has both runs."""
        return [pair.loss[arm] - pair.loss["before"] for pair in self.pairs if arm in pair.loss]

    def verdict(self, arm: str) -> Verdict:
        """Return the verdict whether the change helps, at equal tokens (arm `after`) or in equal time (`in-time`)."""
        return verdict(self.differences(arm), self.design.most_pairs, self.design.worth, LOSS_ERROR)

    @property
    def step_time(self) -> StepTime | None:
        """Time of the same tokens with the change, divided by the time without it; None before the first pair."""
        return self._step_time(len(self.pairs)) if self.pairs else None

    def _step_time(self, n: int) -> StepTime:
        return step_time([self.time_of(pair) for pair in self.pairs[:n]], self.design.most_pairs, SPEED_ERROR)

    def time_of(self, pair: Pair) -> float:
        """Return the time of the same tokens with the change, divided by the time without it, from one pair."""
        return pair.step_seconds["after"] * self.steps_after / (pair.step_seconds["before"] * self.design.steps)

    @cached_property
    def steps_in_time(self) -> int | None:
        """Number of steps that the changed model can train in the time of a run without the change; None until a test
        finds a difference of the times.

        The first such test fixes the number, so it is the same in all pairs and after a restart.
        """
        looks = (self._step_time(n) for n in range(FEWEST_PAIRS, len(self.pairs) + 1))
        ratio = next((look.ratio for look in looks if look.differs), None)
        return None if ratio is None else max(1, round(self.steps_after / ratio))

    @property
    def steps_after(self) -> int:
        """Number of steps in which a run with the change reads as many tokens as a run without it."""
        return self.design.steps_after or self.design.steps

    @property
    def arms(self) -> tuple[str, ...]:
        """The names of the runs of a pair."""
        return ("before", "after") if self.steps_in_time is None else ("before", "after", "in-time")

    @property
    def is_time_open(self) -> bool:
        """Whether the times seem to differ, but more pairs are needed to exclude noise as the reason."""
        return self.steps_in_time is None and self.step_time is not None and self.step_time.is_distinct

    @property
    def open_questions(self) -> tuple[str, ...]:
        """Questions that more pairs may answer: whether the loss of `after` or `in-time` differs, and whether the times
        differ."""
        asked = [
            f"{PLACES[arm]}: whether the loss differs" for arm in self.arms[1:] if self.verdict(arm).answer == "open"
        ]
        if self.is_time_open:
            asked.append(f"{PLACES['in-time']}: whether the same tokens take another time")
        return tuple(asked)

    @property
    def decided(self) -> bool:
        return not self.open_questions

    def due(self, ended: bool) -> tuple[int, tuple[str, ...]] | None:
        """Return the number of the next pair to train and its remaining arms, in the order of training; None if nothing
        remains. If `ended`, only complete the pairs so far."""
        for pair in self.pairs:  # a pair lacks the third run if it is older than the decision for third runs
            if missing := tuple(arm for arm in self.arms if arm not in pair.loss):
                return pair.number, missing
        n = len(self.pairs)
        if n == self.design.most_pairs or ended:
            return None
        return n, self.arms[:: -1 if n % 2 else 1]  # alternate: a machine that slows down favors neither run

    @property
    def to_same_loss(self) -> float | None:
        """Time in which a run with the change reaches the final loss of the run without it, divided by the whole time
        of the run without it. The mean over the pairs; None before the first pair, or if a run with the change never
        reaches this loss."""
        shares = [pair.share_to_same_loss for pair in self.pairs]
        reached = [share for share in shares if share is not None]
        if self.step_time is None or len(reached) < len(shares):
            return None
        return fmean(reached) * self.step_time.ratio

    def to_json(self) -> dict[str, Any]:
        """Return the try as JSON with stable keys. An infinite bound of an interval is None."""
        tree = {
            "folder": str(self.folder),
            "design": self.design,
            "pairs": self.pairs,
            "verdicts": {arm: self.verdict(arm) for arm in self.arms[1:]},
            "step_time": self.step_time,
            "open_questions": self.open_questions,
            "steps_in_time": self.steps_in_time,
            "time_to_same_loss": self.to_same_loss,
        }
        made: dict[str, Any] = to_jsonable_python(tree, inf_nan_mode="null")
        return made


def write_try(found: Try) -> None:
    """Write `try.json` into the try's folder, replacing an older file."""
    state = {"design": asdict(found.design), "pairs": [asdict(pair) for pair in found.pairs]}
    write_whole(found.folder / TRY_FILE, json.dumps(state, indent=1) + "\n")


class _Written(BaseModel):
    """The contents of `try.json`."""

    design: Design
    pairs: tuple[Pair, ...]


def read_try(folder: Path, recipe_of: Callable[[Path], Recipe] = load_recipe) -> Try:
    """Read the try in a folder, even while it runs. Raise a UserError if the folder has no `try.json`, or the file is
    damaged."""
    file = folder / TRY_FILE
    try:
        contents = read_regular(file, _MOST_BYTES, inside=folder)
    except FileNotFoundError:
        raise UserError(f"{folder} holds no try: there is no {TRY_FILE}.") from None
    try:
        written = _Written.model_validate_json(contents)
        if len(written.pairs) > written.design.most_pairs:
            raise ValueError("more pairs than the design allows")
        for number, pair in enumerate(written.pairs):
            arms = pair.loss.keys()
            has_runs = {"before", "after"} <= arms == pair.seconds.keys() == pair.step_seconds.keys()
            if pair.number != number or not has_runs:
                raise ValueError("a pair without one of its runs")
    except ValueError as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}): give another --folder.") from None
    recipe, changed = (recipe_of(folder / name) for name in ("before.yaml", "after.yaml"))
    return Try(folder, recipe, changed, written.design, written.pairs)
