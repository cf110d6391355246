"""The device of a model, the precision of its matrix products, and this machine's speed and load."""

import contextlib
import ctypes
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptworks.errors import UserError
from gptworks.kernels import dispatch
from gptworks.machine import NATIVE_BF16, available_memory_bytes, cpu_flags, cpu_name, cpu_quota
from gptworks.planning.devices import LOOPBACK, Device
from gptworks.units import counted


def choose_device(name: str = "auto") -> torch.device:
    """Return the device called `name`; auto takes CUDA, then MPS, then the CPU.

    Raises:
        UserError: this machine has no such device.
    """
    follow_quota()
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(device for device, there in available.items() if there))
    if not available.get(name.partition(":")[0], False):
        there = ", ".join(device for device, there in available.items() if there)
        raise UserError(f"device {name} is not available here: use one of {there}, or auto.")
    return torch.device(name)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Make CUDA compute the same bits each time in the `with` block. Other devices need no change.

    By default, the backward pass of attention adds partial sums in any order, so that a resumed run would drift from an
    uninterrupted run.

    Raises:
        RuntimeError: an operation in the block has no deterministic implementation on CUDA.
    """
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, torch refuses products in this mode
    settings: Any = torch.utils.deterministic  # torch defines its attribute at run time
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # the step reads no memory that it has not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=warns_only)
        settings.fill_uninitialized_memory = before[1]


@cache
def follow_quota() -> None:
    """Limit the threads of torch and the native kernels to a container's CPU quota, unless OMP_NUM_THREADS is set.

    This runs once per process, when the first device is chosen. OpenMP itself follows the CPU affinity, not the quota.
    """
    quota = cpu_quota()
    if quota is not None and "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > quota:
        torch.set_num_threads(max(1, int(quota)))


@dataclass(frozen=True)
class Precision:
    """The dtype of matrix products; weights, gradients and optimizer state keep their own dtypes, usually float32."""

    name: str
    device_type: str
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context for the forward pass."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients need loss scaling, without which they would underflow (Micikevicius et al., 2018)."""
        return self.dtype == torch.float16


def choose_precision(name: str, device: torch.device) -> Precision:
    """Return the precision called `name`; auto takes bf16 if the device has it, fp16 on older GPUs, otherwise fp32.

    Raises:
        UserError: the name is fp16 and the device is not CUDA; other devices have no loss scaling.
    """
    if name == "auto":
        slower = "fp16" if device.type == "cuda" else "fp32"
        name = "bf16" if multiplies_bf16_natively(device) else slower
    if name == "fp16" and device.type != "cuda":
        raise UserError(f"precision fp16 needs a CUDA device and this is {device.type}: use auto, bf16 or fp32.")
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return Precision(name, device.type, dtypes[name])


def multiplies_bf16_natively(device: torch.device) -> bool:
    """Return whether the device has bf16 matrix products in hardware, which are faster than fp32 products."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(cpu_flags() & NATIVE_BF16)
    return False


def device_name(device: torch.device) -> str:
    """Return a readable name of the device: a GPU's name, or a processor's name and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = cpu_name() if device.type == "cpu" else ""
    return f"{model or platform.processor() or platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"


def memory_bytes(device: torch.device) -> int:
    """Return the bytes that a run on this device may use: all memory of a CUDA GPU, else the available host memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return available_memory_bytes()


def host_memory_bytes(device: torch.device, n_processes: int = 1) -> int | None:
    """Return the bytes of host memory that a run on this device may use; None on a CPU, whose memory is the host's.

    This is the available memory plus the memory that the run's `n_processes` processes already use. Each process is
    assumed to be as large as this process.
    """
    if device.type == "cpu":
        return None
    return available_memory_bytes() + n_processes * (_resident("VmRSS") or 0)


def rank_memory_bytes(device: torch.device, n_local_ranks: int) -> int:
    """Return the bytes of device memory available to each of this machine's ranks."""
    return memory_bytes(device) // (1 if device.type == "cuda" else n_local_ranks)


def this_device(device: torch.device, n_local_ranks: int = 1, n_ranks: int = 1) -> Device:
    """Describe the device of a rank on this machine for a plan, with device and host memory but without speeds.

    Args:
        n_ranks: number of the run's ranks. If more than `n_local_ranks`, each machine is assumed to have
            `n_local_ranks` devices.
    """
    memory, host = rank_memory_bytes(device, n_local_ranks), host_memory_bytes(device, n_local_ranks)
    bf16, there = multiplies_bf16_natively(device), torch.cuda.device_count() if device.type == "cuda" else 1
    per_node = n_local_ranks if n_ranks > n_local_ranks else max(n_local_ranks, there)
    return Device(
        device_name(device), device.type, memory, None, None, None, "this machine", bf16,
        per_node=per_node, host_bytes=host,
    )  # fmt: skip


def reset_peak(device: torch.device) -> int:
    """Reset the memory peak, and return the bytes in use now, for `peak_growth_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError):  # not on Linux, or forbidden in this container
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc_pid_clear_refs(5)
    return _resident("VmRSS") or 0


def peak_growth_bytes(device: torch.device, before_bytes: int) -> int | None:
    """Return the bytes by which the memory peak since `reset_peak` exceeds the memory at that time; None if unknown.

    On CUDA, this is memory of tensors. Elsewhere, it is resident memory, with 0 if the process reused freed memory.
    Linux counts resident pages per thread and adds them up late, so the peak can be slightly too low.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - before_bytes
    peak = _resident("VmHWM")
    return None if peak is None else max(0, peak - before_bytes)


def memory_figures(device: torch.device) -> dict[str, int]:
    """Return this process's memory on a device, in bytes, as metrics for metrics.jsonl; empty if unknown.

    This is the tensors' peak since `reset_peak` on CUDA, the tensors' current memory on MPS, resident memory on a CPU.
    """
    if device.type == "cuda":
        return {"peak_allocated_bytes": torch.cuda.max_memory_allocated(device)}
    if device.type == "mps":
        return {"allocated_bytes": torch.mps.current_allocated_memory()}
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 the fastest way, since each record reads it
            return {"resident_bytes": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    except OSError:  # only Linux has this file
        return {}


def _resident(field: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next((line for line in status.read_text("ascii").splitlines() if line.startswith(f"{field}:")), None)
    return None if line is None else int(line.split()[1]) * 1024


@contextlib.contextmanager
def cpu_threads(n: int | None) -> Iterator[None]:
    """Run the `with` block with n threads in torch and the native kernels, or with the current number if n is None."""
    before = torch.get_num_threads()
    if n is not None:
        torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class BusyCores:
    """Measures how many cores other programs keep busy, from Linux's CPU times."""

    def __init__(self) -> None:
        self._before = self._counts()

    def soon_by_others(self) -> float | None:
        """Wait until a second has passed since the last call of either method, and return `by_others()`."""
        if self._before is not None:
            time.sleep(max(0.0, 1.01 - (time.monotonic() - self._before[0])))
        return self.by_others()

    def by_others(self) -> float | None:
        """Return the average number of cores used by other programs since the last call, or since this object was made.
        None if that was at most a second ago, or if the system has no CPU times."""
        before, self._before = self._before, self._counts()
        if before is None or self._before is None:
            return None
        seconds, busy, own = (after - then for after, then in zip(self._before, before, strict=True))
        return max(0.0, busy - own) / seconds if seconds > 1 else None

    @staticmethod
    def _counts() -> tuple[float, float, float] | None:
        """Return a clock's seconds, busy seconds of all cores, and CPU seconds of this process and its ended children;
        None if the system has no CPU times."""
        try:
            fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
            ticks = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None
        user, nice, system, _, _, irq, soft_irq, *_ = map(int, fields)
        if os.nice(0) <= 0:  # programs of lower priority yield to this process
            nice = 0
        return time.monotonic(), (user + nice + system + irq + soft_irq) / ticks, sum(os.times()[:4])


def fewer_threads(by_others: float | None, device: torch.device) -> int | None:
    """Return the number of threads to use if too few cores are free for this process's threads, else None."""
    n_threads, n_cores = torch.get_num_threads(), os.cpu_count() or 1
    if device.type != "cpu" or by_others is None or n_threads < 2 or n_threads + by_others < n_cores + 0.5:
        return None
    fewer = max(1, n_cores - math.ceil(by_others - 0.25))
    return fewer if fewer < n_threads else None


def advice_on_threads(by_others: float | None, device: torch.device) -> str | None:
    """Return a line of advice if a run's threads wait for other programs, else None."""
    if by_others is None or (fewer := fewer_threads(by_others, device)) is None:
        return None
    return (
        f"{_busy(by_others)}, and {torch.get_num_threads()} threads wait for one another: train.threads={fewer} may be "
        f"faster."
    )


def free_threads(cores: BusyCores, device: torch.device) -> tuple[int, str] | None:
    """Return a number of threads and a message for a new run if other programs keep cores busy, else None.

    The result is None if OMP_NUM_THREADS is set. Observing the other programs takes up to a second.
    """
    if device.type != "cpu" or torch.get_num_threads() < 2 or "OMP_NUM_THREADS" in os.environ:
        return None
    by_others = cores.soon_by_others()
    if by_others is None or (fewer := fewer_threads(by_others, device)) is None:
        return None
    return fewer, (
        f"{_busy(by_others)}: computing with {counted(fewer, 'thread')}, as recipe.yaml records. "
        f"train.threads={torch.get_num_threads()} takes all."
    )


def _busy(by_others: float) -> str:
    return f"other programs keep {by_others:.1f} of {os.cpu_count()} cores busy"


PROBE_SECONDS = 0.4
"""Seconds for which each rate is measured."""


def measured_device(device: torch.device) -> Device:
    """Describe this machine's device, and measure its FLOP/s in large products and its memory bandwidth."""
    a = torch.ones(_side(device), _side(device), device=device)
    copy = torch.empty_like(a)
    return Device(
        name=device_name(device),
        kind=device.type,
        memory_bytes=memory_bytes(device),
        half_flops=product_rate(device, torch.bfloat16),
        float_flops=product_rate(device, torch.float32),
        bandwidth=2 * a.nbytes / _best_seconds(lambda: copy.copy_(a), device),
        source="measured",
        host_bytes=host_memory_bytes(device),
        has_bf16=multiplies_bf16_natively(device),
        **(LOOPBACK if device.type == "cpu" else {}),
    )


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a large square matrix product, or of the largest product that takes less than
    `PROBE_SECONDS`, since some processors need half a minute for a large product in bf16. torch's global random state
    does not change."""
    side = 256
    while True:
        x = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        work = partial(dispatch.product, x, x)
        if side == _side(device) or 8 * _best_seconds(work, device, once=True) > PROBE_SECONDS:
            return 2 * side**3 / _best_seconds(work, device)
        side *= 2


def _side(device: torch.device) -> int:
    """Return the side length of a square matrix that is large for the device."""
    return 2048 if device.type == "cpu" else 8192


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Scalars:
    """Named numbers on a device. When the host needs one number, all unread numbers are read at once."""

    def __init__(self) -> None:
        self._read: dict[str, float] = {}
        self._unread: dict[str, Tensor] = {}

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._unread[name] = value

    def __getitem__(self, name: str) -> float:
        if name in self._unread:
            values = list(self._unread.values())
            on_cuda = values[0].device.type == "cuda"  # one transfer; float64 holds each dtype's values exactly
            numbers = torch.stack([x.double() for x in values]).tolist() if on_cuda else [x.item() for x in values]
            self._read |= zip(self._unread, numbers, strict=True)
            self._unread = {}
        return self._read[name]


def _best_seconds(work: Callable[[], object], device: torch.device, once: bool = False) -> float:
    """Return the shortest time of a call of `work`, in seconds. The first call only warms up and does not count.

    Calls are repeated until `PROBE_SECONDS` have passed since the start. With `once`, only one call counts.
    """
    best, end = float("inf"), time.perf_counter() + (0 if once else PROBE_SECONDS)
    work()
    synchronize(device)
    while time.perf_counter() < end or best == float("inf"):
        started = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


KEPT_SHARE = 1.5
"""Assumed ratio of resident memory to memory in use if the allocator keeps freed memory. In measurements,
fragmentation made this ratio 1.12 to 1.37 (docs/benchmarks.md)."""


def choose_allocation(
    planned_bytes: int, device: torch.device, n_local_ranks: int = 1, *, gathers: bool = False
) -> None:
    """Let the allocator keep freed memory, which is faster, if memory suffices despite fragmentation; otherwise have it
    return freed memory.

    Args:
        gathers: whether the process gathers sharded tensors. If so, the allocator always returns freed memory. In a
            run of four ranks, a rank that kept freed memory grew to more than 5 GB in its first step, but used only
            0.8 GB.
    """
    if not gathers and planned_bytes * KEPT_SHARE <= rank_memory_bytes(device, n_local_ranks):
        keep_freed_memory()
    else:
        return_freed_memory()


def keep_freed_memory() -> None:
    """Ask the allocator to keep large freed blocks instead of returning them to the system.

    A training step on the CPU frees and allocates the same hundreds of megabytes; with glibc's defaults, all these
    pages are returned, faulted in and zeroed again. Without glibc, this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    if not libc.mallopt(_MMAP_THRESHOLD, 2**30):
        libc.mallopt(_MMAP_THRESHOLD, 2**25)  # the maximum in older releases of glibc
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Ask the allocator to return blocks of 128 KiB or more to the system as soon as they are freed.

    This is the opposite of `keep_freed_memory`: slower, but the process keeps only memory in use. glibc's default is
    between the two, since its threshold rises with the blocks' sizes.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 2**17)
        libc.mallopt(_TRIM_THRESHOLD, 2**17)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants of malloc.h
