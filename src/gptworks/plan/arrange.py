"""How a run is arranged on devices: its precision, how batch and model are divided, and a preset's own training."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.plan.devices import Device
from gptworks.plan.fit import can_split, largest_micro_batch
from gptworks.plan.memory import SHARDINGS, Layout, Setting, training_peak
from gptworks.plan.objectives import recipe_setting
from gptworks.plan.params import count_parameters
from gptworks.recipe import apply_overrides, parse_model, parse_recipe

COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. (2022), table 3: about 20 tokens for each parameter at every size."""

DEFAULT_BATCH_TOKENS = 2**19
"""Tokens of a step where no recipe says: GPT-3's smaller sizes took 0.5M (Brown et al., 2020, table 2.1)."""


_UNSET_STEPS = 10**12
"""Stands for the steps of a preset until its batch is known."""


def check_figures(**figures: float | None) -> None:
    """Refuse figures of a device that are not above 0, and a utilization above 1."""
    for name, figure in figures.items():
        option = f"--{name.replace('_', '-')}"
        if figure is not None and not figure > 0:
            raise UserError(f"{option} {figure:g} is not above 0.")
        if name == "utilization" and figure is not None and figure > 1:
            raise UserError(f"{option} {figure:g} is above 1: it is a share of the device's rate, such as 0.4.")


def plan_preset(
    name: str, overrides: Sequence[str], device: Device, world_size: int, tensor_parallel: int, sharding: str
) -> tuple[Recipe, Layout]:
    """How a preset is taken to be trained where `overrides` do not say, and the layout of `choose_layout`.

    AdamW, compute-optimal tokens, half a million of them a step (or a sequence for each rank, where that is more), in
    the largest micro-batches that fit.
    """
    tree: dict[str, Any] = apply_overrides({"model": {"preset": name}}, overrides)
    model, given = parse_model(tree["model"], name), tree.pop("train", {})
    ranks = max(1, world_size // tensor_parallel)
    sequences = max(1, DEFAULT_BATCH_TOKENS // model.context_length // ranks)
    anything = {"tokenizer": {"type": "char"}, "data": {"sources": [{"type": "python-stdlib"}]}}
    train = given
    if isinstance(given, dict):
        end = {} if {"max_steps", "epochs", "max_minutes"} & given.keys() else {"max_steps": _UNSET_STEPS}
        train = {"batch_size": sequences * ranks} | end | given
    recipe = parse_recipe({"name": name, **anything, **tree, "train": train}, name)
    if recipe.train.max_steps == _UNSET_STEPS:
        tokens = COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER * count_parameters(model).total
        recipe = _with(recipe, max_steps=ceil(tokens / (recipe.train.batch_size * model.context_length)))
    layout = choose_layout(recipe, device, world_size, tensor_parallel, sharding)
    if "micro_batch_size" in recipe.train.model_fields_set:
        return recipe, layout
    setting = rank_setting(recipe, device, layout)
    largest = largest_micro_batch(replace(setting, accumulates=True), device.memory_bytes)
    micro = largest_divisor(recipe.train.batch_size // layout.data_parallel, max(1, largest))
    return _with(recipe, micro_batch_size=micro), layout


def _with(recipe: Recipe, **train: int) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})


def choose_layout(
    recipe: Recipe, device: Device, world_size: int = 1, tensor_parallel: int = 1, sharding: str = "auto"
) -> Layout:
    """How the model lies on `world_size` devices; auto shards no more than one sequence at a time needs to fit.

    Raises:
        UserError: a number or a word that makes no layout.
    """
    if world_size < 1 or tensor_parallel < 1 or world_size % tensor_parallel:
        raise UserError(
            f"--world-size {world_size} is not a multiple of --tensor-parallel {tensor_parallel}: "
            f"each group of tensor-parallel ranks holds one copy of the model."
        )
    data_parallel = world_size // tensor_parallel
    if sharding in SHARDINGS:
        return Layout(sharding, data_parallel, tensor_parallel)
    if sharding != "auto":
        raise UserError(f"--sharding {sharding} is not known: use auto, {', '.join(SHARDINGS)}.")
    useful = SHARDINGS if data_parallel > 1 else ("none",)
    layouts = [Layout(each, data_parallel, tensor_parallel) for each in useful]
    for layout in layouts:
        setting = replace(rank_setting(recipe, device, layout), micro_batch_size=1)
        if training_peak(setting).total_bytes <= device.memory_bytes:
            return layout
    return layouts[-1]


def planned_precision(name: str, device: Device) -> str:
    """The precision called `name` on a device, as `gptworks.device.choose_precision` takes it."""
    if name == "fp16" and device.kind != "cuda":
        raise UserError(f"precision fp16 needs a CUDA device and this is {device.kind}: use auto, bf16 or fp32.")
    if name != "auto":
        return name
    return "bf16" if device.has_bf16 else "fp16" if device.kind == "cuda" else "fp32"


def rank_setting(recipe: Recipe, device: Device, layout: Layout) -> Setting:
    """The step of one of the layout's devices, checkpoints included.

    Raises:
        UserError: the batch or the model cannot be divided.
    """
    model, train = recipe.model, recipe.train
    whole = recipe_setting(recipe, planned_precision(train.precision, device), device.on_cpu)
    sequences, rest = divmod(train.batch_size, layout.data_parallel)
    if rest or not sequences:
        raise UserError(
            f"train.batch_size={train.batch_size} is not a multiple of {layout.data_parallel} data-parallel ranks: "
            f"each takes as many sequences; change train.batch_size or --world-size."
        )
    if layout.tensor_parallel > 1 and not can_split(whole, layout.tensor_parallel):
        raise UserError(
            f"--tensor-parallel {layout.tensor_parallel} does not divide n_heads={model.n_heads}, "
            f"n_kv_heads={model.n_kv_heads} and d_ff={model.d_ff}: every rank takes whole heads."
        )
    micro = largest_divisor(sequences, train.micro_batch_size)
    return replace(whole, micro_batch_size=micro, accumulates=micro < sequences, layout=layout)


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`."""
    return next(size for size in range(min(n, most), 0, -1) if n % size == 0)
