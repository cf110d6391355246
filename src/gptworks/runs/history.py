"""Read a run from its folder, at any point of its training."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.files import fetched_path
from gptworks.planning.params import count_parameters
from gptworks.planning.steps import planned_steps
from gptworks.recipe import load_recipe, not_a_run
from gptworks.training.changes import Origin
from gptworks.training.changes import read_history as read_changes
from gptworks.training.record.metrics import Record, Skipped, read_metrics

THINNED_RECORDS = 20_000
"""When a kind has twice this number of records, every second record is dropped, except the best and the last."""


@dataclass(frozen=True)
class History:
    """A run: its recipe and the records of its metrics.jsonl."""

    folder: Path
    recipe: Recipe
    records: tuple[Record, ...]
    skipped: Skipped = field(default_factory=Skipped)
    """Lines of the log that could not be read as records."""
    n_records: int = 0
    """Number of records in the log; `records` may be fewer."""
    seconds_by_part: Mapping[str, float] = field(default_factory=dict)
    """Total seconds of each part of a step, over all training records."""
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """The maximum of each memory figure over all training records."""

    @property
    def name(self) -> str:
        """The name of the folder, not of the recipe, which several runs may share."""
        return self.folder.resolve().name

    def kind(self, kind: str) -> list[Record]:
        """Return the records of one kind, such as train, validation, sample or skipped."""
        return [record for record in self.records if record.get("kind") == kind]

    @cached_property
    def train(self) -> list[Record]:
        return self.kind("train")

    @cached_property
    def validation(self) -> list[Record]:
        return self.kind("validation")

    @property
    def loss_unit(self) -> str:
        return self.recipe.objective.loss_unit

    @property
    def rewarded(self) -> bool:
        """Whether the run maximizes a reward, so that its loss is not a likelihood."""
        return self.recipe.objective.rollouts is not None

    @property
    def train_unit(self) -> str:
        return "policy loss" if self.rewarded else self.loss_unit

    @property
    def parameters(self) -> int:
        return count_parameters(self.recipe.model).total

    @property
    def step(self) -> int:
        """The last recorded step."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def planned_steps(self) -> int | None:
        """The setting `train.max_steps`; None if it is not set. `epochs` or `max_minutes` may end the run earlier."""
        return planned_steps(self.recipe.train, self.recipe.row_length)[0]

    @property
    def tokens(self) -> int:
        """Number of tokens that the model has read in training, including padding, up to the last record."""
        return max((record["tokens"] for record in self.records if "tokens" in record), default=0)

    @property
    def seconds(self) -> float:
        """Seconds of training, over all sessions, up to the last training record."""
        return float(self.train[-1]["seconds"]) if self.train else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Average speed of training, over the whole run."""
        return self.train[-1]["tokens"] / self.seconds if self.seconds else 0.0

    @property
    def best(self) -> Record | None:
        """The evaluation with the lowest loss; None if no evaluation has a finite loss."""
        finite = [record for record in self.validation if math.isfinite(record["loss"])]
        return min(finite, key=lambda record: float(record["loss"]), default=None)

    @property
    def last(self) -> Record | None:
        return self.validation[-1] if self.validation else None

    @cached_property
    def origins(self) -> tuple[Origin, ...]:
        return origins_of(self.folder)

    def seconds_at(self, steps: Sequence[int]) -> list[float]:
        """Return the seconds of training up to each step, interpolated between training records."""
        known = [(0, 0.0), *((record["step"], record["seconds"]) for record in self.train)]
        found: list[float] = np.interp(steps, *np.array(known).T).tolist()
        return found

    @property
    def data_fingerprint(self) -> str | None:
        """The sha256 of the run's token files; None if no checkpoint records it."""
        return self._recorded("data_fingerprint")

    @property
    def text_fingerprint(self) -> str | None:
        """The sha256 of the held-out text, independent of the tokenizer; None if no checkpoint records it."""
        return self._recorded("validation_text_sha256")

    def _recorded(self, key: str) -> str | None:
        value = self._state.get(key)
        return value if isinstance(value, str) and value else None

    @cached_property
    def _state(self) -> dict[str, Any]:
        """State of the newest readable checkpoint; empty without one."""
        from gptworks.checkpoint import all_checkpoints

        for checkpoint in all_checkpoints(self.folder):
            try:
                return dict(checkpoint.state())
            except (UserError, OSError, ValueError, KeyError, TypeError):  # the checkpoint is damaged or being deleted
                continue
        return {}


def origins_of(folder: Path) -> tuple[Origin, ...]:
    """Return the checkpoints that a fork descends from, nearest first; empty if none are recorded or readable."""
    try:
        return tuple(read_changes(folder).origins)
    except (UserError, OSError):
        return ()


def read_history(folder: Path) -> History:
    """Read the run in a folder; raise a UserError if it is not a run folder."""
    folder = fetched_path(folder)
    if not (folder / "recipe.yaml").exists():
        trials = folder / "trials"
        if trials.is_dir():
            raise UserError(f"{folder} is not a run folder: it has no recipe.yaml; a sweep's runs are below {trials}.")
        raise not_a_run(folder)
    skipped, kinds = Skipped(), defaultdict[str, _Thinned](_Thinned)
    n_records, parts, memory = 0, Counter[str](), dict[str, int]()
    for record in read_metrics(folder / "metrics.jsonl", skipped):
        n_records += 1
        kinds[record["kind"]].add(record)
        if record["kind"] == "train":
            taken = record.pop("seconds_by_part", {})
            parts.update(taken if isinstance(taken, dict) else {})
            for key, value in record.items():
                if key.endswith("_bytes") and isinstance(value, int) and value >= 0:
                    memory[key] = max(value, memory.get(key, 0))
    records = sorted((record for kind in kinds.values() for record in kind.records), key=lambda record: record["step"])
    return History(folder, load_recipe(folder), tuple(records), skipped, n_records, parts, memory)


class _Thinned:
    """All records of one kind if they are few, else evenly spaced records, with the last and the best record."""

    def __init__(self) -> None:
        self._kept: list[Record] = []
        self._every, self._n = 1, 0
        self._last: Record | None = None
        self._best: Record | None = None

    def add(self, record: Record) -> None:
        if self._n % self._every == 0:
            self._kept.append(record)
        self._n, self._last = self._n + 1, record
        loss = record.get("loss", math.inf)
        if isinstance(loss, int | float) and loss < (math.inf if self._best is None else self._best["loss"]):
            self._best = record
        if len(self._kept) >= 2 * THINNED_RECORDS:
            self._kept, self._every = self._kept[::2], 2 * self._every

    @property
    def records(self) -> list[Record]:
        more = {id(record): record for record in (self._best, self._last) if record is not None}
        return [*(record for record in self._kept if id(record) not in more), *more.values()]
