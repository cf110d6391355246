"""`gptworks try`: find out whether a change helps a model. Train pairs of runs, with and without the change, from the
same seed and on the same samples, until the answer is clear or the time is over.

A try's folder holds `try.json` (design and results), `before.yaml` and `after.yaml` (the recipe without and with the
change), `pairs/00-before` and `pairs/00-after` (run folders, each next to its recipe and its log), and `try.html`. If
the pairs show that the same tokens take more or less time with the change, each pair gets a third run, `00-in-time`. It
trains the changed model for about as long as the run without the change. A try that was killed continues from these
files.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from gptworks.config import Recipe
from gptworks.config.optimizers import OPTIMIZERS
from gptworks.data.prepare import prepare
from gptworks.device import (
    BusyCores,
    Precision,
    choose_device,
    choose_precision,
    cpu_threads,
    free_threads,
    keep_freed_memory,
)
from gptworks.errors import UserError
from gptworks.recipe import load_recipe, save_recipe, with_vocab_size
from gptworks.runs.comparable import check_same, differences
from gptworks.runs.history import History, read_history
from gptworks.runs.statistics import FEWEST_PAIRS, MOST_PAIRS
from gptworks.runs.trials import Report, check_comparable, open_folder, train_to_end
from gptworks.runs.try_results import CHUNKS, TRY_FILE, Design, Pair, StepTime, Try, read_try, step_seconds, write_try
from gptworks.training.rehearsal.measure import measure_speed, median_of_turns, step_times
from gptworks.training.rehearsal.trace import Rehearsal
from gptworks.training.setup import check_memory

EVALUATIONS = 5
"""Approximate number of evaluations of each run, the points of its loss curve."""

USUAL_PAIRS = 5
"""Number of pairs that should fit in the time. Runs are shortened for this."""

LEAST_STEPS = 20
RUN_SECONDS = 10.0
"""Estimated seconds of a run outside its steps: start, evaluations and files."""

MEASUREMENTS = 2
"""Number of times that the step of each model is measured, in alternation. The shortest time counts."""

LEAST_TURNS, MOST_TURNS, TURN_SECONDS = 5, 100, 4.0
"""Minimum and maximum number of turns of steps after a pair of runs, and the seconds after which turns end. After short
runs, the maximum is a tenth of their steps, but not less than the minimum."""

MOST_TOKENS_APART = 0.02
"""Maximum difference in tokens between a run with a change and the run without it, as a fraction."""

_SEED_STRIDE = 10_007
_BEFORE_THE_FIRST_STATE = {".lock", "before.yaml", "after.yaml"}
"""Files of a try that was killed before it wrote `try.json`."""


@dataclass(frozen=True)
class Rules:
    """The rules for a try's seeds and its end. The defaults are those of `gptworks try`."""

    seed_of: Callable[[int], int] | None = None
    """Returns the seed of a pair by its number. If None, seeds follow from the recipe's seed."""
    ended: Callable[[Try], bool] = attrgetter("decided")
    """Returns whether the try needs no more pairs; called before the first pair and after each pair."""
    stop_asked: Callable[[], object] = lambda: None
    """Returns whether to stop the current run. The run then writes a checkpoint from which the try can continue."""


def length_of_runs(recipe: Recipe, path: str | Path, steps: int | None) -> int:
    """Return the wanted number of steps of each run: `steps` if given, else the recipe's `train.max_steps`. Raise a
    UserError if neither is given, or runs would be too short to compare."""
    wanted = steps or recipe.train.max_steps
    if wanted is None:
        raise UserError(f"{path} sets no train.max_steps: give --steps, the length of each run.")
    if wanted < LEAST_STEPS:
        raise UserError(f"runs of {wanted} steps are too short to compare: give --steps {LEAST_STEPS} or more.")
    return wanted


def plan_try(
    path: str | Path, changes: Sequence[str], folder: Path, minutes: float, worth: float, steps: int | None = None,
    resume: bool = False, report: Report = lambda _: None, prepare_text: Callable[[Recipe], object] = prepare,
) -> Try:  # fmt: skip
    """Return the try in the folder, or plan a new try, with run lengths based on the measured time of a step.

    Args:
        changes: overrides `key.path=value`, tested together as one change.
        steps: steps per run. Default: the recipe's number, or fewer if too few pairs of runs would fit in the time.
        prepare_text: called with the recipe to prepare its text, after all checks that do not need the text.

    Raises:
        UserError: the recipe rejects a change, a change makes losses incomparable, the time is too short, or the folder
            holds other files, or a try that is not resumed or has another recipe or change.
        RunError: a step failed while its time was measured.
    """
    if not changes:
        raise UserError("nothing is changed: give at least one key.path=value, such as train.optimizer=adamw.")
    recipe = load_recipe(path)
    for change in changes:
        key = change.partition("=")[0]
        if key != "seed":  # a new seed is allowed: it is a change without effect
            check_comparable(recipe, key, f"change {change}")
    changed = load_recipe(path, changes)
    if not differences([recipe, changed]):
        raise UserError(f"{' '.join(changes)}: the recipe says that already. Give a value that differs.")
    if (folder / TRY_FILE).exists():
        return _found(folder, recipe, changed, tuple(changes), resume)
    if folder.exists() and (not folder.is_dir() or {file.name for file in folder.iterdir()} - _BEFORE_THE_FIRST_STATE):
        raise UserError(f"{folder} exists and holds no try: give another --folder.")
    wanted = length_of_runs(recipe, path, steps)
    cores, device = BusyCores(), choose_device(recipe.train.device)
    prepare_text(recipe)
    report("measuring a step without and with the change")
    times = [[measured_step_seconds(one) for one in (recipe, changed)] for _ in range(MEASUREMENTS)]
    seconds, seconds_changed = map(min, zip(*times, strict=True))  # other work on the machine only adds time
    ratio = seconds_changed / seconds * recipe.tokens_per_step / changed.tokens_per_step
    # Plan a third run, in equal time, for each pair if the times seem to differ. The times of the pairs decide later.
    third = StepTime(ratio, ratio, ratio).is_distinct
    n_arms, per_step = (3, seconds * (2 + ratio)) if third else (2, seconds * (1 + ratio))
    budget = 60 * minutes
    if steps is None:
        fitting = int((budget / USUAL_PAIRS - n_arms * RUN_SECONDS) / per_step)
        wanted = min(wanted, max(fitting, LEAST_STEPS))
    pairs = min(MOST_PAIRS, int(budget / (wanted * per_step + n_arms * RUN_SECONDS)))
    if pairs < FEWEST_PAIRS:
        least = FEWEST_PAIRS * (wanted * per_step + n_arms * RUN_SECONDS) / 60
        raise UserError(
            f"{minutes:.3g} minutes are too short: {FEWEST_PAIRS} pairs of runs of {wanted} steps take "
            f"about {least:.1f} minutes here. Give more minutes{', or fewer --steps' if steps else ''}."
        )
    steps_after = _steps_after(path, changes, wanted)
    threads = _threads(recipe, device, cores)
    design = Design(tuple(changes), minutes, worth, pairs, wanted, ratio, steps_after, threads)
    for arm, length in {"before": wanted, "after": steps_after, "in-time": max(1, round(steps_after / ratio))}.items():
        if arm != "in-time" or third:  # fail here, not later, if a recipe is invalid
            _arm_recipe(path, design, folder, 0, arm, length, None)
    return Try(folder, recipe, changed, design, ())


def _steps_after(path: str | Path, changes: Sequence[str], steps: int) -> int:
    """Return the number of steps in which a run with the change reads as many tokens as `steps` steps without it. Raise
    a UserError if no number of steps reads about as many tokens, or the number is too small."""
    before = load_recipe(path, [f"train.max_steps={steps}"])
    tokens, found, missing = before.train.samples_before(steps) * before.row_length, steps, 0
    for _ in range(20):  # repeat, since the sizes of batches that grow in training depend on the number of steps
        found = max(1, found + missing)
        after = load_recipe(path, [*changes, f"train.max_steps={found}"])
        read = after.train.samples_before(found) * after.row_length
        missing = round((tokens - read) / after.tokens_per_step)
        if not missing:
            break
    if found < min(steps, LEAST_STEPS) or abs(read / tokens - 1) > MOST_TOKENS_APART:
        raise UserError(
            f"{' '.join(changes)}: {steps:,} steps without the change read {tokens:,} tokens, and {found:,} with it "
            f"{read:,}. Runs of fewer than {LEAST_STEPS} steps, or of other numbers of tokens, do not compare: give "
            f"more --steps, or a batch that divides their tokens."
        )
    return found


def _threads(recipe: Recipe, device: torch.device, cores: BusyCores) -> int | None:
    """Return the number of CPU threads for all runs. If each run chose the number, other work could slow down only some
    runs.

    The result is the recipe's number if set; else, on a CPU, as many threads as other programs leave free; else None.
    """
    if device.type != "cpu" or recipe.train.threads is not None:
        return recipe.train.threads
    fewer = free_threads(cores, device)
    return fewer[0] if fewer else torch.get_num_threads()


def _found(folder: Path, recipe: Recipe, changed: Recipe, changes: tuple[str, ...], resume: bool) -> Try:
    found = read_try(folder)
    if not resume:
        raise UserError(f"{folder} already holds a try: add --resume to continue it, or give another --folder.")
    if found.design.changes != changes:
        raise UserError(
            f"{folder} tries {' '.join(found.design.changes)}, not {' '.join(changes)}: give another --folder."
        )
    for now, then in ((recipe, found.recipe), (changed, found.changed)):
        check_same(folder, then, now, "Give another --folder.")
    return found


def measured_step_seconds(recipe: Recipe) -> float:
    """Return the seconds that a training step takes, measured in this process. Raise a UserError if the recipe's text
    cannot be prepared, and a RunError if a step failed."""
    return recipe.tokens_per_step / measure_speed(_rehearsal(recipe)).tokens_per_second


def steps_in_turns(
    recipes: Sequence[Recipe], clock: Callable[[], float] = time.perf_counter
) -> Iterator[tuple[float, ...]]:
    """Yield the seconds of one training step of each recipe, in this process, again and again.

    Since the steps take turns, other work on the machine slows down all recipes alike. From the first turn on, this
    process keeps freed memory. `clock` returns seconds; `time.process_time` counts only the CPU time of this process.
    Raise a UserError if a recipe's text cannot be prepared.
    """
    keep_freed_memory()
    yield from zip(*(step_times(_rehearsal(recipe), clock) for recipe in recipes), strict=True)


def measured_in_turns(recipes: Sequence[Recipe]) -> list[float]:
    """Return the median seconds of a training step of each recipe, from steps that take turns. With one thread, only
    CPU time counts. Raise a RunError if a step failed."""
    threads, steps = recipes[0].train.threads, recipes[0].train.max_steps or 0
    clock = time.process_time if threads == 1 else time.perf_counter
    most = min(MOST_TURNS, max(LEAST_TURNS, steps // 10))
    with cpu_threads(threads):
        return median_of_turns(steps_in_turns(recipes, clock), LEAST_TURNS, most, TURN_SECONDS)


def _step_times(recipes: dict[str, Recipe], runs: dict[str, History]) -> dict[str, float]:
    """Return the seconds of a step of each run, by arm.

    If the steps of a run differ by design, and not only by a schedule that both runs share, the result is the mean over
    all steps of a run. Otherwise the result is the median over parts of a run. On a CPU, the steps of `before` and
    `after` are timed in turns instead, unless a run has rollouts or an average of the weights, the runs differ in
    threads or compilation, or both models do not fit into memory together.
    """
    before, after = recipes["before"].train, recipes["after"].train
    alike = (before.smaller_batches, before.shorter_contexts) == (after.smaller_batches, after.shorter_contexts)
    if not alike or any(OPTIMIZERS[one.optimizer].steps_differ for one in (before, after)):
        return {arm: run.seconds / run.step for arm, run in runs.items()}
    times = {arm: step_seconds(run) for arm, run in runs.items()}
    computes_alike = (before.threads, before.compile) == (after.threads, after.compile)
    # the measured steps include neither rollouts nor the average of the weights
    whole = not (before.averages or after.averages or recipes["before"].objective.rollouts)
    pair = [recipes["before"], recipes["after"]]
    if computes_alike and whole and _fit_together_on_cpu(pair):
        times["before"], times["after"] = measured_in_turns(pair)
    return times


def _fit_together_on_cpu(recipes: Sequence[Recipe]) -> bool:
    """Return whether the recipes train on a CPU whose memory suffices for all of them at once."""
    if any(choose_device(recipe.train.device).type != "cpu" for recipe in recipes):
        return False
    needs = [check_memory(*_as_trained(recipe), force=True) for recipe in recipes]
    return sum(one.peak.total_bytes for one in needs) <= needs[0].device.memory_bytes


def _as_trained(recipe: Recipe) -> tuple[Recipe, torch.device, Precision]:
    """Return a recipe with the size of its vocabulary, and the device and the precision in which it trains."""
    device = choose_device(recipe.train.device)
    recipe = with_vocab_size(recipe, prepare(recipe).manifest.vocab_size)
    return recipe, device, choose_precision(recipe.train.precision, device)


def _rehearsal(recipe: Recipe) -> Rehearsal:
    recipe, device, precision = _as_trained(recipe)
    return Rehearsal(
        recipe.model, recipe.train, device.type, precision.name, recipe.adapter, recipe.freeze, recipe.objective,
        recipe.several_texts,
    )  # fmt: skip


def _arm_recipe(
    path: str | Path, design: Design, folder: Path, number: int, arm: str, steps: int,
    seed_of: Callable[[int], int] | None,
) -> Recipe:  # fmt: skip
    changes = () if arm == "before" else design.changes
    log_every = min(load_recipe(path, changes).train.log_every, max(1, steps // CHUNKS))
    length = [
        f"train.max_steps={steps}", "train.epochs=null", "train.max_minutes=null", "train.loggers=[]",
        f"train.evaluate_every={max(1, steps // EVALUATIONS)}", "train.sample_every=0", "train.keep_every=0",
        f"train.checkpoint_every={steps}", f"train.log_every={log_every}", "sweep=null",
    ]  # fmt: skip
    threads = [] if design.threads is None else [f"train.threads={design.threads}"]
    recipe = load_recipe(path, [*threads, *changes, *length])
    seed = (recipe.seed + number * _SEED_STRIDE) % 2**32 if seed_of is None else seed_of(number)
    name = f"{number:02d}-{arm}"
    return recipe.model_copy(update={"seed": seed, "run_dir": folder / "pairs" / name, "name": name})


def run_try(
    begun: Try, path: str | Path, report: Report = lambda _: None, after_pair: Callable[[Try], None] = lambda _: None,
    rules: Rules = Rules(),
) -> Try:  # fmt: skip
    """Train pairs of runs until the rules end the try, the time is over or a signal requests a stop; return the try.

    `path` is the path of the recipe. `after_pair` is called with the try after each pair, before `try.json` is written.

    Raises:
        UserError: another process uses the folder.
        RunError: a run failed.
    """
    folder, design = begun.folder, begun.design
    with open_folder(folder, "try", "--folder") as signalled:

        def stop_asked() -> object:
            return signalled() or rules.stop_asked()

        if not (folder / TRY_FILE).exists():
            save_recipe(begun.recipe, folder / "before.yaml")
            save_recipe(begun.changed, folder / "after.yaml")
            write_try(begun)
        found, started = read_try(folder), time.monotonic()
        before = sum(sum(pair.seconds.values()) for pair in found.pairs)
        while (due := found.due(rules.ended(found))) is not None:
            number, arms = due
            done, taken = sum(len(pair.loss) for pair in found.pairs), before + time.monotonic() - started
            if done and taken * (1 + len(arms) / done) > 60 * design.minutes * 1.1:
                report(f"the {design.minutes:g} minutes are over")
                break
            pair = _train(found, path, number, arms, stop_asked, report, rules.seed_of)
            if pair is None:
                break
            earlier, found = found, replace(found, pairs=(*found.pairs[:number], pair, *found.pairs[number + 1 :]))
            after_pair(found)
            write_try(found)
            last = "  ".join(f"{arm} {loss:.4f}" for arm, loss in pair.loss.items())
            so_far = "  ".join(f"{arm} {found.verdict(arm).value:+.4f}" for arm in pair.loss if arm != "before")
            report(f"pair {pair.number}: {last}; mean difference: {so_far}")
            if found.arms != earlier.arms:
                report(f"{found.step_time}: each pair gets a third run, of {found.steps_in_time:,} steps")
    return found


def _train(
    found: Try, path: str | Path, number: int, arms: Sequence[str], stop_asked: Callable[[], Any], report: Report,
    seed_of: Callable[[int], int] | None,
) -> Pair | None:  # fmt: skip
    """Train the runs `arms` of a pair one by one. Return the pair with all its runs; None if a stop was requested."""
    had = tuple(found.pairs[number].loss) if number < len(found.pairs) else ()
    (found.folder / "pairs").mkdir(exist_ok=True)
    recipes, runs = dict[str, Recipe](), dict[str, History]()
    for arm in (*had, *arms):
        steps = {"before": found.design.steps, "after": found.steps_after, "in-time": found.steps_in_time or 0}[arm]
        recipe = _arm_recipe(path, found.design, found.folder, number, arm, steps, seed_of)
        if arm in arms and not train_to_end(recipe, stop_asked, report):
            return None
        recipes[arm], runs[arm] = recipe, read_history(recipe.run_dir)
    runs = {arm: runs[arm] for arm in found.arms if arm in runs}
    ends = {arm: float(run.validation[-1]["loss"]) for arm, run in runs.items()}
    seconds = {arm: run.seconds for arm, run in runs.items()}
    if had:  # results that the pair already has do not change
        pair, new = found.pairs[number], {arm: step_seconds(runs[arm]) for arm in arms}
        times, ends, seconds = new | pair.step_seconds, ends | pair.loss, seconds | pair.seconds
    else:
        times = _step_times(recipes, runs)
    share = _share_to_reach(runs["after"], ends["before"])
    return Pair(number, runs["before"].recipe.seed, ends, seconds, times, share)


def _share_to_reach(run: History, loss: float) -> float | None:
    """Return the fraction of a run's steps, interpolated between evaluations, at which the validation loss reaches
    `loss`; None if it never does."""
    before: tuple[float, float] | None = None
    for record in run.validation:
        at, here = float(record["step"]), float(record["loss"])
        if here <= loss:
            if before is not None and before[1] > here:
                at = before[0] + (at - before[0]) * (before[1] - loss) / (before[1] - here)
            return at / run.step
        before = at, here
    return None
