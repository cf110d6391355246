"""The loss of each token of a text at each checkpoint of a run, and the step at which the run learned the token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gptworks.checkpoint import all_checkpoints, load_run
from gptworks.interpret.hooks import Check, never
from gptworks.interpret.text import Costs, TokenizedText

MOST_CHECKPOINTS = 32


@dataclass(frozen=True)
class AtStep:
    """The loss of each token of a text at a checkpoint."""

    step: int
    nats: Costs
    """Loss of each token, [T]; see `TokenizedText.token_nats`."""


def chosen_steps(run_dir: Path, most: int = MOST_CHECKPOINTS) -> list[int]:
    """Return the steps of a run's checkpoints, or of `most` of them, evenly chosen from first to last; ascending."""
    steps = sorted({checkpoint.step for checkpoint in all_checkpoints(run_dir)})
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def through_checkpoints(
    run_dir: Path,
    text: TokenizedText,
    steps: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    check: Check = never,
) -> Iterator[AtStep]:
    """Yield the loss of a text's tokens at each step, with one model in memory at a time.

    Raises:
        UserError: a checkpoint is gone or damaged, or the text has ids outside the model's vocabulary.
    """
    for step in steps:
        check()
        model = load_run(run_dir, str(step), device=device).model
        yield AtStep(step, text.token_nats(model, check))


def learned_at(steps: Sequence[int], probabilities: Sequence[float], threshold: float = 0.5) -> int | None:
    """Return the first step from which on every probability is at least `threshold`; None if the last is below it."""
    learned = None
    for step, probability in sorted(zip(steps, probabilities, strict=True), reverse=True):
        if not probability >= threshold:  # also true of NaN, for a token that is not predicted
            break
        learned = step
    return learned
