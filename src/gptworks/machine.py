"""What this machine is, as Linux tells it: processor, its instructions, free memory. Without torch."""

import functools
import os
import platform
from pathlib import Path

NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
"""Processor features with which bf16 products are faster than float32 ones."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The processor's feature names as Linux gives them; empty elsewhere. Read once, since they stay."""
    for line in _lines("/proc/cpuinfo"):
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_name() -> str:
    """The processor's model as Linux gives it; empty elsewhere."""
    names = (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
    return next(names, "")


def is_amd() -> bool:
    """Whether the processor is one of AMD's, as Linux or Windows names its maker."""
    names = (line for line in _lines("/proc/cpuinfo") if line.startswith("vendor_id"))
    return "AuthenticAMD" in next(names, platform.processor())


def available_memory_bytes() -> int:
    """Memory that a new run may take: what Linux calls available, or less where a control group allows less.

    Where neither is known (not Linux), all memory.
    """
    free = (line for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:"))
    bounds = [int(line.split()[1]) * 1024 for line in free]
    for limit, used in CONTROL_GROUP_FILES:
        figures = [next(iter(_lines(path)), "").strip() for path in (limit, used)]
        if all(figure.isdigit() for figure in figures):  # "max" is no limit
            bounds.append(int(figures[0]) - int(figures[1]))
    return max(0, min(bounds)) if bounds else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


CONTROL_GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
