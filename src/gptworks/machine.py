"""Find the processors, instructions and memory that this process may use, also in a container. Needs no torch."""

import ctypes
import functools
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
"""Processor features that make bf16 products faster than float32 products."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the names of the processor's features on Linux; empty elsewhere."""
    for line in _lines("/proc/cpuinfo"):
        if line.lower().startswith(("flags", "features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_name() -> str:
    """Return the processor's model name as Linux states it; empty elsewhere, and where Linux states none, as on ARM."""
    names = (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
    return next(names, "")


def is_amd() -> bool:
    """Return whether the processor is from AMD, according to Linux or Windows."""
    names = (line for line in _lines("/proc/cpuinfo") if line.startswith("vendor_id"))
    return "AuthenticAMD" in next(names, platform.processor())


def cpu_identity() -> str:
    """Return macOS' description of the processor, which replaces the `cpu_flags` of Linux; empty elsewhere."""
    if platform.system() != "Darwin":
        return ""
    command = ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional", "hw.cputype", "hw.cpusubtype", "hw.cpufamily"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def available_memory_bytes() -> int:
    """Return the bytes that a new run may use: the memory that Linux and Windows call available, or less if a control
    group limits it. On macOS, this is all memory.

    Inactive files in the page cache of a control group count as free, since the system reclaims them.
    """
    free = (line for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:"))
    bounds = [int(line.split()[1]) * 1024 for line in free]
    for version, folder in _control_groups("memory"):
        limit_name, used_name, cached_name = _MEMORY_FILES[version]
        limit, used = (_number(f"{folder}/{name}") for name in (limit_name, used_name))
        if limit is not None and used is not None:
            counts = dict(line.split(maxsplit=1) for line in _lines(f"{folder}/memory.stat") if " " in line)
            cached = counts.get(cached_name, "0").strip()
            bounds.append(limit - max(0, used - (int(cached) if cached.isdigit() else 0)))
    if bounds:
        return max(0, min(bounds))
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    status = _WindowsMemory(length=ctypes.sizeof(_WindowsMemory))
    vars(ctypes)["windll"].kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return int(status.available_bytes)


class _WindowsMemory(ctypes.Structure):
    """MEMORYSTATUSEX of Windows; `others` are figures of the page file and of this process's addresses."""

    _fields_ = (
        ("length", ctypes.c_uint32), ("used_percent", ctypes.c_uint32), ("all_bytes", ctypes.c_uint64),
        ("available_bytes", ctypes.c_uint64), ("others", ctypes.c_uint64 * 5),
    )  # fmt: skip


_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def cpu_quota() -> float | None:
    """Return the number of processors, such as 1.5, to which control groups limit this process, else None."""
    granted = []
    for version, folder in _control_groups("cpu"):
        if version == 2:
            words = next(iter(_lines(f"{folder}/cpu.max")), "").split()
        else:
            words = [next(iter(_lines(f"{folder}/cpu.cfs_{name}_us")), "").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):  # "max" and -1: no limit
            granted.append(int(words[0]) / int(words[1]))
    return min(granted, default=None)


def usable_cpus() -> int:
    """Return the number of processors that this process may use, from its CPU affinity and its quota (rounded down)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _control_groups(controller: str) -> Iterator[tuple[int, str]]:
    """Yield the version and the folder of each control group that limits this process, the innermost group first."""
    own: dict[str, str] = {}  # controller → path; in version 2 the controller is ""
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        own |= dict.fromkeys(controllers.split(","), path)
    for line in _lines("/proc/self/mountinfo"):
        mount, _, kind = line.partition(" - ")
        fields, (file_system, *rest) = mount.split(), kind.split() or [""]
        version = {"cgroup": 1, "cgroup2": 2}.get(file_system)
        if version is None or len(fields) < 5 or (version == 1 and controller not in rest[-1].split(",")):
            continue
        if (name := controller if version == 1 else "") not in own:
            continue
        path = own[name]
        root, folder = fields[3].rstrip("/"), fields[4]
        # Without its own namespace, a container sees the host's path but mounts only the folders below a part of it.
        below = path[len(root) :] if path == root or path.startswith(f"{root}/") else ""
        names = [name for name in below.split("/") if name and name != ".."]
        for n in range(len(names), -1, -1):
            yield version, "/".join([folder.rstrip("/"), *names[:n]])


def _number(path: str) -> int | None:
    """Return the number in a file; None if the file is missing or has another text, such as "max"."""
    word = next(iter(_lines(path)), "").strip()
    return int(word) if word.isdigit() else None


_ROOT = Path("/")


def _lines(path: str) -> list[str]:
    try:
        return (_ROOT / path.lstrip("/")).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
