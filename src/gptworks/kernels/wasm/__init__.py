"""The decoding step as WebAssembly: step.wasm, which build.py builds from the C++ of `gptworks.kernels`."""

from pathlib import Path

_HERE = Path(__file__).parent
MODULE, SUMS = _HERE / "step.wasm", _HERE / "step.sums"
WIDEST_PANEL = 16
"""Largest number of rows in a panel of a bf16, int8 or int4 matrix, for registers of 16 bytes."""


def module() -> bytes:
    """Return the WebAssembly module. It imports its memory, which threads can share; see html_file/js/kernels.js."""
    return MODULE.read_bytes()
