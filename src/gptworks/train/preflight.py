"""Whether a run fits this machine, before its first step."""

from dataclasses import replace

import torch

from gptworks.config import Recipe
from gptworks.device import Precision, device_name, keep_freed_memory, memory_bytes, return_freed_memory
from gptworks.errors import UserError
from gptworks.plan.devices import Device
from gptworks.plan.fit import changes_that_fit
from gptworks.plan.memory import ONE_DEVICE, Layout, Peak, Setting, training_peak
from gptworks.plan.objectives import recipe_setting
from gptworks.units import readable

KEPT_SHARE = 1.5
"""What a process has resident where the allocator keeps freed memory, over what is in use: 1.2 to 1.45 as measured
(docs/benchmarks.md), from holes between blocks of unlike sizes."""


def run_setting(recipe: Recipe, device: torch.device, precision: Precision, layout: Layout = ONE_DEVICE) -> Setting:
    """The step of one device with checkpoints; the least that it may be where the vocabulary is not known yet."""
    model = recipe.model.model_copy(update={"vocab_size": recipe.model.vocab_size or 1})
    micro = recipe.train.rank_micro_batch_size(layout.data_parallel)
    return replace(
        recipe_setting(recipe.model_copy(update={"model": model}), precision.name, device.type == "cpu"),
        micro_batch_size=micro,
        accumulates=micro < recipe.train.batch_size // layout.data_parallel,
        layout=layout,
    )


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
    setting, there_bytes = run_setting(recipe, device, precision, layout), rank_memory_bytes(device, n_local_ranks)
    peak = training_peak(setting)
    if force or peak.total_bytes <= there_bytes:
        return peak
    has_bf16 = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_bf16_supported())
    place = Device(device_name(device), device.type, there_bytes, None, None, None, "this machine", has_bf16)
    change = changes_that_fit(setting, place, there_bytes)[0]
    raise UserError(
        f"this run does not fit: it holds {readable(peak.total_bytes, 'B')} at its peak, and "
        f"{readable(there_bytes, 'B')} are available on {place.name}. {change.words} would hold "
        f"{readable(change.peak_bytes, 'B')}; `gptworks plan` shows more, and --force tries nevertheless."
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
