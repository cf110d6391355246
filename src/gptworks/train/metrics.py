"""What a run leaves to look at: metrics.jsonl (the truth), and samples.md and curves.png made from it."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from gptworks.config import Recipe
from gptworks.files import write_whole

Record = dict[str, Any]

TIMINGS = ("seconds", "tokens_per_second", "flops_per_second", "utilization", "seconds_by_part")
"""The keys of a record that depend on the clock; all others repeat exactly when a run is repeated or resumed."""


class Writer(Protocol):
    """What is handed each record beside the file."""

    def __init__(self, recipe: Recipe) -> None: ...
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class MetricsLog:
    """`metrics.jsonl`: one JSON object a line, with a `step` and a `kind` (train, validation, sample…)."""

    def __init__(
        self, path: Path, resume_step: int, writers: Sequence[Writer] = (), *, resume_rollbacks: int = 0
    ) -> None:
        """Open the log; records after `resume_step`, which the resumed run will make again, are dropped.

        So are records of rollbacks beyond the first `resume_rollbacks`: one that was interrupted is made again too.
        Writers are given the records that stay, and then each that is written.
        """
        kept = [record for record in read_metrics(path) if record["step"] <= resume_step]
        rollbacks = [record for record in kept if record["kind"] == "rollback"]
        kept = [record for record in kept if record not in rollbacks[resume_rollbacks:]]
        write_whole(path, "".join(_line(record) for record in kept))
        self.path = path
        self._file = path.open("a", encoding="utf-8")
        self._writers = writers
        for record in kept:
            self._hand_on(record)

    def write(self, record: Record) -> None:
        """Append a record."""
        self._file.write(_line(record))
        self._file.flush()
        self._hand_on(record)

    def close(self) -> None:
        """Close the file, and the writers."""
        self._file.close()
        for writer in self._writers:
            writer.close()

    def _hand_on(self, record: Record) -> None:
        for writer in self._writers:
            writer.write(record)


class NoLog:
    """What ranks other than the first write to: one log is enough."""

    def write(self, record: Record) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def read_metrics(path: Path) -> Iterator[Record]:
    """The records of a log; a last line cut short by a crash is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield {key: float(value) if value in _NOT_FINITE else value for key, value in record.items()}


_NOT_FINITE = ("nan", "inf", "-inf")
"""JSON has no such numbers: a figure that is one of them is written as its name."""


def _line(record: Record) -> str:
    plain = {k: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"


def write_samples(metrics: Path, path: Path) -> None:
    """Write the run's samples as Markdown, oldest first: what was given, and below it how the model went on."""
    samples = [record for record in read_metrics(metrics) if record["kind"] == "sample"]
    if not samples:
        return
    parts = []
    for record in samples:
        given, made = fenced(str(record["prompt"])), fenced(str(record["text"]))
        parts.append(f"## Step {record['step']:,}\n\nPrompt:\n\n{given}\n\nContinuation:\n\n{made}\n")
    write_whole(path, "\n".join(["# Samples\n", *parts]))


def fenced(text: str) -> str:
    """The text as a block of Markdown that nothing in it can end."""
    longest = max((len(ticks) for ticks in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def draw_curves(metrics: Path, path: Path, title: str) -> bool:
    """Draw training and validation loss and the learning rate over tokens. False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    records = list(read_metrics(metrics))
    train = [record for record in records if record["kind"] == "train"]
    validation = [record for record in records if record["kind"] == "validation"]
    if not train:
        return True
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    tokens = [record["tokens"] / 1e6 for record in train]
    losses = [record["loss"] for record in train]
    loss_axes.plot(tokens, losses, color="#9db8d9", linewidth=0.8, label="training, one batch")
    loss_axes.plot(tokens, smooth(losses), color="#1f5fa8", linewidth=1.4, label="training, smoothed")
    if validation := [record for record in validation if math.isfinite(record["loss"])]:
        points = [record["tokens"] / 1e6 for record in validation]
        loss_axes.plot(
            points, [record["loss"] for record in validation], "o-", color="#d1495b", markersize=3.5, label="validation"
        )
        best = min(validation, key=lambda record: record["loss"])
        loss_axes.annotate(
            f"{best['loss']:.4f}",
            (best["tokens"] / 1e6, best["loss"]),
            textcoords="offset points",
            xytext=(0, -14),
            ha="right",
            color="#d1495b",
        )
    loss_axes.set(ylabel="loss (nats per token)", title=title)
    loss_axes.grid(alpha=0.25)
    loss_axes.legend(frameon=False)
    rate_axes.plot(tokens, [record["learning_rate"] for record in train], color="#666666", linewidth=1.2)
    rate_axes.set(xlabel="training tokens (millions)", ylabel="learning rate")
    rate_axes.grid(alpha=0.25)
    aside = path.with_name(f".{path.name}.writing.png")
    figure.savefig(aside)
    aside.replace(path)
    return True


def smooth(values: list[float], decay: float = 0.9) -> list[float]:
    """Exponential moving average without the bias of its start (Kingma & Ba, 2015, section 3)."""
    smoothed, average = [], 0.0
    for i, value in enumerate(values):
        average = decay * average + (1 - decay) * value if math.isfinite(value) else average
        smoothed.append(average / (1 - decay ** (i + 1)))
    return smoothed
