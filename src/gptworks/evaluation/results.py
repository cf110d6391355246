"""The results of evaluations, kept in the run folder as JSON, and shown as a table and in the model card.

RUN/evaluations/capitals-3-shot.json      figures with intervals, and each item's statistics
RUN/model-card.md                         its section "Evaluations" lists all results

`Measurements` shows figures as text, as JSON and as tables in a notebook.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from gptworks.errors import UserError
from gptworks.evaluation.metrics import Floats, figure_of, interval
from gptworks.files import make_folder, read_regular, read_text, send, write_whole
from gptworks.pages import parts as html
from gptworks.pages.page import cell
from gptworks.pages.tables import Table, in_a_cell
from gptworks.terminal import lines_of
from gptworks.units import significant

FOLDER = "evaluations"
HEADING = "## Evaluations"
MAX_BYTES = 1 << 28
"""Maximum bytes of an evaluation's file; an item takes a few hundred bytes."""
MAX_CARD_BYTES = 1 << 22

_WIDTHS = {
    "mean": (range(2, 3), 1), "perplexity": (range(2, 3), 1), "bits": (range(2, 3), 1),
    "calibration": (range(3, 3_000), 3), "bleu": (range(10, 11), 1), "chrf": (range(1, 1_000), 1),
}  # fmt: skip
"""Kind of figure → range and step of the number of columns that its statistics may have."""

_Number = Annotated[float, Strict()]
_Count = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
_ROWS = TypeAdapter(list[list[_Number]])
_FORBID_EXTRA = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def _array(rows: Any) -> Floats:
    """Convert the statistics in a file to an array [N, S]."""
    found = _ROWS.validate_python(rows)
    if len(set(map(len, found))) > 1:
        raise ValueError("the rows have different numbers of columns")
    return np.array(found, dtype=np.float64)


@dataclass(frozen=True)
class Measured:
    """A figure over all items, with its 95% interval and its statistics."""

    __pydantic_config__ = _FORBID_EXTRA

    kind: str
    """The rule that computes the figure from statistics; see `metrics.figure_of`."""
    statistics: Annotated[Floats, BeforeValidator(_array)]
    """float64 [N, S] for N items; empty if another program measured the figure."""
    value: _Number
    low: _Number | None
    high: _Number | None

    def __post_init__(self) -> None:
        known, step = _WIDTHS.get(self.kind, (range(0), 1))
        if not known or (len(self.statistics) and self.statistics.shape[1] not in known[::step]):
            raise ValueError(f"statistics of the kind {self.kind[:40]!r} have other columns, or there is no such kind")

    @classmethod
    def of(cls, kind: str, statistics: Floats) -> "Measured":
        """Compute the figure and its interval from the statistics [N, S] of N items."""
        found = interval(statistics, figure_of(kind))
        return cls(kind, statistics, found.value, found.low, found.high)


class _Position(BaseModel):
    last: _Count
    loss: _Number


def _with_positions(details: Any) -> Any:
    if isinstance(details, dict):
        TypeAdapter(list[_Position]).validate_python(details.get("positions", []))
    return details


@dataclass(frozen=True)
class Evaluation:
    """The figures of a run on one task or one text. The types also validate files, which may come from other people."""

    __pydantic_config__ = _FORBID_EXTRA

    name: str
    kind: str
    """The task's type, or `text`, `calibration`, `memorization` or `harness`."""
    run: str
    step: _Count
    n_items: _Count
    metrics: dict[str, Measured]
    shots: _Count | None = None
    fingerprint: str = ""
    """A hash or key that is equal for evaluations with the same questions."""
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    details: Annotated[dict[str, Any], BeforeValidator(_with_positions)] = field(default_factory=dict)
    """Further results, such as the loss by position or the bins of a reliability table."""
    items: tuple[dict[str, Any], ...] = ()
    """The model's answer to each item."""

    def to_json(self) -> dict[str, Any]:
        """Return the entire evaluation as JSON, which `read_evaluations` reads."""
        metrics = {name: {**vars(one), "statistics": one.statistics.tolist()} for name, one in self.metrics.items()}
        return {**vars(self), "metrics": metrics, "notes": list(self.notes), "items": list(self.items)}

    def summary(self) -> dict[str, Any]:
        """Return the evaluation as JSON, without items and statistics. Figures have keys such as `bits_per_byte`."""
        tree = self.to_json()
        del tree["items"]
        tree["metrics"] = {
            re.sub(r"\W+", "_", name.replace("@", "_at_")).strip("_"): {"name": name, **one}
            for name, one in tree["metrics"].items()
        }
        for one in tree["metrics"].values():
            del one["statistics"]
        return tree


_STORED = TypeAdapter(Evaluation)


def table(evaluations: Iterable[Evaluation]) -> Table:
    """Return a table with a row for each figure of the evaluations."""
    rows = []
    for one in evaluations:
        shots = "" if one.shots is None else str(one.shots)
        for name, measured in one.metrics.items():
            low, high = measured.low, measured.high
            bounds = "" if low is None or high is None else f"{number(low)} to {number(high)}"
            rows.append((one.name, shots, f"{one.n_items:,}", name, number(measured.value), bounds, f"{one.step:,}"))
    return Table(("evaluation", "shots", "items", "figure", "value", "95% interval", "step"), "lrrlrlr", rows)


def number(value: float) -> str:
    """Format a value: four decimals below 10, two decimals below 1,000, else five significant digits."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 1000 else significant(value, 5)


def save_evaluations(run_dir: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write evaluations to the run folder, replacing evaluations of the same names, and rewrite the model card's
    section. If `run_dir` is the mirror of a remote folder, upload the files."""
    folder = run_dir / FOLDER
    make_folder(folder)
    for one in evaluations:
        text = json.dumps(one.to_json(), indent=1, ensure_ascii=False) + "\n"
        write_whole(folder / f"{one.name}.json", text, inside=run_dir)
    write_card_section(run_dir)
    send([run_dir / "model-card.md", *(folder / f"{one.name}.json" for one in evaluations)])


def read_evaluations(run_dir: Path) -> dict[str, Evaluation]:
    """Return the evaluations saved in a run folder, by name; raise a UserError if a saved file is not an evaluation."""
    found = {}
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        try:
            one = _STORED.validate_python(json.loads(read_regular(path, MAX_BYTES, inside=run_dir)))
        except UserError:
            raise
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"])) or "the file"
            raise UserError(f"{path} is not an evaluation ({place}: {error.errors()[0]['msg']}): delete it.") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is not an evaluation ({type(error).__name__}): delete it.") from None
        found[one.name] = one
    return found


def write_card_section(run_dir: Path) -> None:
    """List the evaluations, if any, in a section at the end of the model card; create the card if it does not exist."""
    evaluations = read_evaluations(run_dir)
    if not evaluations:
        return
    card = run_dir / "model-card.md"
    text = read_text(card, MAX_CARD_BYTES, inside=run_dir) if card.exists() else f"# {run_dir.resolve().name}\n"
    text = re.sub(rf"\n*^{HEADING}\n.*?(?=^## |\Z)", "\n\n", text, flags=re.MULTILINE | re.DOTALL).rstrip()
    notes = [in_a_cell(f"* {one.name}: {note}") for one in evaluations.values() for note in one.notes]
    below = "\n" + "\n".join(notes) + "\n" if notes else ""
    write_whole(card, f"{text}\n\n{HEADING}\n\n{table(evaluations.values()).markdown()}\n{below}")


@dataclass(frozen=True, repr=False)
class Measurements:
    """Figures of the validation split, or of other evaluations such as texts and tasks."""

    validation: dict[str, Any] | None
    """Loss, perplexity and bits per byte of the validation split; None if something else was measured."""
    evaluations: tuple[Evaluation, ...] = ()
    without_bits: str = ""
    """The reason to state if the validation split has no bits per byte."""
    rounded_to: str | None = None
    """The format to which weights were rounded while loading; None if they were not rounded."""

    def to_json(self) -> Any:
        """Return the figures as JSON with stable keys: a dict for the validation split, else a list of evaluations."""
        return self.validation if self.validation is not None else [one.summary() for one in self.evaluations]

    @property
    def table(self) -> Table | None:
        """A table with a row for each figure; None without evaluations."""
        return table(self.evaluations) if self.evaluations else None

    @cached_property
    def lines(self) -> list[str]:
        """Lines of text with the figures of the validation split, or with the losses by position and the bins of other
        evaluations."""
        return [f"{name:<15}  {value}" for name, value in self._rows()]

    @property
    def notes(self) -> list[str]:
        """Remarks on the evaluations, one per line."""
        return [f"{one.name}: {note}." for one in self.evaluations for note in one.notes]

    def __repr__(self) -> str:
        lines = [] if self.table is None else lines_of(self.table.rich())
        return "\n".join([*lines, *self.lines, *self.notes]).strip("\n")

    def _repr_html_(self) -> str:
        tables = [*([] if self.table is None else [self.table]), Table(("", ""), "ll", list(self._rows()))]
        return cell(*(one.html() for one in tables), *(html.paragraph(note, "note") for note in self.notes))

    def _rows(self) -> Iterator[tuple[str, str]]:
        if (found := self.validation) is not None:
            yield (
                "validation loss",
                f"{found['loss']:.4f} nats per token, {found['tokens']:,} tokens, step {found['step']:,}",
            )
            if self.rounded_to is not None:
                yield "weights", f"rounded to {self.rounded_to} as they were loaded; the run's own are in fp32"
            yield "perplexity", significant(found["perplexity"])
            bits, n_bytes = found["bits_per_byte"], found["text_bytes"]
            undefined = f"undefined: {self.without_bits}"
            yield "bits per byte", undefined if bits is None else f"{bits:.4f} over {n_bytes:,} bytes"
            for part in found.get("datasets", []):
                if part["loss"] is not None:
                    bits = part["bits_per_byte"]
                    note = "" if bits is None else f"  {bits:.4f} bits per byte"
                    yield f"of {part['name']}", f"{part['loss']:.4f} nats per token{note}"
            yield from _positions(found.get("positions", []))
            for name, value in found.get("compressors", {}).items():
                yield name.replace("_", " -"), f"{value:.4f}"
        for one in self.evaluations:
            yield from _positions(one.details.get("positions", []))
            for part in one.details.get("bins", []):
                if part["n_tokens"]:
                    yield (
                        f"given {part['low']:.2f} to {part['high']:.2f}",
                        f"{part['n_tokens']:>11,} tokens, mean {part['confidence']:.3f}, right {part['accuracy']:.3f}",
                    )


def _positions(positions: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for part in positions:
        bits = part["bits_per_byte"]
        note = "" if bits is None else f"  {bits:.4f} bits per byte"
        yield f"tokens {part['first']:>6,} to {part['last']:>6,}", f"{part['loss']:.4f} nats per token{note}"
