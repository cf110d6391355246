"""Every optimizer: its settings, what it keeps of a parameter, and in which pieces it works.

Training, checkpoints and the plan read this one table. To add an optimizer, write its name, settings and entry of
`OPTIMIZERS` here, and what it computes in a file of its name in `gptworks.training.optim`.
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


@dataclass(frozen=True)
class Optimizer:
    """What others need to know of an optimizer."""

    name: str
    """With that of the optimizer for all but the blocks' matrices."""
    state: Callable[[Shape], dict[str, StateTensor]]
    """Its state of a parameter of this shape, by key."""
    scratch_bytes: Callable[[dict[Shape, int]], int] = lambda _: 0
    """Peak memory of an update of these matrices, beyond the state: their number by shape."""
    orthogonalizes: bool = False
    """Whether an update is an orthogonal matrix, at `muon_learning_rate`; ranks divide such updates."""


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
    """Updates of some matrices of one shape at a time, in bf16."""
    most = 0
    for (a, b), n in matrices.items():
        together = min(n, max(1, MUON_TOGETHER // (a * b)))
        making, orthogonalizing = 4 * a * b + 2 * together * a * b, 4 * together * (a * b + min(a, b) ** 2)
        most = max(most, making, orthogonalizing)
    return most


def _normuon(shape: Shape) -> dict[str, StateTensor]:
    return _muon(shape) | {"row_second_moment": StateTensor(shape[:1], signed=False)}


def _soap(shape: Shape) -> dict[str, StateTensor]:
    sides = zip(("left", "right"), shape, strict=True)
    bases = {f"{side}{kind}": StateTensor((n, n)) for side, n in sides for kind in ("", "_basis")}
    return _adamw(shape) | bases


def _soap_scratch(matrices: dict[Shape, int]) -> int:
    """A preconditioner is multiplied with its basis, sorted and factored."""
    widest = max(map(max, matrices), default=0)
    return 4 * 4 * widest**2 + 8 * widest


OPTIMIZERS = {
    "adamw": Optimizer("AdamW", _adamw),
    "adamw_int8": Optimizer("AdamW", _adamw_int8),
    "muon": Optimizer("Muon and AdamW", _muon, _muon_scratch, orthogonalizes=True),
    "normuon": Optimizer("NorMuon and AdamW", _normuon, _muon_scratch, orthogonalizes=True),
    "soap": Optimizer("SOAP and AdamW", _soap, _soap_scratch),
}
"""By `train.optimizer`; adamw_int8 is AdamW of the blocks' matrices with `train.optimizer_state` int8."""


def n_scales(shape: Iterable[int]) -> int:
    """Blocks of a tensor that each share a scale; the last may be short."""
    return -(-prod(shape) // SCALED_TOGETHER)


class RateFactors(Section):
    """What the peak rates are multiplied by, for each kind of parameter."""

    embeddings: Steering[float] = Field(1.0, ge=0, description="Tables of tokens and positions, and a tied head.")
    head: Steering[float] = Field(1.0, ge=0, description="A head of its own (model.tie_embeddings=false).")
    matrices: Steering[float] = Field(1.0, ge=0, description="The blocks' matrices, an adapter's among them.")
    vectors: Steering[float] = Field(1.0, ge=0, description="Norms, biases and other vectors and scalars.")


class OptimizerSettings(BatchSettings):
    """Which optimizer changes the weights, and how far at each step."""

    optimizer: Fixed[Literal["adamw", "muon", "normuon", "soap"]] = Field(
        "muon",
        description="muon: Muon for the blocks' matrices (Jordan et al., 2024), AdamW for the rest; normuon: with rows "
        "of one size (Li et al., 2025); soap: for them Adam in Shampoo's eigenbasis (Vyas et al., 2024). "
        "From trained weights, and with an adapter, the default is adamw.",
    )
    optimizer_state: Fixed[Literal["fp32", "int8"]] = Field(
        "fp32",
        description="AdamW's moments of the blocks' matrices. int8: in 8 bits, with a scale for each 256 (Dettmers et "
        "al., 2022).",
    )
    learning_rate: Steering[float] = Field(
        0.02,
        gt=0,
        description="Peak rate of AdamW. Default with Muon: 0.02, and 0.02 × √(512 / d_model) from d_model 512 on; "
        "only AdamW: 0.5 / d_model, at most 0.003; from trained weights: 0.0768 / d_model, ten times for an adapter, "
        "a fifth where answers are judged, at most 0.001.",
    )
    muon_learning_rate: Steering[float] = Field(0.02, gt=0, description="Peak rate of Muon's matrices.")
    rate_factors: RateFactors = RateFactors()
    muon_momentum: Steering[Fraction] = 0.95
    muon_coefficients: Steering[Literal["jordan", "polar_express"]] = Field(
        "jordan",
        description="Muon's polynomials: jordan, the same in each iteration (Jordan et al., 2024); polar_express, the "
        "best for each (Amsel et al., 2025).",
    )
    muon_iterations: Steering[int] = Field(
        5, ge=1, le=20, description="Iterations by which Muon orthogonalizes a matrix."
    )
    normuon_beta: Steering[Fraction] = Field(0.95, description="Decay of the second moments of NorMuon's rows.")
    soap_frequency: Steering[PositiveInt] = Field(
        10, description="Steps from one refresh of SOAP's eigenbases to the next."
    )
    betas: Steering[tuple[Fraction, Fraction]] = (0.9, 0.95)
    eps: Steering[float] = Field(1e-8, gt=0)
    weight_decay: Steering[float] = Field(
        0.01,
        ge=0,
        description="Decoupled, on matrices only. Default with Muon: 0.01; only AdamW: 0.1; trained weights: 0.",
    )
    cautious_weight_decay: Steering[bool] = Field(
        False, description="Decay only the weights that the update takes towards zero (Chen et al., 2025)."
    )
    grad_clip: Steering[float] = Field(1.0, ge=0, description="Largest global gradient norm. 0: no clipping.")

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer != "adamw" and self.optimizer_state == "int8":
            raise ValueError(
                f"optimizer_state=int8 with optimizer={self.optimizer}: what it keeps of the blocks' matrices are not "
                f"AdamW's moments, and AdamW's of all else stay fp32 in any case; set optimizer=adamw, or leave "
                f"optimizer_state out"
            )
        return self

    @property
    def orthogonalizes(self) -> bool:
        """Whether the blocks' matrices have orthogonal updates, at `muon_learning_rate`."""
        return OPTIMIZERS[self.optimizer].orthogonalizes
