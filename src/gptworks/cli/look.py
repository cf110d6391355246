"""Commands that show what would be built: presets, recipes, describe, plan, schema."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptworks.choices import Sharding
from gptworks.cli.common import (
    AsJSON,
    Overrides,
    PageFile,
    console_of,
    notice,
    print_json,
    recipe_names,
    refuse_unused,
    working,
)
from gptworks.errors import UserError, nearest

if TYPE_CHECKING:
    from gptworks.config import ModelConfig, Recipe
    from gptworks.data.prepare import Prepared
    from gptworks.plan.devices import Device as PlannedDevice
    from gptworks.plan.tokens import DataSize


def _targets(incomplete: str) -> list[str]:
    from gptworks.presets import PRESETS

    return [*(name for name in PRESETS if name.startswith(incomplete)), *recipe_names(incomplete)]


def _device_names(incomplete: str) -> list[str]:
    from gptworks.plan.devices import DEVICES

    return [name for name in ("this", *DEVICES) if name.startswith(incomplete)]


Target = Annotated[
    str,
    typer.Argument(
        metavar="PRESET|RECIPE|RUN", autocompletion=_targets, help="A preset's name, a recipe file, or a run folder."
    ),
]


def presets(as_json: AsJSON = False) -> None:
    """List the named architectures."""
    from rich.table import Table

    from gptworks.plan.params import count_parameters
    from gptworks.presets import PRESETS, preset

    rows = {name: (preset(name), count_parameters(preset(name)).total) for name in PRESETS}
    if as_json:
        print_json(
            {name: {"parameters": {"total": total}, "model": c.model_dump()} for name, (c, total) in rows.items()}
        )
        return
    table = Table("preset", box=None, header_style="bold", pad_edge=False)
    for column in ("parameters", "layers", "width", "heads", "context", "vocabulary"):
        table.add_column(column, justify="right")
    table.add_column("position, norm, MLP")
    for name, (c, total) in rows.items():
        figures = (total, c.n_layers, c.d_model, c.n_heads, c.context_length, c.vocab_size)
        table.add_row(name, *(f"{figure:,}" for figure in figures), f"{c.position}, {c.norm}, {c.mlp}")
    console_of().print(table)


def recipes(as_json: AsJSON = False) -> None:
    """List the recipes that come with gptworks.

    Every command that takes RECIPE takes one of these names.
    """
    from rich.table import Table

    from gptworks.plan.params import count_parameters
    from gptworks.recipe import load_recipe
    from gptworks.recipes import shipped_recipes

    def parameters(path: Path) -> int | None:
        """None where the vocabulary is the text's, or the model that of a run which is not here."""
        try:
            model = load_recipe(path).model
        except UserError:
            return None
        return count_parameters(model).total if model.vocab_size else None

    rows = [(shipped, parameters(shipped.path)) for shipped in shipped_recipes()]
    if as_json:
        print_json([
            {"name": one.name, "parameters": total, "time": one.time, "summary": one.summary, "file": str(one.path)}
            for one, total in rows
        ])  # fmt: skip
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("parameters", justify="right")
    for column in ("training", "what it makes"):
        table.add_column(column)
    for one, total in rows:
        table.add_row(one.name, "" if total is None else f"{total:,}", one.time or "", one.summary)
    console_of().print(table)


def describe(
    target: Target,
    overrides: Overrides = None,
    html: PageFile = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: AsJSON = False,
) -> None:
    """Draw an architecture: shapes, parameters, exact totals.

    Totals are compared with published ones.
    """
    from gptworks.describe.sheet import describe as describe_model

    if as_json:
        refuse_unused("does nothing with --json", markdown=markdown)
    config, name = _architecture(target, overrides or [])
    sheet = describe_model(config, name)
    if html is not None:
        from gptworks.describe.page import to_html
        from gptworks.pages.page import write_page

        write_page(to_html(sheet), html, "--html")
        notice(f"wrote {html}")
    if as_json:
        print_json(sheet.to_json())
    elif markdown:
        typer.echo(sheet.to_markdown())
    elif html is None:
        console_of().print(sheet)


def plan(
    target: Target,
    overrides: Overrides = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=_device_names,
            help="h100, rtx-4090, m2-ultra...; this: measured. Default: this machine's CPU.",
        ),
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of a GPU that is not listed.")] = None,
    flops: Annotated[
        float | None, typer.Option(help="With --memory-gib: its dense FLOP/s in the training precision.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="With --memory-gib: the bytes/s of its memory.")] = None,
    world_size: Annotated[int, typer.Option(min=1, help="How many devices.")] = 1,
    sharding: Annotated[Sharding | None, typer.Option(help="Sets train.parallel. auto: as little as fits.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Sets train.parallel.tensor_parallel: devices that share each matrix.")
    ] = None,
    utilization: Annotated[
        float | None, typer.Option(help="Share of the device's FLOP/s that training reaches. Default: 0.4.")
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Count a step's memory on fake tensors too.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Take two real steps on this machine too.")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="FLOPs by part, other precisions and layouts, inference.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Estimate a run's FLOPs, memory, time and disk.

    Nothing is allocated: neither data nor weights need exist. Exit code 3: the run does not fit on the device.
    2: a setting is wrong, or the data is missing.
    """
    from dataclasses import replace

    if as_json:
        refuse_unused("does nothing with --json, which has every figure", details=details)
    if measure:
        refuse_unused("does nothing with --measure, which times a step", utilization=utilization)
    from gptworks.describe.plan_tables import plan_json, printed
    from gptworks.plan.assumed import preset_recipe
    from gptworks.plan.devices import UTILIZATION, check_figures
    from gptworks.plan.layout import parallel_overrides
    from gptworks.plan.run import plan as plan_recipe
    from gptworks.recipe import load_recipe

    check_figures(memory_gib=memory_gib, flops=flops, bandwidth=bandwidth, utilization=utilization)
    given = [*parallel_overrides(sharding, tensor_parallel), *(overrides or [])]
    data, reason = None, None
    loaded = None if _is_preset(target) else load_recipe(target, given)
    place = _planned_device(device, memory_gib, flops, bandwidth, loaded)
    if loaded is None:
        recipe, reason = preset_recipe(target, given, place, world_size)
    else:
        recipe, data = _planned_data(loaded)

    def apply(more: Sequence[str], n_ranks: int) -> "Recipe":
        if loaded is None:
            return preset_recipe(target, [*given, *more], place, n_ranks)[0]
        changed = load_recipe(target, [*given, *more])
        model = changed.model.model_copy(update={"vocab_size": recipe.model.vocab_size})
        return changed.model_copy(update={"model": model})

    sheet = plan_recipe(
        recipe, data.train_tokens if data else None, samples_per_epoch=data.samples_per_epoch if data else None,
        tokens_estimated=data is not None and data.estimated, steps_reason=reason, device=place, n_ranks=world_size,
        utilization=utilization or UTILIZATION, apply=apply,
    )  # fmt: skip
    if (trace or measure) and world_size > 1:
        raise UserError("--trace and --measure follow one device's step: leave --world-size out.")
    if trace or measure:
        from gptworks.device import choose_device
        from gptworks.train.rehearsal.measure import measure_step
        from gptworks.train.rehearsal.trace import Rehearsal, trace_step

        rehearsal = Rehearsal(
            recipe.model, sheet.one_step, place.kind, sheet.setting.precision, recipe.adapter, recipe.freeze,
            recipe.objective, sheet.setting.several_texts,
        )  # fmt: skip
        if trace:
            with working("tracing a step"):
                sheet = replace(sheet, traced_bytes=trace_step(rehearsal).peak_bytes)
        if measure:
            here = replace(rehearsal, device=choose_device(place.kind).type)
            with working("measuring two steps"):
                sheet = replace(sheet, measured=measure_step(here))
    if as_json:
        print_json(plan_json(sheet))
    else:
        console_of().print(printed(sheet, details))
    if data is not None and data.missing is not None:
        raise UserError(f"{data.missing} What depends on its tokens is unknown in this plan.")
    if not sheet.fits:
        raise typer.Exit(DOES_NOT_FIT)


DOES_NOT_FIT = 3
"""Exit code of `plan` for a run that does not fit on its device."""


def _planned_data(recipe: "Recipe") -> tuple["Recipe", "DataSize"]:
    """The recipe with its vocabulary where that is known, and the size of its data: exact where it is prepared."""
    from gptworks.plan.tokens import DataSize, data_size

    recipe, prepared = with_what_is_prepared(recipe)
    if prepared is None:
        size = data_size(recipe)
        if size.missing is not None and not recipe.model.vocab_size:
            raise UserError(size.missing)
        return recipe, size
    samples = None
    if recipe.data.records:
        from gptworks.train.objectives.choose import choose_objective

        samples = choose_objective(recipe, prepared.folder).samples_per_epoch
    return recipe, DataSize(prepared.manifest.splits["train"].tokens, samples, estimated=False)


def _planned_device(
    name: str | None, memory_gib: float | None, flops: float | None, bandwidth: float | None, recipe: "Recipe | None"
) -> "PlannedDevice":
    """The device that the options describe; by default this machine's CPU, unmeasured."""
    from gptworks.plan.devices import custom_device, find_device, this_cpu

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


def schema() -> None:
    """Print the JSON schema of recipe files, for editors."""
    from gptworks.recipe import recipe_schema

    print_json(recipe_schema())


def _architecture(target: str, overrides: list[str]) -> tuple["ModelConfig", str]:
    """The model that a preset's name, a recipe file or a run folder describes."""
    from gptworks.recipe import apply_overrides, load_recipe, parse_model

    if _is_preset(target):
        tree = apply_overrides({"model": {"preset": target}}, overrides)
        return parse_model(tree["model"], target), target
    recipe, _ = with_what_is_prepared(load_recipe(target, overrides))
    return recipe.model, recipe.name


def _is_preset(target: str) -> bool:
    """Whether a target is a preset, perhaps misspelled, and no recipe or run."""
    from gptworks.presets import PRESETS
    from gptworks.recipes import shipped_paths

    if target in PRESETS or Path(target).exists() or target.endswith((".yaml", ".yml")):
        return target in PRESETS
    return nearest(target, [*PRESETS, *shipped_paths()]) not in shipped_paths()


def with_what_is_prepared(recipe: "Recipe") -> tuple["Recipe", "Prepared | None"]:
    """The recipe with the vocabulary of its prepared data, and that data; None if it is not prepared."""
    from gptworks.data.prepare import find_prepared
    from gptworks.recipe import with_vocab_size

    prepared = find_prepared(recipe)
    if prepared is None:
        return recipe, None
    return with_vocab_size(recipe, prepared.manifest.vocab_size), prepared
