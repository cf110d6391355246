"""Show a sweep as a table and as an HTML page."""

import math
from typing import Any

from markupsafe import Markup

from gptworks.pages import parts as html
from gptworks.pages.chart import Chart, Series
from gptworks.pages.page import page, write_page
from gptworks.pages.tables import Table
from gptworks.runs.history import History, read_history
from gptworks.runs.sweep import Sweep, TrialResult
from gptworks.training.record.curves import points, validation_chart
from gptworks.training.record.display import clock


def trials_table(sweep: Sweep) -> Table:
    """Return a table of the trials, best first."""
    keys, rows = list(sweep.settings.ranges), list[list[html.Cell]]()
    short = [key.rpartition(".")[2] for key in keys]
    names = short if len(set(short)) == len(short) else keys
    for trial in sorted(sweep.trials, key=lambda t: (t.state != "complete", math.inf if t.loss is None else t.loss)):
        run, values = _history(trial), [trial.values.get(key) for key in keys]
        cells = [
            f"{trial.number:03d}",
            html.rounded(trial.loss),
            *(html.number(value, _text(value)) if html.is_figure(value) else _text(value) for value in values),
            "" if run is None else html.number(run.tokens),
            "" if run is None else html.number(run.seconds, clock(run.seconds)),
            "best" if trial == sweep.best else f"{trial.state}: {trial.reason}" if trial.reason else trial.state,
        ]
        rows.append([html.bold(cell) for cell in cells] if trial == sweep.best else [*cells])
    header = ("trial", "validation loss", *names, "tokens", "time", "")
    return Table(header, "l" + "r" * (len(keys) + 3) + "n", rows)


def write_sweep_page(sweep: Sweep) -> None:
    """Write the page `sweep.html` into the sweep's folder, replacing an older page."""
    write_page(to_html(sweep), sweep.recipe.run_dir / "sweep.html", "run_dir")


def to_html(sweep: Sweep) -> str:
    """Return the sweep as an HTML page, in which <data> elements hold the exact numbers."""
    best, recipe, unit = sweep.best, sweep.recipe, sweep.loss_unit
    tiles: list[tuple[str, str | Markup, str]] = [
        ("trials", html.number(len(sweep.trials)), f"of {sweep.settings.n_trials:,}"),
        ("pruned", html.number(sweep.count("pruned")), f"{sweep.count('failed'):,} failed"),
    ]
    if best is not None:
        tiles.insert(0, ("best validation loss", html.rounded(best.loss, unit=unit), f"trial {best.number:03d}"))
    charts = html.figures(_scatter(sweep, i, key) for i, key in enumerate(sweep.settings.ranges))
    parts = [
        html.key_figures(tiles),
        html.section("Validation loss by setting", charts),
        html.section("Validation loss by tokens", html.figure(_curves(sweep))),
        html.section("Trials", trials_table(sweep).html()),
        html.section("The best settings", html.settings(best.values) if best is not None else ""),
    ]
    lines = (f"{len(sweep.settings.ranges)} settings · {len(sweep.trials):,} trials", f"the recipe {recipe.name}")
    return page(f"{recipe.name}: sweep", lines, parts, _conventions(sweep))


def _history(trial: TrialResult) -> History | None:
    """Return the trial's run; None if the trial has not begun."""
    return read_history(trial.folder) if (trial.folder / "recipe.yaml").exists() else None


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _scatter(sweep: Sweep, i: int, key: str) -> Markup:
    """Return a chart of each trial's loss over the setting `key`."""
    values = sweep.settings.ranges[key]
    names = None if values.choices is None else [str(choice) for choice in values.choices]
    x_range = None if values.low is None or values.high is None else (values.low, values.high)

    def series(trials: list[TrialResult], kind: str) -> Series:
        placed = [t for t in trials if t.loss is not None and key in t.values]
        xs = [t.values[key] if values.choices is None else values.choices.index(t.values[key]) for t in placed]
        return Series(
            [(float(x), t.loss or 0.0) for x, t in zip(xs, placed, strict=True)],
            kind=kind,
            style="dots",
            titles=[f"trial {t.number:03d}, {_text(t.values[key])}: {t.loss:.4f}" for t in placed],
        )

    others = [t for t in sweep.trials if t.state == "complete" and t != sweep.best]
    cut = [t for t in sweep.trials if t.state not in ("complete", "failed")]
    drawn = [series(cut, "series-4 idle"), series(others, "series-0")]
    drawn += [series([sweep.best], "series-1")] if sweep.best is not None else []
    return Chart(
        f"setting-{i}", f"Validation loss by {key}", drawn, key, sweep.loss_unit,
        format_x=_text, log_x=values.log, x_range=x_range, x_names=names,
    ).svg()  # fmt: skip


def _curves(sweep: Sweep) -> Markup:
    drawn = []
    for trial in sorted(sweep.trials, key=lambda t: t == sweep.best):  # draw the best on top
        run = _history(trial)
        if run is not None and trial != sweep.best:
            kind = "series-0 faint" if trial.state == "complete" else "series-4 faint"
            drawn.append(Series(points(run.validation, "loss"), kind=kind))
        elif run is not None:
            drawn.append(Series(points(run.validation, "loss"), f"trial {trial.number:03d}", "series-1", "both"))
    return validation_chart(drawn, sweep.loss_unit).svg()


def _conventions(sweep: Sweep) -> str:
    return (
        f"A trial's loss is its lowest validation loss, in {sweep.loss_unit}; of a pruned trial, the lowest "
        "before it was stopped. Each trial has one seed, so small differences may be noise: train the best settings "
        "with several seeds and compare them with gptworks compare. best.yaml is the recipe of the best trial. Written "
        "by gptworks sweep."
    )
