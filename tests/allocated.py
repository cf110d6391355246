"""Measures the memory that a training step allocates in a process of its own.

LD_PRELOAD=allocated.so python allocated.py < rehearsal.json: JSON, see `Allocated`.
"""

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from gptworks.training.rehearsal.measure import step_times
from gptworks.training.rehearsal.trace import Rehearsal

_JSON = TypeAdapter(Rehearsal)


class Allocated(NamedTuple):
    """Numbers of bytes."""

    step: int
    """The most at once, model and optimizer included, beyond the base."""
    base: int
    """What the process has after the same step of a model that is gone: modules, and what kernels keep."""
    kernels: int
    """Of the base, what the first such step added: code that is compiled for each shape, and what it starts with."""


def counter_in(folder: Path) -> Path | None:
    """Compile the counting library into a folder and return its path; None: there is no compiler or no glibc."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return None
    library = folder / "allocated.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def allocated_by_a_step(rehearsal: Rehearsal, counter: Path) -> Allocated:
    """Return what a step allocates, measured in a new process."""
    environment = os.environ | {"LD_PRELOAD": str(counter), "PYTHONMALLOC": "malloc"}
    result = subprocess.run(
        [sys.executable, __file__],
        input=_JSON.dump_json(rehearsal),
        stdout=subprocess.PIPE,
        env=environment,
        check=True,
    )
    return Allocated(*json.loads(result.stdout))


def _count(rehearsal: Rehearsal) -> Allocated:
    c = ctypes.CDLL(None)
    c.allocated_now.restype = c.allocated_at_most.restype = ctypes.c_long

    def now() -> int:
        gc.collect()
        n_bytes: int = c.allocated_now()
        return n_bytes

    first = now()
    next(step_times(rehearsal))
    base = now()
    steps = step_times(rehearsal)
    next(steps)
    c.forget_the_most()
    next(steps)
    return Allocated(c.allocated_at_most() - base, base, base - first)


if __name__ == "__main__":
    print(json.dumps(_count(_JSON.validate_json(sys.stdin.read()))))
