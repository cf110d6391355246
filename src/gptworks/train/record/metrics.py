"""metrics.jsonl, from which everything that shows a run is made, and samples.md."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from gptworks.config import Recipe
from gptworks.files import replacing, write_whole

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
        with replacing(path) as aside, aside.open("w", encoding="utf-8") as file:
            file.writelines(_line(record) for record in self._kept(path, resume_step, resume_rollbacks))
        self.path = path
        self._writers = writers
        for record in read_metrics(path) if writers else ():
            self._hand_on(record)
        self._file = path.open("a", encoding="utf-8")

    @staticmethod
    def _kept(path: Path, resume_step: int, resume_rollbacks: int) -> Iterator[Record]:
        n_rollbacks = 0
        for record in read_metrics(path):
            if record["step"] > resume_step:
                continue
            n_rollbacks += record["kind"] == "rollback"
            if record["kind"] != "rollback" or n_rollbacks <= resume_rollbacks:
                yield record

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


@dataclass
class Skipped:
    """What a log held that is no record: how many lines for each reason, and the first of them."""

    reasons: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By reason: how many lines, and the number of the first."""

    def add(self, reason: str, line: int) -> None:
        count, first = self.reasons.get(reason, (0, line))
        self.reasons[reason] = (count + 1, first)

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        parts = [
            f"{count:,} {reason} ({'the first is ' if count > 1 else ''}line {first:,})"
            for reason, (count, first) in self.reasons.items()
        ]
        return f"lines of metrics.jsonl that were left out: {', '.join(parts)}"


def read_metrics(path: Path, skipped: Skipped | None = None) -> Iterator[Record]:
    """The records of a log, one at a time, each of the form that its kind has.

    A log may be cut short by a crash or damaged: lines that are no record are left out and counted in `skipped`. In a
    record, a value of a type that no figure has is left out. Memory: one line of at most 4 MiB.
    """
    skipped = Skipped() if skipped is None else skipped
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            if line is None:
                skipped.add("longer than 4 MiB", number)
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # also a number of more than 4,300 digits
                skipped.add("not whole JSON", number)
                continue
            fault = _fault(record)
            if fault is not None:
                skipped.add(fault, number)
            else:
                yield _checked(record)


_MOST_LINE_BYTES = 1 << 22

_TEXTS = ("kind", "prompt", "text", "unit")
_NOT_FINITE = ("nan", "inf", "-inf")
"""JSON has no such numbers: a figure that is one of them is written as its name."""


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Each line; None for one that is too long, of which no more than its limit is ever held."""
    while line := file.readline(_MOST_LINE_BYTES):
        if line.endswith(b"\n") or len(line) < _MOST_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_MOST_LINE_BYTES)
        yield None


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -(2**63) < value < 2**63)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and value >= 0


def _is_figure(value: Any) -> bool:
    return _is_number(value) or value in _NOT_FINITE


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_NEEDED: dict[str, dict[str, Callable[[Any], bool]]] = {
    "train": {"tokens": _is_count, "loss": _is_figure, "seconds": _is_figure},
    "validation": {"tokens": _is_count, "loss": _is_figure},
    "sample": {"prompt": _is_text, "text": _is_text},
    "rollback": {"from_step": _is_count},
}
"""The values without which a record of each kind is none, and how each is checked."""


def _fault(record: Any) -> str | None:
    """Why this is no record, in words that follow a number of lines; None: it is one."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return "without a kind"
    if not _is_count(record.get("step")):
        return "without a step"
    for key, is_right in _NEEDED.get(record["kind"], {}).items():
        if not is_right(record.get(key)):
            return f"without {key}"
    return None


def _checked(record: Record) -> Record:
    """The record with its figures as numbers, less values that are none; of an unknown kind as it is."""
    if record["kind"] not in (*_NEEDED, "skipped"):
        return record
    checked: Record = {} if record["kind"] != "validation" else {"perplexity": None, "bits_per_byte": None}
    for key, value in record.items():
        if type(value) is float:  # nearly all are
            checked[sys.intern(key)] = value
        elif key in _TEXTS:
            if isinstance(value, str):
                checked[sys.intern(key)] = value.encode("utf-8", "replace").decode("utf-8")  # half of a pair is no text
        elif isinstance(value, str):
            if value in _NOT_FINITE:
                checked[sys.intern(key)] = float(value)
        elif (
            value is None
            or isinstance(value, bool)
            or _is_number(value)
            or (isinstance(value, dict) and all(map(_is_number, value.values())))
            or (isinstance(value, list) and all(map(_is_number, value)))
        ):
            checked[sys.intern(key)] = value
    return checked


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
