"""Plan a recipe, and what a notebook shows of a plan."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gptworks.choices import Sharding
from gptworks.config import Recipe
from gptworks.describe.plan_tables import printed, tables
from gptworks.errors import UserError, nearest, refuse_unused
from gptworks.interface.overrides import overrides_of
from gptworks.planning.assumed import preset_recipe
from gptworks.planning.devices import (
    UTILIZATION,
    Device,
    check_figures,
    custom_device,
    find_device,
    this_cpu,
    with_node,
)
from gptworks.planning.layout import parallel_overrides
from gptworks.planning.run import Plan
from gptworks.planning.run import plan as plan_recipe
from gptworks.presets import PRESETS
from gptworks.recipe import RecipeLike, load_recipe
from gptworks.recipes import shipped_paths


@dataclass(frozen=True, repr=False)
class PlanSheet(Plan):
    """A plan that shows itself: as text, and as tables in a notebook."""

    details: bool = False
    """Whether it shows FLOPs by part, other precisions and layouts, and inference too."""
    missing: str | None = None
    """Which source of the data is not there, and what to do: what depends on its tokens is unknown."""

    def __repr__(self) -> str:
        console = Console(width=100, color_system=None, force_jupyter=False)
        with console.capture() as shown:
            console.print(printed(self, self.details))
        lines = [line.rstrip() for line in shown.get().splitlines()]
        return "\n".join([*lines, *([self.missing] if self.missing else [])]).strip("\n")

    def _repr_html_(self) -> str:
        from gptworks.pages.cell import cell
        from gptworks.pages.parts import paragraph, table

        shown = [table(one.header, one.align, one.rows) for one in tables(self, self.details)]
        return cell(*shown, *([paragraph(self.missing)] if self.missing else []))


def plan(
    recipe: RecipeLike,
    *overrides: str,
    device: str | None = None,
    memory_gib: float | None = None,
    flops: float | None = None,
    bandwidth: float | None = None,
    world_size: int = 1,
    sharding: Sharding | None = None,
    tensor_parallel: int | None = None,
    utilization: float | None = None,
    intra_node_gb_s: float | None = None,
    inter_node_gb_s: float | None = None,
    gpus_per_node: int | None = None,
    host_memory_gib: float | None = None,
    trace: bool = False,
    measure: bool = False,
    details: bool = False,
    working: Callable[[str], AbstractContextManager[object]] = nullcontext,
    **settings: Any,
) -> PlanSheet:
    """Estimate a run's FLOPs, memory, time and disk: `gptworks.plan("demo", batch_size=64)`.

    Args:
        recipe: a preset's name, or what `gptworks.train` takes.
        overrides: settings that win over it, as on the command line; as for `gptworks.train`.
        device: a name such as h100; this: measured; None: this machine's CPU.
        memory_gib, flops, bandwidth: of a device that has no name here; the last two in FLOP/s and bytes/s.
        world_size: how many devices.
        sharding, tensor_parallel: set train.parallel.
        utilization: share of the device's FLOP/s that training reaches while it computes; None: 0.4.
        intra_node_gb_s, inter_node_gb_s: GB/s that a device sends within its node, and its network card to others.
        gpus_per_node: devices, and so ranks, of a node.
        host_memory_gib: memory of a node's host. None: those of the device's usual node, as the plan says.
        trace: count a step's memory on fake tensors too.
        measure: take two real steps on this machine too.
        details: show every figure.
        working: a context in which a step is traced or measured, such as a progress bar's.
        settings: more settings, as for `gptworks.train`.

    Raises:
        UserError: a wrong setting or device, or the vocabulary is not known yet and the data is missing.
    """
    if measure:
        refuse_unused("does nothing with --measure, which times a step", utilization=utilization)
    if (trace or measure) and world_size > 1:
        raise UserError("--trace and --measure follow one device's step: leave --world-size out.")
    check_figures(
        memory_gib=memory_gib, flops=flops, bandwidth=bandwidth, utilization=utilization,
        intra_node_gb_s=intra_node_gb_s, inter_node_gb_s=inter_node_gb_s, gpus_per_node=gpus_per_node,
        host_memory_gib=host_memory_gib,
    )  # fmt: skip
    given = [*parallel_overrides(sharding, tensor_parallel), *overrides, *overrides_of(settings)]
    preset = recipe if is_preset(recipe) else None
    loaded = None if preset else load_recipe(recipe, given)
    place = with_node(
        _device(device, memory_gib, flops, bandwidth, loaded), world_size, intra_node_gb_s, inter_node_gb_s,
        gpus_per_node, host_memory_gib,
    )  # fmt: skip
    share, missing = utilization or UTILIZATION, None
    if loaded is None:
        planned, reason = preset_recipe(str(preset), given, place, world_size)

        def apply(more: Sequence[str], n_ranks: int) -> Recipe:
            return preset_recipe(str(preset), [*given, *more], place, n_ranks)[0]

        found = plan_recipe(
            planned, steps_reason=reason, device=place, n_ranks=world_size, utilization=share, apply=apply
        )
    else:
        from gptworks.training.rehearsal.estimate import estimate

        found, missing = estimate(loaded, lambda more: load_recipe(recipe, [*given, *more]), place, world_size, share)
    sheet = PlanSheet(**vars(found), details=details, missing=missing)
    if trace or measure:
        from gptworks.device import choose_device
        from gptworks.training.rehearsal.measure import measure_step
        from gptworks.training.rehearsal.trace import Rehearsal, trace_step

        rehearsal = Rehearsal(
            sheet.recipe.model, sheet.one_step, place.kind, sheet.setting.precision, sheet.recipe.adapter,
            sheet.recipe.freeze, sheet.recipe.objective, sheet.setting.several_texts,
        )  # fmt: skip
        if trace:
            with working("tracing a step"):
                sheet = replace(sheet, traced_bytes=trace_step(rehearsal).peak_bytes)
        if measure:
            here = replace(rehearsal, device=choose_device(place.kind).type)
            with working("measuring two steps"):
                sheet = replace(sheet, measured=measure_step(here))
    return sheet


def is_preset(target: RecipeLike) -> bool:
    """Whether a target is a preset's name, perhaps misspelled, and no recipe or run."""
    if not isinstance(target, str):
        return False
    if target in PRESETS or Path(target).exists() or target.endswith((".yaml", ".yml")):
        return target in PRESETS
    return nearest(target, [*PRESETS, *shipped_paths()]) not in shipped_paths()


def _device(
    name: str | None, memory_gib: float | None, flops: float | None, bandwidth: float | None, recipe: Recipe | None
) -> Device:
    """The device that the options describe; by default this machine's CPU, unmeasured."""
    if memory_gib is not None:
        if name is not None:
            raise UserError(f"--device {name} and --memory-gib {memory_gib:g} both describe the device: give one.")
        return custom_device(memory_gib, flops, bandwidth)
    if flops is not None or bandwidth is not None:
        raise UserError("--flops or --bandwidth without --memory-gib: give the device's memory too, or its name.")
    if name is None:
        return this_cpu()
    if name != "this":
        return find_device(name)
    from gptworks.device import choose_device, measured_device

    return measured_device(choose_device(recipe.train.device if recipe is not None else "auto"))
