"""The progress of a run."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gptworks.errors import UserError
from gptworks.training.optim.anomalies import GradientEstimate

Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _number(value: float) -> float:
    if math.isnan(value):
        raise ValueError("it must be a number")
    return value


@dataclass
class Progress:
    """A run's progress, saved in every checkpoint: all that a resumed run needs besides weights and optimizer state."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    step: Count = 0
    """Optimizer steps done, skipped ones included."""
    samples: Count = 0
    """Samples trained on: the rows, pairs or answers that `batch_size` counts."""
    tokens: Count = 0
    """Tokens that the model has read in training, padding included."""
    seconds: Seconds = 0.0
    """Seconds of training, over all sessions."""
    skipped: Count = 0
    skipped_in_a_row: Count = 0
    rollbacks: Count = 0
    samples_passed: Count = 0
    """Samples that rollbacks have skipped."""
    gradient: GradientEstimate = field(default_factory=GradientEstimate)
    best_loss: Annotated[float, AfterValidator(_number)] = math.inf
    best_step: Count = 0
    evaluations_since_best: Count = 0
    evaluation_cut: bool = False
    """Whether a signal interrupted the evaluation of this step."""
    data_fingerprint: str = ""
    validation_text_sha256: str = ""
    """The sha256 of the held-out text: shows whether runs with different tokenizers were evaluated on the same text."""
    scaler: dict[str, float] = field(default_factory=dict)

    @property
    def position(self) -> int:
        """Position of the next sample, counted from the start of the run."""
        return self.samples + self.samples_passed

    def require_training(self, run_dir: Path) -> None:
        """Refuse an import, which has no training to resume.

        Raises:
            UserError: the run is an import; the message names it.
        """
        if not self.data_fingerprint:
            raise UserError(
                f"{run_dir} was imported and has no training to resume: start a run from it with "
                f"initialize_from={run_dir} and another run_dir=."
            )

    @classmethod
    def from_json(cls, state: dict[str, Any], path: Path | None = None) -> Self:
        """Read progress from a checkpoint's JSON, as `dataclasses.asdict` gave it.

        Args:
            path: the file of `state`, for messages; its folder's name must have the same step.

        Raises:
            UserError: a key is unknown, a value has the wrong type, is negative or NaN, or the step differs.
        """
        try:
            progress = TypeAdapter(cls).validate_json(json.dumps(state))
            said = int(path.parent.name.rpartition("-")[2]) if path else progress.step
            problem = "" if progress.step == said else f"`step`={progress.step} in the checkpoint of step {said}"
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem = f"`{'.'.join(map(str, first['loc']))}`={first['input']!r:.80}: {first['msg']}"
        if problem:
            raise UserError(
                f"{path or 'state.json'} is damaged: {problem}. Restore it from a copy, or delete the checkpoint: "
                f"--resume then continues from the one before it."
            )
        return progress
