"""A drafted recipe: its settings with their reasons, as a commented YAML file, and the expected time and memory of its
run."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import yaml

from gptworks.config import Recipe
from gptworks.planning.run import Plan
from gptworks.recipe import name_for, parse_recipe
from gptworks.units import readable

Row = tuple[str, Any, str]
"""A setting: its key, its value, and the reason for the value, which may be empty."""

Sections = dict[str, list[Row]]
"""Maps the name of each section to its settings; the section "" holds settings outside all sections."""

TRAINING_SHARE = 0.9
"""Fraction of a run's time that training takes; the rest goes to evaluations, samples and checkpoints."""

_COMMENT_COLUMN, _WIDTH = 36, 120


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
        """Return the text of the recipe's file: the lines of `about` as comments, then each section's settings with
        their reasons as comments."""
        lines = [f"# {line}".rstrip() for line in about]
        for name, rows in self.sections.items():
            assert len({key for key, _, _ in rows}) == len(rows), "a key that is given twice makes the file invalid"
            indent = "  " if name else ""
            lines += ["", *([f"{name}:"] if name else [])]
            for key, value, why in rows:
                setting = f"{indent}{key}: {_flow(value)}"
                if isinstance(value, list) and value and isinstance(value[0], dict):
                    setting = "\n".join([f"{indent}{key}:", *(f"{indent}  - {_flow(item)}" for item in value)])
                commented = f"{setting:<{_COMMENT_COLUMN - 2}}  # {why}"
                if not why:
                    lines.append(setting)
                else:
                    lines += [commented] if len(commented) <= _WIDTH else [f"{indent}# {why}", setting]
        return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """Return a value in YAML's flow style, on one line."""
    text = yaml.safe_dump([value], default_flow_style=True, width=inf, allow_unicode=True, sort_keys=False)
    return text.strip()[1:-1]


def parsed(sections: Sections, out: Path) -> Recipe:
    """Return the recipe with the settings of `sections`, named after its file `out`."""
    tree: dict[str, Any] = {name: {key: value for key, value, _ in rows} for name, rows in sections.items()}
    return parse_recipe({"name": name_for(out), **tree.pop("", {}), **tree}, str(out))
