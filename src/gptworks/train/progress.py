"""Where a run stands."""

import math
from dataclasses import dataclass, field
from typing import Any, Self

from gptworks.train.anomalies import GradientEstimate


@dataclass
class Progress:
    """Saved with every checkpoint; beside the weights and the optimizer it is all that a resumed run needs."""

    step: int = 0
    """Optimizer steps done, skipped ones included."""
    tokens: int = 0
    """Targets trained on."""
    seconds: float = 0.0
    """Of training, over all sittings."""
    skipped: int = 0
    skipped_in_a_row: int = 0
    rollbacks: int = 0
    batches_passed: int = 0
    """Batches that rollbacks have gone past: step n trains on batch n and these."""
    gradient: GradientEstimate = field(default_factory=GradientEstimate)
    best_loss: float = math.inf
    best_step: int = 0
    evaluations_since_best: int = 0
    data_fingerprint: str = ""
    scaler: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Self:
        """What `dataclasses.asdict` gave, after a checkpoint's JSON."""
        return cls(**state | {"gradient": GradientEstimate(**state.get("gradient", {}))})
