"""The interface of training objectives. The loop knows only `Objective`; objectives differ nowhere else.

To add one, write its settings in `gptworks.config.objective`, and a subclass of `Objective` in a file here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from gptworks.config import Recipe, TrainConfig
from gptworks.config.objective import ObjectiveSettings
from gptworks.data.samples import Samples, open_samples
from gptworks.device import Precision
from gptworks.evaluation.loss import LossReport, Workers, evaluate_loss
from gptworks.infer.engine import Engine
from gptworks.model import GPT
from gptworks.training.distributed.ranks import Ranks
from gptworks.training.objectives.next_token import (
    Batch,
    Losses,
    LossFunction,
    Routing,
    StepBatches,
    count_targets,
    next_token,
)

Report = Callable[[str], None]


@dataclass(frozen=True)
class RunContext:
    """The run that an objective is part of."""

    model: GPT
    """The model, with the weights from which training starts or resumes."""
    engine: Engine
    precision: Precision
    workers: Workers
    ranks: Ranks
    is_new: bool
    """Whether the run begins, so that these are the weights of its start."""
    report: Report


class Objective:
    """Predicting every next token of the text, or every token of the answers of conversations. Others override what
    differs."""

    generates = False
    """Whether a step's batches are made with the current model (`generate`)."""

    kept_files: tuple[str, ...] = ()
    """Files that it keeps in the run folder and cannot make again: a fork needs them too."""

    def __init__(self, recipe: Recipe, samples: Samples) -> None:
        self.recipe, self.samples, self.context_length = recipe, samples, recipe.model.context_length
        self._routing, self._future_weights = Routing.of(recipe.train), recipe.train.future_weights

    @staticmethod
    def check(recipe: Recipe) -> None:
        """Check the objective's other inputs, such as a run or a file, before any work is done.

        Raises:
            UserError: an input is missing or cannot be used.
        """

    @classmethod
    def loss_without_data(cls, settings: ObjectiveSettings, train: TrainConfig, model: GPT) -> LossFunction:
        """The loss of batches of only inputs and targets, to trace and measure a step of a new model."""
        return partial(next_token, routing=Routing.of(train), future_weights=train.future_weights)

    def begin(self, run: RunContext) -> None:
        """Called once, before the first step of each session.

        Raises:
            UserError: something that the objective needs is missing or cannot be used.
        """

    def begin_step(self, share_done: float) -> None:
        """Called before each step with the share of the run that is done, from 0 to 1."""
        self._future_weights = self.recipe.train.future_weights_at(share_done)

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        """The batch of `Samples.batch`, with the additional tensors that the loss needs."""
        return self.samples.batch(position, micro_step, size)

    def generate(self, position: int, asked: StepBatches) -> StepBatches:
        """The micro-batches of the step at a position, generated for what `batch` made; called if `generates`."""
        raise NotImplementedError

    @property
    def n_validation(self) -> int:
        """Sequences in the validation split."""
        return self.samples.n_validation

    @property
    def n_evaluated(self) -> int:
        """Number of these that an evaluation reads, evenly spaced. 0: all."""
        return self.recipe.train.n_evaluated(self.n_validation, self.context_length)

    def count(self, batch: Batch) -> int:
        """The divisor of the sum of a batch's losses: its targets."""
        return count_targets(batch)

    def loss(self, model: GPT, batch: Batch) -> Losses:
        """The loss and the reported figures, as sums over the batch."""
        return next_token(model, batch, self._routing, self._future_weights)

    def evaluate(self, model: GPT, workers: Workers, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        """The loss on the validation split, and other means for the metrics, by name."""
        n_sequences = self.n_evaluated
        sequences = self.samples.held_out(n_sequences)
        text_bytes = self.samples.held_out_bytes if n_sequences == 0 else None
        with precision.autocast():
            return evaluate_loss(model, sequences, text_bytes=text_bytes, workers=workers), {}


def objective_of(settings: ObjectiveSettings) -> type[Objective]:
    """The class that the settings name."""
    found: type[Objective] = resolve_name(settings.code)
    return found


def choose_objective(recipe: Recipe, folder: Path, verify: bool = False) -> Objective:
    """The objective of a recipe, with its samples; arguments and errors as for `open_samples`."""
    return objective_of(recipe.objective)(recipe, open_samples(recipe, folder, verify))
