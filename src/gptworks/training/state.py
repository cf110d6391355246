"""The state of a run in checkpoints, saved and restored: a resumed run continues bit for bit."""

import itertools
from collections import deque
from dataclasses import asdict

from torch import Tensor

from gptworks.checkpoint import Checkpoint, newest_verified
from gptworks.config import Recipe
from gptworks.errors import RunError, UserError
from gptworks.quantize.convert import pack_for
from gptworks.tensors import Expected
from gptworks.training.distributed.agreed import agreed_checkpoint
from gptworks.training.events import Listener
from gptworks.training.length import Length
from gptworks.training.optim.average import WeightAverage
from gptworks.training.optim.late_untying import LateUntying
from gptworks.training.progress import Progress
from gptworks.training.record.display import Display
from gptworks.training.saving import CheckpointWriter, remove_newer
from gptworks.training.step import TrainStep


class TrainingState(Listener):
    """A run's progress, weights, their average and the optimizer."""

    def __init__(self, recipe: Recipe, step: TrainStep, progress: Progress, length: Length, display: Display) -> None:
        self._recipe, self._step, self._display = recipe, step, display
        self.progress, self._length = progress, length
        self.average = WeightAverage(step.model, recipe.train)
        self.untying = LateUntying(step.model, step.optimizer, recipe.train.untie_after_steps)
        self.writer = CheckpointWriter(recipe.run_dir, recipe.train.keep_checkpoints, recipe.train.keep_every)
        self._saved_step = -1

    def begin_step(self, progress: Progress) -> None:
        self.untying.begin(progress.step, self.average)

    def applied(self, progress: Progress) -> None:
        self.average.update(progress.step, self._length.total_steps(progress))

    def newest_checkpoint(self, up_to_step: int | None = None) -> Checkpoint | None:
        """The newest undamaged checkpoint of the run, chosen by rank 0, on every rank."""
        folder, report = self._recipe.run_dir, self._display.message
        return agreed_checkpoint(
            self._step.ranks, folder, lambda: newest_verified(folder, report, up_to_step=up_to_step)
        )

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of another run; if an adapter is trained, they are the base model's."""
        model = self._step.model
        weights = pack_for(model, weights)
        model.load_state_dict(self._step.parallel.shard_tensors(weights), strict=self._recipe.adapter is None)
        self.average = WeightAverage(model, self._recipe.train)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint.

        Raises:
            UserError: the checkpoint is damaged, was imported, or was trained on other data.
        """
        progress = Progress.from_json(checkpoint.state(), checkpoint.folder / "state.json")
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
        optimizer, shares, own = self._step.optimizer, self._step.parallel.shard_tensors, self.average.own_tensors
        weights = checkpoint.model_tensors({name: Expected.like(p) for name, p in self.average.parameters.items()})
        moments = checkpoint.optimizer_tensors(lambda stored: optimizer.expected_tensors(stored, own))
        optimizer.load_state_tensors(self.average.restore(shares(weights), shares(moments)))
        if progress.scaler:
            self._step.scaler.load_state_dict(progress.scaler)

    def roll_back(self, reason: str) -> int:
        """Restore the last good checkpoint after many skipped steps, and continue after the batches that broke the run.

        Args:
            reason: why the last step was skipped.

        Returns:
            The step from which the run went back.

        Raises:
            RunError: no checkpoint precedes the skipped steps, or the run has rolled back too often already.
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
        """Write a checkpoint of this step, unless it is already written, and delete those no longer kept.

        Args:
            weights_only: leave out the optimizer's state, which is then not gathered from the ranks.
        """
        if self._saved_step == self.progress.step:
            return
        step, ranks, whole = self._step, self._step.ranks, self._step.parallel.gather_tensors
        self.progress.scaler = step.scaler.state_dict()
        self.untying.before_saving(self.average)
        with step.stopwatch.part("checkpoint"):
            tensors = {"model": whole(self.average.model_tensors)}
            if not weights_only:
                tensors["optimizer"] = whole(step.optimizer.state_tensors() | self.average.own_tensors)
            if ranks.is_rank_zero:
                with ranks.busy():
                    self.writer.wait()
                self.writer.save(self.progress.step, tensors, asdict(self.progress))
            else:
                deque(itertools.chain(*tensors.values()), maxlen=0)  # each rank takes part in gathering
        if not weights_only:
            self._saved_step = self.progress.step
