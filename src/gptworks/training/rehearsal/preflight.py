"""Checks before a run's first step whether it fits this machine."""

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
from gptworks.units import readable

KEPT_SHARE = 1.5
"""Assumed ratio of resident memory to memory in use if the allocator keeps freed memory; measured: 1.2 to 1.45
(docs/benchmarks.md), from fragmentation."""


def this_device(device: torch.device, n_local_ranks: int = 1, n_ranks: int = 1) -> Device:
    """The device of a rank on this machine, for a plan: its share of device and host memory; rates are unknown.

    Args:
        n_ranks: ranks of the run. If more than `n_local_ranks`, each machine is assumed to have `n_local_ranks`.
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
    """The planned peak memory of a device; a lower bound while the vocabulary is not known yet.

    Args:
        n_local_ranks: processes on this machine; on the CPU they share its memory.

    Raises:
        UserError: device or host memory is too small and `force` is false; the message names a change that would fit.
    """
    place = this_device(device, n_local_ranks, layout.world_size)
    needed = need(rank_setting(recipe, precision.name, device.type == "cpu", layout), place)
    if force or needed.fits:
        return needed.peak
    advice = "".join(f" {_advised(change)}." for change in changes_that_fit(recipe, layout.world_size, place)[:1])
    raise UserError(
        f"this run does not fit: {needed.missing}.{advice} `gptworks plan` shows more, and --force starts it anyway."
    )


def _advised(change: Change) -> str:
    """A change in the words of `gptworks train`, and the memory that is needed with it."""
    what = list(change.overrides)
    if change.n_ranks != change.n_ranks_before:
        what += [f"on {change.n_ranks} devices (`gptworks launch --nproc`, or torchrun)"]
    if change.ranks_per_node is not None:
        what += [f"with {change.ranks_per_node} of {change.n_ranks} ranks on each machine (`torchrun --nnodes`)"]
    host = change.need.host
    and_host = "" if host is None or host.limit_bytes is None else f", and a host {readable(host.total_bytes, 'B')}"
    would = "would hold" if change.fits else "would still hold"
    return f"{' '.join(what)} {would} {readable(change.peak_bytes, 'B')}{and_host}"


def rank_memory_bytes(device: torch.device, n_local_ranks: int) -> int:
    """Device memory available to one of this machine's ranks."""
    return memory_bytes(device) // (1 if device.type == "cuda" else n_local_ranks)


def choose_allocation(peak: Peak, device: torch.device, n_local_ranks: int = 1) -> None:
    """Let the allocator keep freed memory, which is faster, if there is room for fragmentation."""
    if peak.total_bytes * KEPT_SHARE <= rank_memory_bytes(device, n_local_ranks):
        keep_freed_memory()
    else:
        return_freed_memory()
