"""The length of a run: its steps, epochs or minutes, whichever ends it first."""

import math

from gptworks.config import Recipe
from gptworks.data.samples import Samples
from gptworks.errors import UserError
from gptworks.planning.steps import DataSize, planned_steps
from gptworks.training.progress import Progress
from gptworks.training.record.display import clock


class Length:
    """The length of a recipe's run, in steps."""

    def __init__(self, recipe: Recipe, samples: Samples) -> None:
        self._recipe, self._train, self._samples = recipe, recipe.train, samples

    def total_steps(self, progress: Progress) -> int | None:
        """Optimizer steps of the run; None: unknown. After batch_size changes, the remaining steps use the new size."""
        train, samples = self._train, self._samples.per_epoch
        planned = planned_steps(train, self._samples.context_length, DataSize(samples_per_epoch=samples))[0]
        if train.epochs is None or progress.samples == progress.step * train.batch_size:
            return planned
        left = train.epochs * samples - progress.samples
        by_epochs = progress.step + max(0, math.floor(left / train.batch_size + 0.5))
        return min(by_epochs, train.max_steps or by_epochs)

    def share_done(self, progress: Progress) -> float:
        """Share of the run that is done, from 0 to 1: by steps or by the clock, whichever is further."""
        total = self.total_steps(progress)
        shares = [progress.step / total] if total else []
        if self._train.max_minutes is not None:
            shares.append(progress.seconds / (60 * self._train.max_minutes))
        return min(1.0, max(shares))

    def due(self, progress: Progress, every: int) -> bool:
        """Whether something done every `every` steps, and at the end, is due now."""
        return every > 0 and (progress.step % every == 0 or self.share_done(progress) >= 1)

    def end_reason(self, progress: Progress, stop_asked: str | None) -> str | None:
        """The reason why the run ends here; None while it continues."""
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
        """The planned length in words: steps, minutes or both."""
        total, minutes = self.total_steps(progress), self._train.max_minutes
        length = [f"{total:,} steps"] if total else []
        return " or ".join(length + ([f"{minutes:g} minutes"] if minutes is not None else []))

    def reached(self, progress: Progress) -> str:
        """The step reached, and the progress towards the run's end, by steps or by the clock."""
        total, minutes = self.total_steps(progress), self._train.max_minutes
        if minutes is not None and (not total or progress.seconds / (60 * minutes) >= self.share_done(progress)):
            return f"step {progress.step:,}  {clock(progress.seconds)} of {clock(60 * minutes)}"
        return f"step {progress.step:,}/{total:,}"

    def check_resume(self, progress: Progress, before: Recipe | None) -> None:
        """Refuse a length that is shorter than the training already done.

        Args:
            before: the recipe before the change.

        Raises:
            UserError: the length is too short; the message names the setting and the steps done.
        """
        train, total = self._train, self.total_steps(progress)
        if total is not None and total < progress.step:
            name = "max_steps" if train.max_steps == total else "epochs"
            done = f"{progress.step:,} steps"
        elif (
            train.max_minutes is not None
            and before is not None
            and train.max_minutes != before.train.max_minutes
            and progress.seconds > 60 * train.max_minutes
        ):
            name, done = "max_minutes", f"{progress.seconds / 60:.1f} minutes"
        else:
            return
        raise UserError(
            f"train.{name}={getattr(train, name):g} and {self._recipe.run_dir} has done {done}: give more to continue, "
            f"or use its checkpoints as they are."
        )
