"""The interface of training objectives. The loop uses only `Objective`; subclasses contain all differences.

To add one, write its settings in `gptworks.config.objective`, and a subclass of `Objective` in a file here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import torch

from gptworks.config import Recipe, TrainConfig
from gptworks.config.objective import ObjectiveSettings
from gptworks.data.samples import Samples, open_samples
from gptworks.device import Precision
from gptworks.evaluation.loss import LossReport, Workers, evaluate_loss
from gptworks.infer.engine import Engine
from gptworks.model.gpt import GPT
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
    """Prediction of every next token of a text, or of the answers' tokens in conversations; base of other
    objectives."""

    generates = False
    """Whether a step's batches are made with the current model (`generate`)."""

    kept_files: tuple[str, ...] = ()
    """Files in the run folder that the objective cannot make again: a fork copies them."""

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
        """A loss that needs only inputs and targets, to trace or measure a step of a new model."""
        return partial(next_token, routing=Routing.of(train), future_weights=train.future_weights)

    def begin(self, run: RunContext) -> None:
        """Called once, before the first step of each session.

        Raises:
            UserError: an input of the objective is missing or cannot be used.
        """

    def begin_step(self, share_done: float) -> None:
        """Called before each step with the share of the run that is done, from 0 to 1."""
        self._future_weights = self.recipe.train.future_weights_at(share_done)

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
        return self.recipe.train.n_evaluated(self.n_validation, self.context_length)

    def count(self, batch: Batch) -> int:
        """The number of a batch's targets, by which the sum of losses is divided."""
        return count_targets(batch)

    def loss(self, model: GPT, batch: Batch) -> Losses:
        """The batch's loss and reported figures, as sums over the batch."""
        return next_token(model, batch, self._routing, self._future_weights)

    def evaluate(self, model: GPT, workers: Workers, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        """The loss on the validation split, and additional means by name for the metrics."""
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


@contextmanager
def generating(precision: Precision) -> Iterator[None]:
    """A context in which an engine may run a model that is being trained.

    Products are rounded as in a training step, so that answers come from the policy in training. Compiled blocks run
    uncompiled: a growing cache changes shape at each token.
    """
    with torch.compiler.set_stance("force_eager"), precision.autocast():
        yield
