"""Show a comparison of runs as an HTML page with figures, conclusions and curves."""

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from gptworks.pages import parts as html
from gptworks.pages.chart import WIDE, Chart, Series, colour
from gptworks.pages.drawing import Point
from gptworks.pages.page import page
from gptworks.runs.compare import Comparison
from gptworks.runs.history import History
from gptworks.training.record.curves import dot_titles, points, smoothed


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
    return page(title, (names,), parts, _conventions())


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


def _conventions() -> str:
    return (
        "Runs are compared at the last point of training at which all were evaluated: at equal steps where a step is "
        "the same work, else at equal tokens, or at their ends where all train for the same minutes. Runs with equal "
        "settings and different seeds form a group; each group is compared with the first, and p is not corrected for "
        "the number of groups. A band's shade is the mean of its runs ± t·s·√(1 + 1/n), the interval that holds one "
        "more run of the recipe with 95% probability at each point. Training loss is a moving average of single "
        "batches. Time counts training steps only. Written by gptworks compare."
    )
