"""The events of a training loop, and the interface of their listeners."""

from dataclasses import dataclass, field
from typing import Any

from gptworks.evaluation.loss import LossReport
from gptworks.training.progress import Progress
from gptworks.training.step import StepLosses


@dataclass
class Step:
    """One optimizer step."""

    rate_factor: float
    """The learning rate, as a factor of its peak."""
    losses: StepLosses
    norm: float
    """Norm of the gradients before clipping."""
    skipped: str | None = None
    """The reason why the gradients were not applied; None if they were."""
    by_layer: dict[str, Any] = field(default_factory=dict)
    """Norms of each layer, if recorded."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    report: LossReport
    figures: dict[str, float]
    """Additional means by name."""
    is_best: bool
    """Whether the evaluation's loss is the lowest of the run."""


class Listener:
    """Follows a run: overrides the events that it needs. They come in this order."""

    def begin_step(self, progress: Progress) -> None:
        """Called before a step's batch is read."""

    def gradients(self, step: Step) -> None:
        """Called when the step's gradients are complete, before clipping."""

    def applied(self, progress: Progress) -> None:
        """Called after the weights are updated; `progress` does not count the step yet."""

    def end_step(self, progress: Progress, step: Step) -> None:
        """Called after a step was applied or skipped; `progress` counts it."""

    def evaluated(self, progress: Progress, found: Evaluation) -> None:
        """Called after an evaluation."""
