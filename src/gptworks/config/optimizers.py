"""Settings, state and scratch memory of every optimizer.

Training, checkpoints and the plan read the table `OPTIMIZERS`. To add an optimizer, write its name, settings and table
entry here, and its computation in a file with its name in `gptworks.training.optim`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal, Self

from pydantic import Field, model_validator

from gptworks.config.base import Fixed, Fraction, PositiveInt, Section, Steering
from gptworks.config.batches import BatchSettings
from gptworks.config.model import Shape

MUON_TOGETHER = 2**22
"""Muon orthogonalizes matrices in batches of up to this many elements; larger batches only need more scratch memory."""

CPU_AT_ONCE, AT_ONCE = 2**18, 2**22
"""Number of elements that 8-bit AdamW and cautious decay process at a time, on a CPU and on other devices."""

LEAST_IN_8_BITS = 4096
"""Smallest number of elements with which a matrix gets 8-bit moments."""

SCALED_TOGETHER = 256
"""Number of consecutive elements of an 8-bit tensor that share a scale."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of an optimizer's state."""

    shape: Shape
    dtype: Literal["float32", "int8", "uint8"] = "float32"
    signed: bool = True
    """Whether elements may be negative."""


@dataclass(frozen=True)
class Ownership:
    """How ranks divide the updates of whole matrices: each matrix has an owner, which computes its update."""

    work: Callable[[Shape], int]
    """Returns the relative cost of an update of a matrix with this shape."""
    element_bytes: int
    """Bytes per element of the tensors that an owner gathers, and of the updates that it sends."""
    scratch_bytes: Callable[[dict[Shape, int], int], int]
    """Returns the peak scratch bytes of an owner that gathers matrices, given the number of matrices of each shape and
    the number of owners."""
    keeps_state: bool = False
    """Whether only the owner keeps a matrix's state; otherwise each rank keeps the state of its parts."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's properties, which other packages read instead of checking its name."""

    name: str
    """Display name, including the optimizer of the other parameters, such as `Muon and AdamW`."""
    state: Callable[[Shape], dict[str, StateTensor]]
    """Returns the state tensors, by key, of a parameter with this shape."""
    scratch_bytes: Callable[[dict[Shape, int]], int] = lambda _: 0
    """Returns the peak scratch memory of an update in bytes, given the number of matrices of each shape."""
    ownership: Ownership | None = None
    """How ranks divide the updates of whole matrices; None if each rank updates the parts that it holds."""
    orthogonalizes: bool = False
    """Whether updates are orthogonal matrices times `muon_learning_rate`."""
    steps_differ: bool = False
    """Whether some steps take longer by design."""


def _adamw(shape: Shape) -> dict[str, StateTensor]:
    moments = {"exp_avg": StateTensor(shape), "exp_avg_sq": StateTensor(shape, signed=False)}
    return {"step": StateTensor((), signed=False), **moments}


def _adamw_int8(shape: Shape) -> dict[str, StateTensor]:
    scales = StateTensor((n_scales(shape),), signed=False)
    return {
        "step": StateTensor((), signed=False),
        "exp_avg": StateTensor(shape, "int8"),
        "exp_avg_scale": scales,
        "exp_avg_sq": StateTensor(shape, "uint8", signed=False),
        "exp_avg_sq_scale": scales,
    }


def _muon(shape: Shape) -> dict[str, StateTensor]:
    return {"momentum_buffer": StateTensor(shape)}


def _muon_scratch(matrices: dict[Shape, int]) -> int:
    """Return the peak scratch bytes of Muon, which updates several matrices of one shape at a time, in bf16."""
    most = 0
    for (a, b), n in matrices.items():
        together = min(n, max(1, MUON_TOGETHER // (a * b)))
        making, orthogonalizing = 4 * a * b + 2 * together * a * b, 4 * together * (a * b + min(a, b) ** 2)
        most = max(most, making, orthogonalizing)
    return most


def _muon_work(shape: Shape) -> int:
    """Return the number of multiplications in one of Muon's iterations: for X·Xᵀ, its square, and a product with X."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def _muon_owner_scratch(matrices: dict[Shape, int], n_owners: int) -> int:
    """Return the peak scratch bytes of a rank that orthogonalizes matrices gathered from several ranks. In bf16 it
    holds the parts that it sends, a copy of these, the parts that it receives, and the whole matrices."""
    together = (min(-(-n // n_owners), max(1, MUON_TOGETHER // prod(shape))) for shape, n in matrices.items())
    return max((8 * n * prod(shape) for n, shape in zip(together, matrices, strict=True)), default=0)


def _normuon(shape: Shape) -> dict[str, StateTensor]:
    return _muon(shape) | {"row_second_moment": StateTensor(shape[:1], signed=False)}


def _soap(shape: Shape) -> dict[str, StateTensor]:
    sides = zip(("left", "right"), shape, strict=True)
    bases = {f"{side}{kind}": StateTensor((n, n)) for side, n in sides for kind in ("", "_basis")}
    return _adamw(shape) | bases


def _soap_scratch(matrices: dict[Shape, int]) -> int:
    """Return the peak scratch bytes of SOAP, while it updates the eigenbasis of its widest preconditioner."""
    widest = max(map(max, matrices), default=0)
    return 4 * 4 * widest**2 + 8 * widest


def _soap_work(shape: Shape) -> int:
    """Return the relative cost of an update by SOAP: m³ + n³ for the bases, 3 m n (m + n) for products."""
    return sum(shape) ** 3


BY_MUON = Ownership(_muon_work, 2, _muon_owner_scratch)
BY_SOAP = Ownership(_soap_work, 4, lambda matrices, _: _soap_scratch(matrices), keeps_state=True)

OPTIMIZERS = {
    "adamw": Optimizer("AdamW", _adamw),
    "adamw_int8": Optimizer("AdamW", _adamw_int8),
    "muon": Optimizer("Muon and AdamW", _muon, _muon_scratch, BY_MUON, orthogonalizes=True),
    "normuon": Optimizer("NorMuon and AdamW", _normuon, _muon_scratch, BY_MUON, orthogonalizes=True),
    "soap": Optimizer("SOAP and AdamW", _soap, _soap_scratch, BY_SOAP, steps_differ=True),
}
"""Optimizers by `train.optimizer`. `adamw_int8` is `train.optimizer=adamw` with `train.optimizer_state=int8`."""


def n_scales(shape: Iterable[int]) -> int:
    """Return the number of scales of an 8-bit tensor with this shape."""
    return -(-prod(shape) // SCALED_TOGETHER)


class RateFactors(Section):
    """Factors of the peak learning rates, by kind of parameter."""

    embeddings: Steering[float] = Field(
        1.0, ge=0, description="Matrices outside the blocks: all embeddings, a tied head, and future heads."
    )
    head: Steering[float] = Field(1.0, ge=0, description="An untied head (model.tie_embeddings=false).")
    matrices: Steering[float] = Field(1.0, ge=0, description="The blocks' matrices, including an adapter's.")
    vectors: Steering[float] = Field(1.0, ge=0, description="Norms, biases and other vectors and scalars.")


class OptimizerSettings(BatchSettings):
    """Settings of the optimizer and of its updates."""

    optimizer: Fixed[Literal["adamw", "muon", "normuon", "soap"]] = Field(
        "muon",
        description="muon: Muon for the blocks' matrices (Jordan et al., 2024), AdamW for the rest. normuon: Muon with "
        "normalized rows (Li et al., 2025). soap: Adam in Shampoo's eigenbasis for the blocks' matrices (Vyas et al., "
        "2024). The default from trained weights, with an adapter and with `optimizer_state: int8` is "
        "adamw.",
    )
    optimizer_state: Fixed[Literal["fp32", "int8"]] = Field(
        "fp32",
        description="Format of AdamW's moments of the blocks' matrices. int8: 8 bits with one scale per 256 values "
        "(Dettmers et al., 2022); matrices of fewer than 4,096 elements keep fp32.",
    )
    learning_rate: Steering[float] = Field(
        0.02,
        gt=0,
        description="Peak rate of AdamW and SOAP. Default with Muon: 0.02, above d_model 512 times √(512 / d_model). "
        "Without Muon: 0.5 / d_model, at most 0.003. From trained weights: 0.0768 / d_model, ten times that for an "
        "adapter, a fifth of it for preferences and rewards, at most 0.001.",
    )
    muon_learning_rate: Steering[float] = Field(0.02, gt=0, description="Peak rate of Muon.")
    rate_factors: RateFactors = Field(RateFactors(), description="Factors of the peak rates by kind of parameter.")
    muon_momentum: Steering[Fraction] = Field(0.95, description="Momentum of Muon.")
    muon_coefficients: Steering[Literal["jordan", "polar_express"]] = Field(
        "jordan",
        description="Muon's polynomials. jordan: the same in each iteration (Jordan et al., 2024). polar_express: the "
        "best one for each (Amsel et al., 2025).",
    )
    muon_iterations: Steering[int] = Field(5, ge=1, le=20, description="Iterations of Muon's orthogonalization.")
    normuon_beta: Steering[Fraction] = Field(0.95, description="Decay of NorMuon's second moments of rows.")
    soap_frequency: Steering[PositiveInt] = Field(10, description="Steps between refreshes of SOAP's eigenbases.")
    betas: Steering[tuple[Fraction, Fraction]] = Field(
        (0.9, 0.95), description="Decay of the first and second moments of AdamW and SOAP."
    )
    eps: Steering[float] = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: Steering[float] = Field(
        0.01, ge=0, description="Decoupled, on matrices only. Default: 0.01; AdamW only: 0.1; from trained weights: 0."
    )
    cautious_weight_decay: Steering[bool] = Field(
        False, description="Decay only weights that the update moves towards zero (Chen et al., 2025)."
    )
    grad_clip: Steering[float] = Field(1.0, ge=0, description="Largest global gradient norm. 0: no clipping.")

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer != "adamw" and self.optimizer_state == "int8":
            raise ValueError(
                f"optimizer_state=int8 with optimizer={self.optimizer}: only AdamW's moments of the blocks' matrices "
                f"have 8 bits; set optimizer=adamw, or leave optimizer_state out"
            )
        return self

    @property
    def orthogonalizes(self) -> bool:
        """Whether updates of the blocks' matrices are orthogonal matrices times `muon_learning_rate`."""
        return OPTIMIZERS[self.optimizer].orthogonalizes
