"""The native kernels under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, and without warnings.

The library is built for AVX2, and for the instructions that only some processors have, with a sanitizer and the
kernels' own threads (ThreadSanitizer does not see OpenMP's). A Python that has preloaded the sanitizer's runtime runs
every function, with sizes at every boundary, on tensors that end where their memory does. A report ends it.

clang compiles it where it is there with its runtime (Debian: clang, libclang-rt-dev), because GCC takes many times as
long; but not for ThreadSanitizer, whose runtime of clang's cannot be preloaded.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gptworks.kernels import build as kernel_build
from gptworks.kernels.build import LEVELS, SOURCES, Level
from gptworks.machine import cpu_flags

pytestmark = [pytest.mark.sanitizers, pytest.mark.timeout(900)]

LEFT_OUT = "null,object-size,vptr,return,unreachable"
"""Undefined behavior that is not looked for: checks that make the compiler take many times as long."""

OPTIONS = {
    "address": ("-fsanitize=address",),
    "undefined": ("-fsanitize=undefined", f"-fno-sanitize={LEFT_OUT}", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}

X86 = {level.name: level for level in LEVELS["x86_64"]}

CALLS = """
import sys, torch
from gptworks.kernels import entries, library as native_library
from gptworks.kernels.library import Library
import ctypes

functions = ctypes.CDLL(sys.argv[1])
entries.declare(functions)
loaded = Library(functions, "for a test", False)
for name in ("library", "training_library"):
    setattr(native_library, name, lambda: loaded)
import gptworks.infer.backends.native as backend
from gptworks.infer.backends import cache, placement
backend.library = native_library.library
for user in (cache, placement):  # each tensor with an end of its own
    user.rooms_in_large_pages = lambda wanted: [torch.zeros(n, dtype=dtype) for dtype, n in wanted]
import kernel_calls
kernel_calls.library = native_library.library
torch.set_num_threads(1)
if sys.argv[2] == "planted":
    owned = torch.ones(1000)
    wrong = kernel_calls.descriptors(owned)
    wrong.sizes[0] += 1  # an element that is not there
    kernel_calls.Call("add", {name: wrong for name in ("x", "branch", "out")}, {"alpha": 1.0}, n_threads=1)()
kept = kernel_calls.of_models()
for call in [call for _, call in kept] + kernel_calls.without_models():
    for n_threads in (1, 2, 3):
        call.with_number("n_threads", n_threads)()
        try:  # threads that give up, too
            call.with_number("n_threads", 0)()
        except ValueError:
            pass
if sys.argv[2] == "boundaries":
    for calls in (kernel_calls.at_boundaries(), kernel_calls.steps_at_boundaries()):
        for i, call in enumerate(calls):
            call.with_number("n_threads", 1 + i % 3)()
print("all computed")
"""


def compiler(name: str) -> str:
    found = shutil.which(name)
    if found is None or platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip(f"needs {name} on x86-64 Linux")
    return found


def library_of(program: str, name: str) -> str | None:
    """Return the path of a compiler's library with this name."""
    command = [compiler(program), f"-print-file-name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = Path(done.stdout.strip())
    return str(found.resolve()) if found.is_absolute() and found.exists() else None


def tools(sanitizer: str) -> tuple[str, tuple[str, ...], list[str | None]]:
    """Return the compiler, its options, and the runtimes to preload."""
    options = OPTIONS[sanitizer]
    if sanitizer != "thread" and shutil.which("clang++"):
        if sanitizer == "undefined":  # it traps, without a text: to compile the reports takes longer than all the rest
            return "clang++", (*options, "-fsanitize-undefined-trap-on-error"), []
        if runtime := library_of("clang++", "libclang_rt.asan-x86_64.so"):
            return "clang++", (*options, "-shared-libsan"), [runtime]
    if sanitizer == "address":  # libstdc++: what throws is looked for at once
        calls = ("--param", "asan-instrumentation-with-call-threshold=0")
        return "g++", (*options, *calls), [library_of("g++", name) for name in ("libasan.so", "libstdc++.so")]
    return "g++", options, [library_of("g++", "libtsan.so")] if sanitizer == "thread" else []


def built(program: str, options: tuple[str, ...], level: Level, folder: Path) -> Path:
    """Build the library for a level; skip the test if this processor cannot run it."""
    if missing := level.flags - cpu_flags():
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_build, "FLAGS", ("-O1", "-g1", "-std=c++17", "-fPIC", "-pthread"))
        content = kernel_build.build(compiler(program), ((*level.options, *options),))
    file = folder / f"kernels-{level.name}.so"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("level", "sanitizer"),
    [
        ("avx512bf16", "address"), ("avx512bf16", "undefined"), ("avx2", "address"), ("avx2", "undefined"),
        ("avx2", "thread"),
    ],
)  # fmt: skip
def test_every_function_runs_without_a_report(level: str, sanitizer: str, tmp_path: Path) -> None:
    program, options, runtimes = tools(sanitizer)
    file = built(program, options, X86[level], tmp_path)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1:exitcode=66",
        "LD_PRELOAD": " ".join(filter(None, runtimes)),
    }
    command = [sys.executable, "-X", "faulthandler", "-c", CALLS, str(file)]
    if sanitizer == "thread" and (fixed := shutil.which("setarch")):
        command = [fixed, "-R", *command]  # its runtime wants addresses that are not random

    def run(what: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, what], env=environment, capture_output=True, text=True, check=False, timeout=600
        )

    if sanitizer == "address":  # it sees one element too many
        done = run("planted")
        assert done.returncode and "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-3000:]
    done = run("some" if sanitizer == "thread" else "boundaries")
    assert done.returncode == 0 and "all computed" in done.stdout, (done.stdout + done.stderr)[-6000:]
    assert "ERROR: " not in done.stderr and "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[-6000:]


@pytest.mark.parametrize("name", ["g++", "clang++"])
@pytest.mark.parametrize("processor", ["native", "haswell", "x86-64"])
def test_nothing_is_warned_of(name: str, processor: str) -> None:
    """Compiles each source for processors with different intrinsics; GCC warns more when it optimizes."""
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
