"""The functions for programs, notebooks and the commands: `gptworks.train`, `gptworks.plan`, `gptworks.evaluate`.

Each function imports what it needs when it is called, so that importing this module is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.errors import UserError, nearest, refuse_unused

if TYPE_CHECKING:
    from gptworks.choices import LoadedWeights, PrecisionName, Sharding
    from gptworks.config import Recipe
    from gptworks.data.opened import Prepared
    from gptworks.describe.plan_sheet import PlanSheet
    from gptworks.describe.rehearsal import RehearsalSheet
    from gptworks.evaluation.measurements import Measurements
    from gptworks.planning.devices import Device
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
    """Train a recipe's model to the end of its run: `gptworks.train("demo", max_steps=20)`.

    Args:
        recipe: a file, a shipped recipe's name, a run folder, nested dictionaries, or a `Recipe`.
        overrides: settings that replace the recipe's, as on the command line: `"train.max_steps=20"`.
        resume: continue from the newest checkpoint in the run folder.
        change: paths of settings that the resumed run may change although its loss curve depends on them.
        force: start even if the plan says that the run does not fit in memory.
        report: called with a line on the settings kept from an earlier session; None: the display shows it.
        prepare: makes the recipe's tokenizer and shards; None: the default, quiet or with a notebook's display.
        settings: further overrides: of the section `train` by name (`max_steps=20`), others by section
            (`model={"n_layers": 2}`, `run_dir="runs/small"`).

    Raises:
        UserError: the recipe, its data or the run folder cannot be used, or the run does not fit in memory.
        RunError: loss or gradients stayed non-finite, or a checkpoint could not be written.
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
    """Train as this process's rank, without reading the run's folder afterwards; see `train`."""
    from gptworks.data.prepare import prepare as prepare_data
    from gptworks.device import choose_device
    from gptworks.training.distributed.ranks import join
    from gptworks.training.loop import train as train_model
    from gptworks.training.record.display import Display
    from gptworks.training.record.notebook import NotebookDisplay, in_notebook

    given, change = with_changes(list(overrides), change, resume)
    display = NotebookDisplay() if in_notebook() else None
    loaded = settings_of(recipe, given, resume, report or (display or Display()).message)
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


def plan(
    recipe: RecipeLike,
    *overrides: str,
    device: str | None = None,
    world_size: int = 1,
    sharding: Sharding | None = None,
    tensor_parallel: int | None = None,
    price: float | None = None,
    hours: float | None = None,
    budget: float | None = None,
    trace: bool = False,
    measure: bool = False,
    details: bool = False,
    working: Callable[[str], AbstractContextManager[object]] = nullcontext,
    **settings: Any,
) -> PlanSheet:
    """Estimate a run's FLOPs, memory, time and disk: `gptworks.plan("demo", batch_size=64)`.

    Args:
        recipe: a preset's name, or what `gptworks.train` takes.
        overrides: settings that replace the recipe's, as for `gptworks.train`.
        device: a name such as h100, or a GPU's memory such as `8 GB`; `this` and `cpu` measure this machine's device
            and CPU; None is this machine's CPU, not measured.
        world_size: number of devices.
        sharding, tensor_parallel: settings of train.parallel.
        price: price of an hour of a device, in any currency.
        hours, budget: plan the other way round too: what this many hours, or this much money at `price`, suffice for.
        trace: also run a step on fake tensors, to count its memory.
        measure: also run two real steps on this machine, to measure time and memory.
        details: show every figure.
        working: called with a description; returns a context for tracing or measuring, such as a progress bar.
        settings: figures of the device, such as `memory_gib=80`, by their names in
            `gptworks.planning.device_options.DeviceOptions`; and further overrides, as for `gptworks.train`.

    Raises:
        UserError: a setting or the device is wrong, or the vocabulary is not known yet and the data is missing.
    """
    from gptworks.describe.plan_sheet import PlanSheet
    from gptworks.planning.assumed import preset_recipe
    from gptworks.planning.budget import affordable, hours_for
    from gptworks.planning.device_options import DeviceOptions
    from gptworks.planning.devices import UTILIZATION
    from gptworks.planning.layout import parallel_overrides
    from gptworks.planning.run import plan as plan_recipe
    from gptworks.recipe import load_recipe

    figures = {one.name: settings.pop(one.name) for one in fields(DeviceOptions) if one.name in settings}
    options = DeviceOptions(device, **figures)
    if measure:
        refuse_unused("does nothing with --measure, which times a step", utilization=options.utilization)
    _check_positive(price=price, hours=hours, budget=budget)
    if budget is not None and (price is None or hours is not None):
        raise UserError(
            f"--budget {budget:g} needs --price, the price of an hour of a device."
            if price is None
            else f"--budget {budget:g} and --hours {hours:g} both limit the run: give one."
        )
    if (trace or measure) and world_size > 1:
        raise UserError("--trace and --measure follow one device's step: leave --world-size out.")
    given = [*parallel_overrides(sharding, tensor_parallel), *overrides, *overrides_of(settings)]
    preset = recipe if is_preset(recipe) else None
    loaded = None if preset else load_recipe(recipe, given)

    def measured(name: str) -> Device:
        from gptworks.device import choose_device, measured_device

        here = loaded.train.device if loaded is not None else "auto"
        return measured_device(choose_device("cpu" if name == "cpu" else here))

    place = options.in_node(options.found(measured), world_size)
    share = options.utilization or UTILIZATION
    if loaded is None:
        planned, reason = preset_recipe(str(preset), given, place, world_size)

        def apply(more: Sequence[str], n_ranks: int) -> Recipe:
            return preset_recipe(str(preset), [*given, *more], place, n_ranks)[0]

        found = plan_recipe(
            planned, steps_reason=reason, device=place, n_ranks=world_size, utilization=share, apply=apply
        )
    else:
        from gptworks.training.rehearsal.estimate import estimate

        found = estimate(loaded, lambda more: load_recipe(recipe, [*given, *more]), place, world_size, share)
    sheet = PlanSheet(**vars(replace(found, price=price)), details=details)
    if trace or measure:
        from gptworks.device import choose_device
        from gptworks.training.rehearsal.measure import measure_step
        from gptworks.training.rehearsal.trace import Rehearsal, trace_step

        rehearsal = Rehearsal.of(sheet, place.kind)
        if trace:
            with working("tracing a step"):
                sheet = replace(sheet, traced_bytes=trace_step(rehearsal).peak_bytes)
        if measure:
            here = replace(rehearsal, device=choose_device(place.kind).type)
            with working("measuring two steps"):
                sheet = replace(sheet, measured=measure_step(here))
    if budget is not None and price is not None:
        hours = hours_for(budget, price, sheet.n_priced)
    return sheet if hours is None else replace(sheet, affordable=affordable(sheet, hours))


def rehearse(
    recipe: RecipeLike,
    *overrides: str,
    device: str | None = None,
    world_size: int = 1,
    disk_gb_s: float | None = None,
    price: float | None = None,
    working: Callable[[str], AbstractContextManager[object]] = nullcontext,
    **settings: Any,
) -> RehearsalSheet:
    """Rehearse a run on many devices on this machine: `gptworks.rehearse("demo", device="h100", world_size=8)`.

    Args:
        recipe, overrides, device, world_size, settings: as for `gptworks.plan`.
        disk_gb_s: GB/s at which all ranks together write a checkpoint; None: 1, an assumption.
        price: price of an hour of a device, in any currency.
        working: called with a description; returns a context for the rehearsal, such as a progress bar.

    Raises:
        UserError: `plan` raises it, or the recipe cannot run on this many devices.
    """
    from gptworks.describe.rehearsal import RehearsalSheet
    from gptworks.training.rehearsal.dress import DISK_GB_PER_SECOND
    from gptworks.training.rehearsal.dress import rehearse as rehearse_plan

    _check_positive(disk_gb_s=disk_gb_s)
    sheet = plan(recipe, *overrides, device=device, world_size=world_size, price=price, working=working, **settings)
    with working("rehearsing"):
        found = rehearse_plan(sheet, not is_preset(recipe), disk_gb_s or DISK_GB_PER_SECOND)
    return RehearsalSheet(**vars(found))


def _check_positive(**options: float | None) -> None:
    """Raise a UserError if an option is given and not above 0 and finite."""
    for name, figure in options.items():
        if figure is not None and not 0 < figure < inf:
            raise UserError(f"--{name.replace('_', '-')} {figure:g} is not above 0 and finite.")


def is_preset(target: RecipeLike) -> bool:
    """Whether a target is the name of a preset, perhaps misspelled, and not a recipe or a run."""
    from gptworks.presets import PRESETS
    from gptworks.recipes import shipped_paths

    if not isinstance(target, str):
        return False
    if target in PRESETS or Path(target).exists() or target.endswith((".yaml", ".yml")):
        return target in PRESETS
    return nearest(target, [*PRESETS, *shipped_paths()]) not in shipped_paths()


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
    """Measure a run, by default on its whole validation split: `gptworks.evaluate("runs/demo", text="book.txt")`.

    Args:
        run: a run folder, or the run that `gptworks.train` returned.
        overrides: settings that replace the run's, such as `"model.context_length=1024"`.
        checkpoint: best, last, or a step.
        text: files of text; measures how well the model predicts them.
        task: files of tasks, whose items the model answers.
        shots: for tasks: numbers of solved examples in a prompt; each task is measured with each number.
        limit: for tasks and the harness: maximum number of items.
        chat: for tasks: prompt with the run's chat template.
        run_generated_code: let tasks run programs that the model wrote; see gptworks/confined/sandbox.py.
        harness: names of lm-evaluation-harness tasks.
        calibration: measure whether tokens predicted with probability p are right in a share p of cases.
        memorization: measure the share of the model's text that is copied from the training text.
        stride: number of tokens between the starts of windows; None: the context length.
        by_position: also measure each eighth of the context.
        compressors: also measure gzip and xz on the same text.
        precision: precision of matrix products; None: the run's own.
        weights: format in which to load the weights; see `gptworks.load`. Results for weights that are rounded while
            loading are saved under their own name, such as text-book-int8.
        save: write the results, except those of the validation split, to the run folder and its model card.
        report: called with a message for each fallback.
        prepare: finds or builds the shards of the run's own text; None: the default, quietly.
        progress: called with the number of items or tokens done, and their total.

    Raises:
        UserError: the run, checkpoint, text or task does not exist, or an option would have no effect.
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
    from gptworks.evaluation.measurements import Measurements
    from gptworks.evaluation.results import save_evaluations
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


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as overrides: `max_steps=20` as `train.max_steps=20`, `model={"n_layers": 2}` as
    `model.n_layers=2`.

    A name that is not a key of a recipe names a setting of its section `train`.
    """
    from gptworks.config import Recipe

    return [
        override
        for name, value in settings.items()
        for override in _written(name if name in Recipe.model_fields else f"train.{name}", value)
    ]


def _written(path: str, value: Any) -> Iterator[str]:
    from gptworks.recipe import as_typed

    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _written(f"{path}.{name}", inner)
    else:
        yield f"{path}={as_typed(value)}"


def with_changes(overrides: list[str], change: Collection[str], resume: bool) -> tuple[list[str], list[str]]:
    """Return the overrides plus the items of `change` of the form KEY=VALUE; and the key of each item of `change`."""
    if change and not resume:
        [first, *_] = change
        raise UserError(f"--change {first} is for a resumed run: add --resume, or give KEY=VALUE without it.")
    return [*overrides, *(one for one in change if "=" in one)], [one.partition("=")[0] for one in change]


def settings_of(recipe: RecipeLike, overrides: list[str], resume: bool, report: Callable[[str], None]) -> Recipe:
    """Load the recipe; with `resume`, also apply and report the settings of the run's earlier command lines."""
    from gptworks.recipe import load_recipe
    from gptworks.training.changes import load_to_resume

    if not resume:
        return load_recipe(recipe, overrides)
    loaded, kept = load_to_resume(recipe, overrides)
    if kept:
        report(f"settings of the earlier command line are kept: {' '.join(kept)}")
    return loaded
