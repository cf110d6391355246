"""Whether a run fits on its devices and hosts, the largest micro-batch, and the same step in other arrangements."""

from dataclasses import dataclass, replace

from gptworks.config import Recipe
from gptworks.planning.arrange import Refusal, arrange, planned_precision, rank_setting
from gptworks.planning.devices import Device
from gptworks.planning.host import HostMemory, host_memory
from gptworks.planning.layout import Layout
from gptworks.planning.memory import Peak, training_peak
from gptworks.planning.setting import Setting
from gptworks.units import readable

LARGEST_BATCH = 4096
"""Largest micro-batch that is tried, in sequences, unless a step of a device has more."""

COMPARED_DEVICES = 8
"""Number of devices for which sharding is shown if the plan has only one."""


@dataclass(frozen=True)
class Need:
    """Memory that a run needs on each device and on a node's host, compared with their memory. The plan, its advice
    and the check before training all use it."""

    device: Device
    peak: Peak
    """Peak memory of each device."""
    host: HostMemory | None
    """Memory of the fullest node's host; None on a CPU, which is both device and host."""

    @property
    def fits_device(self) -> bool:
        return self.peak.total_bytes <= self.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether device and host hold the run."""
        return self.fits_device and (self.host is None or self.host.fits)

    @property
    def missing(self) -> str:
        """A sentence naming the memory that is too small; empty if everything fits."""
        held, there = readable(self.peak.total_bytes, "B"), readable(self.device.memory_bytes, "B")
        device = f"it holds {held} at its peak, and {there} are available on {self.device.name}"
        host = f"memory of the host: {self.host.words}" if self.host is not None and not self.host.fits else ""
        return "; ".join(filter(None, ("" if self.fits_device else device, host)))


def need(setting: Setting, device: Device) -> Need:
    """The memory needs of a run with this step on such devices."""
    return Need(device, training_peak(setting), host_memory(setting, device))


@dataclass(frozen=True)
class Alternative:
    """Another way to run the same step, with the peak memory of each device."""

    setting: Setting
    peak_bytes: int


def divisors(n: int) -> list[int]:
    """The divisors of n, the largest first."""
    small = [size for size in range(1, int(n**0.5) + 1) if n % size == 0]
    return sorted({*small, *(n // size for size in small)}, reverse=True)


def largest_micro_batch(setting: Setting, capacity_bytes: int, sequences: int | None = None) -> int:
    """The largest micro-batch whose step fits; 0 if even one sequence does not.

    Args:
        sequences: their number per step on one device. Smaller micro-batches accumulate gradients, which are then held
            during the forward pass. None: use the setting's own `accumulates` at any size.
    """

    def fits(size: int) -> bool:
        several = setting.accumulates if sequences is None else size < sequences
        tried = replace(setting, micro_batch_size=size, accumulates=several)
        return training_peak(tried).total_bytes <= capacity_bytes

    def last(low: int, high: int) -> int:
        """The largest size below `high` that fits; `low` if no larger one does."""
        step = 1
        while low + step < high and fits(low + step):
            low, step = low + step, 2 * step
        top = min(low + step, high)
        while top - low > 1:
            middle = (low + top) // 2
            low, top = (middle, top) if fits(middle) else (low, middle)
        return low

    if sequences is not None and fits(sequences):  # one micro-batch holds no gradients in the forward pass
        return last(sequences, max(LARGEST_BATCH, sequences) + 1)
    return last(0, LARGEST_BATCH + 1 if sequences is None else sequences)


def alternatives(recipe: Recipe, n_ranks: int, device: Device) -> list[Alternative]:
    """The recipe's step in each precision, with and without checkpointing, in each layout that it may have, at the same
    micro-batch."""
    n = n_ranks if n_ranks > 1 else COMPARED_DEVICES
    own = planned_precision(recipe.train.precision, device)
    micro = arrange(recipe, n_ranks, device)
    size = recipe.train.rank_micro_batch_size(1 if isinstance(micro, Refusal) else micro.data_parallel)
    found = []
    for precision in dict.fromkeys(("fp32", "bf16" if device.has_bf16 or device.on_cpu else own)):
        for checkpointing in ("none", "block"):
            for layout in _layouts(recipe, n, precision, device):
                setting = rank_setting(recipe, precision, device.on_cpu, layout)
                setting = replace(setting, checkpointing=checkpointing, micro_batch_size=size)
                found.append(Alternative(setting, training_peak(setting).total_bytes))
    return found


def _layouts(recipe: Recipe, n: int, precision: str, device: Device) -> list[Layout]:
    """The layout of one device, and those that `arrange` returns for n devices with each `train.parallel`."""
    layouts = [Layout()]
    train = recipe.train.model_copy(update={"precision": precision, "batch_size": n * recipe.train.batch_size})
    for settings in ({"reshard_after_forward": False}, {"reshard_after_forward": True}, {"tensor_parallel": n}):
        strategy = "auto" if "tensor_parallel" in settings else "fsdp"
        parallel = train.parallel.model_copy(update={"tensor_parallel": 1, "strategy": strategy} | settings)
        tried = recipe.model_copy(update={"train": train.model_copy(update={"parallel": parallel})})
        arranged = arrange(tried, n, device)
        if not isinstance(arranged, Refusal):
            layouts.append(arranged)
    return list(dict.fromkeys(layouts))


def layout_words(layout: Layout) -> str:
    """The layout in words, such as `8 × FSDP`."""
    name = {"none": "DDP", "zero2": "FSDP without resharding", "fsdp": "FSDP"}[layout.sharding]
    parts = [f"{layout.data_parallel:,} × {name}"] if layout.data_parallel > 1 else []
    parts += [f"{layout.tensor_parallel} × tensor"] if layout.tensor_parallel > 1 else []
    return ", ".join(parts) or "one device"
