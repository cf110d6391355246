"""Whether a run fits this machine, before its first step."""

import torch

from gptworks.config import Recipe
from gptworks.device import (
    Precision,
    device_name,
    keep_freed_memory,
    memory_bytes,
    multiplies_bf16_natively,
    return_freed_memory,
)
from gptworks.errors import UserError
from gptworks.plan.advice import changes_that_fit
from gptworks.plan.arrange import rank_setting
from gptworks.plan.devices import Device
from gptworks.plan.layout import ONE_DEVICE, Layout
from gptworks.plan.memory import Peak, training_peak
from gptworks.plan.setting import Setting
from gptworks.units import readable

KEPT_SHARE = 1.5
"""What a process has resident where the allocator keeps freed memory, over what is in use: 1.2 to 1.45 as measured
(docs/benchmarks.md), from holes between blocks of unlike sizes."""


def run_setting(recipe: Recipe, device: torch.device, precision: Precision, layout: Layout = ONE_DEVICE) -> Setting:
    """The step of one device with checkpoints; the least that it may be where the vocabulary is not known yet."""
    return rank_setting(recipe, precision.name, device.type == "cpu", layout)


def this_device(device: torch.device, n_local_ranks: int = 1) -> Device:
    """What one of this machine's ranks trains on, as a plan sees it: its share of the memory, rates unknown."""
    memory = rank_memory_bytes(device, n_local_ranks)
    bf16 = multiplies_bf16_natively(device)
    return Device(device_name(device), device.type, memory, None, None, None, "this machine", bf16)


def check_memory(
    recipe: Recipe,
    device: torch.device,
    precision: Precision,
    force: bool = False,
    layout: Layout = ONE_DEVICE,
    n_local_ranks: int = 1,
) -> Peak:
    """The most that a device will hold at once.

    Args:
        n_local_ranks: processes that share this machine, and its memory where they run on the CPU.

    Raises:
        UserError: it does not fit, and `force` is false; the message names what would make it fit.
    """
    place = this_device(device, n_local_ranks)
    peak = training_peak(run_setting(recipe, device, precision, layout))
    if force or peak.total_bytes <= place.memory_bytes:
        return peak
    changes = changes_that_fit(recipe, layout.world_size, place)
    advice = ""
    if changes:
        what = f"{' '.join(changes[0].overrides)}"
        if changes[0].more_devices:
            what += f" on {changes[0].n_ranks} devices (`gptworks launch --nproc`, or torchrun)"
        so = "would hold" if changes[0].fits else "would still hold"
        advice = f" {what} {so} {readable(changes[0].peak_bytes, 'B')}."
    raise UserError(
        f"this run does not fit: it holds {readable(peak.total_bytes, 'B')} at its peak, and "
        f"{readable(place.memory_bytes, 'B')} are available on {place.name}.{advice} `gptworks plan` shows more, and "
        f"--force tries nevertheless."
    )


def rank_memory_bytes(device: torch.device, n_local_ranks: int) -> int:
    """What one of this machine's ranks may take."""
    return memory_bytes(device) // (1 if device.type == "cuda" else n_local_ranks)


def choose_allocation(peak: Peak, device: torch.device, n_local_ranks: int = 1) -> None:
    """Let the allocator keep freed memory, which is faster, where there is room for the holes it leaves."""
    if peak.total_bytes * KEPT_SHARE <= rank_memory_bytes(device, n_local_ranks):
        keep_freed_memory()
    else:
        return_freed_memory()
