"""The command that rehearses a run on many GPUs: rehearse."""

from typing import Annotated

import typer
from typer import Option

from gptworks.cli import options
from gptworks.cli.design import DOES_NOT_FIT
from gptworks.cli.printing import notice, show, working


def rehearse(
    target: options.Target,
    overrides: options.Overrides = None,
    device: options.PlannedDevice = None,
    memory_gib: options.MemoryGiB = None,
    flops: options.Flops = None,
    bandwidth: options.Bandwidth = None,
    world_size: options.WorldSize = 1,
    sharding: options.Sharded = None,
    tensor_parallel: options.TensorParallel = None,
    utilization: options.Utilization = None,
    intra_node_gb_s: options.IntraNode = None,
    inter_node_gb_s: options.InterNode = None,
    gpus_per_node: options.PerNode = None,
    host_memory_gib: options.HostMemoryGiB = None,
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
        target, *overrides or [], device=device, memory_gib=memory_gib, flops=flops, bandwidth=bandwidth,
        utilization=utilization, intra_node_gb_s=intra_node_gb_s, inter_node_gb_s=inter_node_gb_s,
        gpus_per_node=gpus_per_node, host_memory_gib=host_memory_gib, world_size=world_size, sharding=sharding,
        tensor_parallel=tensor_parallel, disk_gb_s=disk_gb_s, price=price, working=working,
    )  # fmt: skip
    if html is not None:
        from gptworks.pages.page import write_page

        write_page(sheet.to_html(), html, "--html")
        notice(f"wrote {html}")
    if as_json or html is None:
        show(sheet, as_json)
    if not sheet.plan.fits:
        raise typer.Exit(DOES_NOT_FIT)
