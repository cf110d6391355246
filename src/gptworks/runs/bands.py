"""Bands: the range of a recipe's validation loss over several seeds, and a check whether another run stays inside it.

The package includes bands of recipes that train in minutes; `find_band` finds the band of a recipe by its settings.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import Field, ValidationError

from gptworks.config import PositiveInt, Recipe, Section
from gptworks.errors import UserError
from gptworks.files import read_given, write_whole
from gptworks.runs.comparable import decisive, differences, settings_fingerprint
from gptworks.runs.history import History
from gptworks.runs.statistics import binomial_quantile, t_quantile

FEWEST_SEEDS = 3
SHARE = 0.95
"""Probability that the loss of another run of the recipe lies inside the band's interval at a step."""


class BandPoint(Section):
    """Statistics of the validation losses of all seeds at one step, in the unit of the recipe's loss."""

    step: int
    tokens: int
    mean: float
    standard_deviation: float = Field(ge=0)
    min: float
    max: float
    n: PositiveInt


class Band(Section):
    """The range of a recipe's validation loss over several seeds, at each evaluated step."""

    name: str
    fingerprint: str
    """A sha256 of `settings`."""
    settings: dict[str, Any]
    """Settings that decide the loss curve and differ from their defaults."""
    data_fingerprint: str | None
    """A sha256 of the token files, on which the curve depends; None if it is unknown or differs between the runs."""
    seeds: tuple[int, ...]
    points: tuple[BandPoint, ...] = Field(min_length=1)

    def margin(self, point: BandPoint) -> float:
        """Return the half-width of the 95% prediction interval for another run's loss, assuming normal losses."""
        factor = t_quantile((1 + SHARE) / 2, point.n - 1) * math.sqrt(1 + 1 / point.n)
        return factor * point.standard_deviation


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a run with a band.

    A run is inside its band if at most `n_allowed` of its evaluations lie outside the band's interval at their step.
    `n_allowed` is the 95% quantile of this number for independent evaluations. The 95% is nominal, since the
    evaluations of a run depend on one another.
    """

    band: Band
    n_points: int
    n_outside: int
    n_allowed: int
    last: BandPoint
    loss: float
    """The run's loss at `last`, the last step that both the run and the band have."""
    other_data: bool
    """Whether the run and the band's runs are known to have read different token files, which may change the curve."""

    @property
    def inside(self) -> bool:
        return self.n_outside <= self.n_allowed

    def __str__(self) -> str:
        margin = self.band.margin(self.last)
        text = (
            f"{'inside' if self.inside else 'outside'} the band of {self.band.name} ({len(self.band.seeds)} seeds): "
            f"{self.n_outside} of {self.n_points} evaluations lie outside their 95% interval, {self.n_allowed} may; at "
            f"step {self.last.step:,} loss {self.loss:.4f}, band {self.last.mean:.4f} ± {margin:.4f}"
        )
        return text + ("; the text is not the one the band was made with" if self.other_data else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "band": self.band.name,
            "seeds": list(self.band.seeds),
            "inside": self.inside,
            "points": self.n_points,
            "outside": self.n_outside,
            "allowed": self.n_allowed,
            "step": self.last.step,
            "loss": self.loss,
            "mean": self.last.mean,
            "margin": self.band.margin(self.last),
            "other_data": self.other_data,
        }


def make_band(runs: Sequence[History]) -> Band:
    """Make the band of three or more runs of one recipe, which differ only in their seed. Raise a UserError if there
    are fewer runs, their settings differ, a seed occurs twice, the runs were not evaluated at the same steps, a loss is
    not finite, or the recipe sets `max_minutes`."""
    first = runs[0]
    settings = decisive(first.recipe)
    if len(runs) < FEWEST_SEEDS:
        raise UserError(
            f"{len(runs)} runs are too few for a band: give at least {FEWEST_SEEDS}, each with its own seed."
        )
    if first.recipe.train.max_minutes is not None:
        raise UserError(
            f"{first.folder} ends by the clock (max_minutes): its curve depends on the machine. Set max_steps."
        )
    seeds = tuple(run.recipe.seed for run in runs)
    steps = [record["step"] for record in first.validation]
    for run in runs:
        if (theirs := decisive(run.recipe)) != settings:
            key = next(key for key in {**settings, **theirs} if settings.get(key) != theirs.get(key))
            wanted, found = differences([first.recipe, run.recipe])[key]
            raise UserError(
                f"{run.folder} is another recipe than {first.folder}: {key} is {found} and not "
                f"{wanted}. The runs of a band differ only in their seed."
            )
        if seeds.count(run.recipe.seed) > 1:
            raise UserError(f"{run.folder}: seed {run.recipe.seed} is given twice, and equal seeds give equal curves.")
        if [record["step"] for record in run.validation] != steps or not steps:
            raise UserError(
                f"{run.folder} and {first.folder} were not evaluated at the same steps: train both to the end."
            )
        if not all(math.isfinite(record["loss"]) for record in run.validation):
            raise UserError(f"{run.folder} has an evaluation that is not finite: a band cannot hold it.")
    points = []
    for records in zip(*(run.validation for run in runs), strict=True):
        losses = [float(record["loss"]) for record in records]
        points.append(
            BandPoint(
                step=records[0]["step"], tokens=records[0]["tokens"], mean=fmean(losses),
                standard_deviation=stdev(losses), min=min(losses), max=max(losses), n=len(losses),
            )
        )  # fmt: skip
    data = {run.data_fingerprint for run in runs}
    return Band(
        name=first.recipe.name,
        fingerprint=settings_fingerprint(settings),
        settings=settings,
        data_fingerprint=data.pop() if len(data) == 1 else None,
        seeds=seeds,
        points=tuple(points),
    )


def write_band(band: Band, path: Path) -> None:
    if not path.parent.is_dir():
        raise UserError(f"--make-band {path}: there is no folder {path.parent}; make it first.")
    write_whole(path, band.model_dump_json(indent=2) + "\n")


_MOST_BYTES = 1 << 26


def read_band(path: Path) -> Band:
    """Read a band from its file; raise a UserError if the file does not exist or is not a band."""
    try:
        return Band.model_validate_json(read_given(path, _MOST_BYTES))
    except FileNotFoundError:
        making = f"gptworks compare --make-band {shlex.quote(str(path))} RUN RUN RUN"
        raise UserError(f"{path}: no such band. `{making}` makes one.") from None
    except ValidationError as error:
        raise UserError(f"{path} is not a band: {str(error).splitlines()[0]}") from None


def shipped_bands() -> list[Band]:
    paths = sorted((Path(__file__).parent / "bands").glob("*.json"))
    return [Band.model_validate_json(path.read_text(encoding="utf-8")) for path in paths]


def find_band(recipe: Recipe) -> Band | None:
    """Return the shipped band with the recipe's settings; None if no shipped band has them."""
    settings = settings_fingerprint(decisive(recipe))
    return next((band for band in shipped_bands() if band.fingerprint == settings), None)


def judge(run: History, band: Band) -> Verdict | None:
    """Compare a run with a band at the steps that both have; return None if no step is common."""
    losses = {record["step"]: float(record["loss"]) for record in run.validation}
    common = [point for point in band.points if point.step in losses]
    if not common:
        return None
    outside = [p for p in common if not abs(losses[p.step] - p.mean) <= band.margin(p)]  # NaN is outside too
    return Verdict(
        band=band,
        n_points=len(common),
        n_outside=len(outside),
        n_allowed=binomial_quantile(len(common), 1 - SHARE, SHARE),
        last=common[-1],
        loss=losses[common[-1].step],
        other_data=None not in (run.data_fingerprint, band.data_fingerprint)
        and run.data_fingerprint != band.data_fingerprint,
    )
