"""`gptworks report`: show one run as an HTML page, from its recipe and its metrics."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from markupsafe import Markup

from gptworks.config import Recipe
from gptworks.describe.page import architecture
from gptworks.describe.sheet import describe, summary, traits
from gptworks.errors import UserError
from gptworks.files import fetched_path
from gptworks.pages import parts as html
from gptworks.pages.chart import Chart, Format, Series, colour, compact
from gptworks.pages.page import page, write_page
from gptworks.runs.compare_evaluations import evaluations_section
from gptworks.runs.history import History, read_history
from gptworks.training.changes import read_history as read_changes
from gptworks.training.record.curves import points, training_chart
from gptworks.training.record.display import clock
from gptworks.training.record.metrics import Record, last_step
from gptworks.training.record.outcome import FILE as OUTCOME
from gptworks.training.record.outcome import read_outcome
from gptworks.training.run_folder import is_in_use
from gptworks.units import significant

Item = TypeVar("Item")

MOST_ROWS = 24
"""Maximum number of rows in a table of evaluations or of skipped steps."""

MOST_LAYERS = 5
"""Maximum number of layers that a chart shows, one line each."""

MOST_PROMPTS, MOST_SAMPLES = 20, 6
"""Maximum number of prompts on the page, and of samples of each prompt."""

REFRESH_SECONDS = 5
"""Seconds between two updates of a watched page."""


def write_report(run: History, path: Path, refresh_seconds: int | None = None) -> None:
    """Write the HTML page of a run (see `to_html`), replacing an older page. Raise a UserError if `path` is a folder,
    or its parent folder does not exist."""
    write_page(to_html(run, refresh_seconds), path, "--html")


def watch_report(folder: Path, path: Path, wait: Callable[[float], object] = time.sleep) -> None:
    """Write the page of a run as `write_report` does, whenever its log has changed, until the run ends or Ctrl-C is
    pressed. Raise a UserError if `folder` is not a run folder."""
    seen = None
    with contextlib.suppress(KeyboardInterrupt):
        while not has_ended(fetched_path(folder)):
            if (now := _written(folder / "metrics.jsonl")) != seen:
                write_report(read_history(folder), path, REFRESH_SECONDS)
                seen = now
            wait(REFRESH_SECONDS)
    write_report(read_history(folder), path)


def has_ended(folder: Path) -> bool:
    """Return whether a run has an outcome as new as its log, and no process trains it. A crash writes no outcome."""
    log, outcome = folder / "metrics.jsonl", read_outcome(folder)
    if is_in_use(folder):
        return False
    if isinstance(outcome, str):  # missing or damaged: compare the times of the files
        return _written(folder / OUTCOME) >= max(1, _written(log))
    return last_step(log) <= outcome.step


def _written(path: Path) -> int:
    """Return the time of a file's last change in nanoseconds; 0 if the file does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def to_html(run: History, refresh_seconds: int | None = None) -> str:
    """Return a run as an HTML page, in which <data> elements hold the exact numbers. A browser reloads the page every
    `refresh_seconds`, if given."""
    sheet, outcome, planned = describe(run.recipe.model, run.recipe.name), read_outcome(run.folder), run.planned_steps
    loss = training_chart(run.train, run.validation, run.name, run.loss_unit, rewarded=run.rewarded)
    parts = [
        key_figures_of(run),
        *_left_out_lines(run),
        html.section("Reward" if run.rewarded else "Loss", loss.figure()),
        html.section("Along the run", html.figures((*_charts(run), *_by_layer(run)))),
        html.section("Where the time went", _where_time_went(run)),
        html.section(
            "Memory",
            html.byte_table((k.removesuffix("_bytes").replace("_", " "), n) for k, n in run.memory_bytes.items()),
        ),
        html.section("Evaluations", *_evaluations(run)),
        evaluations_section(run.folder),
        html.section("Origin and changes", _origin(run)),
        html.section("Steps skipped", *_bad_steps(run)),
        html.section(
            "When it last ended",
            html.paragraph(outcome, "note") if isinstance(outcome, str) else html.settings(dict(outcome.training)),
        ),
        html.section("Samples", *_samples(run)),
        html.section(
            "Architecture",
            html.paragraph(html.unbroken(summary(sheet))),
            html.paragraph(html.unbroken(traits(run.recipe.model))),
            architecture(run.recipe.model),
        ),
        html.section("Settings", *_settings(run.recipe)),
    ]
    step = f"step {run.step:,}" + (f" of {planned:,}" if planned else "")
    progress = f"{step} · {run.tokens:,} tokens · {clock(run.seconds)} of training"
    return page(
        run.name, (html.unbroken(progress), html.unbroken(summary(sheet))), parts, _conventions(run), refresh_seconds
    )


def _settings(recipe: Recipe) -> tuple[Markup, Markup]:
    """Return the settings that differ from their defaults, and a folded section of all settings."""
    hidden = {"name", "run_dir", "sweep"}
    given, whole = (recipe.model_dump(mode="json", exclude=hidden, exclude_defaults=some) for some in (True, False))
    return html.settings(given), html.folded("All settings", html.settings(whole))


def key_figures_of(run: History) -> Markup:
    """Return tiles that show the losses, size, tokens and time of a run."""
    best = run.best
    tiles: list[tuple[str, str | Markup, str]] = []
    if best is not None:
        perplexity = "" if best["perplexity"] is None else f"perplexity {significant(best['perplexity'])}, "
        tiles.append(
            ("best validation loss", html.rounded(best["loss"], unit=run.loss_unit), f"{perplexity}{_at(best)}")
        )
        if best["bits_per_byte"] is not None:
            tiles.append(("bits per byte", html.rounded(best["bits_per_byte"], unit="bits"), _at(best)))
    finite = [record for record in run.train if math.isfinite(record["loss"])]
    if finite and len(tiles) < 2:
        loss = html.rounded(finite[-1]["loss"], unit=run.train_unit)
        tiles.append(("last training loss", loss, f"one batch, {_at(finite[-1])}"))
    tiles += [
        ("parameters", html.large(run.parameters), f"{run.parameters:,}"),
        ("tokens read", html.large(run.tokens), f"{run.tokens:,}"),
        ("training", html.number(run.seconds, *_duration(run.seconds)), "over all sessions"),
        ("throughput", html.large(run.tokens_per_second, "tok/s"), "over the whole run"),
    ]
    return html.key_figures(tiles)


def _at(record: Record) -> str:
    return f"at step {record['step']:,}"


def _duration(seconds: float) -> tuple[str, str]:
    if seconds < 60:
        return f"{seconds:.3g}", "s"
    return (clock(seconds)[:-3], "h") if seconds >= 3600 else (clock(seconds), "min")


def _charts(run: History) -> Iterator[Markup]:
    """Yield a chart for each quantity in the records."""
    load, share = "tokens of the busiest expert ÷ the mean", "share of the speed of large matrix products"
    plain: Format = "{:g}".format
    for name, title, records, key, label, form in (
        ("policy", "Policy loss", run.train if run.rewarded else [], "loss", run.train_unit, plain),
        ("bits", "Bits per byte", run.validation, "bits_per_byte", "bits per byte", plain),
        ("rate", "Learning rate", run.train, "learning_rate", "learning rate", plain),
        ("norm", "Gradient norm", run.train, "grad_norm", "gradient norm", plain),
        ("speed", "Throughput", run.train, "tokens_per_second", "tokens a second", compact),
        ("share", "Utilization", run.train, "utilization", share, "{:.0%}".format),
        ("expert", "Busiest expert", run.train, "busiest_expert_load", load, plain),
    ):
        if curve := points(records, key):
            kind, style = ("series-1", "both") if records is run.validation else ("series-0", "line")
            series, from_zero = [Series(curve, kind=kind, style=style)], name in ("speed", "share")
            yield Chart(
                name, f"{title} of {run.name}", series, "tokens", label, format_y=form, from_zero=from_zero
            ).svg()


def _by_layer(run: History) -> Iterator[Markup]:
    """Yield a chart for each quantity recorded by layer, with the first and last layer and some between them."""
    for key, title in (
        ("gradient_norm_by_layer", "Gradient norm by layer"),
        ("activation_rms_by_layer", "Block output (root mean square) by layer"),
    ):
        records = [record for record in run.train if isinstance(record.get(key), list)]
        n_layers = len(records[0][key]) if records else 0
        records = [record for record in records if len(record[key]) == n_layers]
        if not n_layers:
            continue
        layers = _spread(range(n_layers), MOST_LAYERS)
        series = [
            Series([(r["tokens"], r[key][layer]) for r in records], f"layer {layer + 1}", colour(i))
            for i, layer in enumerate(layers)
        ]
        yield Chart(key, f"{title} of {run.name}", series, "tokens", title.lower()).svg()


def _where_time_went(run: History) -> Markup:
    """Return a table of the seconds that each part of a step took over the whole run."""
    parts = sorted(run.seconds_by_part.items(), key=lambda part: -part[1])
    total = sum(run.seconds_by_part.values())
    if not parts or not 0 < total < math.inf:
        return Markup("")
    rows = [
        (
            name,
            html.number(seconds, f"{seconds:,.1f} s"),
            html.percent(seconds / total),
            html.Bar(seconds / parts[0][1], "memory"),
        )
        for name, seconds in parts
    ]
    foot = [("together", html.number(total, f"{total:,.1f} s"), "", "")]
    return html.table(("", "time", "share", ""), "lrrt", rows, foot)


def _evaluations(run: History) -> list[Markup]:
    if not run.validation:
        return []
    best = run.best
    chosen = {id(r) for r in _spread([r for r in run.validation if r is not best], MOST_ROWS - 1)}
    shown = [r for r in run.validation if r is best or id(r) in chosen]
    rows: list[list[html.Cell]] = [
        [
            html.number(r["step"]),
            html.number(r["tokens"]),
            clock(seconds),
            html.rounded(r["loss"]),
            html.number(r["perplexity"], significant(r["perplexity"])) if html.is_figure(r["perplexity"]) else "",
            html.rounded(r["bits_per_byte"]),
            "best" if r is best else "",
        ]
        for r, seconds in zip(shown, run.seconds_at([r["step"] for r in shown]), strict=True)
    ]
    marked = [[html.bold(cell) for cell in row] if row[-1] else row for row in rows]
    bits = "bits per byte" if any(html.is_figure(r["bits_per_byte"]) for r in shown) else ""
    body = html.table(("step", "tokens", "time", "validation loss", "perplexity", bits, ""), "lrrrrrl", marked)
    return [body, _left_out(len(run.validation), len(shown), "evaluations")]


def _bad_steps(run: History) -> list[Markup]:
    """Return a table of the skipped steps and of the rollbacks to a checkpoint."""
    bad = [record for record in run.records if record["kind"] in ("skipped", "rollback")]
    if not bad:
        return []
    shown = bad[-MOST_ROWS:]
    rows: list[tuple[html.Cell, ...]] = [
        (
            html.number(r["step"]),
            *(html.rounded(r.get(key), ".4g") for key in ("loss", "grad_norm")),
            f"went back to this step from step {r['from_step']:,}" if r["kind"] == "rollback" else "skipped",
        )
        for r in shown
    ]
    body = html.table(("step", "loss", "gradient norm", ""), "lrrl", rows)
    return [body, _left_out(len(bad), len(shown), "steps, the last")]


def _origin(run: History) -> Markup:
    """Return a section on the checkpoint a fork started from and on settings changed during training, if any."""
    try:
        history = read_changes(run.folder)
    except UserError as error:
        return html.paragraph(str(error), "note")
    rows = history.origin_rows() | history.change_rows()
    return html.settings(dict(rows)) if rows else Markup("")


def _left_out_lines(run: History) -> list[Markup]:
    """Return notes on the records of metrics.jsonl that the page does not show."""
    notes = [f"Left out: {run.skipped}."] if run.skipped else []
    if len(run.records) < run.n_records:
        notes.append(
            f"metrics.jsonl holds {run.n_records:,} records. The curves show {len(run.records):,} of them, evenly "
            f"spread; times and the best evaluation are those of all."
        )
    return [html.paragraph(note, "note") for note in notes]


def _samples(run: History) -> list[Markup]:
    """Return the texts that the model generated from each prompt during training."""
    prompts: dict[str, list[Record]] = {}
    for record in run.kind("sample"):
        prompts.setdefault(record["prompt"], []).append(record)
    texts = [
        (html.number(r["step"]), prompt, r["text"])
        for prompt, records in list(prompts.items())[:MOST_PROMPTS]
        for r in _spread(records, MOST_SAMPLES)
    ]
    left_out = _left_out(len(prompts), min(len(prompts), MOST_PROMPTS), "prompts")
    return [html.samples(texts), left_out] if texts else []


def _spread(items: Sequence[Item], n: int) -> Sequence[Item]:
    """Return at most n of the items, evenly spaced, with the first and the last."""
    return items if len(items) <= n else [items[round(i * (len(items) - 1) / (n - 1))] for i in range(n)]


def _left_out(n: int, n_shown: int, what: str) -> Markup:
    return html.paragraph(f"{n_shown:,} of {n:,} {what}", "note") if n_shown < n else Markup("")


def _conventions(run: History) -> str:
    if run.rewarded:
        loss = (
            "The reward is the mean over answers; the validation loss is the reward with its sign turned, over the "
            "held-out prompts that the recipe asks for. "
        )
    elif run.loss_unit == "nats per token":
        loss = (
            "Loss is the mean −log p of each next token in nats; validation over the part of the held-out text that "
            "the recipe asks for. "
        )
    else:
        loss = f"Loss is in {run.loss_unit}; validation over the held-out pairs that the recipe asks for. "
    return (
        f"{loss}The training curve is a moving average of single batches, which the thin line shows. "
        "Tokens and throughput count all tokens of the batches, with padding and tokens that are not learned; the "
        "seconds are those of training steps only. Figures are from metrics.jsonl, the last outcome from outcome.json. "
        "Written by gptworks report."
    )
