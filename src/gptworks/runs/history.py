"""What a run's folder tells of it, however far it has come."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.plan.params import count_parameters
from gptworks.plan.run import planned_steps
from gptworks.recipe import load_recipe
from gptworks.train.metrics import Record, read_metrics


@dataclass(frozen=True)
class History:
    """A run: its recipe and the records of its metrics.jsonl."""

    folder: Path
    recipe: Recipe
    records: tuple[Record, ...]

    @property
    def name(self) -> str:
        """The folder's name: several runs may share a recipe."""
        return self.folder.resolve().name

    def kind(self, kind: str) -> list[Record]:
        """The records of a kind: train, validation, sample, skipped."""
        return [record for record in self.records if record.get("kind") == kind]

    @cached_property
    def train(self) -> list[Record]:
        return self.kind("train")

    @cached_property
    def validation(self) -> list[Record]:
        return self.kind("validation")

    @property
    def parameters(self) -> int:
        return count_parameters(self.recipe.model).total

    @property
    def step(self) -> int:
        """The last step that left a record."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def planned_steps(self) -> int | None:
        """The length in steps; None where epochs of an unknown text or the clock decide."""
        return planned_steps(self.recipe.train, self.recipe.model.context_length, None)[0]

    @property
    def tokens(self) -> int:
        """Targets trained on, up to the last record."""
        return max((record["tokens"] for record in self.records if "tokens" in record), default=0)

    @property
    def seconds(self) -> float:
        """Of training, over all sittings, up to the last training record."""
        return float(self.train[-1]["seconds"]) if self.train else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Over the whole run."""
        return self.train[-1]["tokens"] / self.seconds if self.seconds else 0.0

    @property
    def best(self) -> Record | None:
        """The evaluation with the lowest loss."""
        finite = [record for record in self.validation if math.isfinite(record["loss"])]
        return min(finite, key=lambda record: float(record["loss"]), default=None)

    @property
    def last(self) -> Record | None:
        """The last evaluation."""
        return self.validation[-1] if self.validation else None

    def seconds_at(self, step: int) -> float:
        """Seconds of training up to a step: those of its record, or between those of its neighbours in proportion."""
        i = bisect_left(self.train, step, key=lambda record: int(record["step"]))
        before = self.train[i - 1] if i else {"step": 0, "seconds": 0.0}
        if i == len(self.train):
            return float(before["seconds"])
        after = self.train[i]
        share = (step - before["step"]) / (after["step"] - before["step"])
        return float(before["seconds"] + share * (after["seconds"] - before["seconds"]))

    @cached_property
    def data_fingerprint(self) -> str | None:
        """What its token files sum to, as the newest checkpoint says; None without one."""
        from gptworks.checkpoint import checkpoints

        for checkpoint in checkpoints(self.folder):
            try:
                return str(checkpoint.state()["data_fingerprint"]) or None
            except (OSError, ValueError, KeyError):  # being deleted, or damaged
                continue
        return None


def read_history(folder: Path) -> History:
    """The run in a folder.

    Raises:
        UserError: it is none.
    """
    if not (folder / "recipe.yaml").exists():
        trials = folder / "trials"
        hint = f"; a sweep's runs are below {trials}" if trials.is_dir() else ""
        raise UserError(f"{folder} is not a run folder: it has no recipe.yaml{hint}.")
    records = tuple(sorted(read_metrics(folder / "metrics.jsonl"), key=lambda record: int(record["step"])))
    return History(folder, load_recipe(folder), records)
