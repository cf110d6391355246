"""The events of a training loop, and what listens to them."""

from dataclasses import dataclass, field
from typing import Any

from gptworks.evaluation.loss import LossReport
from gptworks.training.progress import Progress
from gptworks.training.step import StepLosses


@dataclass
class Step:
    """What is known of one optimizer step."""

    rate_factor: float
    """The learning rate, as a factor of its peak."""
    losses: StepLosses
    norm: float
    """Of the gradients, before they are clipped."""
    skipped: str | None = None
    """Why the gradients were not applied; None: they were."""
    by_layer: dict[str, Any] = field(default_factory=dict)
    """Norms of each layer, where they were recorded."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation has found."""

    report: LossReport
    figures: dict[str, float]
    """Other means, by name."""
    is_best: bool
    """Whether it is the lowest loss so far."""


class Listener:
    """Follows a run in training: overrides the events that it needs. They come in this order."""

    def begin_step(self, progress: Progress) -> None:
        """A step begins; its batch is not read yet."""

    def gradients(self, step: Step) -> None:
        """The gradients of the whole step are there, neither clipped nor applied."""

    def applied(self, progress: Progress) -> None:
        """The optimizer has changed the weights; `progress` does not count the step yet."""

    def end_step(self, progress: Progress, step: Step) -> None:
        """The step is done, or was skipped; `progress` counts it."""

    def evaluated(self, progress: Progress, found: Evaluation) -> None:
        """An evaluation was finished."""
