"""Runs a test file's `main` on a CPU in Triton's interpreter, which needs a process of its own."""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest


def interpret(file: str) -> None:
    """Run a Python file with Triton's kernels interpreted; skip the test where that is impossible."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if version("triton") < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("this Triton's interpreter does not work with numpy 2.4")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
