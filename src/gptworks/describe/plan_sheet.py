"""The plans of training and of serving: a terminal prints them as text, and a notebook shows them as tables."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group

from gptworks.describe.plan_tables import memory_words, named, plan_json, tables
from gptworks.pages.page import cell
from gptworks.pages.parts import paragraph
from gptworks.pages.tables import Table
from gptworks.planning.budget import Affordable
from gptworks.planning.run import Plan
from gptworks.planning.serving import Serving
from gptworks.terminal import lines_of
from gptworks.units import readable


class Tables:
    """Tables that a terminal prints as text and a notebook shows."""

    @property
    def note(self) -> str | None:
        """A remark below the tables, in `repr` and in a notebook; None without a remark. `__rich__` leaves it out."""
        return None

    def _tables(self) -> Iterable[Table]:
        raise NotImplementedError

    def __rich__(self) -> Group:
        return Group(*(table.rich() for table in self._tables()))

    def __repr__(self) -> str:
        return "\n".join([*lines_of(self.__rich__()), self.note or ""]).strip("\n")

    def _repr_html_(self) -> str:
        return cell(*(table.html() for table in self._tables()), *([paragraph(self.note)] if self.note else []))


@dataclass(frozen=True, repr=False)
class PlanSheet(Tables, Plan):
    """A plan of training, as text, tables and JSON."""

    details: bool = False
    """Whether to also show more figures, the FLOPs by part, other precisions and layouts, and the memory of
    inference."""
    affordable: Affordable | None = None
    """The training that a given time or budget allows; None if neither was given."""

    @property
    def note(self) -> str | None:
        return self.data.missing

    def _tables(self) -> Iterator[Table]:
        return tables(self, self.details, affordable=self.affordable)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON with stable keys."""
        return plan_json(self, self.affordable)


@dataclass(frozen=True, repr=False)
class ServingSheet(Tables, Serving):
    """The memory and speed of serving a model, as text, tables and JSON."""

    name: str = ""
    """Name of the recipe, run or preset."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON with stable keys."""
        return {
            "name": self.name,
            "parameters": self.parameters.total,
            "device": named(self.device, "name", "kind", "memory_bytes", "bandwidth", "source"),
            **_figures(self),
            "most_tokens_per_second": self.most_tokens_per_second,
            "alternatives": [_figures(one) for one in self.alternatives],
        }

    def _tables(self) -> Iterator[Table]:
        speed = self.most_tokens_per_second
        bandwidth = "" if self.device.bandwidth is None else f", {readable(self.device.bandwidth, 'B')}/s"
        tables = f", and {_size(self.tables_bytes)} of rotary tables" if self.tables_bytes else ""
        free = " free" if self.device.source == "this machine" else ""
        facts = [
            ("parameters", f"{self.parameters.total:,}"),
            (
                "device",
                f"{self.device.name}: {_size(self.device.memory_bytes)}{free}{bandwidth} ({self.device.source})",
            ),
            ("requests at once", f"{self.requests:,} of up to {self.context:,} tokens"),
            ("weights", f"{_size(self.weights_bytes)} in {self.weights}{tables}"),
            ("keys and values", f"{_size(self.cache_bytes)} in {self.cache}, with all texts at full length"),
            ("workspace of a step", f"about {_size(self.workspace_bytes)}"),
            ("memory", memory_words(self.total_bytes, self.device)),
            ("requests that fit", f"{self.most_requests:,}"),
            (
                "tokens",
                "unknown (--bandwidth gives the bytes/s of the memory)"
                if speed is None
                else f"at most {speed:,.0f} a second for all requests: each step reads the weights once",
            ),
        ]
        yield Table((self.name, "serving"), "ll", facts)
        rows = [
            (
                f"{one.weights}, {one.cache}",
                *map(_size, (one.weights_bytes, one.cache_bytes, one.total_bytes)),
                f"{one.most_requests:,}",
            )
            for one in self.alternatives
        ]
        yield Table(("weights, cache", "weights", "keys and values", "memory", "requests that fit"), "lrrrr", rows)


def _figures(one: Serving) -> dict[str, Any]:
    sizes = ("weights_bytes", "cache_bytes", "workspace_bytes", "total_bytes")
    return named(one, "requests", "context", "weights", "cache", *sizes, "fits", "most_requests")


def _size(n_bytes: int) -> str:
    return readable(n_bytes, "B")
