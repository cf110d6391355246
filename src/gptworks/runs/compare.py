"""`gptworks compare`: runs side by side, and differences told from noise."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from gptworks.errors import UserError
from gptworks.plan.tables import Table
from gptworks.runs.bands import Band, Verdict, judge
from gptworks.runs.history import History
from gptworks.runs.settings import decisive, differences, fingerprint
from gptworks.runs.statistics import Difference, known_spread, welch
from gptworks.train.display import clock

MEASURES = {"loss": "nats per token", "bits_per_byte": "bits per byte"}


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, each with another seed."""

    runs: tuple[History, ...]

    @property
    def names(self) -> str:
        return ", ".join(run.name for run in self.runs)

    def finals(self, measure: str) -> list[float]:
        """Of each run, the last evaluation."""
        return [float(run.last[measure]) for run in self.runs if run.last is not None]


@dataclass(frozen=True)
class Finding:
    """What the last evaluations of two groups say."""

    first: str
    second: str
    measure: str
    how: str
    """The test, and where the spread is from; or why there is none."""
    difference: Difference | None
    value: float

    def __str__(self) -> str:
        unit, found = MEASURES[self.measure], self.difference
        text = f"{self.second} − {self.first}: {_signed(self.value)} {unit}"
        if found is None:
            return f"{text}; {self.how}"
        verdict = "a difference" if found.p < 0.05 else "within noise"
        interval = f"95% from {_signed(found.low)} to {_signed(found.high)}"
        return f"{text}, {interval}, p = {found.p:.2g}: {verdict} ({self.how})"

    def to_json(self) -> dict[str, Any]:
        found = None if self.difference is None else asdict(self.difference)
        return {**vars(self), "difference": found}


@dataclass(frozen=True)
class Comparison:
    """Several runs, or one and its band. Print it with rich, or take it as JSON or as a page."""

    runs: tuple[History, ...]
    bands: tuple[Band | None, ...]
    """For each run, the band it is held against."""

    @cached_property
    def groups(self) -> list[Group]:
        """By the settings that decide a curve. Counted are those that got furthest, and one of each seed."""
        found: dict[str, list[History]] = {}
        for run in self.runs:
            if run.last is not None:
                found.setdefault(fingerprint(run.recipe), []).append(run)
        groups = []
        for runs in found.values():
            furthest = max(run.validation[-1]["step"] for run in runs)
            by_seed: dict[int, History] = {}
            for run in runs:
                if run.validation[-1]["step"] == furthest:
                    by_seed.setdefault(run.recipe.seed, run)
            groups.append(Group(tuple(by_seed.values())))
        return groups

    @cached_property
    def uncounted(self) -> list[str]:
        """Runs that no test counts."""
        counted = {run.folder for group in self.groups for run in group.runs}
        return [run.name for run in self.runs if run.folder not in counted]

    @cached_property
    def differing(self) -> dict[str, list[Any]]:
        """The settings in which the recipes differ, with their value in each run."""
        return differences([run.recipe for run in self.runs])

    @cached_property
    def verdicts(self) -> list[Verdict | None]:
        """Each run against its band."""
        pairs = zip(self.runs, self.bands, strict=True)
        return [None if band is None else judge(run, band) for run, band in pairs]

    @cached_property
    def measure(self) -> str | None:
        """What can be compared: loss where all predict the same tokens, else bits per byte, where all have them."""
        evaluated = [run for run in self.runs if run.last is not None]
        texts = {run.data_fingerprint for run in evaluated} - {None}
        same = ("tokenizer", "data.sources", "data.validation", "train.evaluate_sequences")
        if len(texts) <= 1 and not any(key.startswith(same) for key in self.differing if not key.endswith(".path")):
            return "loss"
        sources = ("data.sources", "data.validation")
        if any(key.startswith(sources) for key in self.differing):
            return None
        return "bits_per_byte" if all(run.last and run.last.get("bits_per_byte") for run in evaluated) else None

    @cached_property
    def findings(self) -> list[Finding]:
        """Every further group against the first."""
        if self.measure is None:
            return []
        groups = [group for group in self.groups if all(map(math.isfinite, group.finals(self.measure)))]
        return [self._finding(groups[0], other, self.measure) for other in groups[1:]]

    def _finding(self, first: Group, second: Group, measure: str) -> Finding:
        a, b = first.finals(measure), second.finals(measure)
        value = fmean(b) - fmean(a)
        if len(a) > 1 and len(b) > 1:
            how = f"Welch's t-test, {len(a)} and {len(b)} seeds"
            return Finding(first.names, second.names, measure, how, welch(a, b), value)
        for group, finals in ((first, a), (second, b)):
            if len(finals) > 1:
                found = known_spread(a, b, stdev(finals), len(finals) - 1)
                how = f"with the spread of {group.names} for both"
                return Finding(first.names, second.names, measure, how, found, value)
        for group in (first, second):
            band = self.bands[self.runs.index(group.runs[0])]
            if band is not None and measure == "loss":
                last = band.points[-1]
                found = known_spread(a, b, last.standard_deviation, last.n - 1)
                how = f"with the spread of the band of {band.name}, {last.n} seeds"
                return Finding(first.names, second.names, measure, how, found, value)
        how = "one seed each and no band: repeat with other seeds to know what noise makes"
        return Finding(first.names, second.names, measure, how, None, value)

    @property
    def notes(self) -> list[str]:
        """What the tables do not say."""
        lines = [f"{run.name}: {verdict}" for run, verdict in zip(self.runs, self.verdicts, strict=True) if verdict]
        lines += [str(finding) for finding in self.findings]
        if len(self.groups) > 1 and self.measure is None:
            lines.append("losses are not compared: the runs are evaluated on other text or other tokens.")
        if self.uncounted:
            why = "another run of the same recipe got further, or has the same seed and is no other observation"
            lines.append(f"not counted: {', '.join(self.uncounted)} ({why})")
        if len(self.runs) == 1 and self.bands[0] is None:
            lines.append(_why_no_band(self.runs[0]))
        elif len(self.runs) == 1 and self.verdicts[0] is None:
            lines.append(f"{self.runs[0].name} has no evaluation yet at a step of the band.")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Stable keys; null where a run has no such figure yet."""
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
                    "best_validation_loss": figure_of(run.best, "loss"),
                    "last_validation_loss": figure_of(run.last, "loss"),
                    "best_bits_per_byte": figure_of(run.best, "bits_per_byte"),
                    "verdict": verdict and verdict.to_json(),
                }
                for run, verdict in zip(self.runs, self.verdicts, strict=True)
            ],
            "differing_settings": {
                key: dict(zip((run.name for run in self.runs), values, strict=True))
                for key, values in self.differing.items()
            },
            "findings": [finding.to_json() for finding in self.findings],
            "notes": self.notes,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Table(HEADER, "lrrrrrrr", [_row(run) for run in self.runs]).rich()
        if self.differing:
            header = ("settings that differ", *(run.name for run in self.runs))
            room = max(10, 60 // len(self.runs))
            rows = [(key, *(text_of(value, room) for value in values)) for key, values in self.differing.items()]
            yield Table(header, "l" + "r" * len(self.runs), rows).rich()
        for note in self.notes:
            yield Text(note)


def compare(runs: Sequence[History], bands: Sequence[Band | None]) -> Comparison:
    """The runs side by side, each held against its band.

    Raises:
        UserError: a folder twice, or two folders of one name.
    """
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            raise UserError(f"{run.folder}: `{run.name}` is there twice. Runs are told apart by their folders' names.")
    return Comparison(tuple(runs), tuple(bands))


HEADER = ("run", "parameters", "tokens", "time", "tokens/s", "best loss", "last loss", "bits per byte")


def losses(run: History) -> tuple[float | None, float | None, float | None]:
    """Best and last validation loss, and the best evaluation's bits per byte."""
    return figure_of(run.best, "loss"), figure_of(run.last, "loss"), figure_of(run.best, "bits_per_byte")


def _row(run: History) -> tuple[str, ...]:
    return (
        run.name, f"{run.parameters:,}", f"{run.tokens:,}", clock(run.seconds), f"{run.tokens_per_second:,.0f}",
        *map(_figure, losses(run)),
    )  # fmt: skip


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


def figure_of(record: dict[str, Any] | None, key: str) -> float | None:
    return None if record is None else record.get(key)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def text_of(value: Any, room: int = 40) -> str:
    """A setting's value; of a long one, its end."""
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= room else f"…{text[1 - room :]}"


def _why_no_band(run: History) -> str:
    """Which shipped band has the recipe's name, and where its settings are others."""
    from gptworks.runs.bands import shipped_bands

    for band in shipped_bands():
        if band.name == run.recipe.name:
            ours = decisive(run.recipe)
            other = [key for key in {**ours, **band.settings} if ours.get(key) != band.settings.get(key)]
            return f"no band: the one of {band.name} was made with other {', '.join(other)}."
    return (
        "no band has this recipe's settings: `gptworks compare --make-band FILE RUN RUN RUN` makes one of three seeds."
    )
