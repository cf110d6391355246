"""Checks the demo's claim for .ci/run: a model needs fewer bits per byte of held-out text than xz.

    gptworks evaluate runs/demo --compressors --json | python tests/demo_claim.py

ends with 1 where the claim does not hold.
"""

import json
import sys
from typing import Any


def holds(report: dict[str, Any]) -> bool:
    """Whether the model in the output of `gptworks evaluate --compressors --json` needs fewer bits per byte than xz."""
    model, xz = report["bits_per_byte"], report["compressors"]["xz_9e"]
    print(f"bits per byte: {model:.4f}, xz -9e {xz:.4f}")
    return bool(model < xz)


if __name__ == "__main__":
    sys.exit(not holds(json.load(sys.stdin)))
