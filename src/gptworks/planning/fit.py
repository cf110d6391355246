"""Checks whether a run fits on its devices and hosts, and estimates other micro-batches, precisions and layouts."""

from dataclasses import dataclass, replace

from gptworks.config import Recipe
from gptworks.planning.arrange import Refusal, arrange, device_setting, planned_precision
from gptworks.planning.bisection import largest_that_fits
from gptworks.planning.devices import Device
from gptworks.planning.host import HostMemory, host_memory
from gptworks.planning.layout import Layout
from gptworks.planning.memory import generation_peak, training_peak
from gptworks.planning.setting import Setting
from gptworks.planning.timeline import Peak
from gptworks.units import readable

LARGEST_BATCH = 4096
"""Largest micro-batch to try, in samples, unless each device has even more samples in a step."""

COMPARED_DEVICES = 8
"""Number of devices for which `alternatives` shards the model if the plan has only one device."""


@dataclass(frozen=True)
class Need:
    """Memory that a run needs on each device and on a node's host, compared with the memory that they have."""

    device: Device
    peak: Peak
    """Peak memory use of each device."""
    host: HostMemory | None
    """Memory use of the fullest node's host; None on a CPU, which is both device and host."""
    gathers_once: bool = False
    """Whether FSDP gathers all blocks once to generate texts: always for rollouts, otherwise if all blocks fit."""

    @property
    def fits_device(self) -> bool:
        return self.peak.total_bytes <= self.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the run fits both on each device and on each host."""
        return self.fits_device and (self.host is None or self.host.fits)

    @property
    def missing(self) -> str:
        """Clauses that explain which memory is too small; empty if the run fits."""
        held, there = readable(self.peak.total_bytes, "B"), readable(self.device.memory_bytes, "B")
        device = f"it holds {held} at its peak, and {there} are available on {self.device.name}"
        host = f"memory of the host: {self.host.words}" if self.host is not None and not self.host.fits else ""
        return "; ".join(filter(None, ("" if self.fits_device else device, host)))


def need(setting: Setting, device: Device) -> Need:
    """Estimate the memory that a run with this training step needs on devices of this kind and on their hosts."""
    peak, gathers_once = training_peak(setting), False
    if setting.n_texts and setting.layout.sharding != "none":
        generating = generation_peak(setting, gathered=True)
        # Rollouts need all blocks at once: each rank answers its own prompts, in a different number of steps.
        gathers_once = setting.objective.rollouts is not None or generating.total_bytes <= device.memory_bytes
        if gathers_once and generating.total_bytes > peak.total_bytes:
            peak = generating
    return Need(device, peak, host_memory(setting, device), gathers_once)


@dataclass(frozen=True)
class Alternative:
    """The planned training step in another precision or layout, with the peak memory of each device."""

    setting: Setting
    peak_bytes: int


def divisors(n: int) -> list[int]:
    """Return the divisors of n, the largest first."""
    small = [size for size in range(1, int(n**0.5) + 1) if n % size == 0]
    return sorted({*small, *(n // size for size in small)}, reverse=True)


def largest_micro_batch(setting: Setting, capacity_bytes: int, step_samples: int) -> int:
    """Return the largest micro-batch whose step fits into `capacity_bytes`; 0 if even one sample does not fit.

    Args:
        step_samples: samples per step on one device. With smaller micro-batches, accumulated gradients are in memory
            during the forward pass.
    """

    def fits(size: int) -> bool:
        tried = replace(setting, micro_batch_size=size, accumulates=size < step_samples)
        return training_peak(tried).total_bytes <= capacity_bytes

    if fits(step_samples):  # one micro-batch per step: no gradients are accumulated
        return largest_that_fits(fits, step_samples, max(LARGEST_BATCH, step_samples) + 1)
    return largest_that_fits(fits, 0, step_samples)


def alternatives(recipe: Recipe, n_ranks: int, device: Device) -> list[Alternative]:
    """Estimate the recipe's step in two precisions and in each possible layout, with and without recomputed blocks.

    The precisions are fp32 and bf16; on an accelerator without bf16, fp32 and the planned precision. All steps have the
    recipe's micro-batch.
    """
    n = n_ranks if n_ranks > 1 else COMPARED_DEVICES
    own = planned_precision(recipe.train.precision, device)
    micro = arrange(recipe, n_ranks, device)
    size = recipe.train.rank_micro_batch_size(1 if isinstance(micro, Refusal) else micro.data_parallel)
    found = []
    for precision in dict.fromkeys(("fp32", "bf16" if device.has_bf16 or device.on_cpu else own)):
        for checkpointing in ("none", "block"):
            for layout in _layouts(recipe, n, precision, device):
                setting = device_setting(recipe, device, layout, precision)
                setting = replace(setting, checkpointing=checkpointing, micro_batch_size=size)
                found.append(Alternative(setting, training_peak(setting).total_bytes))
    return found


def _layouts(recipe: Recipe, n: int, precision: str, device: Device) -> list[Layout]:
    """Return the layout of one device, and the sharded and tensor-parallel layouts of n devices that can run."""
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
    """Return the layout in words, such as `8 × FSDP`."""
    name = {"none": "DDP", "zero2": "FSDP without resharding", "fsdp": "FSDP"}[layout.sharding]
    parts = [f"{layout.data_parallel:,} × {name}"] if layout.data_parallel > 1 else []
    parts += [f"{layout.tensor_parallel} × tensor"] if layout.tensor_parallel > 1 else []
    return ", ".join(parts) or "one device"
