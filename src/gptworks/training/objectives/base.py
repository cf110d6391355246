"""What a run learns, and from what: the one place where objectives differ. The loop knows only `Objective`.

To add one, write its settings in `gptworks.config.objective`, and a subclass of `Objective` in a file here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from gptworks.config import Recipe, TrainConfig
from gptworks.config.objective import ObjectiveSettings
from gptworks.data.batches import Batches, evaluation_windows
from gptworks.data.conversations.packing import ExampleBatches, Examples, evaluation_rows
from gptworks.data.permutation import Int64s, shuffled
from gptworks.data.rows import Row, pieces_of
from gptworks.data.shards import TokenShards
from gptworks.data.shares import weights_over_run
from gptworks.device import Precision
from gptworks.evaluation.loss import LossReport, Workers, evaluate_loss
from gptworks.infer.engine import Engine
from gptworks.model import GPT
from gptworks.planning.steps import planned_steps
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
    """With the weights that training starts from, or resumes with."""
    engine: Engine
    precision: Precision
    workers: Workers
    ranks: Ranks
    is_new: bool
    """Whether the run begins, so that these are the weights of its start."""
    report: Report


class Objective:
    """Predicting every next token of the text, or every token of the answers of conversations. Others override what
    differs.

    Batches are a function of only (shards, seed, position): exact resume relies on it. A position counts samples from
    the start of the run, including those that rollbacks have passed.
    """

    generates = False
    """Whether a step's batches are made with the current model (`generate`)."""

    kept_files: tuple[str, ...] = ()
    """What it keeps in the run folder of the run's start or progress, and cannot make again: a fork needs it too."""

    _held_out: Examples | None = None
    """Conversations in rows, if it reads those."""

    def __init__(self, recipe: Recipe, data_folder: Path, verify: bool = False) -> None:
        """
        Args:
            data_folder: what `prepare` made.
            verify: compare every byte of it with its sha256.

        Raises:
            UserError: files are missing or changed, or there is too little text.
        """
        self.recipe, self.context_length = recipe, recipe.model.context_length
        self.train_shards = TokenShards(data_folder, "train", verify=verify)
        self.validation_shards = TokenShards(data_folder, "validation", verify=verify)
        self._routing, self._future_weights = Routing.of(recipe.train), recipe.train.future_weights
        self._open()

    def _open(self) -> None:
        """Open the splits: as windows of text, or as rows of conversations."""
        settings, context, seed = self.recipe.objective, self.context_length, self.recipe.seed
        self._batches: Batches | ExampleBatches
        if settings.several_texts and self.recipe.data.conversations:
            self._batches = rows = ExampleBatches(Examples(self.train_shards, context, settings.packs), seed)
            self._samples_per_epoch = rows.rows_per_epoch
            self._held_out = Examples(self.validation_shards, context, settings.packs)
        else:
            phases, stretches = weights_over_run(self.recipe), self.train_shards.stretches
            self._batches = windows = Batches(self.train_shards, context, seed, stretches, phases)
            self._samples_per_epoch = windows.windows_per_epoch

    @staticmethod
    def check(recipe: Recipe) -> None:
        """Check what else the objective needs, such as another run or a file, before any work is done.

        Raises:
            UserError: it is missing or cannot be used.
        """

    @classmethod
    def loss_without_data(cls, settings: ObjectiveSettings, train: TrainConfig, model: GPT) -> LossFunction:
        """The loss of batches of inputs and targets only, to trace and measure a step of a new model."""
        return partial(next_token, routing=Routing.of(train), future_weights=train.future_weights)

    def begin(self, run: RunContext) -> None:
        """Called once, before the first step of each session.

        Raises:
            UserError: something that the objective needs is missing or cannot be used.
        """

    def begin_step(self, share_done: float) -> None:
        """Called before each step with how much of the run is done, from 0 to 1."""
        self._future_weights = self.recipe.train.future_weights_at(share_done)

    def generate(self, position: int, asked: StepBatches) -> StepBatches:
        """The micro-batches of the step at a position, generated for what `batch` made; called if `generates`."""
        raise NotImplementedError

    @property
    def data_fingerprint(self) -> str:
        """Must be equal when a run is resumed."""
        return self.train_shards.manifest.fingerprint

    @property
    def samples_per_epoch(self) -> int:
        """Samples in the training split, as `train.batch_size` counts them."""
        return self._samples_per_epoch

    @property
    def n_validation(self) -> int:
        """Sequences in the whole validation split: windows, rows, pairs or prompts."""
        if self._held_out is not None:
            return len(self._held_out.rows)
        return max(1, -(-(self.validation_shards.n_tokens - 1) // self.context_length))

    @property
    def n_evaluated(self) -> int:
        """How many of them an evaluation reads, evenly spaced. 0: all."""
        return self.recipe.train.n_evaluated(self.n_validation, self.context_length)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run, if known beforehand."""
        train, samples = self.recipe.train, self.samples_per_epoch
        return planned_steps(train, self.context_length, None, windows_per_epoch=samples)[0]

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        """Micro-batch number `micro_step`, of `size` samples, of the step that begins at a position, on the CPU."""
        return self._batches.batch(position + micro_step * size, size)

    @property
    def n_items(self) -> int:
        """Windows, rows, pairs or prompts of the training split, as `rows` counts them."""
        return self.samples_per_epoch

    def item(self, position: int) -> tuple[int, int]:
        """What the sample at a position is: its epoch, and its number among the items of that.

        Raises:
            UserError: the run folder does not keep it.
        """
        batches = getattr(self, "_batches", None)  # pairs and prompts have none
        if isinstance(batches, Batches):
            epochs, windows = batches.items(np.array([position]))
            return int(epochs[0]), int(windows[0])
        n = self.samples_per_epoch
        return position // n, int(shuffled(np.array([position]), n, self.recipe.seed)[0])

    def epochs(self, position: int) -> dict[str, float]:
        """How often the samples before a position read each dataset of a mixture, by its name."""
        if not self.recipe.data.mixture or not isinstance(self._batches, Batches):
            return {}
        names = [member.name for member in self.recipe.data.mixture]
        return dict(zip(names, self._batches.epochs(position), strict=True))

    def rows(self, number: int, epoch: int = 0) -> list[Row]:
        """An item of the training split as a batch has it; windows begin elsewhere in each epoch."""
        if isinstance(self._batches, ExampleBatches):
            return [self._batches.examples.shown(number)]
        start = self._batches.start(epoch, number)
        window = torch.from_numpy(self.train_shards.read(start, self.context_length + 1))
        pieces = pieces_of(self._document_starts, start, len(window))
        return [Row.of(window[:-1], window[1:], None, [(self.context_length, pieces)])]

    @cached_property
    def _document_starts(self) -> Int64s:
        return self.train_shards.document_starts()

    def count(self, batch: Batch) -> int:
        """The divisor of the sum of a batch's losses: its targets."""
        return count_targets(batch)

    def loss(self, model: GPT, batch: Batch) -> Losses:
        """Sums over the batch."""
        return next_token(model, batch, self._routing, self._future_weights)

    def evaluate(self, model: GPT, workers: Workers, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        """The loss on held-out text, and other figures for the metrics, by name."""
        shards, n_sequences, text_bytes = self.validation_shards, self.n_evaluated, None
        windows: Iterator[Batch]
        if self._held_out is not None:
            windows = evaluation_rows(self._held_out, n_sequences)
        else:
            windows = evaluation_windows(shards, self.context_length, n_sequences)
            text_bytes = shards.text_bytes if n_sequences == 0 and shards.manifest.round_trips else None
        report = evaluate_loss(model, windows, text_bytes=text_bytes, workers=workers, autocast=precision.autocast)
        return report, {}
