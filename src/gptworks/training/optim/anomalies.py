"""Steps that would do harm: a non-finite loss or gradient, or a gradient far larger than those before it."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from gptworks.config import TrainConfig

MEMORY_STEPS = 100
"""Time constant of the running estimate, in steps."""

WARMUP_STEPS = 20
"""Applied steps that the estimate needs before it judges a step."""


@dataclass
class GradientEstimate:
    """Mean and variance of the logarithm of the gradient norm over applied steps; saved with the progress."""

    n_steps: Annotated[int, Field(ge=0)] = 0
    mean: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    variance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    def take(self, norm: float) -> None:
        """Add the gradient norm of an applied step."""
        value = math.log(max(norm, 1e-30))
        weight = 1 / min(self.n_steps + 1, MEMORY_STEPS)
        difference = value - self.mean
        self.mean += weight * difference
        self.variance = (1 - weight) * (self.variance + weight * difference**2)
        self.n_steps += 1

    def deviations(self, norm: float) -> float:
        """Standard deviations by which a norm's logarithm exceeds the mean; 0 during the first `WARMUP_STEPS`."""
        if self.n_steps < WARMUP_STEPS:
            return 0.0
        return (math.log(max(norm, 1e-30)) - self.mean) / max(math.sqrt(self.variance), 0.05)


def anomaly(train: TrainConfig, estimate: GradientEstimate, loss: float, norm: float) -> str | None:
    """The reason why a step with this loss and gradient norm must be skipped; None: apply the step."""
    if not math.isfinite(loss):
        return "its loss is not finite"
    if not math.isfinite(norm):
        return "its gradient is not finite"
    above = estimate.deviations(norm)
    if train.spike_deviations and above > train.spike_deviations:
        return f"its gradient norm {norm:.3g} is {above:.1f} deviations above the run's"
    return None
