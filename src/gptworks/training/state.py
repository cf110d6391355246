"""The state of a run: its progress, weights, average of the weights, and optimizer. A run resumed from a checkpoint
continues bit for bit."""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import Tensor, nn

from gptworks.checkpoint import Checkpoint, newest_verified
from gptworks.config import Recipe, TrainConfig
from gptworks.errors import RunError, UserError
from gptworks.quantize.convert import pack_for
from gptworks.quantize.linear import weight_tensors
from gptworks.tensors import Expected
from gptworks.training.checkpoint_files import CheckpointWriter, remove_newer
from gptworks.training.distributed.agreed import agreed_checkpoint
from gptworks.training.progress import Progress
from gptworks.training.record.display import Display
from gptworks.training.step import TrainStep

_OWN = "own"

_REPORTED_WAIT_SECONDS = 5.0
"""Seconds that a save waits for the previous one before a message reports the delay."""


class WeightAverage:
    """Keeps an exponential average of a model's weights over the training steps (Polyak & Juditsky, 1992).

    `tensors` has the averages by parameter name, in float32; training does not read them. The decay of step n is
    `ema_decay`, but at most (1 + n) / (10 + n), so that the initial weights fade soon. Without `ema_decay`, `tensors`
    is empty. Frozen weights have no average.
    """

    def __init__(self, model: nn.Module, train: TrainConfig) -> None:
        self.train = train
        self.parameters = weight_tensors(model)
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.tensors = {name: p.detach().float().clone() for name, p in trained.items()} if train.averages else {}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after optimizer step number `step`, from 0, to the average."""
        decay = min(self.train.ema_decay, (1 + step) / (10 + step))
        for name, average in self.tensors.items():
            average.lerp_(self.parameters[name].detach().float(), 1 - decay)

    @property
    def model_tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint's model: the averages, and the weights without an average."""
        return {name: p.detach() for name, p in self.parameters.items()} | self.tensors

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """The current weights of averaged parameters, as `parameter/own`, for a resumed run."""
        return {f"{name}/{_OWN}": self.parameters[name].detach() for name in self.tensors}

    def own_in(self, stored: Collection[str]) -> set[str]:
        """Return the names of `own_tensors` that a checkpoint must hold, given the names of its stored tensors.

        If the checkpoint has no average, the result is empty. If the run has since given up its average, the result has
        the stored names.
        """
        trained = (name for name, parameter in self.parameters.items() if parameter.requires_grad)
        found = {f"{name}/{_OWN}" for name in trained} & set(stored)
        return found | self.own_tensors.keys() if found else found

    def restore(self, model_tensors: dict[str, Tensor], optimizer_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Restore weights and averages from a checkpoint's tensors; return the optimizer's state tensors. If the
        checkpoint has no average, an average begins with the checkpoint's weights."""
        own = {key.removesuffix(f"/{_OWN}"): t for key, t in optimizer_tensors.items() if key.endswith(f"/{_OWN}")}
        self._set(model_tensors | own)
        self.tensors = {name: model_tensors[name].to(tensor.device).clone() for name, tensor in self.tensors.items()}
        return {key: tensor for key, tensor in optimizer_tensors.items() if not key.endswith(f"/{_OWN}")}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Enter a context in which the averaged parameters have their averages as values."""
        own = {name: self.parameters[name].detach().clone() for name in self.tensors}
        self._set(self.tensors)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)


class TrainingState:
    """A run's progress, weights, average of the weights, and optimizer."""

    def __init__(self, recipe: Recipe, step: TrainStep, progress: Progress, display: Display) -> None:
        self._recipe, self._step, self._display = recipe, step, display
        self.progress = progress
        self.average = WeightAverage(step.model, recipe.train)
        self.writer = CheckpointWriter(
            recipe.run_dir, recipe.train.keep_checkpoints, recipe.train.keep_every, step.ranks.writers
        )
        self._saved_step = -1

    def newest_checkpoint(self, up_to_step: int | None = None) -> Checkpoint | None:
        """Return the run's newest undamaged checkpoint to resume from, of step `up_to_step` at most; None if there is
        none. Rank 0 chooses it for all ranks."""
        folder, report = self._recipe.run_dir, self._display.message
        return agreed_checkpoint(
            self._step.ranks, folder, lambda: newest_verified(folder, report, up_to_step=up_to_step)
        )

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of another run: of the whole model or, if an adapter is trained, of its base model."""
        model = self._step.model
        weights = pack_for(model, weights)
        model.load_state_dict(self._step.parallel.shard_tensors(weights), strict=self._recipe.adapter is None)
        self.average = WeightAverage(model, self._recipe.train)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore progress, weights, averages and optimizer from a checkpoint; raise UserError if it is damaged, was
        imported, or was trained on other data."""
        progress = Progress.of(checkpoint)
        folder = self._recipe.run_dir
        progress.require_training(folder)
        if progress.data_fingerprint != self.progress.data_fingerprint:
            raise UserError(
                f"the data has changed since {folder} began: its shards were {progress.data_fingerprint[:12]} and are "
                f"now {self.progress.data_fingerprint[:12]}. Restore the text, or start a new run with another "
                f"run_dir=."
            )
        self.progress = progress
        self._saved_step = progress.step
        optimizer, shares = self._step.optimizer, self._step.parallel.shard_tensors
        weights = checkpoint.model_tensors({name: Expected.like(p) for name, p in self.average.parameters.items()})
        moments = checkpoint.optimizer_tensors(
            lambda stored: optimizer.expected_tensors(stored, self.average.own_in(stored))
        )
        optimizer.load_state_tensors(self.average.restore(shares(weights), shares(moments, optimizer.holders)))
        if progress.scaler:
            self._step.scaler.load_state_dict(progress.scaler)

    def roll_back(self, reason: str) -> int:
        """Restore the newest checkpoint before a series of skipped steps, delete later checkpoints, and skip all
        batches read since then. Return the step from which the run went back.

        Args:
            reason: why the last step was skipped.

        Raises:
            RunError: no checkpoint precedes the skipped steps, or `max_rollbacks` rollbacks are done.
        """
        train, ranks, broken = self._recipe.train, self._step.ranks, self.progress
        with ranks.busy():
            self.writer.wait()
        before = broken.step - broken.skipped_in_a_row  # the last step before the skipped ones
        good = self.newest_checkpoint(before)
        if good is None or broken.rollbacks >= train.max_rollbacks:
            good = good or self.newest_checkpoint()
            where = f"the last good checkpoint is {good.folder}" if good else "there is no checkpoint yet"
            raise RunError(
                f"{broken.skipped_in_a_row} steps in a row were skipped, the last at step {broken.step:,} because "
                f"{reason}: {where}. Lower train.learning_rate, warm up longer, use precision fp32, or set "
                f"train.max_rollbacks."
            )
        ranks.from_rank_zero(lambda: remove_newer(self._recipe.run_dir, good.step))
        self.restore(good)
        progress = self.progress
        progress.seconds, progress.rollbacks = broken.seconds, broken.rollbacks + 1
        progress.skipped, progress.skipped_in_a_row = broken.skipped, 0
        progress.samples_passed = broken.position - progress.samples
        return broken.step

    def save(self, *, weights_only: bool = False) -> None:
        """Begin to write a checkpoint of this step, unless a full checkpoint of it exists. The writer then deletes
        checkpoints that are no longer kept. Raise RunError if the earlier save failed.

        Args:
            weights_only: leave out the optimizer's state.
        """
        if self._saved_step == self.progress.step:
            return
        step, parts = self._step, self._step.parallel.parts
        self.progress.scaler = step.scaler.state_dict()
        with step.stopwatch.part("checkpoint"):
            tensors = {"model": parts(self.average.model_tensors)}
            if not weights_only:
                state = step.optimizer.state_tensors() | self.average.own_tensors
                tensors["optimizer"] = parts(state, step.optimizer.holders)
            began = time.perf_counter()
            with step.ranks.busy():
                self.writer.wait()
            if (waited := time.perf_counter() - began) >= _REPORTED_WAIT_SECONDS:
                self._display.message(
                    f"step {self.progress.step:,}: waited {waited:.0f} s until the previous checkpoint was written "
                    f"(train.checkpoint_every={self._recipe.train.checkpoint_every:,})"
                )
            self.writer.save(self.progress.step, tensors, asdict(self.progress))
        if not weights_only:
            self._saved_step = self.progress.step
