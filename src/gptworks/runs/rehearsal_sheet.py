"""Show the rehearsal of a training run as text for a terminal, as a page and as JSON. Each line has a status: shown on
this machine, planned, or not checked."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from markupsafe import Markup

from gptworks.describe.plan_sheet import Tables
from gptworks.describe.plan_tables import plan_json, words
from gptworks.pages import parts as html
from gptworks.pages.page import page
from gptworks.pages.tables import Table
from gptworks.planning.fit import layout_words
from gptworks.planning.host import building_bytes, placed_bytes
from gptworks.planning.network import machines
from gptworks.training.rehearsal.dress import Rehearsed, Traffic
from gptworks.training.rehearsal.fake_cuda import Finding, Kind
from gptworks.units import counted, duration, readable

Status = Literal["shown", "planned", "not checked"]


@dataclass(frozen=True)
class Line:
    """One result of a rehearsal, with its status."""

    what: str
    status: Status
    found: str
    figures: dict[str, float | int | str | None] = field(default_factory=dict)
    """Exact figures of the line, by name."""


def sections(rehearsed: Rehearsed) -> dict[str, list[Line]]:
    """Return the lines of a rehearsal by the titles of its sections."""
    made = {
        "before the start": _before, "step": _step, "ranks": _ranks, "memory and time": _memory_and_time,
        "data, disk and cost": _data_and_cost,
    }  # fmt: skip
    return {title: list(lines(rehearsed)) for title, lines in made.items()}


def _before(r: Rehearsed) -> Iterator[Line]:
    for check in r.checks:
        yield Line(check.what, "shown", check.problem or "passed")
    if not r.checks:
        yield Line("a run's inputs", "not checked", "a preset names no data, run folder or weights to start from")


_KINDS: dict[Kind, tuple[str, str]] = {
    "failed": ("a step on fake CUDA tensors", "runs to its end"),
    "wrong device": ("devices of its tensors", "all operations have their tensors on the GPU"),
    "host read": ("waits for the GPU", "none"),
    "blocking copy": ("copies that wait", "none"),
    "float32 product": ("products in float32", "none"),
    "graph break": ("graph breaks", "none"),
}
"""The subject of each kind of finding, and the text to print if there is no finding."""


def _step(r: Rehearsed) -> Iterator[Line]:
    step = r.step
    if step is None:
        yield Line("a step on fake CUDA tensors", "not checked", f"{r.plan.device.name} is not a CUDA GPU")
        return
    if step.not_checked is not None:
        yield Line("a step on fake CUDA tensors", "not checked", step.not_checked)
        return
    for kind, (what, good) in _KINDS.items():
        if kind == "graph break" and step.n_graphs is None:
            yield Line(what, "not checked", "train.compile compiles no block")
            continue
        found = [one for one in step.findings if one.kind == kind]
        words = "; ".join(f"{one.count} × {one.operation} at {one.where}{_why(one)}" for one in found)
        yield Line(what, "shown", words or good, {"count": step.count(kind)})
    products = ", ".join(f"{n:,} in {dtype}" for dtype, n in step.products)
    yield Line("products of matrices", "shown", products, dict(step.products))
    yield Line("speed of kernels", "not checked", f"nothing was computed on {r.plan.device.name}")


def _why(one: Finding) -> str:
    return f" ({one.expected})" if one.expected is not None else ""


def _ranks(r: Rehearsed) -> Iterator[Line]:
    layout, placed = r.plan.setting.layout, r.placement
    if placed is None:
        yield Line("placement", "shown", "one device: nothing is divided and nothing is sent")
        return
    if placed.not_checked is not None:
        yield Line("placement", "not checked", placed.not_checked)
        if placed.not_built is not None:
            yield _built(r)
        return
    first, last = placed.ranks[0], placed.ranks[-1]
    parts, planned = first.held_bytes, placed_bytes(r.plan.setting)
    yield Line(
        "parts of the model on rank 0", "shown",
        f"{readable(parts, 'B')} of {layout_words(layout)}; {_against(parts, planned)}; rank {last.rank:,} holds "
        f"{readable(last.held_bytes, 'B')}",
        {"bytes": parts, "planned_bytes": planned, "last_rank_bytes": last.held_bytes},
    )  # fmt: skip
    yield _built(r)
    for one in r.traffic:
        yield _traffic(one)
    yield Line(
        "order of collectives", "shown",
        f"ranks 0 and {last.rank:,} begin the same {len(first.second):,} collectives in the same order"
        if r.in_order else f"ranks 0 and {last.rank:,} begin different collectives: they would wait for each other",
        {"collectives": len(first.second), "same": r.in_order},
    )  # fmt: skip
    yield Line(
        "memory of rank 0's tensors in a step", "shown",
        f"{readable(first.peak_bytes, 'B')} on fake tensors of a CPU; {_against(first.peak_bytes, r.step_bytes)}",
        {"bytes": first.peak_bytes, "planned_bytes": r.step_bytes},
    )  # fmt: skip
    yield Line("network", "not checked", "no byte was sent: rates and latencies are those of the plan")


def _built(r: Rehearsed) -> Line:
    assert r.placement is not None
    built, what = r.placement.built, "building rank 0's parts in memory"
    if built is None:
        return Line(what, "not checked", r.placement.not_built or "")
    planned = building_bytes(replace(r.plan.setting, on_cpu=True))  # the process is both device and host
    grown = built.grown_bytes
    held = "the system reports no peak" if grown is None else f"{readable(grown, 'B')} more than the process before"
    return Line(
        what, "shown", f"{held}, {readable(planned, 'B')} planned; {duration(built.seconds)} on this machine",
        {"grown_bytes": grown, "planned_bytes": planned, "seconds": built.seconds, "held_bytes": built.held_bytes},
    )  # fmt: skip


def _traffic(one: Traffic) -> Line:
    along = {"data": "data-parallel ranks", "tensor": "tensor-parallel ranks", "all": "all ranks"}[one.dimension]
    of = ", ".join(map(words, one.what)) or "not in the plan"
    against = "as planned" if one.as_planned else _against(one.shown_bytes, one.planned_bytes)
    if one.kind == "all_to_all" and not one.as_planned:
        against += ", the mean of all ranks: a rank sends more where it owns more matrices"
    return Line(
        f"{one.kind.replace('_', '-')} over {along}", "shown",
        f"{readable(one.shown_bytes, 'B')} a step ({of}); {against}",
        {
            "kind": one.kind, "dimension": one.dimension, "bytes": one.shown_bytes, "planned_bytes": one.planned_bytes,
            "as_planned": int(one.as_planned),
        },
    )  # fmt: skip


def _against(shown: int, planned: int) -> str:
    """Return text that compares shown bytes with planned bytes."""
    if not planned:
        return "nothing planned" if shown else "as planned"
    off = shown / planned - 1
    return "as planned" if abs(off) < 0.01 else f"{readable(planned, 'B')} planned: {off:+.1%}"


def _memory_and_time(r: Rehearsed) -> Iterator[Line]:
    plan = r.plan
    share = plan.peak.total_bytes / max(1, plan.device.memory_bytes)
    yield Line(
        "memory of a device", "planned",
        f"{readable(plan.peak.total_bytes, 'B')} at the peak, {share:.0%} of {readable(plan.device.memory_bytes, 'B')} "
        f"({plan.device.name}); reached during: {plan.peak.moment}",
        {"bytes": plan.peak.total_bytes, "device_bytes": plan.device.memory_bytes},
    )  # fmt: skip
    if plan.host is not None:
        yield Line("memory of a host", "planned", plan.host.words, {"bytes": plan.host.total_bytes})
    if plan.tokens_per_second is None or plan.step_time is None:
        yield Line("time of a step", "not checked", f"the speed of {plan.device.name} is not known")
        return
    seconds = plan.tokens_per_step / plan.tokens_per_second
    sent = sum(plan.sent_bytes.values())
    network = f"; a rank sends {readable(sent, 'B')}, {duration(plan.step_time.exposed)} of it not hidden by computing"
    yield Line(
        "time of a step", "planned",
        f"{duration(seconds)} for {plan.tokens_per_step:,} tokens: {duration(plan.step_time.compute)} computing at "
        f"{plan.utilization:.0%} of the device's rate{network if sent else ''}",
        {
            "seconds": seconds, "compute_seconds": plan.step_time.compute, "exposed_seconds": plan.step_time.exposed,
            "sent_bytes": sent, "tokens_per_second": plan.tokens_per_second,
        },
    )  # fmt: skip


def _data_and_cost(r: Rehearsed) -> Iterator[Line]:
    plan = r.plan
    tokens, shards = plan.data.train_tokens, plan.shards_bytes
    about = "about " if plan.data.estimated else ""
    if tokens is None:
        unknown = "the number of its tokens is not known" if r.checks else "a preset names none"
        yield Line("data", "not checked", plan.data.missing or unknown)
    else:
        yield Line(
            "data", "planned" if plan.data.estimated else "shown",
            f"{about}{tokens:,} training tokens, {readable(shards or 0, 'B')} of shards",
            {"tokens": tokens, "shards_bytes": shards},
        )  # fmt: skip
    steps = "unknown" if plan.steps is None else f"{plan.steps:,}"
    read = "" if plan.tokens is None else f"; {plan.tokens:,} tokens are read"
    epochs = "" if plan.tokens is None or not tokens else f", {plan.tokens / tokens:.3g} for each there is"
    yield Line("steps", "planned", f"{steps} ({plan.steps_reason}){read}{epochs}", {"steps": plan.steps})
    disk = r.disk_gb_per_second
    yield Line(
        "a checkpoint", "planned",
        f"{readable(plan.checkpoint_bytes, 'B')}, written in {duration(r.write_seconds)} at {disk:g} GB/s",
        {"bytes": plan.checkpoint_bytes, "write_seconds": r.write_seconds, "disk_gb_per_second": disk},
    )  # fmt: skip
    kept = plan.checkpoints_bytes
    each = "unknown" if kept is None else f"at most {plan.most_checkpoints:,}, {readable(kept, 'B')}"
    yield Line("checkpoints on disk", "planned", each, {"bytes": kept, "checkpoints": plan.most_checkpoints})
    if plan.seconds is None or plan.device_hours is None:
        yield Line("time", "not checked", "it depends on what is not known: the data, the length or the speed")
        return
    layout = plan.setting.layout
    nodes = counted(machines(layout, plan.device), "node")
    yield Line(
        "time", "planned",
        f"{duration(plan.seconds)} on {counted(layout.world_size, 'device')} in {nodes}, without evaluations and "
        f"samples: {plan.device_hours:,.4g} hours of a device",
        {"seconds": plan.seconds, "device_hours": plan.device_hours, "devices": layout.world_size},
    )  # fmt: skip
    if plan.cost is None:
        yield Line("cost", "not checked", "--price gives the price of an hour of a device")
    else:
        yield Line("cost", "planned", f"{plan.cost:,.2f} at {plan.price:g} an hour of a device", {"cost": plan.cost})


# -------------------------------------------------------------------------------------------- as text, page and JSON


def _titled(rehearsed: Rehearsed) -> Iterator[tuple[str, Table]]:
    for title, lines in sections(rehearsed).items():
        yield title, Table((title, "", ""), "lln", [(one.what, one.status, one.found) for one in lines])


def _advice(rehearsed: Rehearsed) -> Table:
    rows = [(f"{n}.", one.reason, " ".join(one.settings)) for n, one in enumerate(rehearsed.advice, 1)]
    return Table(("", "to change", "settings to write"), "lnn", rows or [("", "nothing found", "")])


class RehearsalSheet(Tables, Rehearsed):
    """A rehearsal, as text, tables, page and JSON."""

    def _tables(self) -> Iterator[Table]:
        yield from (table for _, table in _titled(self))
        yield _advice(self)

    def to_json(self) -> dict[str, Any]:
        """Return the rehearsal as JSON with stable keys."""
        return {
            "name": self.plan.recipe.name,
            "world_size": self.plan.setting.layout.world_size,
            "sections": {title: [asdict(one) for one in lines] for title, lines in sections(self).items()},
            "to_change": [asdict(one) for one in self.advice],
            "plan": plan_json(self.plan),
        }

    def to_html(self) -> str:
        """Return the rehearsal as a page."""
        plan = self.plan
        count = counted(plan.setting.layout.world_size, "device")
        parts: list[Markup] = [html.section(title, table.html()) for title, table in _titled(self)]
        lines = [
            f"{plan.parameters.total:,} parameters on {count}: {plan.device.name}, {layout_words(plan.setting.layout)}"
        ]
        return page(
            f"Rehearsal of {plan.recipe.name}",
            lines,
            [*parts, html.section("to change", _advice(self).html())],
            _FOOTER,
        )


_FOOTER = (
    "shown: done on this machine by the code of training. planned: from the recipe and the device's datasheet. "
    "not checked: needs the devices, or what the line names. kB, MB and GB are decimal. Written by gptworks rehearse."
)
