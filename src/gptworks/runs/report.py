"""`gptworks report`: one run as a page, from its recipe and its metrics."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from markupsafe import Markup

from gptworks.describe.figure import architecture_svg
from gptworks.describe.sheet import describe, summary, traits
from gptworks.pages.chart import NARROW, WIDE, Format, Series, chart, colour, compact
from gptworks.pages.drawing import Point
from gptworks.pages.page import page, write_page
from gptworks.pages.parts import (
    Cell,
    bar,
    bold,
    figure,
    figures,
    key_figures,
    large,
    number,
    paragraph,
    percent,
    samples,
    section,
    settings,
    table,
    together,
    unbroken,
)
from gptworks.runs.evaluations import evaluations_section
from gptworks.runs.history import History
from gptworks.train.record.display import clock
from gptworks.train.record.metrics import Record, smooth
from gptworks.train.record.outcome import read_outcome
from gptworks.units import readable, significant

MOST_ROWS = 24
"""Evaluations and bad steps that a table shows."""

MOST_LAYERS = 5
"""Drawn of what is recorded layer by layer."""

MOST_PROMPTS, MOST_SAMPLES = 20, 6
"""Prompts of which samples are shown, and steps for each."""


def write_report(run: History, path: Path) -> None:
    """Write the page at once, over an older one.

    Raises:
        UserError: the path is a folder, or lies in none.
    """
    write_page(to_html(run), path, "--out")


def to_html(run: History) -> str:
    """The page. Numbers stand in <data> elements with their exact values."""
    sheet = describe(run.recipe.model, run.recipe.name)
    drawn = architecture_svg(run.recipe.model, run.recipe.name, f"{summary(sheet)}. {traits(run.recipe.model)}.")
    parts = [
        _key_figures(run),
        *_left_out_lines(run),
        section("Reward" if run.rewarded else "Loss", figure(_loss(run))),
        section("Along the run", figures((*_charts(run), *_by_layer(run)))),
        *_where_time_went(run),
        *_memory(run),
        *_evaluations(run),
        *evaluations_section(run.folder),
        *_bad_steps(run),
        *_outcome(run),
        *_samples(run),
        section(
            "Architecture",
            together(
                (
                    paragraph(unbroken(summary(sheet))),
                    paragraph(unbroken(traits(run.recipe.model))),
                    figure(drawn, "architecture"),
                )
            ),
        ),
        section("Settings", settings(run.recipe.model_dump(mode="json", exclude={"name", "run_dir", "sweep"}))),
    ]
    return page(run.name, (unbroken(_where_it_stands(run)), unbroken(summary(sheet))), parts, _conventions(run))


def _where_it_stands(run: History) -> str:
    planned = run.planned_steps
    step = f"step {run.step:,}" + (f" of {planned:,}" if planned else "")
    return f"{step} · {run.tokens:,} tokens · {clock(run.seconds)} of training"


def _key_figures(run: History) -> Markup:
    best = run.best
    tiles: list[tuple[str, str | Markup, str]] = []
    if best is not None:
        perplexity = "" if best["perplexity"] is None else f"perplexity {significant(best['perplexity'])}, "
        tiles.append(("best validation loss", _exact(best["loss"], run.loss_unit), f"{perplexity}{_at(best)}"))
        if best["bits_per_byte"] is not None:
            tiles.append(("bits per byte", _exact(best["bits_per_byte"], "bits"), _at(best)))
    finite = [record for record in run.train if math.isfinite(record["loss"])]
    if finite and len(tiles) < 2:
        tiles.append(
            ("last training loss", _exact(finite[-1]["loss"], run.train_unit), f"one batch, {_at(finite[-1])}")
        )
    tiles += [
        ("parameters", large(run.parameters), f"{run.parameters:,}"),
        ("tokens trained on", large(run.tokens), f"{run.tokens:,}"),
        ("training", number(run.seconds, *_duration(run.seconds)), "over all sessions"),
        ("throughput", large(run.tokens_per_second, "tok/s"), "over the whole run"),
    ]
    return key_figures(tiles)


def _exact(value: float, unit: str) -> Markup:
    return number(value, f"{value:.4f}", unit)


def _at(record: Record) -> str:
    return f"at step {record['step']:,}"


def _duration(seconds: float) -> tuple[str, str]:
    """A number and its unit."""
    if seconds < 60:
        return f"{seconds:.3g}", "s"
    return (clock(seconds)[:-3], "h") if seconds >= 3600 else (clock(seconds), "min")


# ------------------------------------------------------------------------------------------------ curves


def is_figure(value: object) -> TypeGuard[float]:
    """Whether a value of a record is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def points(records: Sequence[Record], key: str) -> list[Point]:
    """Tokens and a figure of each record that has it."""
    return [(record["tokens"], record[key]) for record in records if is_figure(record.get(key))]


def dot_titles(records: Sequence[Record], key: str = "loss") -> list[str]:
    """What is shown of an evaluation's dot, for each that `points` draws."""
    drawn = (record for record in records if is_figure(record.get(key)))
    return [f"step {r['step']:,}, {r['tokens']:,} tokens: {r[key]:.4f}" for r in drawn]


def smoothed(curve: Sequence[Point]) -> list[Point]:
    """The mean of two moving averages, from the left and from the right, so that the curve does not lag."""
    values = [y for _, y in curve]
    pairs = zip(smooth(values, 0.8), reversed(smooth(values[::-1], 0.8)), strict=True)
    return [(x, (left + right) / 2) for (x, _), (left, right) in zip(curve, pairs, strict=True)]


def _loss(run: History) -> Markup:
    """The loss over the tokens; where a reward is maximized, the reward: its loss is no likelihood."""
    key, title, label = "loss", "Loss", run.loss_unit
    if run.rewarded:
        key, title, label = "reward", "Reward", "mean reward of an answer"
    raw, evaluated = points(run.train, key), run.validation
    series = [
        Series(raw, kind="series-0 faint"),
        Series(smoothed(raw), "training"),
        Series(points(evaluated, key), "validation", "series-1", "both", dot_titles(evaluated, key)),
    ]
    return chart("loss", f"{title} of {run.name}", series, x_label="tokens", y_label=label, width=WIDE,
                 height=380)  # fmt: skip


def _charts(run: History) -> Iterator[Markup]:
    """A figure for each thing that the records hold."""
    load = "tokens of the busiest expert ÷ the mean"
    plain: Format = "{:g}".format
    for name, title, records, key, label, form in (
        *([("policy", "Policy loss", run.train, "loss", run.train_unit, plain)] if run.rewarded else []),
        ("bits", "Bits per byte", run.validation, "bits_per_byte", "bits per byte", plain),
        ("rate", "Learning rate", run.train, "learning_rate", "learning rate", plain),
        ("norm", "Gradient norm", run.train, "grad_norm", "gradient norm", plain),
        ("speed", "Throughput", run.train, "tokens_per_second", "tokens a second", compact),
        (
            "share",
            "Utilization",
            run.train,
            "utilization",
            "share of the speed of large matrix products",
            "{:.0%}".format,
        ),
        ("expert", "Busiest expert", run.train, "busiest_expert_load", load, plain),
    ):
        if curve := points(records, key):
            kind, style = ("series-1", "both") if records is run.validation else ("series-0", "line")
            drawn = chart(name, f"{title} of {run.name}", [Series(curve, kind=kind, style=style)], x_label="tokens",
                          y_label=label, format_y=form, width=NARROW, from_zero=name in ("speed", "share"))  # fmt: skip
            yield drawn


def _by_layer(run: History) -> Iterator[Markup]:
    """A figure for each thing that is recorded layer by layer: the first, the last and what lies evenly between."""
    for key, title in (
        ("gradient_norm_by_layer", "Gradient norm by layer"),
        ("activation_rms_by_layer", "Block output (root mean square) by layer"),
    ):
        records = [record for record in run.train if isinstance(record.get(key), list)]
        n_layers = len(records[0][key]) if records else 0
        records = [record for record in records if len(record[key]) == n_layers]
        if not n_layers:
            continue
        layers = sorted({round(i * (n_layers - 1) / (MOST_LAYERS - 1)) for i in range(MOST_LAYERS)})
        series = [
            Series([(r["tokens"], r[key][layer]) for r in records], f"layer {layer + 1}", colour(i))
            for i, layer in enumerate(layers)
        ]
        drawn = chart(key, f"{title} of {run.name}", series, x_label="tokens", y_label=title.lower(), width=NARROW)
        yield drawn


# ------------------------------------------------------------------------------------------------ tables


def _where_time_went(run: History) -> list[Markup]:
    """Seconds of each part of a step, over the whole run."""
    parts = sorted(run.seconds_by_part.items(), key=lambda part: -part[1])
    total = sum(run.seconds_by_part.values())
    if not parts or not 0 < total < math.inf:
        return []
    rows = [
        (name, number(seconds, f"{seconds:,.1f} s"), percent(seconds / total), bar(seconds / parts[0][1], "memory"))
        for name, seconds in parts
    ]
    foot = [("together", number(total, f"{total:,.1f} s"), "", "")]
    return [section("Where the time went", table(("", "time", "share", ""), "lrrt", rows, foot))]


def _memory(run: History) -> list[Markup]:
    """The last figure of each kind of memory that records hold, in bytes."""
    if not run.memory_bytes:
        return []
    largest = max(run.memory_bytes.values()) or 1
    rows = [
        (key.removesuffix("_bytes").replace("_", " "), number(n, readable(n, "B")), bar(n / largest, "memory"))
        for key, n in run.memory_bytes.items()
    ]
    return [section("Memory", table(("", "bytes", ""), "lrt", rows))]


def _evaluations(run: History) -> list[Markup]:
    if not run.validation:
        return []
    best = run.best
    shown = _spread([r for r in run.validation if r is not best], MOST_ROWS - 1)
    chosen = {id(record) for record in shown}
    shown = [r for r in run.validation if r is best or id(r) in chosen]
    rows: list[list[Cell]] = [
        [
            number(r["step"]),
            number(r["tokens"]),
            clock(run.seconds_at(r["step"])),
            number(r["loss"], f"{r['loss']:.4f}"),
            number(r["perplexity"], significant(r["perplexity"])) if is_figure(r["perplexity"]) else "",
            number(r["bits_per_byte"], f"{r['bits_per_byte']:.4f}") if is_figure(r["bits_per_byte"]) else "",
            "best" if r is best else "",
        ]
        for r in shown
    ]
    marked = [[bold(cell) for cell in row] if row[-1] else row for row in rows]
    bits = "bits per byte" if any(is_figure(r["bits_per_byte"]) for r in shown) else ""
    body = table(("step", "tokens", "time", "validation loss", "perplexity", bits, ""), "lrrrrrl", marked)
    return [section("Evaluations", together((body, *_left_out(len(run.validation), len(shown), "evaluations"))))]


def _bad_steps(run: History) -> list[Markup]:
    """Steps that were not taken, and returns to a checkpoint."""
    bad = [record for record in run.records if record["kind"] in ("skipped", "rollback")]
    if not bad:
        return []
    shown = bad[-MOST_ROWS:]
    rows: list[tuple[Cell, ...]] = [
        (
            number(r["step"]),
            *(number(r[key], f"{r[key]:.4g}") if is_figure(r.get(key)) else "" for key in ("loss", "grad_norm")),
            f"went back to this step from step {r['from_step']:,}" if r["kind"] == "rollback" else "skipped",
        )
        for r in shown
    ]
    body = table(("step", "loss", "gradient norm", ""), "lrrl", rows)
    return [section("Steps skipped", together((body, *_left_out(len(bad), len(shown), "steps, the last"))))]


def _outcome(run: History) -> list[Markup]:
    """How the training ended, where, in what memory. A run that goes on has an older outcome."""
    outcome = read_outcome(run.folder)
    body = paragraph(outcome, "note") if isinstance(outcome, str) else settings(dict(outcome.training))
    return [section("When it last ended", body)]


def _left_out_lines(run: History) -> list[Markup]:
    """What of metrics.jsonl the page does not show."""
    notes = [f"Left out: {run.skipped}."] if run.skipped else []
    if len(run.records) < run.n_records:
        notes.append(
            f"metrics.jsonl holds {run.n_records:,} records. The curves show {len(run.records):,} of them, evenly "
            f"spread; times and the best evaluation are those of all."
        )
    return [paragraph(note, "note") for note in notes]


def _samples(run: History) -> list[Markup]:
    """Continuations of each prompt over time."""
    prompts: dict[str, list[Record]] = {}
    for record in run.kind("sample"):
        prompts.setdefault(record["prompt"], []).append(record)
    texts = [
        (number(r["step"]), prompt, r["text"])
        for prompt, records in list(prompts.items())[:MOST_PROMPTS]
        for r in _spread(records, MOST_SAMPLES)
    ]
    if not texts:
        return []
    more = _left_out(len(prompts), min(len(prompts), MOST_PROMPTS), "prompts")
    return [section("Samples", together((samples(texts), *more)))]


def _spread(records: list[Record], n: int) -> list[Record]:
    """At most n of them, evenly spread, the first and the last included."""
    if len(records) <= n:
        return records
    return [records[round(i * (len(records) - 1) / (n - 1))] for i in range(n)]


def _left_out(n: int, n_shown: int, what: str) -> list[Markup]:
    return [paragraph(f"{n_shown:,} of {n:,} {what}", "note")] if n_shown < n else []


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
        "Throughput counts targets and the seconds of training steps alone. Figures are from metrics.jsonl, the last "
        "outcome from outcome.json. Written by gptworks report."
    )
