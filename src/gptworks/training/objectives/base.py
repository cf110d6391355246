"""The base class of training objectives. The loop uses only the members of `Objective`; subclasses override them.

To add an objective, write a settings class in `gptworks.config.objective` and, in a file of this folder, a subclass of
`Objective` whose annotation of `settings` names that settings class.
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
    """The model to train, with its starting or restored weights."""
    engine: Engine
    precision: Precision
    workers: Workers
    ranks: Ranks
    is_new: bool
    """Whether the run begins at step 0, so that `model` has the starting weights."""
    report: Report


class Objective:
    """Base class of objectives: provides a run's batches, its loss and its evaluation."""

    generates = False
    """Whether `generate` makes each step's batches with the current model."""

    kept_files: tuple[str, ...] = ()
    """Names of the run folder's files and folders that the objective cannot rebuild; a fork copies them."""

    recipe: Recipe
    samples: Samples

    def __init__(self, settings: Any, train: TrainConfig) -> None:
        self.settings, self.train = settings, train
        self._routing = Routing(train.router_balance_weight, train.router_z_weight)

    def take_data(self, recipe: Recipe, samples: Samples) -> None:
        """Set the run's data, which all other methods except `check` and `loss_without_data` may use."""
        self.recipe, self.samples, self.context_length = recipe, samples, samples.context_length

    def check(self, recipe: Recipe) -> None:
        """Check inputs other than the data, such as a run or a file, before any work is done.

        Raises:
            UserError: an input is missing or cannot be used.
        """

    def loss_without_data(self, model: GPT) -> LossFunction:
        """Return a loss function that needs only inputs and targets, for tracing or timing a step of a new model."""
        return self.loss

    def begin(self, run: RunContext) -> None:
        """Prepare for the session's steps; the loop calls this method once, before the first step.

        Raises:
            UserError: an input of the objective is missing or cannot be used.
        """

    def begin_step(self, share_done: float) -> None:
        """Prepare for a step; `share_done` is the fraction of the run that is done, from 0 to 1."""

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        """Return the micro-batch that `Samples.batch` gives, with the additional tensors that the loss needs."""
        return self.samples.batch(position, micro_step, size)

    def generate(self, position: int, asked: StepBatches) -> StepBatches:
        """Generate and return the step's micro-batches to train on. The loop calls this method only if `generates`.

        `asked` has the micro-batches that `batch` returned.
        """
        raise NotImplementedError

    @property
    def n_validation(self) -> int:
        """Number of samples in the validation split: windows, rows, pairs or prompts."""
        return self.samples.n_validation

    @property
    def n_evaluated(self) -> int:
        """Number of validation samples in an evaluation, evenly spaced over the split; 0 for all samples."""
        return self.train.n_evaluated(self.n_validation, self.context_length)

    def count(self, batch: Batch) -> int:
        """Return the number of the batch's losses, which is the number of its targets, pairs or answers.

        A step's sum of losses is divided by the total of this number over the step's batches.
        """
        return count_targets(batch)

    def loss(self, model: GPT, batch: Batch) -> Losses:
        """Return the loss and the reported figures, as sums over the batch."""
        raise NotImplementedError

    def evaluate(self, model: GPT, workers: Workers, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        """Return the loss on the `n_evaluated` samples of the validation split, and the means of other figures by name,
        for the metrics."""
        n_sequences = self.n_evaluated
        sequences = self.samples.held_out(n_sequences)
        text_bytes = self.samples.held_out_bytes if n_sequences == 0 else None
        with precision.autocast():
            return evaluate_loss(model, sequences, text_bytes=text_bytes, workers=workers), {}


class NextToken(Objective):
    """Predicts each next token of a text or conversation; with `InstructionObjective`, only the answers' tokens."""

    settings: NextTokenObjective | InstructionObjective

    def __init__(self, settings: Any, train: TrainConfig) -> None:
        super().__init__(settings, train)
        self._future_weights = train.future_weights

    def begin_step(self, share_done: float) -> None:
        self._future_weights = self.train.future_weights_at(share_done)

    def loss(self, model: GPT, batch: Batch) -> Losses:
        return next_token(model, batch, self._routing, self._future_weights)


def objective_of(settings: ObjectiveSettings, train: TrainConfig) -> Objective:
    """Return the objective with these settings; its data is not set yet."""
    return by_settings("gptworks.training.objectives", Objective)[type(settings)](settings, train)


def choose_objective(recipe: Recipe, folder: Path, verify: bool = False) -> Objective:
    """Return the objective of a recipe, with its samples opened; arguments and errors are as in `open_samples`."""
    objective = objective_of(recipe.objective, recipe.train)
    objective.take_data(recipe, open_samples(recipe, folder, verify))
    return objective


@contextmanager
def generating(precision: Precision) -> Iterator[None]:
    """Return a context in which an engine can generate with a model that is being trained.

    Products are computed in the training step's precision, so that answers come from the policy in training. Compiled
    blocks run eagerly, because a growing cache changes shape at each token.
    """
    with torch.compiler.set_stance("force_eager"), precision.autocast():
        yield
