"""Arguments and options that several commands share."""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from gptworks.choices import (
    SAMPLING,
    SAMPLING_RULES,
    BackendName,
    CacheName,
    DeviceName,
    LoadedWeights,
    Sampling,
    Sharding,
)
from gptworks.files import fetched_path


def fetched_paths(paths: list[Path] | None) -> list[Path] | None:
    """Return the local paths of run folders. Folders given as URLs are fetched first."""
    return paths and [fetched_path(path) for path in paths]


def recipe_names(incomplete: str) -> list[str]:
    """Return the names of shipped recipes that begin with `incomplete`."""
    from gptworks.recipes import shipped_paths

    return [name for name in shipped_paths() if name.startswith(incomplete)]


def _targets(incomplete: str) -> list[str]:
    from gptworks.presets import PRESETS

    return [*(name for name in PRESETS if name.startswith(incomplete)), *recipe_names(incomplete)]


def _device_names(incomplete: str) -> list[str]:
    from gptworks.planning.device_options import MEASURED
    from gptworks.planning.device_table import DEVICES

    return [name for name in (*MEASURED, *DEVICES) if name.startswith(incomplete)]


RecipeFile = Annotated[
    Path,
    Argument(
        metavar="RECIPE",
        autocompletion=recipe_names,
        help="A recipe file, a run folder, or a name that `gptworks recipes` lists.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="KEY=VALUE", help="Settings that override the file's, such as train.max_steps=200."),
]
RunFolder = Annotated[
    Path, Argument(metavar="RUN", help="A run folder, such as runs/demo, or its URL.", callback=fetched_path)
]
WhichCheckpoint = Annotated[str, Option("--checkpoint", metavar="best|last|STEP", help="The checkpoint to use.")]
Texts = Annotated[
    list[Path] | None,
    Option("--text", metavar="FILE", help="A text to measure on, instead of the run's own; repeatable."),
]
Device = Annotated[DeviceName, Option(help="Where to compute. auto: a GPU if there is one.")]
PageFile = Annotated[Path | None, Option("--html", metavar="FILE", help="Write an HTML page.")]
AsJSON = Annotated[bool, Option("--json", help="Print JSON.")]
Resume = Annotated[bool, Option("--resume", help="Continue what the folder holds; start if it is empty.")]
Force = Annotated[bool, Option("--force", help="Start even if it should not fit in memory.")]
Slide = Annotated[bool, Option("--slide", help="When the context is full, continue from its last half.")]

Target = Annotated[
    str,
    Argument(
        metavar="PRESET|RECIPE|RUN", autocompletion=_targets, help="A preset's name, a recipe file, or a run folder."
    ),
]
Price = Annotated[float | None, Option(help="Price of an hour of a device, for the cost of the run.")]
Stop = Annotated[list[str] | None, Option(help="End before this string; repeatable.")]
Worth = Annotated[
    float, Option(min=0, help="The smallest difference of the loss that matters, in its unit, such as nats.")
]
Steps = Annotated[int | None, Option(min=1, help="Steps of each run. Default: the recipe's, or fewer to fit.")]
Context = Annotated[
    int | None, Option("--context", min=1, help="Most tokens of prompt and answer together. Default: the model's.")
]
Cache = Annotated[CacheName, Option("--cache", help="Format of the cached keys and values.")]
Speculative = Annotated[
    int, Option("--speculative", min=0, help="Speculative decoding: tokens drafted at a time. The text is the same.")
]
Backend = Annotated[
    BackendName, Option(help="The backend. native: C++, on a CPU. auto: native if it supports the model.")
]
KeptWeights = Annotated[
    LoadedWeights,
    Option(
        "--weights",
        help="bf16, int8, int4: round the weights as they are loaded, each to the nearest value; gptworks quantize has "
        "GPTQ for int4. auto: as the run keeps them.",
    ),
]
MaxTokens = Annotated[int, Option(help="Most tokens to generate.")]

# A server's address and access, shared by `serve` and `studio`.
Host = Annotated[str, Option(metavar="ADDRESS", help="The address to listen at; 0.0.0.0 is all of them.")]
Port = Annotated[int, Option(min=0, max=65535, help="The port to listen at. 0: a free one.")]
ApiKeys = Annotated[
    list[str] | None,
    Option("--api-key", metavar="KEY", envvar="GPTWORKS_API_KEY", help="A key that requests must carry; repeatable."),
]


def without_environment(keys: list[str] | None) -> tuple[str, ...]:
    """Return the API keys, and remove them from the environment so that child processes do not inherit them."""
    os.environ.pop("GPTWORKS_API_KEY", None)
    return tuple(keys or ())


# ------------------------------------------------------------------------------------------------- groups of options


class Group(dict[str, tuple[Any, Any]]):
    """Options that several commands share. Each name has a type with its `Option`, and a default.

    A command's parameter of the type `Annotated[dict[str, Any], group]` gets the values of all these options by name.
    """


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command for typer, in which each `Group` parameter is replaced by the options of the group."""
    signature = inspect.signature(command, eval_str=True)
    groups, parameters = dict[str, Group](), list[inspect.Parameter]()
    for one in signature.parameters.values():
        group = next((part for part in getattr(one.annotation, "__metadata__", ()) if isinstance(part, Group)), None)
        if group is None:
            parameters.append(one)
        else:
            groups[one.name] = group
            parameters += [
                one.replace(name=name, annotation=kind, default=default) for name, (kind, default) in group.items()
            ]

    @functools.wraps(command)
    def call(**values: Any) -> None:
        together = {name: {key: values.pop(key) for key in group} for name, group in groups.items()}
        command(**values, **together)

    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    return call


_DEVICE_NAME = Option(
    "--device",
    metavar="NAME",
    autocompletion=_device_names,
    help="A device's name, such as rtx-4090 or 'm2 max 64', or a memory, such as '8 GB'. this, cpu: measure this "
    "machine. Default: this CPU, not measured.",
)
PlannedDevice = Annotated[
    dict[str, Any],
    Group(
        device=(Annotated[str | None, _DEVICE_NAME], None),
        memory_gib=(
            Annotated[float | None, Option(help="Memory of a GPU that `gptworks devices` does not list.")], None
        ),
        flops=(Annotated[float | None, Option(help="FLOP/s of the device, dense.")], None),
        bandwidth=(Annotated[float | None, Option(help="Bytes/s of the memory of the device.")], None),
    ),
]  # fmt: skip
_SHARDING = Option(help="Sets train.parallel. auto: the least sharding that fits.")
PlannedDevices = Annotated[
    dict[str, Any],
    Group(
        world_size=(Annotated[int, Option(min=1, help="Number of devices.")], 1),
        sharding=(Annotated[Sharding | None, _SHARDING], None),
        tensor_parallel=(Annotated[int | None, Option(min=1, help="Devices that share each matrix.")], None),
        utilization=(Annotated[float | None, Option(help="Share of the FLOP/s reached. Default: 0.4.")], None),
        intra_node_gb_s=(Annotated[float | None, Option(help="GB/s between devices of a node.")], None),
        inter_node_gb_s=(Annotated[float | None, Option(help="GB/s of each device to other nodes.")], None),
        gpus_per_node=(Annotated[int | None, Option(help="Devices of a node, each with one rank.")], None),
        host_memory_gib=(Annotated[float | None, Option(help="Memory of the host of a node.")], None),
    ),
]
"""Number of the devices, their node, and how training is divided among them."""
EngineOptions = Annotated[
    dict[str, Any],
    Group(
        weights=(KeptWeights, "auto"),
        backend=(Backend, "auto"),
        cache=(Cache, "auto"),
        checkpoint=(WhichCheckpoint, "best"),
        device=(Device, "auto"),
    ),
]
"""Options for loading a run that generates texts."""


def _sampling(name: str) -> Any:
    """Return a sampling setting's option, and its default None, for which a model's own default may apply."""
    option = Option(help=SAMPLING_RULES[name].help, show_default=f"the model's own, else {getattr(SAMPLING, name):g}")
    return Annotated[Sampling.__annotations__[name] | None, option], None


SamplingOptions = Annotated[
    dict[str, Any],
    Group(
        {name: _sampling(name) for name in SAMPLING_RULES},
        seed=(Annotated[int | None, Option(help="The same seed gives the same text.")], None),
    ),
]
