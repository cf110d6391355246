"""What each optimizer keeps of a parameter, and in which pieces it works: one table for training, checkpoints and the
plan, without torch."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from gptworks.planning.params import Shape

MUON_TOGETHER = 2**22
"""Elements that Muon orthogonalizes at once, at most: batching larger matrices is no faster, and each needs scratch
memory."""

CPU_AT_ONCE, AT_ONCE = 2**18, 2**22
"""Elements that AdamW in 8 bits updates at once, and that cautious decay takes at once: on a CPU, and elsewhere."""

LEAST_IN_8_BITS = 4096
"""Elements of the smallest matrix whose moments are kept in 8 bits."""

SCALED_TOGETHER = 256
"""Elements of a flattened tensor in 8 bits that share a scale."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of an optimizer's state."""

    shape: Shape
    dtype: Literal["float32", "int8", "uint8"] = "float32"
    signed: bool = True
    """Whether its elements may be negative."""


def state_layout(optimizer: str, shape: Shape) -> dict[str, StateTensor]:
    """An optimizer's state of a parameter by key: that of adamw, adamw_int8, muon, normuon or soap."""
    whole, step = StateTensor(shape), StateTensor((), signed=False)
    if optimizer in ("muon", "normuon"):
        rows = {"row_second_moment": StateTensor(shape[:1], signed=False)} if optimizer == "normuon" else {}
        return {"momentum_buffer": whole, **rows}
    if optimizer == "adamw_int8":
        scales = StateTensor((n_scales(shape),), signed=False)
        return {
            "step": step,
            "exp_avg": StateTensor(shape, "int8"),
            "exp_avg_scale": scales,
            "exp_avg_sq": StateTensor(shape, "uint8", signed=False),
            "exp_avg_sq_scale": scales,
        }
    layout = {"step": step, "exp_avg": whole, "exp_avg_sq": StateTensor(shape, signed=False)}
    if optimizer == "soap":
        for side, size in zip(("left", "right"), shape, strict=True):
            layout |= dict.fromkeys((side, f"{side}_basis"), StateTensor((size, size)))
    return layout


def n_scales(shape: Shape) -> int:
    """Blocks of a tensor that each share a scale; the last may be short."""
    return -(-prod(shape) // SCALED_TOGETHER)
