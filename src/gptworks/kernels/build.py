"""Compiling this folder's C++ to a library, for this machine's processor or for one that is named."""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gptworks.kernels.cache import make_private
from gptworks.machine import cpu_flags, cpu_identity, usable_cpus

_NAMES = ("products", "cached_attention", "passes", "attention", "optimizer", "gemm", "step", "threads", "entry")
SOURCES = tuple(Path(__file__).with_name(f"{name}.cpp") for name in _NAMES)
"""The C++ sources, the slowest to compile first; they include the headers of this folder."""

FLAGS = ("-O3", "-std=c++17", "-fno-schedule-insns", "-fPIC", "-pthread")
"""Compiler options. GCC on ARM needs `-fno-schedule-insns`: it otherwise loads so early that registers spill."""

ATTEMPTS: tuple[tuple[str, ...], ...] = (
    ("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",), (),
)  # fmt: skip
"""Options tried in this order: older ARM compilers name this processor differently, and Apple's compiler lacks OpenMP.

With GCC's OpenMP the kernels share torch's threads. Without it, and always with clang, they start their own threads
(threads.cpp): clang's OpenMP next to torch's would crash the process on a Mac.
"""

MARCH = "GPTWORKS_NATIVE_MARCH"
"""Environment variable: build for this processor, such as haswell, instead of this machine's."""

_OLDER_NAMES = {"znver4": ("cooperlake",), "sapphirerapids": ("cooperlake",)}
"""Older processors with the same instructions for the kernels, for compilers that do not know the newer one."""

_LOG = logging.getLogger(__name__)


class Unavailable(Exception):
    """A backend cannot be used here. The message explains why; users see it if another backend is used instead."""


def find_compiler() -> str | None:
    """The first C++ compiler on the path."""
    return next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def attempts(compiler: str) -> tuple[tuple[str, ...], ...]:
    """The options to try with this compiler, in this order."""
    wanted = ATTEMPTS
    if march := os.environ.get(MARCH):
        names = (march, *_OLDER_NAMES.get(march, ()))
        wanted = tuple((f"-march={name}", *threads) for threads in (("-fopenmp",), ()) for name in names)
    if b"clang" in _version(compiler):
        wanted = tuple(options for options in wanted if "-fopenmp" not in options)
    return wanted


VERSION_SECONDS, COMPILE_SECONDS = 60, 1800
"""Time limits for a compiler to print its version, and to compile one source: minutes on slow processors."""


def _version(compiler: str) -> bytes:
    return _run([compiler, "--version"], VERSION_SECONDS).stdout


def _run(command: Sequence[str | Path], seconds: float) -> subprocess.CompletedProcess[bytes]:
    """Run a compiler without standard input.

    Raises:
        Unavailable: the compiler exceeds the time limit.
    """
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{Path(command[0]).name} did not end within {seconds:g} seconds.") from None


def key(compiler: str) -> str:
    """A build's key: a hash of source, options, compiler and processor."""
    machine = " ".join([platform.platform(), platform.processor(), cpu_identity(), *sorted(cpu_flags())])
    texts = (file.read_bytes() for source in SOURCES for file in (source, *sorted(source.parent.glob("*.h"))))
    parts = (*texts, _version(compiler), machine.encode(), repr((FLAGS, attempts(compiler))).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def compiled(compiler: str) -> bytes:
    """The bytes of a library for this processor; says in the log that it compiles."""
    _LOG.info("compiling the C++ kernels for this processor: this happens once and takes some ten seconds")
    return build(compiler)


def build(compiler: str, options: tuple[tuple[str, ...], ...] | None = None) -> bytes:
    """The bytes of a newly built library. Sources compile in parallel, one per core.

    Args:
        options: compiler options to try, in this order; None: those of `attempts`.

    Raises:
        Unavailable: no attempt succeeds. OSError: every temporary folder may be written by other users, or the compiler
            cannot be run.
    """
    failed = ""
    with (
        tempfile.TemporaryDirectory(prefix="gptworks-building-") as temporary,
        ThreadPoolExecutor(usable_cpus()) as at_once,
    ):
        folder = make_private(Path(temporary))
        made = folder / "kernels.so"
        objects = [folder / f"{source.name}.o" for source in SOURCES]
        for attempt in attempts(compiler) if options is None else options:

            def run(*arguments: str | Path, options: tuple[str, ...] = attempt) -> str | None:
                return _error_of([compiler, *FLAGS, *options, *arguments])

            errors = at_once.map(lambda source, to: run("-c", source, "-o", to), SOURCES, objects)
            error = next(filter(None, list(errors)), None) or run("-shared", *objects, "-o", made)
            if error is None:
                return made.read_bytes()
            failed = error
    raise Unavailable(f"{Path(compiler).name} could not compile it ({failed}).")


def _error_of(command: Sequence[str | Path]) -> str | None:
    """The first error that a compiler prints, or None if it succeeds."""
    done = _run(command, COMPILE_SECONDS)
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").splitlines()
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    return next((line for line in lines if "error" in line), "no message")
