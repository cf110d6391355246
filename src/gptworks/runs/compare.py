"""`gptworks compare`: show runs side by side, on a terminal and as an HTML page with curves, and test whether their
differences are more than noise."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup
from rich.console import Group
from rich.text import Text

from gptworks.errors import UserError
from gptworks.pages import parts as html
from gptworks.pages.chart import WIDE, Chart, Series, colour
from gptworks.pages.drawing import Point
from gptworks.pages.page import page
from gptworks.pages.tables import Table
from gptworks.runs.bands import Band, Verdict, judge, shipped_bands
from gptworks.runs.comparable import (
    Place,
    by_clock,
    common_place,
    comparability,
    decisive,
    differences,
    fingerprint,
    finished_by_clock,
    shared_steps,
    text_of,
)
from gptworks.runs.history import History
from gptworks.runs.statistics import Difference, known_spread, welch
from gptworks.training.record.curves import dot_titles, points, smoothed
from gptworks.training.record.display import clock
from gptworks.units import counted


@dataclass(frozen=True)
class Finding:
    """The difference between two groups of runs at one point of training."""

    first: str
    second: str
    n_runs: tuple[int, int]
    measure: str
    """`loss` or `bits_per_byte`."""
    unit: str
    after: str
    how: str
    """How the spread between runs was estimated; or, if `difference` is None, why there is no interval."""
    difference: Difference | None
    value: float
    caveats: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.second} − {self.first}, {self.after}: {_signed(self.value)} {self.unit}"
        found, more = self.difference, "".join(f" Note: {caveat}." for caveat in self.caveats)
        if found is None:
            return f"{text}. {self.how}{more}"
        verdict = "a difference" if found.p < 0.05 else "within noise"
        interval = f"95% interval {_signed(found.low)} to {_signed(found.high)}"
        return f"{text}, {interval}, p = {found.p:.2g}: {verdict} ({self.how}).{more}"


@dataclass(frozen=True)
class Refusal:
    """Two groups of runs that cannot be compared, with the reasons."""

    first: str
    second: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.second} is not compared with {self.first}: {'; '.join(self.reasons)}."


@dataclass(frozen=True)
class Comparison:
    """A comparison of several runs, or of one run with its band. rich can print it."""

    runs: tuple[History, ...]
    bands: tuple[Band | None, ...]
    """The band of each run; None for a run without a band."""

    @cached_property
    def groups(self) -> list[tuple[History, ...]]:
        """Runs grouped by text and by the settings that decide a curve, with one run per seed.

        If the runs of a group have a time limit and some have finished, the group keeps only the finished runs.
        Otherwise the group keeps only the runs that were evaluated at its latest step.
        """
        found: dict[tuple[str, str | None], list[History]] = {}
        for run in self.runs:
            if run.last is not None:
                found.setdefault((fingerprint(run.recipe), run.data_fingerprint), []).append(run)
        groups = []
        for runs in found.values():
            furthest = max(run.validation[-1]["step"] for run in runs)
            ended = [run for run in runs if finished_by_clock(run)] if by_clock(runs) else []
            by_seed: dict[int, History] = {}
            for run in ended or [run for run in runs if run.validation[-1]["step"] == furthest]:
                by_seed.setdefault(run.recipe.seed, run)
            groups.append(tuple(by_seed.values()))
        return groups

    @cached_property
    def uncounted(self) -> list[str]:
        """Names of the runs that belong to no group."""
        counted = {run.folder for group in self.groups for run in group}
        return [run.name for run in self.runs if run.folder not in counted]

    @cached_property
    def differing(self) -> dict[str, list[Any]]:
        """Settings in which the recipes differ, each with its value in every run."""
        return differences([run.recipe for run in self.runs])

    @cached_property
    def verdicts(self) -> list[Verdict | None]:
        """Result of comparing each run with its band; None if the run has no band or no step in common with it."""
        pairs = zip(self.runs, self.bands, strict=True)
        return [None if band is None else judge(run, band) for run, band in pairs]

    @cached_property
    def results(self) -> list[Finding | Refusal]:
        """Comparisons of each later group with the first group, or the reasons why the two cannot be compared."""
        return [self._result(self.groups[0], other) for other in self.groups[1:]]

    @property
    def findings(self) -> list[Finding]:
        return [result for result in self.results if isinstance(result, Finding)]

    @property
    def refusals(self) -> list[Refusal]:
        return [result for result in self.results if isinstance(result, Refusal)]

    def _result(self, first: Sequence[History], second: Sequence[History]) -> Finding | Refusal:
        found = comparability(first[0], second[0])
        ours, theirs = (", ".join(run.name for run in group) for group in (first, second))
        if found.measure is None:
            return Refusal(ours, theirs, found.reasons)
        place = common_place(first, second, found.measure)
        if isinstance(place, str):
            return Refusal(ours, theirs, (place,))
        difference, how = self._test(first, second, place, found.measure)
        a, b = place.values
        shared = max(shared_steps(one, other) for one in first for other in second)
        forked = f"up to step {shared:,} they are one run, which was forked there" if shared else ""
        return Finding(
            first=ours, second=theirs, n_runs=(len(a), len(b)), measure=found.measure,
            unit=first[0].loss_unit if found.measure == "loss" else "bits per byte", after=place.words, how=how,
            difference=difference, value=fmean(b) - fmean(a),
            caveats=tuple(filter(None, (found.caveat, place.caveat, forked))),
        )  # fmt: skip

    def _test(
        self, first: Sequence[History], second: Sequence[History], place: Place, measure: str
    ) -> tuple[Difference | None, str]:
        """Return the difference with its interval, and the method; or None and the reason why there is no interval."""
        a, b = place.values
        counts = f"{counted(len(a), 'run')} and {counted(len(b), 'run')}"
        if len(a) > 1 and len(b) > 1:
            return welch(a, b), f"Welch's t-test, {counts}"
        for group, values in ((first, a), (second, b)):
            if len(values) > 1:
                how = f"{counts}, taking the spread of {', '.join(run.name for run in group)} for both"
                return known_spread(a, b, stdev(values), len(values) - 1), how
        for group in (first, second):
            band = self.bands[self.runs.index(group[0])]
            point = next((point for point in band.points if point.step == place.step), None) if band else None
            if band is not None and point is not None and measure == "loss":
                spread = f"the spread of the band of {band.name}, which has {counted(point.n, 'run')}"
                how = f"{counts}, taking {spread}, for both"
                return known_spread(a, b, point.standard_deviation, point.n - 1), how
        return None, (
            "One run each gives no interval, so this may be noise. Train each recipe again with other seeds "
            "(seed=1, seed=2, …) and compare all the runs: two of each recipe give an interval."
        )

    @property
    def notes(self) -> list[str]:
        """Sentences to print below the tables."""
        lines = [f"{run.name}: {verdict}" for run, verdict in zip(self.runs, self.verdicts, strict=True) if verdict]
        lines += [str(result) for result in self.results]
        lines += [f"{run.name}: {run.skipped}." for run in self.runs if run.skipped]
        if self.uncounted:
            lines.append(
                f"Not counted: {', '.join(self.uncounted)}. A run is left out where it has no evaluation, where "
                f"another run of the same recipe got further, or where one with the same seed is counted already."
            )
        if len(self.runs) == 1 and self.bands[0] is None:
            lines.append(_why_no_band(self.runs[0]))
        elif len(self.runs) == 1 and self.verdicts[0] is None:
            lines.append(f"{self.runs[0].name} has no evaluation yet at a step that the band has.")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON with stable keys. Losses that a run does not have yet are null."""
        return {
            "runs": [
                {
                    "run": run.name,
                    "folder": str(run.folder),
                    "recipe": run.recipe.name,
                    "seed": run.recipe.seed,
                    "parameters": run.parameters,
                    "steps": run.step,
                    "tokens": run.tokens,
                    "seconds": run.seconds,
                    "tokens_per_second": run.tokens_per_second,
                    **dict(zip(_LOSSES, _losses(run), strict=True)),
                    "verdict": verdict and verdict.to_json(),
                }
                for run, verdict in zip(self.runs, self.verdicts, strict=True)
            ],
            "differing_settings": {
                key: dict(zip((run.name for run in self.runs), values, strict=True))
                for key, values in self.differing.items()
            },
            "findings": [asdict(finding) for finding in self.findings],
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "notes": self.notes,
        }

    @property
    def table(self) -> Table:
        """Table of each run's size, progress and losses."""
        header = ("run", "parameters", "tokens", "time", "tokens/s", "best loss", "last loss", "bits per byte")
        rows = [
            (
                html.key(run.name, colour(i)), html.number(run.parameters), html.number(run.tokens),
                html.number(run.seconds, clock(run.seconds)),
                html.number(run.tokens_per_second, f"{run.tokens_per_second:,.0f}"),
                *map(html.rounded, _losses(run)),
            )
            for i, run in enumerate(self.runs)
        ]  # fmt: skip
        return Table(header, "lrrrrrrr", rows)

    def settings_table(self, room: int) -> Table:
        """Return a table of the settings that differ, with each value in at most `room` characters."""
        header = ("settings that differ", *(run.name for run in self.runs))
        rows = [(key, *(text_of(value, room) for value in found)) for key, found in self.differing.items()]
        return Table(header, "l" + "r" * len(self.runs), rows)

    def __rich__(self) -> Group:
        tables = [self.table, *([self.settings_table(max(10, 60 // len(self.runs)))] if self.differing else [])]
        return Group(*(table.rich() for table in tables), *map(Text, self.notes))


def compare(runs: Sequence[History], bands: Sequence[Band | None]) -> Comparison:
    """Compare runs with one another, and each with its band. Raise a UserError if two runs have the same name."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            raise UserError(f"{run.folder}: `{run.name}` is given twice. Runs are identified by their folders' names.")
    return Comparison(tuple(runs), tuple(bands))


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


_LOSSES = ("best_validation_loss", "last_validation_loss", "best_bits_per_byte")


def _losses(run: History) -> list[float | None]:
    """Return a run's losses in the order of `_LOSSES`; None for each loss that the run does not have."""
    chosen = ((run.best, "loss"), (run.last, "loss"), (run.best, "bits_per_byte"))
    return [None if record is None else record.get(key) for record, key in chosen]


def _why_no_band(run: History) -> str:
    """Return a sentence on why no shipped band fits a run. If a band has the recipe's name, the sentence names the
    settings that differ."""
    for band in shipped_bands():
        if band.name == run.recipe.name:
            ours = decisive(run.recipe)
            other = [key for key in {**ours, **band.settings} if ours.get(key) != band.settings.get(key)]
            return f"No band: the band of {band.name} was made with another {', '.join(other)}."
    return (
        "No band has this recipe's settings. `gptworks compare --make-band FILE RUN RUN RUN` makes one from three runs "
        "with different seeds."
    )


def to_html(comparison: Comparison) -> str:
    """Return the comparison as an HTML page, in which <data> elements hold the exact numbers."""
    runs = comparison.runs
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    names = " · ".join(run.name for run in runs) if len(runs) > 1 else f"the recipe {runs[0].recipe.name}"
    by_time = []
    for run in runs:
        seconds = run.seconds_at([r["step"] for r in run.validation])
        by_time.append([(at / 60, r["loss"]) for at, r in zip(seconds, run.validation, strict=True)])
    training = [Series(smoothed(points(run.train, "loss")), run.name, colour(i)) for i, run in enumerate(runs)]
    by_tokens = [*_bands(comparison), *_evaluated(runs, [points(run.validation, "loss") for run in runs])]
    parts = [
        html.section("Runs", comparison.table.html()),
        html.section("What can be concluded", *(html.paragraph(note, "verdict") for note in comparison.notes)),
        _curves(comparison, "by-tokens", "Validation loss by tokens", by_tokens, height=400),
        _curves(comparison, "by-time", "Validation loss by time", _evaluated(runs, by_time), "minutes of training"),
        _curves(comparison, "training", "Training loss by tokens", training),
        html.section("Settings that differ", comparison.settings_table(room=40).html()),
    ]
    return page(title, (names,), parts, _CONVENTIONS)


def _curves(
    comparison: Comparison, name: str, title: str, series: list[Series], x_label: str = "tokens", height: float = 320
) -> Markup:
    units = {run.loss_unit for run in comparison.runs}
    unit = units.pop() if len(units) == 1 else "loss (the units differ: do not compare the curves)"
    return html.section(title, html.figure(Chart(name, title, series, x_label, unit, width=WIDE, height=height).svg()))


def _evaluated(runs: Sequence[History], curves: Sequence[Sequence[Point]]) -> list[Series]:
    """Return a chart series for each run, with a dot for each evaluation."""
    return [
        Series(curve, run.name, colour(i), "both", dot_titles(run.validation))
        for i, (run, curve) in enumerate(zip(runs, curves, strict=True))
    ]


def _bands(comparison: Comparison) -> Iterator[Series]:
    drawn: set[str] = set()
    for i, band in enumerate(comparison.bands):
        if band is not None and band.fingerprint not in drawn:
            drawn.add(band.fingerprint)
            upper = [(p.tokens, p.mean + band.margin(p)) for p in band.points]
            lower = [(p.tokens, p.mean - band.margin(p)) for p in band.points]
            yield Series([*upper, *reversed(lower)], kind=colour(i), style="area")


_CONVENTIONS = (
    "Runs are compared at the last point of training at which all were evaluated: at equal steps where a step is "
    "the same work, else at equal tokens, or at their ends where all train for the same minutes. Runs with equal "
    "settings and different seeds form a group; each group is compared with the first, and p is not corrected for "
    "the number of groups. A band's shade is the mean of its runs ± t·s·√(1 + 1/n), the interval that holds one "
    "more run of the recipe with 95% probability at each point. Training loss is a moving average of single "
    "batches. Time counts training steps only. Written by gptworks compare."
)
