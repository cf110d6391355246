"""Commands that show what would be built: presets, recipes, devices, describe, plan, rehearse, schema."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from gptworks.cli import options
from gptworks.cli.printing import console_of, print_json, say, show, show_lines, working, write_html
from gptworks.errors import UserError, refuse_unused


def presets(as_json: options.AsJSON = False) -> None:
    """List the named architectures."""
    from gptworks.pages.tables import Table
    from gptworks.planning.params import count_parameters
    from gptworks.presets import PRESETS, preset

    rows = {name: (preset(name), count_parameters(preset(name)).total) for name in PRESETS}
    if as_json:
        print_json(
            {name: {"parameters": {"total": total}, "model": c.model_dump()} for name, (c, total) in rows.items()}
        )
        return
    header = ("preset", "parameters", "layers", "width", "heads", "context", "vocabulary", "position, norm, MLP")
    cells = []
    for name, (c, total) in rows.items():
        figures = (total, c.n_layers, c.d_model, c.n_heads, c.context_length, c.vocab_size)
        cells.append((name, *(f"{figure:,}" for figure in figures), f"{c.position}, {c.norm}, {c.mlp}"))
    console_of().print(Table(header, "lrrrrrrl", cells).rich())


def recipes(as_json: options.AsJSON = False) -> None:
    """List the recipes that come with gptworks.

    Every command with an argument RECIPE accepts these names.
    """
    from gptworks.pages.tables import Table
    from gptworks.planning.params import count_parameters
    from gptworks.recipe import load_recipe
    from gptworks.recipes import shipped_recipes

    def parameters(path: Path) -> int | None:
        """Return the number of parameters; None if the vocabulary depends on the text or the model's run is missing."""
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
    cells = [(one.name, "" if total is None else f"{total:,}", one.time or "", one.summary) for one, total in rows]
    console_of().print(Table(("recipe", "parameters", "training", "what it makes"), "lrll", cells).rich())


def devices(as_json: options.AsJSON = False) -> None:
    """List the devices that `plan` and `rehearse` know by name.

    Rates are the vendors' figures for dense matrices. The source of each is listed.
    """
    from gptworks.pages.tables import Table
    from gptworks.planning.arrange import planned_precision
    from gptworks.planning.device_table import DEVICES
    from gptworks.units import readable

    precisions = {name: planned_precision("auto", device) for name, device in DEVICES.items()}
    if as_json:
        rates = ("memory_bytes", "float_flops", "half_flops", "bandwidth", "source")
        print_json({
            name: {"name": one.name, "precision": precisions[name]} | {key: getattr(one, key) for key in rates}
            for name, one in DEVICES.items()
        })  # fmt: skip
        return
    header = ("device", "memory", "trains in", "FLOP/s", "memory's B/s", "source")
    cells = []
    for name, one in DEVICES.items():
        figures = one.memory_bytes, one.flops(precisions[name]) or 0, one.bandwidth or 0
        memory, rate, bandwidth = (readable(figure, "") for figure in figures)
        cells.append((name, f"{memory}B", precisions[name], rate, bandwidth, one.source))
    console_of().print(Table(header, "lrlrrl", cells).rich())


def describe(
    target: options.Target,
    overrides: options.Overrides = None,
    html: options.PageFile = None,
    markdown: Annotated[bool, Option("--markdown", help="Print Markdown.")] = False,
    run: Annotated[bool, Option("--run", help="Time a forward pass with random weights.")] = False,
    length: Annotated[int | None, Option(help="With --run: tokens of the pass. Default: 16.")] = None,
    as_json: options.AsJSON = False,
) -> None:
    """Draw an architecture: shapes, parameters, exact totals.

    For known models, compares the totals with published ones.
    """
    from gptworks.describe.sheet import describe as describe_model
    from gptworks.estimates import architecture

    if run:
        refuse_unused("does nothing with --run", markdown=markdown, html=html)
        from gptworks.describe.demonstration import DEFAULT_LENGTH, demonstrate

        shown = demonstrate(architecture(target, overrides or [])[0], DEFAULT_LENGTH if length is None else length)
        show_lines(shown, as_json, *shown.lines())
        return
    refuse_unused("is for --run: add it, or", length=length)

    if as_json:
        refuse_unused("does nothing with --json", markdown=markdown)
    config, name = architecture(target, overrides or [])
    sheet = describe_model(config, name)
    if html is not None:
        from gptworks.describe.page import to_html

        write_html(to_html(sheet), html)
    if as_json:
        print_json(sheet.to_json())
    elif markdown:
        say(sheet.to_markdown())
    elif html is None:
        console_of().print(sheet)


def plan(
    target: options.Target,
    overrides: options.Overrides = None,
    *,
    device: options.PlannedDevice,
    devices: options.PlannedDevices,
    price: options.Price = None,
    hours: Annotated[float | None, Option(help="Show what this time suffices for.")] = None,
    budget: Annotated[float | None, Option(help="With --price: show what this money suffices for.")] = None,
    serve: Annotated[bool, Option("--serve", help="Show the memory of serving instead.")] = False,
    requests: Annotated[int | None, Option(help="With --serve: texts at once. Default: 32.")] = None,
    context: options.Context = None,
    weights: options.KeptWeights = "auto",
    cache: options.Cache = "auto",
    trace: Annotated[bool, Option("--trace", help="Count a step's memory on fake tensors too.")] = False,
    measure: Annotated[bool, Option("--measure", help="Take two real steps on this machine too.")] = False,
    details: Annotated[bool, Option("--details", help="Also FLOPs by part, alternatives, inference.")] = False,
    as_json: options.AsJSON = False,
) -> None:
    """Estimate a run's FLOPs, memory, time and disk.

    Needs no weights, and builds a real model only with --measure. Measures this machine's speed if --device is this or
    cpu. Exit code 2: a setting is wrong, or figures are unknown since data is missing. Exit code 3: the run does not
    fit on the device.
    """
    if as_json:
        refuse_unused("does nothing with --json, which has every figure", details=details)
    if serve:
        refuse_unused(
            "is about training, and --serve is not", **devices | {"world_size": devices["world_size"] > 1},
            price=price, hours=hours, budget=budget, trace=trace, measure=measure, details=details,
        )  # fmt: skip
        from gptworks.estimates import plan_serving

        served = plan_serving(
            target, *overrides or [], requests=requests, context=context, weights=weights, cache=cache, **device
        )
        show(served, as_json)
        if not served.fits:
            raise typer.Exit(DOES_NOT_FIT)
        return
    formats = {"weights": weights != "auto", "cache": cache != "auto"}
    refuse_unused("is for --serve: add it, or", requests=requests, context=context, **formats)
    from gptworks.estimates import plan as plan_recipe

    sheet = plan_recipe(
        target, *overrides or [], **device, **devices, price=price, hours=hours, budget=budget, trace=trace,
        measure=measure, details=details, working=working,
    )  # fmt: skip
    show(sheet, as_json)
    if sheet.data.missing is not None:
        raise UserError(f"{sheet.data.missing} What depends on its tokens is unknown in this plan.")
    if not sheet.fits:
        raise typer.Exit(DOES_NOT_FIT)


DOES_NOT_FIT = 3
"""Exit code of `plan` and `rehearse` if training, or serving with --serve, does not fit on the device."""


def rehearse(
    target: options.Target,
    overrides: options.Overrides = None,
    *,
    device: options.PlannedDevice,
    devices: options.PlannedDevices,
    disk_gb_s: Annotated[float | None, Option(help="GB/s at which all ranks write a checkpoint. Default: 1.")] = None,
    price: options.Price = None,
    html: options.PageFile = None,
    as_json: options.AsJSON = False,
) -> None:
    """Rehearse a run on many GPUs, on this machine.

    Does what can be done without the GPUs: a step on fake tensors, and the placement and collectives of the first and
    last rank. Marks each result as shown here, planned, or not checked. Exit code 3: the run does not fit on the
    device.
    """
    from gptworks.estimates import rehearse as rehearse_recipe

    sheet = rehearse_recipe(
        target, *overrides or [], **device, **devices, disk_gb_s=disk_gb_s, price=price, working=working
    )
    if html is not None:
        write_html(sheet.to_html(), html)
    if as_json or html is None:
        show(sheet, as_json)
    if not sheet.plan.fits:
        raise typer.Exit(DOES_NOT_FIT)


def schema() -> None:
    """Print the JSON schema of recipe files, for editors."""
    from gptworks.recipe import recipe_schema

    print_json(recipe_schema())
