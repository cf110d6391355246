"""Functions for programs, notebooks and the commands: `gptworks.train`, `read_run`, `evaluate`; see also `estimates`.

Each function imports what it needs when it is called, so that importing this module is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.errors import UserError, refuse_unused
from gptworks.overrides import overrides_of

if TYPE_CHECKING:
    from gptworks.choices import LoadedWeights, PrecisionName
    from gptworks.config import Recipe
    from gptworks.data.opened import Prepared
    from gptworks.evaluation.results import Measurements
    from gptworks.recipe import RecipeLike
    from gptworks.runs.trained_run import TrainedRun
    from gptworks.training.loop import Outcome

Files = str | PathLike[str] | Sequence[str | PathLike[str]]


def train(
    recipe: RecipeLike,
    *overrides: str,
    resume: bool = False,
    change: Collection[str] = (),
    force: bool = False,
    report: Callable[[str], None] | None = None,
    prepare: Callable[[Recipe], Prepared] | None = None,
    **settings: Any,
) -> TrainedRun:
    """Train a recipe's model until the run ends or a signal stops it, and return the run: `gptworks.train("demo")`.

    Args:
        recipe: a file, a shipped recipe's name, a run folder, nested dictionaries, or a `Recipe`.
        overrides: settings that replace the recipe's, as on the command line: `"train.max_steps=20"`.
        resume: continue from the newest undamaged checkpoint in the run folder; without a checkpoint, start at step 0.
        change: paths of settings that the resumed run may change although its loss curve depends on them; PATH=VALUE
            also sets the new value.
        force: start even if the plan says that the run does not fit in memory.
        report: called with a line about settings kept from an earlier session. By default, the display shows this line.
        prepare: makes the recipe's tokenizer and shards; None: `gptworks.prepare`, which reports only in a notebook.
        settings: further overrides: settings of the section `train` by name (`max_steps=20`), other settings by section
            (`model={"n_layers": 2}`, `run_dir="runs/small"`).

    Raises:
        UserError: the recipe, its data or the run folder cannot be used, or the run does not fit in memory.
        RunError: too many steps were skipped as non-finite or spikes, the dataset or a checkpoint could not be written,
            or other ranks could not be reached.
    """
    outcome = train_here(
        recipe, *overrides, *overrides_of(settings), resume=resume, change=change, force=force, report=report,
        prepare=prepare,
    )  # fmt: skip
    return read_run(outcome.run_dir)


def train_here(
    recipe: RecipeLike,
    *overrides: str,
    resume: bool = False,
    change: Collection[str] = (),
    force: bool = False,
    report: Callable[[str], None] | None = None,
    prepare: Callable[[Recipe], Prepared] | None = None,
) -> Outcome:
    """Train a recipe's model as this process's rank, and return the outcome without reading the run; see `train`."""
    from gptworks.data.prepare import prepare as prepare_data
    from gptworks.device import choose_device
    from gptworks.training.distributed.ranks import join
    from gptworks.training.loop import train as train_model
    from gptworks.training.record.display import Display, NotebookDisplay, in_notebook

    display = NotebookDisplay() if in_notebook() else None
    report = report or (display or Display()).message
    loaded, given, change = settings_of(recipe, overrides, change, resume, report)
    if prepare is None:
        prepare = prepare_data if display is None else partial(prepare_data, report=display.preparing)
    with join(loaded.train.parallel.timeout_seconds, choose_device(loaded.train.device)) as ranks:
        return train_model(
            loaded, resume=resume, change=change, force=force, ranks=ranks, overrides=given, prepare=prepare,
            display=display if ranks.is_rank_zero else None,
        )  # fmt: skip


def read_run(folder: str | PathLike[str]) -> TrainedRun:
    """Return the run in a folder; it may still be training.

    Raises:
        UserError: the folder contains no run.
    """
    from gptworks.runs.history import read_history
    from gptworks.runs.trained_run import TrainedRun

    return TrainedRun(**vars(read_history(Path(folder))))


def evaluate(
    run: str | PathLike[str],
    *overrides: str,
    checkpoint: str = "best",
    text: Files = (),
    task: Files = (),
    shots: Sequence[int] = (),
    limit: int | None = None,
    chat: bool = False,
    run_generated_code: bool = False,
    harness: Sequence[str] = (),
    calibration: bool = False,
    memorization: bool = False,
    stride: int | None = None,
    by_position: bool = False,
    compressors: bool = False,
    precision: PrecisionName | None = None,
    weights: LoadedWeights = "auto",
    device: str = "auto",
    save: bool = True,
    report: Callable[[str], None] = print,
    prepare: Callable[[Recipe], Prepared] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measurements:
    """Measure a run on its whole validation split, or make the requested other measurements instead.

    `gptworks.evaluate("runs/demo")` measures the validation split, `gptworks.evaluate("runs/demo", text="book.txt")` a
    file. Other measurements are `task`, `harness`, `calibration` and `memorization`.

    Args:
        run: a run folder, or the run that `gptworks.train` returned.
        overrides: settings that replace the run's, such as `"model.context_length=1024"`.
        checkpoint: best, last, or a step.
        text: files of text whose loss to measure.
        task: files of tasks, whose items the model answers.
        shots: for tasks: numbers of solved examples in a prompt; each task is measured with each number.
        limit: for tasks and the harness: maximum number of items of each task.
        chat: for tasks and the harness: prompt with the run's chat template.
        run_generated_code: let tasks run programs that the model wrote; see gptworks/confined/sandbox.py.
        harness: names of lm-evaluation-harness tasks, or YAML files of such tasks.
        calibration: measure whether tokens predicted with probability p are right in a share p of cases.
        memorization: measure the share of the model's text that is copied from the training text.
        stride: number of tokens between the starts of windows; None: the context length, or half of it for `text`.
        by_position: also measure each eighth of the context.
        compressors: also measure gzip and xz on the same text.
        precision: precision of matrix products, except in tasks and the harness; None: the run's own.
        weights: format in which to load the weights; see `gptworks.load`. Results for weights that are rounded while
            loading are saved under their own name, such as text-book-int8.
        device: auto, cpu, cuda or mps.
        save: write the results, except those of the validation split, to the run folder and its model card.
        report: called with a message for each damaged checkpoint. An intact checkpoint is measured instead.
        prepare: finds or builds the shards of the run's own text; None: `gptworks.prepare`, without reports.
        progress: called with the number of items or tokens done, and their total; not called by the harness.

    Raises:
        UserError: the run, checkpoint, text, task or device does not exist or cannot be used, or an option would have
            no effect.
    """
    from gptworks.evaluation.task import load_task

    paths, tasks_given = _listed(text), _listed(task)
    others = bool(paths or tasks_given or harness or calibration or memorization)
    if others:
        only = "is for the validation split: it does nothing with --text, --task or another measurement"
        refuse_unused(only, by_position=by_position, compressors=compressors)
        if not paths:
            refuse_unused("is for text: give --text FILE, or", stride=stride)
        if not (paths or calibration or memorization):
            refuse_unused("does nothing with tasks, which are computed as texts are generated", precision=precision)
    tasks = [load_task(path, shots=n, limit=limit) for path in tasks_given for n in shots or (None,)]
    texts = {path: _read_text(path) for path in paths}
    if tasks and all(each.settings.type != "code" for each in tasks):
        refuse_unused("is for tasks of the type code", run_generated_code=run_generated_code)
    if not tasks:
        refuse_unused("is for tasks: give --task FILE, or", shots=shots or None, run_generated_code=run_generated_code)
        if not harness:
            refuse_unused("is for tasks: give --task FILE or --harness TASK, or", chat=chat, limit=limit)
    if not others:
        refuse_unused("does nothing: what is measured on the validation split is not saved", no_save=not save)
    if harness:
        from gptworks.interop.lm_eval import run_harness
    from gptworks.confined.sandbox import Sandbox
    from gptworks.data.prepare import prepare as prepare_data
    from gptworks.evaluation.evaluated_run import EvaluatedRun  # imports torch, so only after options are checked
    from gptworks.evaluation.results import Measurements, save_evaluations
    from gptworks.evaluation.run_task import run_task

    one = EvaluatedRun(
        run, checkpoint, overrides=overrides, device=device, precision=precision, weights=weights, report=report,
        prepare=prepare or prepare_data, progress=progress,
    )  # fmt: skip
    if not others:
        validation = one.validation(stride, by_position, compressors)
        why = "this tokenizer does not keep the whole text"
        if one.prepared.manifest.holds_examples:
            why = "the text is conversations, of which not every byte is predicted"
        return Measurements(validation, without_bits=why, rounded_to=one.rounded_to)
    found = [one.text(path, contents, stride) for path, contents in texts.items()]
    sandbox = Sandbox() if run_generated_code else None
    named: dict[str, Any] = {"run": one.name, "step": one.step}
    found += [run_task(one.engine, each, **named, sandbox=sandbox, chat=chat, progress=progress) for each in tasks]
    if harness:
        found += run_harness(one.engine, harness, **named, limit=limit, chat=chat)
    found += [one.calibration()] if calibration else []
    found += [one.memorization()] if memorization else []
    found = [one.of_these_weights(each) for each in found]
    if save:
        save_evaluations(one.folder, found)
    return Measurements(None, tuple(found))


def _listed(files: Files) -> list[Path]:
    return [Path(files)] if isinstance(files, str | PathLike) else [Path(one) for one in files]


_MOST_TEXT_BYTES = 1 << 32


def _read_text(path: Path) -> str:
    from gptworks.files import read_given

    try:
        return read_given(path, _MOST_TEXT_BYTES)
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}. Give a text file.") from None


def settings_of(
    recipe: RecipeLike, overrides: Sequence[str], change: Collection[str], resume: bool, report: Callable[[str], None]
) -> tuple[Recipe, list[str], list[str]]:
    """Load a recipe to train; with `resume`, also apply and report the settings of the run's earlier command lines.

    See `load_to_resume`, which also keeps the run's values of settings that no recipe and no command line sets.

    Returns:
        The recipe; the overrides, with the items of `change` of the form KEY=VALUE; the key of each item of `change`.

    Raises:
        UserError: `change` is given without `resume`; or the recipe cannot be loaded.
    """
    from gptworks.recipe import load_recipe
    from gptworks.training.changes import load_to_resume

    if change and not resume:
        [first, *_] = change
        raise UserError(f"--change {first} is for a resumed run: add --resume, or give KEY=VALUE without it.")
    given, keys = [*overrides, *(one for one in change if "=" in one)], [one.partition("=")[0] for one in change]
    if not resume:
        return load_recipe(recipe, given), given, keys
    loaded, kept = load_to_resume(recipe, given)
    if kept:
        report(f"settings of the earlier command line are kept: {' '.join(kept)}")
    return loaded, given, keys
