"""Finds out which samples a step of a run trained on, from the files of the run folder."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gptworks.checkpoint import all_checkpoints
from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.training.changes import CHANGES, read_history
from gptworks.training.progress import Progress
from gptworks.training.record.metrics import LOG, last_step, read_metrics

_BATCH_SIZE = "train.batch_size"


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step: `n_samples` from index `position` on."""

    position: int
    """Index of the step's first sample, counted from the start of the run."""
    n_samples: int
    skipped: bool
    """Whether the step was skipped: its gradients were not applied."""


def steps_done(run_dir: Path) -> int:
    """Return the last step in a run's log and checkpoints; 0 if there is none."""
    return max([last_step(run_dir / LOG), *(one.step for one in all_checkpoints(run_dir)[:1])])


def samples_of_step(recipe: Recipe, run_dir: Path, step: int) -> StepSamples:
    """Return the samples of step number `step`, counted from 1; raise UserError if the run has not reached the step, or
    its files are damaged or contradict each other."""
    done = steps_done(run_dir)
    if not 1 <= step <= done:
        raise UserError(f"step {step} is not among those that the run has done: choose one from 1 to {done}.")
    sizes = _batch_sizes(recipe, run_dir)
    records = list(read_metrics(run_dir / LOG, kinds=("rollback", "skipped")))
    jumps = [(record["step"], record["from_step"]) for record in records if record["kind"] == "rollback"]
    _check(run_dir, recipe, sizes, jumps, step)
    size = next(size for first, size in reversed(sizes) if first < step)
    skipped = any(record["kind"] == "skipped" and record["step"] == step for record in records)
    return StepSamples(_position(sizes, jumps, step - 1), size, skipped)


def _batch_sizes(recipe: Recipe, run_dir: Path) -> list[tuple[int, int]]:
    """Return the run's batch sizes in order, each as (number of steps before it applies, size); raise UserError if the
    history of changes is damaged."""
    made = [change for change in read_history(run_dir).changes if _BATCH_SIZE in change.settings]
    try:
        changes = [(change.step, *map(int, change.settings[_BATCH_SIZE])) for change in made]
        sizes = [(0, changes[0][1] if changes else recipe.train.batch_size)]
        sizes += [(step, new) for step, _, new in changes]
        if smaller := recipe.train.smaller_batches:  # `batch_size` applies only after these steps
            last = smaller[-1][0]
            then = next(size for first, size in reversed(sizes) if first <= last)
            starts = [0, *(until for until, _ in smaller)]
            grown = [*zip(starts, (size for _, size in smaller), strict=False), (last, then)]
            sizes = grown + [(step, size) for step, size in sizes if step > last]
        if any(size < 1 for _, size in sizes) or any(b < a for (a, _), (b, _) in pairwise(sizes)):
            raise ValueError("it has sizes or steps that no run has")
    except (TypeError, ValueError) as error:
        raise UserError(f"{run_dir / CHANGES} is damaged ({error}): restore it from a copy.") from None
    return sizes


def _position(sizes: list[tuple[int, int]], jumps: list[tuple[int, int]], n_steps: int) -> int:
    """Return the number of samples read, or skipped by rollbacks, in the first `n_steps` steps.

    Args:
        sizes: the result of `_batch_sizes`.
        jumps: for each rollback, the step to which the run went back, and the step from which it went back.
    """

    def samples(step: int) -> int:
        ends = [*(first for first, _ in sizes[1:]), step]
        parts = zip(sizes, ends, strict=True)
        return sum(size * max(0, min(end, step) - first) for (first, size), end in parts)

    passed = [(0, 0)]  # (step, total number of samples that rollbacks had skipped then)
    for to, from_step in jumps:
        before = next(n for step, n in reversed(passed) if step <= from_step)
        passed = [one for one in passed if one[0] < to] or [(0, 0)]
        passed.append((to, samples(from_step) + before - samples(to)))
    return samples(n_steps) + next(n for step, n in reversed(passed) if step <= n_steps)


def _check(
    run_dir: Path, recipe: Recipe, sizes: list[tuple[int, int]], jumps: list[tuple[int, int]], step: int
) -> None:
    """Raise UserError if `_position` contradicts the first checkpoint at or after `step`, or else the last one."""
    found = sorted(all_checkpoints(run_dir), key=lambda one: one.step)
    near = next((one for one in found if one.step >= step), found[-1] if found else None)
    if near is None:
        return
    progress = Progress.of(near)
    if _position(sizes, jumps[: progress.rollbacks], near.step) != progress.position:
        raise UserError(
            f"{run_dir}: its log, {CHANGES} and the checkpoint of step {near.step} do not agree on the samples that it "
            f"has trained on, so those of step {step} are not known. Restore {LOG} and {CHANGES} from a copy."
        )
