"""Whether a run fits this machine, before its first step."""

import torch

from gptworks.config import Recipe
from gptworks.device import (
    Precision,
    device_name,
    host_memory_bytes,
    keep_freed_memory,
    memory_bytes,
    multiplies_bf16_natively,
    return_freed_memory,
)
from gptworks.errors import UserError
from gptworks.planning.advice import Change, changes_that_fit
from gptworks.planning.arrange import rank_setting
from gptworks.planning.devices import Device
from gptworks.planning.fit import need
from gptworks.planning.layout import ONE_DEVICE, Layout
from gptworks.planning.memory import Peak
from gptworks.planning.setting import Setting
from gptworks.units import readable

KEPT_SHARE = 1.5
"""What a process has resident where the allocator keeps freed memory, over what is in use: 1.2 to 1.45 as measured
(docs/benchmarks.md), from holes between blocks of unlike sizes."""


def run_setting(recipe: Recipe, device: torch.device, precision: Precision, layout: Layout = ONE_DEVICE) -> Setting:
    """The step of one device with checkpoints; the least that it may be where the vocabulary is not known yet."""
    return rank_setting(recipe, precision.name, device.type == "cpu", layout)


def this_device(device: torch.device, n_local_ranks: int = 1, n_ranks: int = 1) -> Device:
    """What one of this machine's ranks trains on, as a plan sees it: its share of the memory, the memory of its host,
    rates unknown.

    Args:
        n_ranks: of the run. More than this machine's: each machine is taken to have as many as this one.
    """
    memory, host = rank_memory_bytes(device, n_local_ranks), host_memory_bytes(device, n_local_ranks)
    bf16, there = multiplies_bf16_natively(device), torch.cuda.device_count() if device.type == "cuda" else 1
    per_node = n_local_ranks if n_ranks > n_local_ranks else max(n_local_ranks, there)
    return Device(
        device_name(device), device.type, memory, None, None, None, "this machine", bf16,
        per_node=per_node, host_bytes=host,
    )  # fmt: skip


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
        UserError: device or host do not hold the run, and `force` is false; the message names what would make it fit.
    """
    place = this_device(device, n_local_ranks, layout.world_size)
    needed = need(run_setting(recipe, device, precision, layout), place)
    if force or needed.fits:
        return needed.peak
    advice = "".join(f" {_advised(change)}." for change in changes_that_fit(recipe, layout.world_size, place)[:1])
    raise UserError(
        f"this run does not fit: {needed.missing}.{advice} `gptworks plan` shows more, and --force tries nevertheless."
    )


def _advised(change: Change) -> str:
    """A change as one makes it where training starts, and what is needed then."""
    what = list(change.overrides)
    if change.n_ranks != change.n_ranks_before:
        what += [f"on {change.n_ranks} devices (`gptworks launch --nproc`, or torchrun)"]
    if change.ranks_per_node is not None:
        what += [f"with {change.ranks_per_node} of {change.n_ranks} ranks on each machine (`torchrun --nnodes`)"]
    host = change.need.host
    besides = "" if host is None or host.limit_bytes is None else f", and a host {readable(host.total_bytes, 'B')}"
    would = "would hold" if change.fits else "would still hold"
    return f"{' '.join(what)} {would} {readable(change.peak_bytes, 'B')}{besides}"


def rank_memory_bytes(device: torch.device, n_local_ranks: int) -> int:
    """What one of this machine's ranks may take."""
    return memory_bytes(device) // (1 if device.type == "cuda" else n_local_ranks)


def choose_allocation(peak: Peak, device: torch.device, n_local_ranks: int = 1) -> None:
    """Let the allocator keep freed memory, which is faster, where there is room for the holes it leaves."""
    if peak.total_bytes * KEPT_SHARE <= rank_memory_bytes(device, n_local_ranks):
        keep_freed_memory()
    else:
        return_freed_memory()
