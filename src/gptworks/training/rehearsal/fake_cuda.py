"""Rehearses a training step on fake CUDA tensors, without a GPU, to find wrong devices, host reads, float32 products
and graph breaks.

A CPU build of torch gets the CUDA device that it lacks from fake_cuda.cpp, which a new process preloads. That process
runs `gptworks.training.rehearsal.watched` and returns a `FakeStep` as JSON. Nothing is computed.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from gptworks.kernels import build, cache
from gptworks.kernels.build import Unavailable
from gptworks.training.rehearsal.new_process import ProcessFailed, ask
from gptworks.training.rehearsal.trace import Rehearsal

Kind = Literal["wrong device", "host read", "blocking copy", "float32 product", "graph break", "failed"]


@dataclass(frozen=True)
class Finding:
    """A fault or a delay that a GPU would show in the step.

    It is an operation that fails or makes the host wait, a tensor on a wrong device, a product in a wider dtype than
    the run's precision, a break of a graph, or the error that ended the step.
    """

    kind: Kind
    operation: str
    """Name of torch's operation or of the tensor on a wrong device, or why a graph breaks or the step failed."""
    where: str
    """File and line, such as `model/moe.py:53`, of the code that called the operation; if autograd called it, of the
    code of the forward pass. Only the file for a tensor that stays on a wrong device; empty if unknown."""
    count: int = 1
    """Number of occurrences in the step."""
    expected: str | None = None
    """The reason, if gptworks does this on purpose; None for a fault."""


@dataclass(frozen=True)
class FakeStep:
    """The operations of a training step on a fake CUDA device."""

    not_checked: str | None = None
    """The reason why nothing was checked; None if the step was checked."""
    n_operations: int = 0
    findings: tuple[Finding, ...] = ()
    products: tuple[tuple[str, int], ...] = ()
    """Each dtype of matrix products and attention, and the number of products of this dtype."""
    n_graphs: int | None = None
    """Number of graphs of the compiled blocks: one per block if no graph breaks. None if no block is compiled, or if
    the step failed or was not checked."""

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that gptworks does not expect."""
        return tuple(finding for finding in self.findings if finding.expected is None)

    def count(self, kind: Kind) -> int:
        """Return how often findings of a kind happened in the step, expected or not."""
        return sum(finding.count for finding in self.findings if finding.kind == kind)


_SECONDS = 1800


def step_on_fake_cuda(rehearsal: Rehearsal) -> FakeStep:
    """Run two training steps of a new model on fake CUDA tensors, in a new process, and report on the second.

    `rehearsal` has the step's settings, with device cuda; `Rehearsal.of(plan, "cuda")` takes them from a plan.
    """
    try:
        guard = guard_library()
    except Unavailable as error:
        return FakeStep(not_checked=str(error))
    try:
        return ask("watched", given=rehearsal, returns=FakeStep, seconds=_SECONDS, environment=preloading(guard))
    except ProcessFailed as failed:
        return FakeStep(not_checked=f"the step on fake CUDA failed: {failed}")


def preloading(guard: Path) -> dict[str, str]:
    """Return this process's environment, changed to preload the fake CUDA device `guard` and to hide GPUs."""
    return os.environ | {"LD_PRELOAD": str(guard), "CUDA_VISIBLE_DEVICES": ""}


def guard_library() -> Path:
    """Return the path of the compiled fake_cuda.cpp; compile it if it is not in the cache of the kernels.

    Raises:
        Unavailable: this torch has CUDA, the system is not Linux, no compiler works, or no folder keeps the library.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise Unavailable("fake CUDA needs a CPU build of torch, and this one is built for GPUs.")
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"fake CUDA preloads a library as Linux does, and this system is {sys.platform}.")
    compiler = build.find_compiler()
    if compiler is None:
        raise Unavailable("fake CUDA needs a C++ compiler, and there is no g++ or clang++.")
    source, torch_folder = Path(__file__).with_suffix(".cpp"), Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    flags = (
        "-std=c++20", "-O1", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{libraries}", f"-Wl,-rpath,{libraries}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    )  # fmt: skip
    key = build.key(compiler, (source,), (torch.__version__, *flags))
    reasons = []
    for folder in cache.folders():
        try:
            return cache.keep(
                folder, key, lambda: build.build(compiler, ((),), (source,), flags, ("-lc10", "-ltorch_cpu"))
            )
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
    raise Unavailable(f"no folder can keep the library of fake CUDA ({'; '.join(reasons)}).")
