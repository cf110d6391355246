"""The events of the training loop, and the base class of their listeners."""

from dataclasses import dataclass, field
from typing import Any

from gptworks.evaluation.loss import LossReport
from gptworks.training.progress import Progress
from gptworks.training.step import StepLosses


@dataclass
class Step:
    """The results of one training step."""

    rate_factor: float
    """The step's learning rate divided by the peak learning rate."""
    losses: StepLosses
    norm: float
    """Norm of the gradients before clipping."""
    skipped: str | None = None
    """The reason why the gradients were not applied; None: they were applied."""
    by_layer: dict[str, Any] = field(default_factory=dict)
    """Root mean square of each layer's outputs, and norm of its gradients; empty if this step does not record them."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    report: LossReport
    figures: dict[str, float]
    """The objective's other figures by name, each a mean over the samples evaluated."""
    is_best: bool
    """Whether the evaluation's loss is the lowest of the run so far."""


class Listener:
    """Base class of a run's listeners. The loop calls its methods in the order below; subclasses override some."""

    def begin_step(self, progress: Progress) -> None:
        """Called before the step's batch is read."""

    def gradients(self, step: Step) -> None:
        """Called when the step's gradients are complete, before clipping."""

    def applied(self, progress: Progress) -> None:
        """Called after the weights are updated; `progress` does not include the step yet."""

    def end_step(self, progress: Progress, step: Step) -> None:
        """Called after a step was applied or skipped; `progress` includes it."""

    def evaluated(self, progress: Progress, found: Evaluation) -> None:
        """Called after an evaluation."""
