"""Compare runs' evaluations on the same tasks and texts item by item, and show a run's evaluations on its page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Group

from gptworks.errors import UserError
from gptworks.evaluation.metrics import Interval, figure_of, paired_difference
from gptworks.evaluation.results import Evaluation, number, read_evaluations, table
from gptworks.pages import parts as html
from gptworks.pages.chart import Chart, Series, colour
from gptworks.pages.tables import Table

_OF_TOKENS = ("loss", "perplexity")
"""Metrics of a text that are comparable only between runs with the same tokenizer."""


@dataclass(frozen=True)
class Finding:
    """One metric of one evaluation, compared between two runs."""

    evaluation: str
    metric: str
    n_items: int
    first: str
    second: str
    first_value: float
    second_value: float
    difference: Interval
    """Second value minus first, with the 95% interval of a paired bootstrap."""

    @property
    def certain(self) -> bool:
        """Whether the interval excludes 0."""
        return self.difference.low > 0 or self.difference.high < 0


@dataclass(frozen=True)
class EvaluationComparison:
    """Comparisons of the first run's evaluations with the other runs' evaluations, printable with rich and as JSON."""

    findings: tuple[Finding, ...]
    skipped: tuple[str, ...]
    """Evaluations that were not compared, each with the reason."""

    def __rich__(self) -> Group:
        rows = [
            (
                one.evaluation, one.metric, f"{one.n_items:,}", one.first, number(one.first_value), one.second,
                number(one.second_value), f"{one.difference.value:+.4f}",
                f"{one.difference.low:+.4f} to {one.difference.high:+.4f}",
                "a difference" if one.certain else "within chance",
            )
            for one in self.findings
        ]  # fmt: skip
        header = ("evaluation", "figure", "items", "run", "value", "run", "value", "difference", "95% interval", "")
        return Group(Table(header, "llrlrlrrll", rows).rich(), *(f"not compared: {each}" for each in self.skipped))

    def to_json(self) -> dict[str, Any]:
        return {
            "findings": [{**asdict(one), "certain": one.certain} for one in self.findings],
            "skipped": list(self.skipped),
        }


def compare_evaluations(runs: Sequence[Path]) -> EvaluationComparison:
    """Compare each run's stored evaluations with the first run's, if both runs were evaluated on the same questions.
    Raise a UserError if only one run is given, or if no other run shares an evaluation of the same questions with the
    first."""
    if len(runs) < 2:
        raise UserError("--evaluations compares runs with the first: give two or more.")
    first, *others = [(run.resolve().name, read_evaluations(run)) for run in runs]
    findings, skipped = [], []
    for name, evaluations in others:
        for key in sorted(first[1].keys() & evaluations.keys()):
            one, other = first[1][key], evaluations[key]
            if one.fingerprint != other.fingerprint:
                skipped.append(f"{key} of {first[0]} and {name}: the questions differ")
                continue
            findings += _findings(one, other, first[0], name)
    if not findings:
        hints = "".join(f" ({reason})" for reason in skipped[:1])
        raise UserError(
            f"these runs have no evaluation of the same questions in common{hints}: "
            f"`gptworks evaluate RUN --task FILE` or `--text FILE` on each makes one."
        )
    return EvaluationComparison(tuple(findings), tuple(skipped))


def _findings(one: Evaluation, other: Evaluation, first: str, second: str) -> list[Finding]:
    same_tokens = one.settings.get("tokenizer") == other.settings.get("tokenizer")
    findings = []
    for metric, measured in one.metrics.items():
        theirs = other.metrics.get(metric)
        if theirs is None or not measured.statistics.size or measured.statistics.shape != theirs.statistics.shape:
            continue
        if one.kind == "text" and metric in _OF_TOKENS and not same_tokens:
            continue
        found = paired_difference(measured.statistics, theirs.statistics, figure_of(measured.kind))
        findings.append(Finding(one.name, metric, one.n_items, first, second, measured.value, theirs.value, found))
    return findings


def evaluations_section(run_dir: Path) -> Markup:
    """Return the page section of a run's stored evaluations, with the loss by position; empty without evaluations."""
    evaluations = list(read_evaluations(run_dir).values())
    if not evaluations:
        return Markup("")
    parts = [table(evaluations).html()]
    texts = [one for one in evaluations if one.details.get("positions")]
    if texts:
        curves = [
            Series([(p["last"], p["loss"]) for p in one.details["positions"]], one.name, colour(i), "both")
            for i, one in enumerate(texts)
        ]
        title = "Loss by position in the context"
        parts.append(html.figure(Chart("position", title, curves, "tokens before, at most", "nats per token").svg()))
    return html.section("Tasks and texts", *parts)
