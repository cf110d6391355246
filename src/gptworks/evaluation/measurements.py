"""The figures of an evaluation, as text, as JSON and as tables in a notebook."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gptworks.evaluation.results import Evaluation, table
from gptworks.pages import parts as html
from gptworks.pages.cell import cell
from gptworks.pages.tables import Table
from gptworks.terminal import lines_of
from gptworks.units import significant

Row = tuple[str, str]


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
        own, rows = self.table, list(self._rows())
        return cell(
            *([] if own is None else [html.table(own.header, own.align, own.rows)]),
            *([html.table(("", ""), "ll", rows)] if rows else []),
            *(html.paragraph(note, "note") for note in self.notes),
        )

    def _rows(self) -> Iterator[Row]:
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


def _positions(positions: list[dict[str, Any]]) -> Iterator[Row]:
    for part in positions:
        bits = part["bits_per_byte"]
        note = "" if bits is None else f"  {bits:.4f} bits per byte"
        yield f"tokens {part['first']:>6,} to {part['last']:>6,}", f"{part['loss']:.4f} nats per token{note}"
