"""Whether a run fits this machine, before its first step."""

import torch

from gptworks.config import Recipe
from gptworks.device import Precision, device_name, keep_freed_memory, memory_bytes, return_freed_memory
from gptworks.errors import UserError
from gptworks.plan.devices import Device
from gptworks.plan.fit import changes_that_fit
from gptworks.plan.memory import Peak, Setting, training_peak
from gptworks.plan.published import readable

KEPT_SHARE = 1.5
"""What a process has resident where the allocator keeps freed memory, over what is in use: 1.2 to 1.45 as measured
(docs/benchmarks.md), from holes between blocks of unlike sizes."""


def run_setting(recipe: Recipe, device: torch.device, precision: Precision) -> Setting:
    """The run's step with checkpoints; the least that it may be where the vocabulary is not known yet."""
    model = recipe.model.model_copy(update={"vocab_size": recipe.model.vocab_size or 1})
    return Setting.of(model, recipe.train, precision.name, device.type == "cpu", saves=True)


def check_memory(recipe: Recipe, device: torch.device, precision: Precision, force: bool = False) -> Peak:
    """The most that the run will hold at once.

    Raises:
        UserError: it does not fit, and `force` is false; the message names what would make it fit.
    """
    setting, there_bytes = run_setting(recipe, device, precision), memory_bytes(device)
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


def choose_allocation(peak: Peak, device: torch.device) -> None:
    """Let the allocator keep freed memory, which is faster, where there is room for the holes it leaves."""
    if peak.total_bytes * KEPT_SHARE <= memory_bytes(device):
        keep_freed_memory()
    else:
        return_freed_memory()
