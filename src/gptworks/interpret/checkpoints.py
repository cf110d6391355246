"""The checkpoints of a run at which a text is read, and the step at which the run learned a token."""

from collections.abc import Sequence
from pathlib import Path

from gptworks.checkpoint import all_checkpoints

MOST_CHECKPOINTS = 32


def chosen_steps(run_dir: Path, most: int = MOST_CHECKPOINTS) -> list[int]:
    """Return the steps of a run's checkpoints, ascending: all, or `most` steps evenly chosen from first to last."""
    steps = sorted({checkpoint.step for checkpoint in all_checkpoints(run_dir)})
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def learned_at(steps: Sequence[int], probabilities: Sequence[float], threshold: float = 0.5) -> int | None:
    """Return the first step from which on every probability is at least `threshold`; None if the last one is lower."""
    learned = None
    for step, probability in sorted(zip(steps, probabilities, strict=True), reverse=True):
        if not probability >= threshold:  # also true of NaN, for a token that is not predicted
            break
        learned = step
    return learned
