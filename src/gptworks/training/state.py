"""What a checkpoint holds of a run in training, saved and restored: a resumed run goes on bit for bit."""

import itertools
from collections import deque
from dataclasses import asdict

from torch import Tensor

from gptworks.checkpoint import Checkpoint, newest_verified
from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.quantize.convert import pack_for
from gptworks.tensors import Expected
from gptworks.training.distributed.agreed import agreed_checkpoint
from gptworks.training.optim.average import WeightAverage
from gptworks.training.optim.late_untying import LateUntying
from gptworks.training.progress import Progress
from gptworks.training.record.display import Display
from gptworks.training.saving import CheckpointWriter
from gptworks.training.step import TrainStep


class TrainingState:
    """Where a run stands, with its weights, their average and its optimizer."""

    def __init__(self, recipe: Recipe, step: TrainStep, progress: Progress, display: Display) -> None:
        self._recipe, self._step, self._display = recipe, step, display
        self.progress = progress
        self.average = WeightAverage(step.model, recipe.train)
        self.untying = LateUntying(step.model, step.optimizer, recipe.train.untie_after_steps)
        self.writer = CheckpointWriter(recipe.run_dir, recipe.train.keep_checkpoints, recipe.train.keep_every)
        self._saved_step = -1

    def newest_checkpoint(self, up_to_step: int | None = None) -> Checkpoint | None:
        """The newest checkpoint of the run that rank 0 finds whole, on every rank."""
        folder, report = self._recipe.run_dir, self._display.message
        return agreed_checkpoint(
            self._step.ranks, folder, lambda: newest_verified(folder, report, up_to_step=up_to_step)
        )

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of another run; of an adapter's run, those of the model that it adapts."""
        model = self._step.model
        weights = pack_for(model, weights)
        model.load_state_dict(self._step.parallel.shard_tensors(weights), strict=self._recipe.adapter is None)
        self.average = WeightAverage(model, self._recipe.train)

    def restore(self, checkpoint: Checkpoint, batch_size: int) -> None:
        """Go back to a checkpoint.

        Args:
            batch_size: that of the run when the checkpoint was saved; see `Progress.from_json`.

        Raises:
            UserError: it is of other data, of an import, or damaged.
        """
        progress = Progress.from_json(checkpoint.state(), batch_size, checkpoint.folder / "state.json")
        folder = self._recipe.run_dir
        progress.require_training(folder)
        if progress.data_fingerprint != self.progress.data_fingerprint:
            raise UserError(
                f"the data has changed since {folder} began: its shards were {progress.data_fingerprint[:12]} and are "
                f"now {self.progress.data_fingerprint[:12]}. Restore the text, or start anew with another run_dir=."
            )
        self.progress = progress
        self._saved_step = progress.step
        optimizer, shares, own = self._step.optimizer, self._step.parallel.shard_tensors, self.average.own_tensors
        weights = checkpoint.model_tensors({name: Expected.like(p) for name, p in self.average.parameters.items()})
        moments = checkpoint.optimizer_tensors(lambda stored: optimizer.expected_tensors(stored, own))
        optimizer.load_state_tensors(self.average.restore(shares(weights), shares(moments)))
        if progress.scaler:
            self._step.scaler.load_state_dict(progress.scaler)

    def save(self, *, weights_only: bool = False) -> None:
        """Write a checkpoint of this step, unless it is written already, and delete the oldest beyond those to keep.

        Args:
            weights_only: leave out what training alone needs; the optimizer's state is not gathered from the ranks.
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
                deque(itertools.chain(*tensors.values()), maxlen=0)  # our part in making them whole
        if not weights_only:
            self._saved_step = self.progress.step
