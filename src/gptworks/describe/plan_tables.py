"""Formats the output of `gptworks plan` as tables and as JSON. Units are decimal (1 GB is 10⁹ bytes)."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from gptworks.describe.sheet import WORDS, parameters_json
from gptworks.pages.tables import Table
from gptworks.planning.assumed import COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER
from gptworks.planning.budget import Affordable
from gptworks.planning.device_table import DEVICES
from gptworks.planning.devices import Device
from gptworks.planning.fit import layout_words
from gptworks.planning.host import PROCESS_BYTES, expert_kernels_bytes
from gptworks.planning.inference import BATCHES
from gptworks.planning.run import Plan
from gptworks.planning.setting import Setting
from gptworks.units import duration, epochs_words, readable

_WORDS = WORDS | {
    "weights_average": "weights' average",
    "adapter_inputs": "adapter's inputs",
    "other_models": "weights of a teacher or of the start",
    "weight_copies": "product-precision copies of weights",
    "attention_output": "output projection",
    "teacher": "teacher's forward pass",
    "sampling_policy": "forward pass over the answers sampled",
    "reference": "forward pass of the start",
    "weights_again": "weights for the backward pass",
    "weights_to_generate": "weights to generate answers",
    "whole_gradients": "gradients of vectors",
    "gradients_alike": "gradients of what each tensor rank has whole",
    "gathered_matrices": "matrices gathered by their owners",
    "updates": "updates sent by the matrices' owners",
}
_UNMEASURED = "--device this measures this machine's speed"


def words(part: str) -> str:
    """Return the displayed name of a part of the memory, the FLOPs or the communication."""
    return _WORDS.get(part, part.replace("_", " "))


def tables(
    plan: Plan, details: bool = False, unmeasured: str = _UNMEASURED, affordable: Affordable | None = None
) -> Iterator[Table]:
    """Yield tables of the plan's main figures, of affordable training if given, of the memory, of changes if the run
    does not fit, and of the traced and measured memory of a step if known.

    Args:
        details: whether to add more figures, FLOPs by part, other precisions and layouts, and the memory of inference.
        unmeasured: advice to print if the machine's speed is unknown.
    """
    yield Table((plan.recipe.name, "plan"), "ll", _facts(plan, details, unmeasured))
    if affordable is not None:
        yield _affordable(plan, affordable)
    yield _memory(plan)
    if plan.changes:
        rows = [(readable(change.peak_bytes, "B"), change.words, change.costs) for change in plan.changes]
        if (other := plan.smallest_device) is not None:
            memory = readable(DEVICES[other].memory_bytes, "B")
            rows.append(
                (
                    readable(plan.peak.total_bytes, "B"),
                    f"--device {other}",
                    f"a device of {memory}, which holds the run as it is",
                )
            )
        title = "would fit, cheapest first" if plan.changes[0].fits else "not even this fits"
        if title.startswith("not") and plan.changes[0].peak_bytes <= plan.device.memory_bytes:
            title += ": the host's memory"
        yield Table(("peak", title, "at the cost of"), "rll", rows)
    if plan.traced_bytes is not None or plan.measured is not None:
        yield _checks(plan)
    if details:
        yield _work(plan)
        yield _alternatives(plan)
        yield _inference(plan)


def _work(plan: Plan) -> Table:
    parts = plan.flops_by_part
    rows = [(words(part), flop(forward), flop(backward)) for part, (forward, backward) in parts.items()]
    total = [sum(column) for column in zip(*parts.values(), strict=True)]
    return Table(("FLOPs a token", "forward", "backward"), "lrr", [*rows, ("total", *map(flop, total))])


def flop(flops: float | None) -> str:
    return "unknown" if flops is None else readable(flops, "FLOP")


def _or_unknown(value: float | None, form: str = ",") -> str:
    return "unknown" if value is None else f"{value:{form}}"


def _facts(plan: Plan, details: bool, unmeasured: str) -> list[tuple[str, str]]:
    optimal = f"about {COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER} are compute-optimal (Hoffmann et al., 2022)"
    shards = f"{plan.shard_bytes_per_token} B a token"
    if plan.shards_bytes is not None:
        shards = f"{'about ' if plan.data.estimated else ''}{readable(plan.shards_bytes, 'B')} ({shards})"
    count, about = plan.parameters, "about " if plan.data.estimated else ""
    most = "at most " if plan.at_most else ""
    samples = "pairs" if plan.recipe.objective.rows_per_sample == 2 else "sequences"
    before = plan.flops_before_first_step
    facts = [
        ("parameters", f"{count.total:,}"),
        *([("active for a token", f"{count.active:,}")] if count.active != count.total else []),
        *([("trained of them", f"{plan.trained.parameters:,}")] if plan.recipe.adapter or plan.recipe.freeze else []),
        *([("outside the embeddings", f"{count.non_embedding:,}")] if details else []),
        *([("objective", objective)] if (objective := _objective(plan)) else []),
        ("tokens a step", f"{most}{plan.tokens_per_step:,} ({_batch(plan)})"),
        ("steps", f"{_or_unknown(plan.steps)} ({plan.steps_reason})"),
        ("tokens in all", _or_unknown(plan.tokens) if plan.tokens is None else f"{about}{most}{plan.tokens:,}"),
        *([("epochs of each dataset", about + epochs_words(plan.epochs_by_dataset))] if plan.epochs_by_dataset else []),
        ("tokens a parameter", f"{_or_unknown(plan.tokens_per_parameter, '.3g')} ({optimal})"),
    ]
    if details:
        facts += [
            ("training FLOPs a token", flop(plan.flops_per_token)),
            ("training FLOPs a step", flop(plan.flops_per_step)),
            *([("FLOPs before the first step", flop(before))] if before != 0 else []),
        ]
    facts += [
        ("training FLOPs in all", f"{'' if plan.total_flops is None else most}{flop(plan.total_flops)}"),
        ("device", _device(plan)),
        ("step", ", ".join(_step(plan))),
        ("memory of a device", _fit(plan)),
        *([("memory of the host", plan.host.words)] if plan.host is not None else []),
        ("largest micro-batch that fits", f"{plan.largest_micro_batch_size:,} {samples}"),
        *_many_ranks(plan),
        ("time", _time(plan, unmeasured)),
        *([("cost", _cost(plan))] if plan.price is not None else []),
    ]
    if details:
        facts += [
            ("weights on disk", readable(plan.weights_bytes, "B")),
            ("one checkpoint on disk", readable(plan.checkpoint_bytes, "B")),
        ]
    return [*facts, ("checkpoints on disk, at most", _checkpoints(plan)), ("token shards on disk", shards)]


def _step(plan: Plan) -> Iterator[str]:
    train, base = plan.train, plan.trained.base
    yield from (plan.setting.precision, f"checkpointing {plan.setting.checkpointing}", train.optimizer)
    if train.optimizer_state != "fp32":
        yield f"moments in {train.optimizer_state}"
    if base != "full":
        yield f"the base in {base}"


def _checkpoints(plan: Plan) -> str:
    each, every = readable(plan.checkpoint_bytes, "B"), plan.train.keep_every
    if plan.checkpoints_bytes is None:
        return f"unknown: {each} each, and those at multiples of keep_every={every} steps stay"
    light = f", {plan.weights_only_at_peak:,} of weights only, {readable(plan.weights_bytes, 'B')}"
    parts = f"{plan.most_checkpoints:,} of {each}{light if plan.weights_only_at_peak else ''}"
    return f"{readable(plan.checkpoints_bytes, 'B')} ({parts})"


def _objective(plan: Plan) -> str:
    """Return text that names the objective and the rows, passes and weights that the figures count because of it; empty
    if there are none."""
    objective = plan.recipe.objective
    paired, answers = objective.rows_per_sample == 2, "text" not in objective.sources
    counted = {
        "both answers of a pair at the full context": paired and plan.at_most,
        "both answers of a pair as long as they are": paired and not plan.at_most,
        "rows at the full context": answers and not paired,
        "what the start gives each row once": objective.scores_start,
        "the teacher's forward pass and weights": objective.teacher_run is not None,
        "the weights of the start": objective.keeps_start,
        "the weights read once for each token sampled": objective.rollouts is not None,
    }
    words = ", and ".join(phrase for phrase, is_counted in counted.items() if is_counted)
    return f"{objective.type}: the figures count {words}" if words else ""


def _batch(plan: Plan) -> str:
    s = plan.setting
    ranks = f" on each of {s.layout.data_parallel:,} ranks" if s.layout.data_parallel > 1 else ""
    whole = plan.train.in_words(s.row_length, s.objective.rows_per_sample)
    return f"{whole}; {s.micro_batch_size:,} at a time{ranks}"


def _device(plan: Plan) -> str:
    d, layout = plan.device, plan.setting.layout
    rate = d.flops(plan.setting.precision)
    figures = [readable(d.memory_bytes, "B") + (" free" if d.source == "this machine" else "")]
    figures += [f"{readable(rate, 'FLOP')}/s in {plan.setting.precision}"] if rate else []
    figures += [f"{readable(d.bandwidth, 'B')}/s"] if d.bandwidth else []
    count = f"{layout.world_size:,} × " if layout.world_size > 1 else ""
    spread = f", {layout_words(layout)}" if layout.world_size > 1 else ""
    return f"{count}{d.name}: {', '.join(figures)} ({d.source}){spread}"


def _many_ranks(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield facts (label, text) about the network and the parts of a step's time; for one device, yield nothing."""
    device, layout = plan.device, plan.setting.layout
    if layout.world_size == 1:
        return
    within, between = readable(device.intra_node, "B"), readable(device.inter_node, "B")
    nodes = f"{min(device.per_node, layout.world_size):,} of a node"
    yield "network of a device", f"{within}/s to the {nodes}, {between}/s to others ({device.network_source})"
    yield "each rank sends in a step", _sent(plan)
    if (times := plan.step_time) is not None:
        yield "computing a step", duration(times.compute)
        yield "communication of a step", f"{duration(times.communication)} at these rates, latency not counted"
        yield "not hidden by computing", duration(times.exposed)


def _sent(plan: Plan) -> str:
    parts = ", ".join(f"{words(what)} {readable(n, 'B')}" for what, n in plan.sent_bytes.items())
    return f"{readable(sum(plan.sent_bytes.values()), 'B')} ({parts})"


def memory_words(needed_bytes: int, device: Device, when: str = "") -> str:
    """Return text with the bytes needed, their share of the device's memory and, on a CPU, the process's own bytes."""
    share = needed_bytes / max(device.memory_bytes, 1)
    times = f"{share:.3g}" if share >= 1.01 else f"{max(share, 1.001):.4g}"  # never "1 times"
    fit = f"{share:.0%} of what there is" if share <= 1 else f"DOES NOT FIT: {times} times what there is"
    process = f"; Python, torch and kernels take about {readable(PROCESS_BYTES, 'B')} more" if device.on_cpu else ""
    return f"{readable(needed_bytes, 'B')}{when}, {fit}{process}"


def _fit(plan: Plan) -> str:
    words, compiled = (
        memory_words(plan.peak.total_bytes, plan.device, " at the peak"),
        expert_kernels_bytes(plan.setting),
    )
    if plan.device.on_cpu and compiled:
        words += f", and kernels for each number of an expert's tokens at most {readable(compiled, 'B')}"
    return words


def _time(plan: Plan, unmeasured: str) -> str:
    speed = plan.tokens_per_second
    if speed is None:
        missing = unmeasured if plan.device.on_cpu else "--flops gives the device's dense FLOP/s"
        return f"unknown ({missing})"
    how = "as measured" if plan.measured else f"at {plan.utilization:.0%} of the device's rate"
    length = "unknown" if plan.seconds is None else duration(plan.seconds)
    length = f"at most {length}" if plan.at_most and plan.seconds is not None else length
    return f"{length}, {speed:,.0f} tokens/s {how}"


def _cost(plan: Plan) -> str:
    most = "at most " if plan.at_most else ""
    if plan.cost is None or plan.device_hours is None:
        return "unknown, as the time is"
    return f"{most}{plan.cost:,.2f}: {plan.device_hours:,.4g} hours of a device at {plan.price:g}"


def _affordable(plan: Plan, found: Affordable) -> Table:
    count = f"{plan.setting.layout.world_size:,} × " if plan.setting.layout.world_size > 1 else ""
    paid = f", {plan.price * plan.n_priced * found.seconds / 3600:,.2f}" if plan.price is not None else ""
    title = f"{duration(found.seconds)} of {count}{plan.device.name}{paid}"
    each = found.tokens / plan.parameters.total
    rows = [
        ("FLOPs", flop(found.flops)),
        ("this model reads", f"{found.tokens:,} tokens, {each:.3g} a parameter: train.max_steps={found.steps}"),
    ]
    if (largest := found.largest) is None:
        return Table((title, ""), "ll", [*rows, ("largest model", f"none: {found.why_none}")])
    law = f"{largest.tokens / largest.parameters:.3g} a parameter"
    law += ", all that the time allows; memory limits the model" if largest.limited_by_memory else ""
    source = f"{COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER} are compute-optimal (Hoffmann et al., 2022)"
    rows += [
        ("largest model", f"{largest.parameters:,} parameters in {duration(largest.seconds)}"),
        ("its tokens", f"{largest.tokens:,}, {law} ({source})"),
        ("its settings", " ".join(largest.overrides)),
    ]
    return Table((title, ""), "ll", rows)


def _memory(plan: Plan) -> Table:
    peak = plan.peak
    parts = sorted(peak.parts.items(), key=lambda item: -item[1])
    shown = [(part, n_bytes) for part, n_bytes in parts if n_bytes >= peak.total_bytes / 1000]
    others = peak.total_bytes - sum(n_bytes for _, n_bytes in shown)
    shown += [("others", others)] if others else []
    rows = [(words(part), readable(n, "B"), f"{n / peak.total_bytes:.1%}") for part, n in shown]
    total = ("total", readable(peak.total_bytes, "B"), "")
    return Table((f"memory of a device at the peak: {peak.moment}", "", "share"), "lrr", [*rows, total])


def _checks(plan: Plan) -> Table:
    """Return a table that compares the predicted peak memory of a step with the traced and the measured peak memory."""
    rows = [("predicted", plan.step_bytes)]
    rows += [] if plan.traced_bytes is None else [("traced", plan.traced_bytes)]
    if plan.measured is not None:
        held = {"measured": plan.measured.peak_bytes, "with freed memory kept": plan.measured.kept_bytes}
        rows += [(name, n_bytes) for name, n_bytes in held.items() if n_bytes is not None]
    cells = [(name, readable(n, "B"), f"{plan.step_bytes / n - 1:+.1%}") for name, n in rows]
    return Table(("a step's peak, no checkpoint being written", "", "predicted is off by"), "lrr", cells)


def _alternatives(plan: Plan) -> Table:
    """Return a table of peak memory by precision and checkpointing (rows) and layout (columns)."""
    layouts = list(dict.fromkeys(layout_words(each.setting.layout) for each in plan.alternatives))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in plan.alternatives:
        mark = "" if each.peak_bytes <= plan.device.memory_bytes else " !"
        cells = rows.setdefault((each.setting.precision, each.setting.checkpointing), {})
        cells[layout_words(each.setting.layout)] = readable(each.peak_bytes, "B") + mark
    header = ("peaks (! does not fit)", *layouts)
    kinds = {"none": "", "block": ", checkpointing"}
    body = [
        (f"{precision}{kinds[how]}", *(cells.get(layout, "") for layout in layouts))
        for (precision, how), cells in rows.items()
    ]
    return Table(header, "l" + "r" * len(layouts), body)


def _inference(plan: Plan) -> Table:
    length = plan.setting.model.context_length
    header = (f"inference, {length:,} tokens of context", "weights", *(f"+ cache of {b}" for b in BATCHES))
    rows = [
        (m.weights, readable(m.weights_bytes, "B"), *(readable(m.total_bytes(b), "B") for b in BATCHES))
        for m in plan.inference
    ]
    return Table(header, "lr" + "r" * len(BATCHES), rows)


def plan_json(plan: Plan, affordable: Affordable | None = None) -> dict[str, Any]:
    """Return the plan as JSON with stable keys; unknown figures are null."""
    setting, device, layout = plan.setting, plan.device, plan.setting.layout
    return {
        "name": plan.recipe.name,
        "parameters": parameters_json(plan.parameters),
        "objective": plan.recipe.objective.type,
        **named(plan, "tokens_per_step", "steps", "steps_reason", "tokens", "at_most"),
        "train_tokens": plan.data.train_tokens,
        "train_tokens_estimated": plan.data.estimated,
        **({"epochs_by_dataset": plan.epochs_by_dataset} if plan.epochs_by_dataset else {}),
        **named(plan, "tokens_per_parameter", "compute_optimal_tokens"),
        "flops": {
            "per_token": plan.flops_per_token,
            "per_step": plan.flops_per_step,
            "before_first_step": plan.flops_before_first_step,
            "total": plan.total_flops,
        },
        "flops_by_part": {
            part: {"forward": forward, "backward": backward} for part, (forward, backward) in plan.flops_by_part.items()
        },
        "step": _step_json(setting)
        | named(setting, "optimizer", "micro_batch_size")
        | {"gathers": layout.gathers if layout.sharding != "none" else None},
        "device": named(device, "name", "kind", "memory_bytes", "source")
        | {"flops_per_second": device.flops(setting.precision), "bytes_per_second": device.bandwidth},
        "memory": {
            "peak_bytes": plan.peak.total_bytes,
            **named(plan.peak, "moment", "parts"),
            "alternatives": [_step_json(each.setting) | {"peak_bytes": each.peak_bytes} for each in plan.alternatives],
        },
        "host_memory": None
        if plan.host is None
        else named(plan.host, "moment", "n_ranks", "rank_bytes", "copied_bytes", "total_bytes", "limit_bytes"),
        "fit": named(plan, "fits", "largest_micro_batch_size", "smallest_device")
        | {
            "changes": [
                named(change, "words", "costs", "peak_bytes", "fits", "ranks_per_node")
                | {"overrides": list(change.overrides), "world_size": change.n_ranks}
                for change in plan.changes
            ],
        },
        "time": named(plan, "seconds", "tokens_per_second")
        | {"utilization": None if plan.measured else plan.utilization},
        "cost": named(plan, "price", "device_hours", "cost"),
        "affordable": None if affordable is None else asdict(affordable),
        "network": _network_json(plan),
        **named(plan, "step_bytes", "traced_bytes"),
        "measured": None if plan.measured is None else vars(plan.measured),
        "inference": [
            named(m, "weights", "weights_bytes")
            | {"cache_bytes": {f"batch_{n}": size for n, size in m.cache_bytes.items()}}
            for m in plan.inference
        ],
        "disk": named(plan, "weights_bytes", "optimizer_state_bytes", "checkpoint_bytes", "checkpoints_bytes")
        | named(plan, "most_checkpoints", "shard_bytes_per_token", "shards_bytes")
        | {"weights_only_checkpoints_at_peak": plan.weights_only_at_peak},
    }


def _network_json(plan: Plan) -> dict[str, Any] | None:
    """Return the `network` part of `plan_json`; None for one device."""
    device, times = plan.device, plan.step_time
    if plan.setting.layout.world_size == 1:
        return None
    return {
        "intra_node_bytes_per_second": device.intra_node,
        "inter_node_bytes_per_second": device.inter_node,
        "devices_per_node": device.per_node,
        "source": device.network_source,
        "sent_bytes_per_step": plan.sent_bytes,
        "compute_seconds_per_step": None if times is None else times.compute,
        "communication_seconds_per_step": None if times is None else times.communication,
        "exposed_seconds_per_step": None if times is None else times.exposed,
    }


def _step_json(setting: Setting) -> dict[str, Any]:
    own = {"precision": setting.precision, "activation_checkpointing": setting.checkpointing}
    return own | named(setting.layout, "sharding", "data_parallel", "tensor_parallel")


def named(thing: object, *names: str) -> dict[str, Any]:
    """Return an object's attributes with these names, by name."""
    return {name: getattr(thing, name) for name in names}
