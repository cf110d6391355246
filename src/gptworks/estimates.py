"""The functions that estimate before anything runs: `gptworks.plan`, `gptworks.plan_serving`, `gptworks.rehearse`.

Each function imports what it needs when it is called, so that importing this module is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.errors import UserError, nearest, refuse_unused
from gptworks.overrides import apply_overrides, overrides_of

if TYPE_CHECKING:
    from gptworks.choices import CacheName, LoadedWeights, Sharding
    from gptworks.config import ModelConfig, Recipe
    from gptworks.describe.plan_sheet import PlanSheet, ServingSheet
    from gptworks.planning.devices import Device
    from gptworks.recipe import RecipeLike
    from gptworks.runs.rehearsal_sheet import RehearsalSheet


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
        recipe: a preset's name, or a recipe in any form that `gptworks.train` takes.
        overrides: settings that replace the recipe's, as for `gptworks.train`.
        device: a name such as h100, or a GPU's memory such as `8 GB`. `this` and `cpu` measure this machine's device
            and CPU. None without `memory_gib` is this machine's CPU, not measured.
        world_size: number of devices.
        sharding, tensor_parallel: settings of train.parallel.
        price: price of an hour of a device, in any currency.
        hours, budget: also estimate how much training this number of hours, or this money at `price`, allows.
        trace: also run a step on fake tensors, to count its memory.
        measure: also run two real steps on this machine, to measure time and memory.
        details: show every figure.
        working: called with a description; returns a context for tracing or measuring, such as a progress bar.
        settings: figures of the device, such as `memory_gib=80`, by their names in
            `gptworks.planning.device_options.DeviceOptions`; and further overrides, as for `gptworks.train`.

    Raises:
        UserError: a setting or the device is wrong; the recipe cannot run on this many devices; the vocabulary is not
            known yet and the data is missing; or `hours` or `budget` is given and the device's speed is unknown.
        RunError: a measured step failed.
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

    here = loaded.train.device if loaded is not None else "auto"
    place = options.in_node(options.found(lambda name: _measured(name, here)), world_size)
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
            real = replace(rehearsal, device=choose_device(place.kind).type)
            with working("measuring two steps"):
                sheet = replace(sheet, measured=measure_step(real))
    if budget is not None and price is not None:
        hours = hours_for(budget, price, sheet.n_priced)
    return sheet if hours is None else replace(sheet, affordable=affordable(sheet, hours))


def plan_serving(
    recipe: RecipeLike,
    *overrides: str,
    requests: int | None = None,
    context: int | None = None,
    weights: LoadedWeights = "auto",
    cache: CacheName = "auto",
    device: str | None = None,
    **settings: Any,
) -> ServingSheet:
    """Estimate the memory of serving a model: `gptworks.plan_serving("runs/demo", requests=16, device="8 GB")`.

    Args:
        recipe, overrides, device, settings: as for `plan`.
        requests: number of texts that are generated at once; None: 32, as in `gptworks serve`.
        context: tokens of each text with its prompt; None: the model's context.
        weights: format of the matrices, as in `gptworks serve`; auto: the run's format.
        cache: format of keys and values; auto: bf16 for weights narrower than fp32 in the C++ engine, otherwise fp32.

    Raises:
        UserError: a setting or the device is wrong, or the size of the vocabulary is not known yet.
    """
    from gptworks.describe.plan_sheet import ServingSheet
    from gptworks.planning.device_options import DeviceOptions
    from gptworks.planning.serving import serving
    from gptworks.planning.setting import ANSWERS_AT_ONCE

    figures = {one.name: settings.pop(one.name) for one in fields(DeviceOptions) if one.name in settings}
    place = DeviceOptions(device, **figures).found(_measured)
    model, name = architecture(recipe, [*overrides, *overrides_of(settings)])
    held = _stored_format(recipe) if weights == "auto" else weights
    found = serving(model, place, ANSWERS_AT_ONCE if requests is None else requests, context, held, cache)
    return ServingSheet(**vars(found), name=name)


def _measured(name: str, here: str = "auto") -> Device:
    """Measure this machine's CPU if `name` is `cpu`, otherwise its device of the kind `here`."""
    from gptworks.device import choose_device, measured_device

    return measured_device(choose_device("cpu" if name == "cpu" else here))


def _stored_format(recipe: RecipeLike) -> LoadedWeights:
    """Return the narrowest format of the weights in a run's newest checkpoint, with bf16 in place of fp16. Return fp32
    for a recipe, a preset, and a run that has an adapter or no readable checkpoint."""
    from gptworks.checkpoint import all_checkpoints
    from gptworks.files import fetched_path
    from gptworks.quantize.formats import KINDS
    from gptworks.tensors import stored_tensors

    if not isinstance(recipe, str | PathLike) or is_preset(recipe):
        return "fp32"
    checkpoint = next(iter(all_checkpoints(fetched_path(recipe))), None)
    if checkpoint is None or not checkpoint.is_quantized:
        return "fp32"
    stored = stored_tensors(checkpoint.folder / "model.safetensors", inside=checkpoint.run_dir)
    kinds = {kind for dtype, kind in KINDS.items() if any(tensor.dtype == dtype for tensor in stored.values())}
    return "int4" if "int4" in kinds else "int8" if "int8" in kinds else "bf16"


def architecture(recipe: RecipeLike, overrides: Sequence[str]) -> tuple[ModelConfig, str]:
    """Return the model that a preset's name, a recipe or a run folder describes, and its name."""
    from gptworks.recipe import load_recipe, parse_model

    if is_preset(recipe):
        tree = apply_overrides({"model": {"preset": recipe}}, overrides)
        return parse_model(tree["model"], str(recipe)), str(recipe)
    from gptworks.training.rehearsal.estimate import with_what_is_prepared  # late, as it imports torch

    loaded, _ = with_what_is_prepared(load_recipe(recipe, overrides))
    return loaded.model, loaded.name


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
        disk_gb_s: GB/s at which all ranks together write a checkpoint; None assumes 1.
        price: price of an hour of a device, in any currency.
        working: called with a description; returns a context for the rehearsal, such as a progress bar.

    Raises:
        UserError: for the reasons of `plan`. Faults that a check of the recipe finds are in the sheet instead.
    """
    from gptworks.runs.rehearsal_sheet import RehearsalSheet
    from gptworks.training.rehearsal.dress import DISK_GB_PER_SECOND
    from gptworks.training.rehearsal.dress import rehearse as rehearse_plan

    _check_positive(disk_gb_s=disk_gb_s)
    sheet = plan(recipe, *overrides, device=device, world_size=world_size, price=price, working=working, **settings)
    with working("rehearsing"):
        found = rehearse_plan(sheet, not is_preset(recipe), disk_gb_s or DISK_GB_PER_SECOND)
    return RehearsalSheet(**vars(found))


def _check_positive(**options: float | None) -> None:
    """Raise a UserError if a given option is not a finite number above 0."""
    for name, figure in options.items():
        if figure is not None and not 0 < figure < inf:
            raise UserError(f"--{name.replace('_', '-')} {figure:g} is not above 0 and finite.")


def is_preset(target: RecipeLike) -> bool:
    """Return whether a target is a preset's name, or counts as a misspelled preset. Existing paths, YAML paths, URLs
    and names closest to a shipped recipe's name do not count."""
    from gptworks.files import is_url
    from gptworks.presets import PRESETS
    from gptworks.recipes import shipped_paths

    if not isinstance(target, str) or is_url(target):
        return False
    if target in PRESETS or Path(target).exists() or target.endswith((".yaml", ".yml")):
        return target in PRESETS
    return nearest(target, [*PRESETS, *shipped_paths()]) not in shipped_paths()
