"""The recipe that `plan` assumes for a preset."""

from collections.abc import Sequence
from math import ceil
from typing import Any

from gptworks.config import ENDS, Recipe
from gptworks.overrides import apply_overrides
from gptworks.planning.arrange import Refusal, arrange, device_setting
from gptworks.planning.bisection import largest_that_fits
from gptworks.planning.devices import Device
from gptworks.planning.fit import divisors
from gptworks.planning.memory import training_peak
from gptworks.planning.params import count_parameters
from gptworks.recipe import parse_model, parse_recipe

COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER = 20
"""Compute-optimal training takes about 20 tokens per parameter at every size (Hoffmann et al., 2022, table 3)."""

DEFAULT_BATCH_TOKENS = 2**19
"""Tokens per step unless an override sets the batch, as for GPT-3's smaller sizes (Brown et al., 2020, table 2.1)."""

ASSUMED_STEPS = f"{COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER} tokens a parameter, as no length is given"

_UNSET_STEPS = 10**9
"""Placeholder for a preset's number of steps until its batch size is known: the largest value that a recipe accepts."""


def preset_recipe(name: str, overrides: Sequence[str], device: Device, n_ranks: int = 1) -> tuple[Recipe, str | None]:
    """Return a recipe for training a preset on `n_ranks` devices, and a clause that explains its number of steps (None
    if `overrides` set the length).

    Settings not in `overrides` are assumed: AdamW, the compute-optimal number of tokens, half a million tokens per step
    (or one sequence for each data-parallel rank, if that is more), and the largest micro-batch that fits.
    """
    tree: dict[str, Any] = apply_overrides({"model": {"preset": name}}, overrides)
    model, given = parse_model(tree["model"], name), tree.pop("train", {})
    anything = {"tokenizer": {"type": "char"}, "data": {"sources": [{"type": "python-stdlib"}]}}
    train, has_end = given, True
    if isinstance(given, dict):
        tensor = given["parallel"].get("tensor_parallel", 1) if isinstance(given.get("parallel"), dict) else 1
        n_data = max(1, n_ranks // tensor) if isinstance(tensor, int) and tensor > 0 else 1
        batch_size = max(1, DEFAULT_BATCH_TOKENS // model.context_length // n_data) * n_data
        has_end = not ENDS.isdisjoint(given)
        length = {} if has_end else {"max_steps": _UNSET_STEPS}
        train = {"optimizer": "adamw", "batch_size": batch_size, **length, **given}
    recipe = parse_recipe({"name": name, **anything, **tree, "train": train}, name)
    reason = None
    if not has_end:
        tokens = COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER * count_parameters(model).total
        recipe = _with(recipe, max_steps=recipe.train.steps_with(ceil(tokens / model.context_length)))
        reason = ASSUMED_STEPS
    if "micro_batch_size" in recipe.train.model_fields_set:
        return recipe, reason
    return with_largest_micro_batch(recipe, device, n_ranks), reason


def with_largest_micro_batch(recipe: Recipe, device: Device, n_ranks: int) -> Recipe:
    """Return the recipe with the largest micro-batch that fits on a rank, or with 1 if none fits. If `arrange` refuses
    the recipe, its micro-batch stays as it is."""
    return _with(recipe, micro_batch_size=_largest_that_fits(recipe, device, n_ranks))


def _largest_that_fits(recipe: Recipe, device: Device, n_ranks: int) -> int:
    """Return the largest micro-batch that fits on a rank, or 1 if none fits. If `arrange` refuses the recipe, return
    the recipe's micro-batch."""
    layout = arrange(_with(recipe, micro_batch_size=1), n_ranks, device)
    if isinstance(layout, Refusal):
        return recipe.train.micro_batch_size

    def fits(size: int) -> bool:
        setting = device_setting(_with(recipe, micro_batch_size=size), device, layout)
        return training_peak(setting).total_bytes <= device.memory_bytes

    whole, *smaller = divisors(recipe.train.common_batch_size // layout.data_parallel)
    if not smaller or fits(whole):  # one micro-batch accumulates no gradients
        return whole
    ascending = smaller[::-1]
    return ascending[largest_that_fits(lambda place: fits(ascending[place]), 0, len(ascending))]


def _with(recipe: Recipe, **train: int) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})
