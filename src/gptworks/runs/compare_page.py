"""Runs side by side as a page: figures, what can be concluded, curves."""

from pathlib import Path

from markupsafe import Markup

from gptworks.pages.chart import WIDE, Series, chart, colour
from gptworks.pages.page import page, write_page
from gptworks.pages.parts import Cell, figure, key, number, paragraph, section, table, together
from gptworks.runs.compare import HEADER, Comparison, losses, text_of
from gptworks.runs.report import dot_titles, points, smoothed
from gptworks.train.record.display import clock


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the page at once, over an older one.

    Raises:
        UserError: the path is a folder, or lies in none.
    """
    write_page(to_html(comparison), path, "--out")


def to_html(comparison: Comparison) -> str:
    """The page. Numbers stand in <data> elements with their exact values."""
    runs = comparison.runs
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    names = " · ".join(run.name for run in runs) if len(runs) > 1 else f"the recipe {runs[0].recipe.name}"
    notes = together(paragraph(note, "verdict") for note in comparison.notes)
    parts = [
        section("Runs", _runs(comparison)),
        *([section("What can be concluded", notes)] if notes else []),
        section("Validation loss by tokens", figure(_by_tokens(comparison))),
        section("Validation loss by time", figure(_by_time(comparison))),
        section("Training loss by tokens", figure(_training(comparison))),
        *([section("Settings that differ", _settings(comparison))] if comparison.differing else []),
    ]
    return page(title, (names,), parts, _conventions())


def _runs(comparison: Comparison) -> Markup:
    rows: list[tuple[Cell, ...]] = [
        (
            key(run.name, colour(i)),
            number(run.parameters),
            number(run.tokens),
            number(run.seconds, clock(run.seconds)),
            number(run.tokens_per_second, f"{run.tokens_per_second:,.0f}"),
            *("" if value is None else number(value, f"{value:.4f}") for value in losses(run)),
        )
        for i, run in enumerate(comparison.runs)
    ]
    return table(HEADER, "lrrrrrrr", rows)


def _by_tokens(comparison: Comparison) -> Markup:
    series = []
    drawn: set[str] = set()
    for i, band in enumerate(comparison.bands):
        if band is None or band.fingerprint in drawn:
            continue
        drawn.add(band.fingerprint)
        upper = [(p.tokens, p.mean + band.margin(p)) for p in band.points]
        lower = [(p.tokens, p.mean - band.margin(p)) for p in band.points]
        series.append(Series([*upper, *reversed(lower)], kind=colour(i), style="area"))
    for i, run in enumerate(comparison.runs):
        records = run.validation
        series.append(Series(points(records, "loss"), run.name, colour(i), "both", dot_titles(records)))
    return chart("by-tokens", "Validation loss by tokens", series, x_label="tokens", y_label=_unit(comparison),
                 width=WIDE, height=400)  # fmt: skip


def _by_time(comparison: Comparison) -> Markup:
    series = [
        Series(
            [(run.seconds_at(record["step"]) / 60, record["loss"]) for record in run.validation],
            run.name, colour(i), "both", dot_titles(run.validation),
        )
        for i, run in enumerate(comparison.runs)
    ]  # fmt: skip
    return chart("by-time", "Validation loss by time", series, x_label="minutes of training",
                 y_label=_unit(comparison), width=WIDE, height=320)  # fmt: skip


def _training(comparison: Comparison) -> Markup:
    series = [Series(smoothed(points(run.train, "loss")), run.name, colour(i)) for i, run in enumerate(comparison.runs)]
    return chart("training", "Training loss by tokens", series, x_label="tokens", y_label=_unit(comparison),
                 width=WIDE, height=320)  # fmt: skip


def _settings(comparison: Comparison) -> Markup:
    rows = [(name, *(text_of(value) for value in values)) for name, values in comparison.differing.items()]
    header = ("", *(run.name for run in comparison.runs))
    return table(header, "l" + "r" * len(comparison.runs), rows)


def _unit(comparison: Comparison) -> str:
    units = {run.loss_unit for run in comparison.runs}
    return units.pop() if len(units) == 1 else "loss (the units differ: do not compare the curves)"


def _conventions() -> str:
    return (
        "Runs are compared at the last point of training at which all were evaluated: at equal steps where a step is "
        "the same work, else at equal tokens, or at their ends where all train for the same minutes. Runs with equal "
        "settings and different seeds form a group; each group is compared with the first, and p is not corrected for "
        "the number of groups. A band's shade is the mean of its runs ± t·s·√(1 + 1/n), the interval that holds one "
        "more run of the recipe with 95% probability at each point. Training loss is a moving average of single "
        "batches. Time counts training steps alone. Written by gptworks compare."
    )
