"""Compile this folder's C++ to a library: for this machine's processor, for the processor that GPTWORKS_NATIVE_MARCH
names, or for each instruction level of a wheel."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gptworks.kernels.cache import make_private
from gptworks.machine import cpu_flags, cpu_identity, usable_cpus

_NAMES = ("products", "cached_attention", "passes", "attention", "optimizer", "gemm", "step", "threads", "entry")
SOURCES = tuple(Path(__file__).with_name(f"{name}.cpp") for name in _NAMES)
"""The C++ sources, the slowest to compile first. They include the headers in this folder."""

FLAGS = ("-O3", "-std=c++17", "-fno-schedule-insns", "-fPIC", "-pthread")
"""Compiler options. Without `-fno-schedule-insns`, GCC on ARM loads values so early that registers spill."""

ATTEMPTS: tuple[tuple[str, ...], ...] = (
    ("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), (),
)  # fmt: skip
"""Sets of options to try, in order: older ARM compilers need -mcpu instead of -march; Apple's compiler lacks OpenMP.

With GCC's OpenMP, the kernels share torch's threads. Without OpenMP, and always with clang, the kernels start their own
threads (threads.cpp), because clang's OpenMP next to torch's would crash the process on a Mac.
"""

MARCH = "GPTWORKS_NATIVE_MARCH"
"""Environment variable that names the processor to build for, such as haswell. Unset: this machine's processor."""

_OLDER_NAMES = {"znver4": ("cooperlake",), "sapphirerapids": ("cooperlake",)}
"""Older processors to build for if the compiler does not know a processor. The kernels use the same instructions."""


@dataclass(frozen=True)
class Level:
    """An instruction level for which a library is built."""

    name: str
    options: tuple[str, ...]
    """Compiler options that produce code for this level."""
    flags: frozenset[str]
    """Features that a processor must have, by their names in Linux."""


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = ("-march=x86-64-v4", "-mavx512vnni")

LEVELS = {
    "x86_64": (
        Level("avx512bf16", (*_VNNI, "-mavx512bf16"), _V4 | {"avx512_vnni", "avx512_bf16"}),
        Level("avx512vnni", _VNNI, _V4 | {"avx512_vnni"}),
        Level("avx512", ("-march=x86-64-v4",), _V4),
        Level("avx2", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (
        Level("neondot", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),
        Level("neon", ("-march=armv8-a",), frozenset({"asimd"})),
    ),
}
"""Instruction levels by `platform.machine()`, the best first. x86 has no level below AVX2, where torch is faster."""


class Unavailable(Exception):
    """A backend cannot be used here. The message says why; users see it if another backend is used instead."""


def find_compiler() -> str | None:
    """Return the path of the first of g++, clang++ and c++ that is on PATH; None without a compiler."""
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def attempts(compiler: str) -> tuple[tuple[str, ...], ...]:
    """Return the sets of options to try with this compiler, in order."""
    wanted = ATTEMPTS
    if march := os.environ.get(MARCH):
        names = (march, *_OLDER_NAMES.get(march, ()))
        wanted = tuple((f"-march={name}", *threads) for threads in (("-fopenmp",), ()) for name in names)
    if b"clang" in _version(compiler):
        wanted = tuple(options for options in wanted if "-fopenmp" not in options)
    return wanted


VERSION_SECONDS, COMPILE_SECONDS = 60, 1800
"""Time limits for printing a compiler's version, and for compiling a source, which takes minutes on slow processors."""


def _version(compiler: str) -> bytes:
    return _run([compiler, "--version"], VERSION_SECONDS).stdout


def _run(command: Sequence[str | Path], seconds: float) -> subprocess.CompletedProcess[bytes]:
    """Run a compiler with empty standard input; raises Unavailable if it exceeds the time limit."""
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{Path(command[0]).name} did not end within {seconds:g} seconds.") from None


def key(compiler: str, sources: Sequence[Path] = SOURCES, flags: Sequence[str] = FLAGS) -> str:
    """Return a build's key: a hash of sources, options, compiler and processor."""
    machine = " ".join([platform.platform(), platform.processor(), cpu_identity(), *sorted(cpu_flags())])
    texts = (file.read_bytes() for source in sources for file in (source, *sorted(source.parent.glob("*.h"))))
    parts = (*texts, _version(compiler), machine.encode(), repr((tuple(flags), attempts(compiler))).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def build(
    compiler: str,
    options: tuple[tuple[str, ...], ...] | None = None,
    sources: Sequence[Path] | None = None,
    flags: Sequence[str] = FLAGS,
    libraries: Sequence[str] = (),
) -> bytes:
    """Build a library and return its bytes. The sources are compiled in parallel, one per core.

    Args:
        options: sets of compiler options to try, in this order; None: the sets that `attempts` returns.
        sources: files to compile; None: `SOURCES`.
        flags: compiler options of every attempt.
        libraries: options that name libraries to link.

    Raises:
        Unavailable: no attempt succeeds.
        OSError: other users may write to the temporary folder, or the compiler cannot be run.
    """
    failed = ""
    with (
        tempfile.TemporaryDirectory(prefix="gptworks-building-") as temporary,
        ThreadPoolExecutor(usable_cpus()) as at_once,
    ):
        folder = make_private(Path(temporary))
        made = folder / "kernels.so"
        sources = SOURCES if sources is None else sources
        objects = [folder / f"{source.name}.o" for source in sources]
        for attempt in attempts(compiler) if options is None else options:
            command = [compiler, *flags, *attempt]
            compilations = [[*command, "-c", source, "-o", to] for source, to in zip(sources, objects, strict=True)]
            errors = [*filter(None, at_once.map(_error_of, compilations))]
            error = errors[0] if errors else _error_of([*command, "-shared", *objects, *libraries, "-o", made])
            if error is None:
                return made.read_bytes()
            failed = error
    raise Unavailable(f"{Path(compiler).name} could not compile it ({failed}).")


def _error_of(command: Sequence[str | Path]) -> str | None:
    """Run the compiler; return the first error that it prints, or None if it succeeds."""
    done = _run(command, COMPILE_SECONDS)
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").splitlines()
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    return next((line for line in lines if "error" in line), "no message")
