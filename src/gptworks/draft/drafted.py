"""A drafted recipe: its settings with their reasons, and the expected time and memory of its run."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.config import Recipe
from gptworks.draft.writing import Row, written
from gptworks.planning.run import Plan
from gptworks.recipe import name_for, parse_recipe
from gptworks.units import readable

Sections = dict[str, list[Row]]
"""Maps the name of each section to its settings; the section "" holds settings outside all sections."""

TRAINING_SHARE = 0.9
"""Fraction of a run's time that training takes; the rest goes to evaluations, samples and checkpoints."""


@dataclass(frozen=True)
class Drafted:
    """A drafted recipe with the plan of its run."""

    sections: Sections
    plan: Plan
    """Plan of the run, with the measured time of a step if a step was measured."""

    @property
    def n_train_tokens(self) -> int:
        assert self.plan.data.train_tokens is not None
        return self.plan.data.train_tokens

    @property
    def rate(self) -> float | None:
        """Measured tokens per second; None if no step was measured."""
        return None if self.plan.measured is None else self.plan.measured.tokens_per_second

    @property
    def minutes(self) -> float:
        """Minutes that the run takes, including evaluations, samples and checkpoints."""
        assert self.plan.seconds is not None
        return self.plan.seconds / TRAINING_SHARE / 60

    def time_and_memory(self) -> list[str]:
        plan, rate = self.plan, self.plan.tokens_per_second
        peak, free = (readable(n_bytes, "B") for n_bytes in (plan.peak.total_bytes, plan.device.memory_bytes))
        return [
            f"time        about {self.minutes:.2g} minutes: {rate:,.0f} tokens/s measured, and a tenth for evaluations",
            f"memory      {peak} at the peak, of {free} free",
        ]

    def file(self, about: Iterable[str]) -> str:
        """Return the text of the recipe's file, which begins with the lines of `about` as comments."""
        return written(about, self.sections)


def parsed(sections: Sections, out: Path) -> Recipe:
    """Parse these sections as a recipe named after its file `out`."""
    tree: dict[str, Any] = {name: {key: value for key, value, _ in rows} for name, rows in sections.items()}
    return parse_recipe({"name": name_for(out), **tree.pop("", {}), **tree}, str(out))
