"""The native kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, and without warnings.

The library is built with GCC's sanitizers and the kernels' own threads (ThreadSanitizer does not see OpenMP's), and a
Python that has preloaded the sanitizer's runtime runs every function on one thread and several. A report ends it.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gptworks.native import library as native_library
from gptworks.native.library import SOURCES

pytestmark = [pytest.mark.sanitizers, pytest.mark.timeout(900)]

UNDEFINED = "undefined", "null,object-size,vptr,return,unreachable"
"""What is looked for, and what of it is left out: checks that make the compiler take many times as long."""

BUILDS = {
    "address": (["-fsanitize=address", "--param", "asan-instrumentation-with-call-threshold=0"], "libasan.so"),
    "undefined": ([f"-fsanitize={UNDEFINED[0]}", f"-fno-sanitize={UNDEFINED[1]}", "-fno-sanitize-recover=all"], None),
    "thread": (["-fsanitize=thread"], "libtsan.so"),
}

CALLS = """
import sys, torch
from gptworks.native import entries, library as native_library
from gptworks.native.library import Library
import ctypes, pathlib

functions = ctypes.CDLL(sys.argv[1])
entries.declare(functions)
loaded = Library(functions, "0" * 64, "for a test", pathlib.Path(sys.argv[1]).parent, False)
for name in ("library", "training_library"):
    setattr(native_library, name, lambda: loaded)
import gptworks.native.backend as backend
backend.library = native_library.library
import kernel_calls
kernel_calls.library = native_library.library
torch.set_num_threads(1)
kept = kernel_calls.of_models()
for call in [call for _, call in kept] + kernel_calls.without_models():
    for n_threads in (1, 2, 3):
        call.with_number("n_threads", n_threads)()
        try:  # threads that give up, too
            call.with_number("n_threads", 0)()
        except ValueError:
            pass
print("all computed")
"""


def compiler(name: str) -> str:
    found = shutil.which(name)
    if found is None or platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip(f"needs {name} on x86-64 Linux")
    return found


def built(sanitizer: str, folder: Path) -> Path:
    options, _ = BUILDS[sanitizer]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "FLAGS", ("-O1", "-g1", "-std=c++17", "-fPIC", "-pthread"))
        content = native_library.build(compiler("g++"), (("-march=haswell", *options),))
    file = folder / f"kernels-{sanitizer}.so"
    file.write_bytes(content)
    return file


def path_of(name: str) -> str:
    """Where GCC's library of this name is."""
    done = subprocess.run([compiler("g++"), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(done.stdout.strip()).resolve())


@pytest.mark.parametrize("sanitizer", BUILDS)
def test_every_function_runs_without_a_report(sanitizer: str, tmp_path: Path) -> None:
    _, runtime = BUILDS[sanitizer]
    file = built(sanitizer, tmp_path)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1:exitcode=66",
    }
    command = [sys.executable, "-c", CALLS, str(file)]
    if runtime is not None:  # libstdc++ too: AddressSanitizer looks for what throws as it begins
        environment["LD_PRELOAD"] = " ".join(map(path_of, (runtime, "libstdc++.so")))
    if sanitizer == "thread" and (fixed := shutil.which("setarch")):
        command = [fixed, "-R", *command]  # its runtime wants addresses that are not random
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0 and "all computed" in done.stdout, (done.stdout + done.stderr)[-6000:]
    assert "ERROR: " not in done.stderr and "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[-6000:]


@pytest.mark.parametrize("name", ["g++", "clang++"])
@pytest.mark.parametrize("processor", ["native", "haswell", "x86-64"])
def test_nothing_is_warned_of(name: str, processor: str) -> None:
    """Of each source, for processors whose intrinsics differ; GCC looks deeper where it optimizes."""
    program = compiler(name)
    looks = ["-O2", "-S", "-o", "/dev/null"] if (name, processor) == ("g++", "native") else ["-O1", "-fsyntax-only"]
    openmp = ["-fopenmp"] if name == "g++" else []
    for source in SOURCES:
        command = [
            program,
            "-std=c++17",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-march={processor}",
            *openmp,
            *looks,
            str(source),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
