"""The progress of a run, its length and learning rates, and the check whether to skip a step."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from gptworks.checkpoint import Checkpoint
from gptworks.config import Recipe, TrainConfig
from gptworks.data.samples import Samples
from gptworks.errors import UserError
from gptworks.planning.steps import DataSize, planned_steps
from gptworks.training.record.display import clock

Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

MEMORY_STEPS = 100
"""Time constant of `GradientEstimate`, in steps."""

WARMUP_STEPS = 20
"""Number of applied steps before `GradientEstimate` reports deviations."""


@dataclass
class GradientEstimate:
    """Running mean and variance of the gradient norm's logarithm over applied steps; saved in checkpoints."""

    n_steps: Count = 0
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
        """Return the number of standard deviations by which the norm's logarithm exceeds the mean; 0 in the first
        `WARMUP_STEPS` steps. A standard deviation below 0.05 counts as 0.05."""
        if self.n_steps < WARMUP_STEPS:
            return 0.0
        return (math.log(max(norm, 1e-30)) - self.mean) / max(math.sqrt(self.variance), 0.05)


def anomaly(train: TrainConfig, estimate: GradientEstimate, loss: float, norm: float) -> str | None:
    """Return the reason to skip a step with this loss and gradient norm; None to apply the step."""
    if not math.isfinite(loss):
        return "its loss is not finite"
    if not math.isfinite(norm):
        return "its gradient is not finite"
    above = estimate.deviations(norm)
    if train.spike_deviations and above > train.spike_deviations:
        return f"its gradient norm {norm:.3g} is {above:.1f} deviations above the run's"
    return None


@dataclass
class Progress:
    """A run's progress, saved in each checkpoint: all that a resumed run needs except weights and optimizer state."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    step: Count = 0
    """Number of training steps done, including skipped ones."""
    samples: Count = 0
    """Number of samples in these steps. A sample is a window, a row, a pair or an answer, as for `batch_size`."""
    tokens: Count = 0
    """Number of tokens that the model has read in training, including padding."""
    seconds: Seconds = 0.0
    """Seconds spent in training steps in all sessions, without evaluations, generated samples and checkpoints."""
    skipped: Count = 0
    skipped_in_a_row: Count = 0
    rollbacks: Count = 0
    samples_passed: Count = 0
    """Number of samples that rollbacks have skipped."""
    gradient: GradientEstimate = field(default_factory=GradientEstimate)
    best_loss: Annotated[float, Field(le=math.inf)] = math.inf  # refuses NaN
    best_step: Count = 0
    evaluations_since_best: Count = 0
    evaluation_cut: bool = False
    """Whether a signal interrupted the evaluation of this step."""
    data_fingerprint: str = ""
    validation_text_sha256: str = ""
    """The sha256 of the validation text; it shows whether runs with different tokenizers have the same text."""
    scaler: dict[str, float] = field(default_factory=dict)

    @property
    def position(self) -> int:
        """Index of the next sample, counted from the start of the run."""
        return self.samples + self.samples_passed

    def require_training(self, run_dir: Path) -> None:
        """Raise UserError if the run in `run_dir` was imported and so has no training to resume."""
        if not self.data_fingerprint:
            raise UserError(
                f"{run_dir} was imported and has no training to resume: start a run from it with "
                f"initialize_from={run_dir} and another run_dir=."
            )

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Read the progress from a checkpoint; raise UserError if it has an unknown key, an invalid value, or another
        step than the checkpoint."""
        try:
            progress = TypeAdapter(cls).validate_json(json.dumps(checkpoint.state()))
            step, due = progress.step, checkpoint.step
            problem = "" if step == due else f"`step`={step} in the checkpoint of step {due}"
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = f"`{'.'.join(map(str, first['loc']))}`={first['input']!r:.80}: {first['msg']}"
        if problem:
            raise UserError(
                f"{checkpoint.folder / 'state.json'} is damaged: {problem}. Restore it from a copy, or delete the "
                f"checkpoint: --resume then continues from the one before it."
            )
        return progress


class Length:
    """The planned length of a run, and how much of it is done."""

    def __init__(self, recipe: Recipe, samples: Samples) -> None:
        self._recipe, self._train, self._samples = recipe, recipe.train, samples

    def total_steps(self, progress: Progress) -> int | None:
        """Return the number of steps after which the run ends, unless time or patience ends it earlier; None if
        only time limits the run. Assumes that `batch_size` stays unchanged."""
        train, samples = self._train, self._samples.per_epoch
        planned = planned_steps(train, self._samples.context_length, DataSize(samples_per_epoch=samples))[0]
        if train.epochs is None or progress.samples == progress.step * train.batch_size:
            return planned
        left = train.epochs * samples - progress.samples
        by_epochs = progress.step + max(0, math.floor(left / train.batch_size + 0.5))
        return min(by_epochs, train.max_steps or by_epochs)

    def share_done(self, progress: Progress) -> float:
        """Return the fraction of the run that is done, from 0 to 1, by steps or by time, whichever is larger."""
        total = self.total_steps(progress)
        shares = [progress.step / total] if total else []
        if self._train.max_minutes is not None:
            shares.append(progress.seconds / (60 * self._train.max_minutes))
        return min(1.0, max(shares))

    def due(self, progress: Progress, every: int) -> bool:
        """Whether an action is due that is done every `every` steps and at the run's end; False if `every` is 0."""
        return every > 0 and (progress.step % every == 0 or self.share_done(progress) >= 1)

    def end_reason(self, progress: Progress, stop_asked: str | None) -> str | None:
        """Return the reason why the run ends now; None if it continues."""
        patience = self._train.early_stopping_patience
        if stop_asked:
            return f"stopped by {stop_asked}"
        if progress.evaluation_cut:
            return None
        if self.share_done(progress) >= 1:
            return "finished"
        if patience is not None and progress.evaluations_since_best >= patience:
            return f"no better validation loss in {patience} evaluations"
        return None

    def words(self, progress: Progress) -> str:
        """Return the planned length as text: steps, minutes or both."""
        total, minutes = self.total_steps(progress), self._train.max_minutes
        length = [f"{total:,} steps"] if total else []
        return " or ".join(length + ([f"{minutes:g} minutes"] if minutes is not None else []))

    def reached(self, progress: Progress) -> str:
        """Return the progress as text: the step and the total steps, or the step and the time taken and planned."""
        total, minutes = self.total_steps(progress), self._train.max_minutes
        if minutes is not None and (not total or progress.seconds / (60 * minutes) >= self.share_done(progress)):
            return f"step {progress.step:,}  {clock(progress.seconds)} of {clock(60 * minutes)}"
        return f"step {progress.step:,}/{total:,}"

    def check_resume(self, progress: Progress) -> None:
        """Raise UserError if `epochs` limits the run to less than it has done. `changes.check_changes` has checked the
        other limits, which do not depend on the data."""
        total = self.total_steps(progress)
        if total is not None and total < progress.step:
            raise UserError(
                f"train.epochs={self._train.epochs:g} and {self._recipe.run_dir} has done {progress.step:,} steps: "
                f"give more to continue, or use its checkpoints as they are."
            )


def rate_factor(train: TrainConfig, step: int, progress: float) -> float:
    """Return the learning rate at step `step` (from 0) divided by the peak rate. `progress` is the fraction of the run
    that is done.

    Warmup is linear over `warmup_steps`. Then, with schedule "cosine", the rate follows half a cosine until the end of
    the run (Loshchilov & Hutter, 2017); with "wsd", it stays constant and then falls linearly over the last
    `decay_fraction` of the run (Hu et al., 2024; Hägele et al., 2024). Both end at `final_rate_fraction`. With
    "constant", the factor stays at 1.
    """
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    floor = train.final_rate_fraction
    if train.schedule == "cosine":
        warmup_share = progress * train.warmup_steps / step if step else 0.0
        after_warmup = (progress - warmup_share) / (1 - warmup_share)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * after_warmup))
    if train.schedule == "wsd":
        decayed = max(0.0, 1 - (1 - progress) / train.decay_fraction)  # fraction of the decay done
        return floor + (1 - floor) * (1 - decayed)
    return 1.0
