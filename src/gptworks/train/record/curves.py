"""The curves of a run: series of its records, and `curves.svg`."""

import math
from collections.abc import Sequence
from pathlib import Path

from gptworks.files import write_whole
from gptworks.pages.chart import WIDE, Chart, Series, picture
from gptworks.pages.drawing import Point
from gptworks.pages.parts import is_figure
from gptworks.train.record.metrics import Record, read_metrics

_DRAWN = ("tokens", "step", "loss", "reward", "learning_rate", "unit")


def points(records: Sequence[Record], key: str) -> list[Point]:
    """Tokens and a figure of each record that has it."""
    return [(record["tokens"], record[key]) for record in records if is_figure(record.get(key))]


def dot_titles(records: Sequence[Record], key: str = "loss") -> list[str]:
    """What the pointer shows at each dot that `points` gives."""
    drawn = (record for record in records if is_figure(record.get(key)))
    return [f"step {r['step']:,}, {r['tokens']:,} tokens: {r[key]:.4f}" for r in drawn]


def smoothed(curve: Sequence[Point], decay: float = 0.8) -> list[Point]:
    """The mean of two moving averages, from the left and from the right, so that the curve does not lag."""
    values = [y for _, y in curve]
    pairs = zip(_averages(values, decay), reversed(_averages(values[::-1], decay)), strict=True)
    return [(x, (left + right) / 2) for (x, _), (left, right) in zip(curve, pairs, strict=True)]


def _averages(values: list[float], decay: float) -> list[float]:
    """Exponential moving average without the bias of its start (Kingma & Ba, 2015, section 3)."""
    averages, average = [], 0.0
    for i, value in enumerate(values):
        average = decay * average + (1 - decay) * value if math.isfinite(value) else average
        averages.append(average / (1 - decay ** (i + 1)))
    return averages


def training_chart(
    train: Sequence[Record], validation: Sequence[Record], title: str, unit: str, *, rewarded: bool, best: str = ""
) -> Chart:
    """The loss over the tokens; of a run that maximizes a reward, the reward: its loss is no likelihood.

    Args:
        best: written behind the name of the validation's curve.
    """
    key, kind = ("reward", "Reward") if rewarded else ("loss", "Loss")
    raw = points(train, key)
    series = [
        Series(raw, kind="series-0 faint"),
        Series(smoothed(raw), "training"),
        Series(points(validation, key), f"validation{best}", "series-1", "both", dot_titles(validation, key)),
    ]
    label = "mean reward of an answer" if rewarded else unit
    return Chart("loss", f"{kind} of {title}", series, "tokens", label, width=WIDE, height=380)


def draw_curves(metrics: Path, path: Path, title: str) -> None:
    """Write the loss and the learning rate over the tokens as SVG; without training records, nothing."""
    records: dict[str, list[Record]] = {"train": [], "validation": []}
    for record in read_metrics(metrics):
        if record["kind"] in records:
            records[record["kind"]].append({key: record[key] for key in _DRAWN if key in record})
    train, validation = records.values()
    if train and (drawn := curves_picture(train, validation, title)):
        write_whole(path, drawn)


def curves_picture(train: Sequence[Record], validation: Sequence[Record], title: str) -> str:
    """The loss and the learning rate over the tokens, as an SVG file; empty where there is nothing to draw."""
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
