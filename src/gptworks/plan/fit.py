"""What fits on a device: the largest micro-batch, and the least that must change where a run does not fit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gptworks.plan.devices import Device
from gptworks.plan.memory import ONE_DEVICE, Layout, Setting, training_peak

LARGEST_BATCH = 4096
"""Sequences beyond which nobody asks what fits."""

MOST_DEVICES = 4096

COMPARED_DEVICES = 8
"""Devices for which sharding is shown where a plan has one."""


@dataclass(frozen=True)
class Alternative:
    """Another way to run the same step, and what it takes on each device."""

    setting: Setting
    peak_bytes: int


@dataclass(frozen=True)
class Change:
    """Settings to change, as a user writes them, and the peak that results."""

    words: str
    peak_bytes: int
    fits: bool


def largest_micro_batch(setting: Setting, capacity_bytes: int) -> int:
    """The most sequences at a time whose step fits; 0 where one is too many."""

    def fits(size: int) -> bool:
        return training_peak(replace(setting, micro_batch_size=size)).total_bytes <= capacity_bytes

    low, high = 0, 1
    while high <= LARGEST_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def alternatives(setting: Setting, precisions: tuple[str, ...]) -> list[Alternative]:
    """Each precision, with and without checkpointing, in each layout, at the same micro-batch."""
    n = setting.layout.world_size if setting.layout.world_size > 1 else COMPARED_DEVICES
    layouts = [ONE_DEVICE, Layout("zero2", n), Layout("fsdp", n)]
    layouts += [Layout("none", 1, COMPARED_DEVICES)] if can_split(setting, COMPARED_DEVICES) else []
    settings = [
        replace(setting, precision=precision, checkpointing=checkpointing, layout=layout)
        for precision in precisions
        for checkpointing in ("none", "block")
        for layout in layouts
    ]
    return [Alternative(each, training_peak(each).total_bytes) for each in settings]


def can_split(setting: Setting, tensor_parallel: int) -> bool:
    """Whether every head and the MLP's width divide among so many tensor-parallel ranks."""
    model = setting.model
    return not any(n % tensor_parallel for n in (model.n_heads, model.n_kv_heads, model.d_ff))


def layout_words(layout: Layout) -> str:
    """`8 × FSDP`."""
    name = {"none": "DDP", "zero2": "ZeRO-2", "fsdp": "FSDP"}[layout.sharding]
    parts = [f"{layout.data_parallel:,} × {name}"] if layout.data_parallel > 1 else []
    parts += [f"{layout.tensor_parallel} × tensor"] if layout.tensor_parallel > 1 else []
    return ", ".join(parts) or "one device"


def changes_that_fit(setting: Setting, device: Device, capacity_bytes: int) -> list[Change]:
    """What to change so that the step fits, one of each kind, cheapest first; where nothing does, the furthest tried.

    A smaller micro-batch changes nothing but the speed, bf16 rounds products, checkpointing computes each block's
    forward pass again, sharding needs more devices and a network between them.
    """
    found: list[Change] = []
    last: Change | None = None
    for kind in _candidates(setting, device):
        if len(kind) > 1 and found:
            break  # more devices are the last resort
        for tried, words in kind:
            last = _with_fitting_micro_batch(tried, words, capacity_bytes)
            if last.fits:
                found.append(last)
                break
    return found or ([last] if last is not None else [])


def _with_fitting_micro_batch(setting: Setting, words: list[str], capacity_bytes: int) -> Change:
    """The setting with its micro-batch, or the largest divisor of it that fits; 1 where none does."""
    whole = setting.micro_batch_size
    peak_bytes = training_peak(smaller := replace(setting, micro_batch_size=1)).total_bytes
    if peak_bytes <= capacity_bytes:
        for size in (size for size in range(whole, 0, -1) if whole % size == 0):
            smaller = replace(setting, micro_batch_size=size, accumulates=setting.accumulates or size < whole)
            peak_bytes = training_peak(smaller).total_bytes
            if peak_bytes <= capacity_bytes:
                break
    if smaller.micro_batch_size < whole:
        words = [f"train.micro_batch_size={smaller.micro_batch_size}", *words]
    return Change(" ".join(words), peak_bytes, peak_bytes <= capacity_bytes)


def _candidates(setting: Setting, device: Device) -> Iterator[list[tuple[Setting, list[str]]]]:
    """Settings to try and the words that ask for them, in kinds of equal cost, the least first within a kind."""
    ways: list[tuple[Setting, list[str]]] = [(setting, [])]
    if setting.precision == "fp32" and (device.has_bf16 or device.kind == "cuda"):
        half = "bf16" if device.has_bf16 else "fp16"
        ways.append((replace(setting, precision=half), [f"train.precision={half}"]))
    further = {"none": ("selective", "block"), "selective": ("block",), "block": ()}[setting.checkpointing]
    ways += [
        (replace(way, checkpointing=kind), [*words, f"train.activation_checkpointing={kind}"])
        for kind in further
        for way, words in list(ways)
    ]
    for way in ways:
        yield [way]
    furthest, words = ways[-1]
    layout = setting.layout
    counts = [layout.data_parallel * 2**power for power in range(1, 13)]
    sharded = [replace(layout, sharding="fsdp", data_parallel=n) for n in counts if n <= MOST_DEVICES]
    if layout.sharding != "fsdp" and layout.data_parallel > 1:
        sharded.insert(0, replace(layout, sharding="fsdp"))
    yield [_in_layout(furthest, words, each) for each in sharded]
    splits = [n for n in (2, 4, 8) if n > layout.tensor_parallel and can_split(setting, n)]
    yield [_in_layout(furthest, words, Layout("fsdp", max(layout.data_parallel, 8), n)) for n in splits]


def _in_layout(setting: Setting, words: list[str], layout: Layout) -> tuple[Setting, list[str]]:
    split = f" --tensor-parallel {layout.tensor_parallel}" if layout.tensor_parallel > 1 else ""
    options = f"--sharding {layout.sharding}{split} --world-size {layout.world_size}"
    return replace(setting, layout=layout), [*words, options]
