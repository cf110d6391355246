"""A run's curves: turns records of metrics.jsonl into charts, and draws `curves.svg`."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gptworks.files import write_whole
from gptworks.pages.chart import WIDE, Chart, Series, picture
from gptworks.pages.drawing import Point
from gptworks.pages.parts import is_figure
from gptworks.training.record.metrics import Record, read_metrics

_DRAWN = ("tokens", "step", "loss", "reward", "learning_rate", "unit")


def points(records: Sequence[Record], key: str) -> list[Point]:
    """Return a point (tokens, figure) for each record that has the figure `key`."""
    return [(record["tokens"], record[key]) for record in records if is_figure(record.get(key))]


def dot_titles(records: Sequence[Record], key: str = "loss") -> list[str]:
    """Return the tooltips of the points that `points` returns for the same arguments."""
    drawn = (record for record in records if is_figure(record.get(key)))
    return [f"step {r['step']:,}, {r['tokens']:,} tokens: {r[key]:.4f}" for r in drawn]


def smoothed(curve: Sequence[Point]) -> list[Point]:
    """Smooth a curve without lag: average a moving average from the left and one from the right."""
    values = np.array([y for _, y in curve], float)
    pairs = (moving_average(values, 0.8) + moving_average(values[::-1], 0.8)[::-1]) / 2
    return list(zip((x for x, _ in curve), pairs.tolist(), strict=True))


_BLOCK = 64


def moving_average(values: NDArray[np.float64], decay: float) -> NDArray[np.float64]:
    """Return the exponential moving average at each value, with Adam's bias correction (Kingma & Ba, 2015, section 3).

    A value that is not finite leaves the average as it was. Each block of values is averaged by a matrix product.
    """
    finite = np.isfinite(values)
    known = values[finite]
    n_blocks = -(-len(known) // _BLOCK)
    if decay == 0 or not n_blocks:
        averages = known
    else:
        rows = np.zeros((n_blocks, _BLOCK))
        rows.reshape(-1)[: len(known)] = known
        ages = np.arange(_BLOCK)[:, None] - np.arange(_BLOCK)
        inside = rows @ np.where(ages >= 0, (1 - decay) * decay ** np.maximum(ages, 0.0), 0.0).T
        before = np.zeros(n_blocks)
        for i in range(1, n_blocks):
            before[i] = inside[i - 1, -1] + decay**_BLOCK * before[i - 1]
        inside += before[:, None] * decay ** np.arange(1.0, _BLOCK + 1)
        averages = inside.reshape(-1)[: len(known)] / (1 - decay ** np.arange(1.0, len(known) + 1))
    if finite.all():
        return averages
    so_far: NDArray[np.float64] = np.concatenate([[np.nan], averages])[np.cumsum(finite)]
    return so_far


def training_chart(
    train: Sequence[Record], validation: Sequence[Record], title: str, unit: str, *, rewarded: bool, best: str = ""
) -> Chart:
    """Return a chart of the loss over tokens; if `rewarded`, of the reward, because the loss is then not a likelihood.
    `best` is appended to the name of the validation curve."""
    key, kind = ("reward", "Reward") if rewarded else ("loss", "Loss")
    raw = points(train, key)
    series = [
        Series(raw, kind="series-0 faint"),
        Series(smoothed(raw), "training"),
        Series(points(validation, key), f"validation{best}", "series-1", "both", dot_titles(validation, key)),
    ]
    label = "mean reward of an answer" if rewarded else unit
    return Chart("loss", f"{kind} of {title}", series, "tokens", label, width=WIDE, height=380)


def validation_chart(series: Sequence[Series], unit: str) -> Chart:
    """Return a page-wide chart of validation losses over tokens."""
    return Chart("curves", "Validation loss by tokens", series, "tokens", unit, width=WIDE, height=360)


def draw_curves(metrics: Path, path: Path, title: str) -> None:
    """Draw the loss and the learning rate over tokens as an SVG file; without training records, write nothing."""
    records: dict[str, list[Record]] = {"train": [], "validation": []}
    for record in read_metrics(metrics):
        if record["kind"] in records:
            records[record["kind"]].append({key: record[key] for key in _DRAWN if key in record})
    train, validation = records.values()
    if train and (drawn := curves_picture(train, validation, title)):
        write_whole(path, drawn)


def curves_picture(train: Sequence[Record], validation: Sequence[Record], title: str) -> str:
    """Return the loss and the learning rate over tokens as the text of an SVG file; empty without points."""
    rewarded = any("reward" in record for record in train)
    unit = next((record["unit"] for record in validation if "unit" in record), "nats per token")
    values = [y for _, y in points(validation, "reward" if rewarded else "loss") if math.isfinite(y)]
    best = f", best {(max if rewarded else min)(values):.4f}" if values else ""
    rate = Series(points(train, "learning_rate"), kind="series-4")
    return picture(
        [
            training_chart(train, validation, title, unit, rewarded=rewarded, best=best),
            Chart("rate", f"Learning rate of {title}", [rate], "tokens", "learning rate", width=WIDE, height=170),
        ],
        title,
    )
