"""The interface of training objectives. The loop uses only `Objective`; subclasses contain all differences.

To add one, write its settings in `gptworks.config.objective`, and a subclass of `Objective` that has these `settings`
in a file here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptworks.checkpoint import Report
from gptworks.config import Recipe, TrainConfig
from gptworks.config.objective import InstructionObjective, NextTokenObjective, ObjectiveSettings
from gptworks.data.registry import by_settings
from gptworks.data.samples import Batch, Samples, open_samples
from gptworks.device import Precision
from gptworks.evaluation.loss import LossReport, Workers, evaluate_loss
from gptworks.infer.engine import Engine
from gptworks.model.gpt import GPT
from gptworks.training.distributed.ranks import Ranks
from gptworks.training.objectives.next_token import (
    Losses,
    LossFunction,
    Routing,
    StepBatches,
    count_targets,
    next_token,
)


@dataclass(frozen=True)
class RunContext:
    """The parts of a run that its objective uses."""

    model: GPT
    """The model, with the weights from which training starts or resumes."""
    engine: Engine
    precision: Precision
    workers: Workers
    ranks: Ranks
    is_new: bool
    """Whether the run begins at step 0: `model` then has the starting weights."""
    report: Report


class Objective:
    """What a run learns: its batches, its loss and its evaluation."""

    generates = False
    """Whether a step's batches are made with the current model (`generate`)."""

    kept_files: tuple[str, ...] = ()
    """Files in the run folder that the objective cannot make again: a fork copies them."""

    recipe: Recipe
    samples: Samples

    def __init__(self, settings: Any, train: TrainConfig) -> None:
        self.settings, self.train = settings, train
        self._routing = Routing(train.router_balance_weight, train.router_z_weight)

    def take_data(self, recipe: Recipe, samples: Samples) -> None:
        """Use a run's data, which all but `check` and `loss_without_data` need."""
        self.recipe, self.samples, self.context_length = recipe, samples, recipe.model.context_length

    def check(self, recipe: Recipe) -> None:
        """Check the objective's other inputs, such as a run or a file, before any work is done.

        Raises:
            UserError: an input is missing or cannot be used.
        """

    def loss_without_data(self, model: GPT) -> LossFunction:
        """A loss that needs only inputs and targets, to trace or measure a step of a new model."""
        return self.loss

    def begin(self, run: RunContext) -> None:
        """Called once, before the first step of each session.

        Raises:
            UserError: an input of the objective is missing or cannot be used.
        """

    def begin_step(self, share_done: float) -> None:
        """Called before each step with the share of the run that is done, from 0 to 1."""

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        """The batch of `Samples.batch`, with the additional tensors that the loss needs."""
        return self.samples.batch(position, micro_step, size)

    def generate(self, position: int, asked: StepBatches) -> StepBatches:
        """The micro-batches of the step at a position, generated from those of `batch`; called if `generates`."""
        raise NotImplementedError

    @property
    def n_validation(self) -> int:
        """Number of sequences in the validation split."""
        return self.samples.n_validation

    @property
    def n_evaluated(self) -> int:
        """Number of validation sequences that an evaluation reads, evenly spaced; 0: all."""
        return self.train.n_evaluated(self.n_validation, self.context_length)

    def count(self, batch: Batch) -> int:
        """The number of a batch's targets, by which the sum of losses is divided."""
        return count_targets(batch)

    def loss(self, model: GPT, batch: Batch) -> Losses:
        """The batch's loss and reported figures, as sums over the batch."""
        raise NotImplementedError

    def evaluate(self, model: GPT, workers: Workers, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        """The loss on the validation split, and additional means by name for the metrics."""
        n_sequences = self.n_evaluated
        sequences = self.samples.held_out(n_sequences)
        text_bytes = self.samples.held_out_bytes if n_sequences == 0 else None
        with precision.autocast():
            return evaluate_loss(model, sequences, text_bytes=text_bytes, workers=workers), {}


class NextToken(Objective):
    """Prediction of every next token of a text, or of the answers' tokens in conversations."""

    settings: NextTokenObjective | InstructionObjective

    def __init__(self, settings: Any, train: TrainConfig) -> None:
        super().__init__(settings, train)
        self._future_weights = train.future_weights

    def begin_step(self, share_done: float) -> None:
        self._future_weights = self.train.future_weights_at(share_done)

    def loss(self, model: GPT, batch: Batch) -> Losses:
        return next_token(model, batch, self._routing, self._future_weights)


def objective_of(settings: ObjectiveSettings, train: TrainConfig) -> Objective:
    """The objective with these settings, without data."""
    return by_settings("gptworks.training.objectives", Objective)[type(settings)](settings, train)


def choose_objective(recipe: Recipe, folder: Path, verify: bool = False) -> Objective:
    """The objective of a recipe, with its samples; arguments and errors as for `open_samples`."""
    objective = objective_of(recipe.objective, recipe.train)
    objective.take_data(recipe, open_samples(recipe, folder, verify))
    return objective


@contextmanager
def generating(precision: Precision) -> Iterator[None]:
    """A context in which an engine may run a model that is being trained.

    Products are rounded as in a training step, so that answers come from the policy in training. Compiled blocks run
    uncompiled: a growing cache changes shape at each token.
    """
    with torch.compiler.set_stance("force_eager"), precision.autocast():
        yield
