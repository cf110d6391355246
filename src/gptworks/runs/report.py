"""`gptworks report`: one run as a page, from its recipe and its metrics."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from gptworks.plan.figure import architecture_svg
from gptworks.plan.page import (
    bar,
    key_figures,
    large,
    line,
    number,
    page,
    percent,
    section,
    settings,
    table,
    write_page,
)
from gptworks.plan.published import readable
from gptworks.plan.sheet import describe, summary, traits
from gptworks.plan.svg import Point
from gptworks.runs.chart import NARROW, WIDE, Format, Series, chart, colour, compact
from gptworks.runs.evaluations import evaluations_section
from gptworks.runs.history import History
from gptworks.train.display import clock
from gptworks.train.metrics import Record, smooth

MOST_ROWS = 24
"""Evaluations and bad steps that a table shows."""

MOST_LAYERS = 5
"""Drawn of what is recorded layer by layer."""

MOST_SAMPLES = 6
"""Steps of which samples are shown, for each prompt."""


def write_report(run: History, path: Path) -> None:
    """Write the page at once, over an older one.

    Raises:
        UserError: the path is a folder, or lies in none.
    """
    write_page(to_html(run), path, "--out")


def to_html(run: History) -> str:
    """The page. Numbers stand in <data> elements with their exact values."""
    sheet = describe(run.recipe.model, run.recipe.name)
    figure = architecture_svg(run.recipe.model, run.recipe.name, f"{summary(sheet)}. {traits(run.recipe.model)}.")
    parts = [
        _key_figures(run),
        section("Loss", f"<figure>{_loss(run)}</figure>"),
        section("Along the run", f'<div class="charts">{"".join((*_charts(run), *_by_layer(run)))}</div>'),
        *_where_time_went(run),
        *_memory(run),
        *_evaluations(run),
        *evaluations_section(run.folder),
        *_bad_steps(run),
        *_card(run),
        *_samples(run),
        f"<section><h2>Architecture</h2><p>{line(summary(sheet))}</p><p>{line(traits(run.recipe.model))}</p>"
        f'<figure class="architecture">{figure}</figure></section>',
        section("Settings", settings(run.recipe.model_dump(mode="json", exclude={"name", "run_dir", "sweep"}))),
    ]
    return page(run.name, (_where_it_stands(run), summary(sheet)), parts, _conventions(), style())


def style() -> str:
    """What the pages of runs add to the style of every page."""
    return files("gptworks.runs").joinpath("runs.css").read_text(encoding="utf-8")


def _where_it_stands(run: History) -> str:
    planned = run.planned_steps
    step = f"step {run.step:,}" + (f" of {planned:,}" if planned else "")
    return f"{step} · {run.tokens:,} tokens · {clock(run.seconds)} of training"


def _key_figures(run: History) -> str:
    best, figures = run.best, []
    if best is not None:
        perplexity = "" if best["perplexity"] is None else f"perplexity {best['perplexity']:.3f}, "
        figures.append(
            ("best validation loss", _exact(best["loss"], best.get("unit", "nats")), f"{perplexity}{_at(best)}")
        )
        if best.get("bits_per_byte") is not None:
            figures.append(("bits per byte", _exact(best["bits_per_byte"], "bits"), _at(best)))
    finite = [record for record in run.train if math.isfinite(record["loss"])]
    if finite and len(figures) < 2:
        figures.append(("last training loss", _exact(finite[-1]["loss"], "nats"), f"one batch, {_at(finite[-1])}"))
    figures += [
        ("parameters", large(run.parameters), f"{run.parameters:,}"),
        ("tokens trained on", large(run.tokens), f"{run.tokens:,}"),
        ("training", number(run.seconds, _duration(run.seconds)), "over all sittings"),
        ("throughput", large(run.tokens_per_second, "tok/s"), "over the whole run"),
    ]
    return key_figures(figures)


def _exact(value: float, unit: str) -> str:
    return number(value, f"{value:.4f} <small>{unit}</small>")


def _at(record: Record) -> str:
    return f"at step {record['step']:,}"


def _duration(seconds: float) -> str:
    unit = "h" if seconds >= 3600 else "min" if seconds >= 60 else "s"
    return f"{clock(seconds)[: -3 if unit == 'h' else None]} <small>{unit}</small>" if unit != "s" else (
        f"{seconds:.3g} <small>s</small>"
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ curves


def points(records: Sequence[Record], key: str) -> list[Point]:
    """Tokens and a figure of each record that has it."""
    return [(record["tokens"], record[key]) for record in records if record.get(key) is not None]


def dot_titles(records: Sequence[Record]) -> list[str]:
    """What is shown of an evaluation's dot."""
    return [f"step {r['step']:,}, {r['tokens']:,} tokens: {r['loss']:.4f}" for r in records]


def smoothed(curve: Sequence[Point]) -> list[Point]:
    """The mean of two moving averages, from the left and from the right, so that the curve does not lag."""
    values = [y for _, y in curve]
    pairs = zip(smooth(values, 0.8), reversed(smooth(values[::-1], 0.8)), strict=True)
    return [(x, (left + right) / 2) for (x, _), (left, right) in zip(curve, pairs, strict=True)]


def _loss(run: History) -> str:
    raw, evaluated = points(run.train, "loss"), run.validation
    series = [
        Series(raw, kind="series-0 faint"),
        Series(smoothed(raw), "training"),
        Series(points(evaluated, "loss"), "validation", "series-1", "both", dot_titles(evaluated)),
    ]
    return chart("loss", f"Loss of {run.name}", series, x_label="tokens", y_label="nats per token", width=WIDE,
                 height=380)  # fmt: skip


def _charts(run: History) -> Iterator[str]:
    """A figure for each thing that the records hold."""
    load = "tokens of the busiest expert ÷ the mean"
    plain: Format = "{:g}".format
    for name, title, records, key, label, form in (
        ("bits", "Bits per byte", run.validation, "bits_per_byte", "bits per byte", plain),
        ("rate", "Learning rate", run.train, "learning_rate", "learning rate", plain),
        ("norm", "Gradient norm", run.train, "grad_norm", "gradient norm", plain),
        ("speed", "Throughput", run.train, "tokens_per_second", "tokens a second", compact),
        ("share", "Utilization", run.train, "utilization", "share of the matrix rate", "{:.0%}".format),
        ("expert", "Busiest expert", run.train, "busiest_expert_load", load, plain),
    ):
        if curve := points(records, key):
            kind, style = ("series-1", "both") if records is run.validation else ("series-0", "line")
            drawn = chart(name, f"{title} of {run.name}", [Series(curve, kind=kind, style=style)], x_label="tokens",
                          y_label=label, format_y=form, width=NARROW, from_zero=name in ("speed", "share"))  # fmt: skip
            yield f"<figure>{drawn}</figure>"


def _by_layer(run: History) -> Iterator[str]:
    """A figure for each thing that is recorded layer by layer: the first, the last and what lies evenly between."""
    for key, title in (
        ("gradient_norm_by_layer", "Gradient norm by layer"),
        ("activation_rms_by_layer", "Block output (root mean square) by layer"),
    ):
        records = [record for record in run.train if record.get(key)]
        if not records:
            continue
        n_layers = len(records[0][key])
        layers = sorted({round(i * (n_layers - 1) / (MOST_LAYERS - 1)) for i in range(MOST_LAYERS)})
        series = [
            Series([(r["tokens"], r[key][layer]) for r in records], f"layer {layer + 1}", colour(i))
            for i, layer in enumerate(layers)
        ]
        drawn = chart(key, f"{title} of {run.name}", series, x_label="tokens", y_label=title.lower(), width=NARROW)
        yield f"<figure>{drawn}</figure>"


# ------------------------------------------------------------------------------------------------ tables


def _where_time_went(run: History) -> list[str]:
    """Sums of the parts that training records break their time into, if they do."""
    parts: Counter[str] = Counter()
    for record in run.records:
        for value in record.values():
            if isinstance(value, dict):
                parts.update(value)
    if not parts:
        return []
    total, largest = sum(parts.values()), max(parts.values())
    rows = [
        (escape(name), number(seconds, f"{seconds:,.1f} s"), percent(seconds / total), bar(seconds / largest, "memory"))
        for name, seconds in parts.most_common()
    ]
    foot = [("together", number(total, f"{total:,.1f} s"), "", "")]
    return [section("Where the time went", table(("", "time", "share", ""), "lrrt", rows, foot))]


def _memory(run: History) -> list[str]:
    """The last figure of each kind of memory that records hold, in bytes."""
    figures = {key: value for record in run.records for key, value in record.items() if key.endswith("_bytes")}
    if not figures:
        return []
    largest = max(figures.values()) or 1
    rows = [
        (escape(key.removesuffix("_bytes").replace("_", " ")), number(n, readable(n, "B")), bar(n / largest, "memory"))
        for key, n in figures.items()
    ]
    return [section("Memory", table(("", "bytes", ""), "lrt", rows))]


def _evaluations(run: History) -> list[str]:
    if not run.validation:
        return []
    best = run.best
    shown = _spread([r for r in run.validation if r is not best], MOST_ROWS - 1)
    shown = [r for r in run.validation if r is best or r in shown]
    rows = [
        (
            number(r["step"]),
            number(r["tokens"]),
            clock(run.seconds_at(r["step"])),
            number(r["loss"], f"{r['loss']:.4f}"),
            "" if r["perplexity"] is None else number(r["perplexity"], f"{r['perplexity']:.3f}"),
            "" if r.get("bits_per_byte") is None else number(r["bits_per_byte"], f"{r['bits_per_byte']:.4f}"),
            "best" if r is best else "",
        )
        for r in shown
    ]
    marked = [[f"<b>{cell}</b>" for cell in row] if row[-1] else row for row in rows]
    bits = "bits per byte" if any(r.get("bits_per_byte") is not None for r in shown) else ""
    body = table(("step", "tokens", "time", "validation loss", "perplexity", bits, ""), "lrrrrrl", marked)
    return [section("Evaluations", body + _left_out(len(run.validation), len(shown), "evaluations"))]


def _bad_steps(run: History) -> list[str]:
    """Steps that were not taken, and returns to a checkpoint."""
    bad = [record for record in run.records if record["kind"] in ("skipped", "rollback")]
    if not bad:
        return []
    shown = bad[-MOST_ROWS:]
    rows = [
        (
            number(r["step"]),
            *(number(r[key], f"{r[key]:.4g}") if key in r else "" for key in ("loss", "grad_norm")),
            f"gone back to, from step {number(r['from_step'])}" if r["kind"] == "rollback" else "skipped",
        )
        for r in shown
    ]
    body = table(("step", "loss", "gradient norm", ""), "lrrl", rows)
    return [section("Steps skipped", body + _left_out(len(bad), len(shown), "steps, the last"))]


def _card(run: History) -> list[str]:
    """What the card says of the training: how it ended, where, in what memory. A run that goes on has an older one."""
    card = run.folder / "model-card.md"
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    lines = text.partition("## Training\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("| ")]
    facts = {row[0]: row[1] for row in rows if len(row) == 2 and row[0]}
    return [section("When it last ended", settings(facts))] if facts else []


def _samples(run: History) -> list[str]:
    """Continuations of each prompt over time."""
    prompts: dict[str, list[Record]] = {}
    for record in run.kind("sample"):
        prompts.setdefault(record["prompt"], []).append(record)
    articles = [
        f"<article><h3>step {number(r['step'])}</h3><pre><b>{escape(prompt)}</b>{escape(r['text'])}</pre></article>"
        for prompt, records in prompts.items()
        for r in _spread(records, MOST_SAMPLES)
    ]
    return [section("Samples", f'<div class="samples">{"".join(articles)}</div>')] if articles else []


def _spread(records: list[Record], n: int) -> list[Record]:
    """At most n of them, evenly spread, the first and the last included."""
    if len(records) <= n:
        return records
    return [records[round(i * (len(records) - 1) / (n - 1))] for i in range(n)]


def _left_out(n: int, n_shown: int, what: str) -> str:
    return f'<p class="note">{n_shown:,} of {n:,} {what}</p>' if n_shown < n else ""


def _conventions() -> str:
    return (
        "Loss is the mean −log p of each next token in nats; validation over the part of the held-out text that the "
        "recipe asks for. The training curve is a moving average of single batches, which the thin line shows. "
        "Throughput counts targets and the seconds of training steps alone. Everything is read from metrics.jsonl. "
        "Written by gptworks report."
    )
