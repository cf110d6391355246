"""The decoding step as WebAssembly: step.wasm, which build.py builds from the C++ of `gptworks.kernels`."""

from pathlib import Path

_HERE = Path(__file__).parent
MODULE, SUMS = _HERE / "step.wasm", _HERE / "step.sums"
WIDEST_PANEL = 16
"""Rows of a panel of matrices in bf16, int8 and int4, for registers of 16 bytes."""


def module() -> bytes:
    """Return the WebAssembly module. It imports its memory, which threads may share; js/kernels.js says how."""
    return MODULE.read_bytes()
