"""Compares a run that is interrupted and resumed with one that is not: nothing may differ."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gptworks.checkpoint import checkpoints
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.training.fork import fork
from gptworks.training.loop import Run, train
from gptworks.training.record.metrics import MEASURED, read_metrics


class BrokenOff(Exception):
    """Raised to end a run in the middle of a step."""


def assert_resumes_exactly(tree: dict[str, Any], at_step: int, *, forks: bool = False) -> Path:
    """Train the recipe twice, once interrupted at a step and resumed; compare everything that the runs leave. Returns
    the uninterrupted run.

    Args:
        forks: train a fork of the broken run on as well.
    """
    whole, parts = (Path(f"{tree['run_dir']}-{name}") for name in ("whole", "parts"))
    train(parse_recipe(tree | {"run_dir": str(whole)}))
    recipe = parse_recipe(tree | {"run_dir": str(parts)})
    step = Run.training_step

    def until(run: Run) -> None:
        if run.progress.step == at_step:
            raise BrokenOff
        step(run)

    with patch.object(Run, "training_step", until), pytest.raises(BrokenOff):
        train(recipe)
    assert 0 < checkpoints(parts)[0].step <= at_step, "there is something to resume from"
    if forks:
        forked = fork(parts, None, parts.with_name(f"{parts.name}-forked"))
        train(load_recipe(forked), resume=True)
        assert_same_end(whole, forked)
    train(recipe, resume=True)
    assert_same_end(whole, parts)
    return whole


def assert_same_end(first: Path, second: Path) -> None:
    """Check that two runs have the same final weights, optimizer state and counters, and the same records."""
    one, other = (checkpoints(run)[0] for run in (first, second))
    assert one.step == other.step
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (one.folder / file).read_bytes() == (other.folder / file).read_bytes(), file
    states = [{key: value for key, value in c.state().items() if key != "seconds"} for c in (one, other)]
    assert states[0] == states[1]
    assert without_timings(first) == without_timings(second)


def without_timings(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run without the values that depend on the clock."""
    records = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]
