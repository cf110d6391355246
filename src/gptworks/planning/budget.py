"""The number of tokens, and the largest model, for which a number of hours or an amount of money suffices."""

from dataclasses import dataclass, replace
from math import ceil

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.planning.assumed import COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER
from gptworks.planning.bisection import largest_that_fits
from gptworks.planning.run import Plan

MOST_GROUPS = 512
"""Largest number of key/value heads of a model to try (query heads, if it has only one key/value head)."""

MOST_HOURS = 1_000_000

WIDTH_MULTIPLE = 64
"""In a model to try, the MLP's width is a multiple of this number, because matrix products are then fast. The
model's width is a multiple too, unless it equals the total width of the query heads."""


@dataclass(frozen=True)
class Largest:
    """The largest model of an architecture that fits on the devices and can be trained in a given time."""

    overrides: tuple[str, ...]
    """Settings of the model's size, such as `model.d_model=512`."""
    parameters: int
    tokens: int
    """Number of training tokens: 20 for each parameter, which is compute-optimal (Hoffmann et al., 2022). If
    memory limits the model, this is the number for which the time suffices."""
    seconds: float
    limited_by_memory: bool


@dataclass(frozen=True)
class Affordable:
    """The training for which a given time suffices on the devices of a plan."""

    seconds: float
    flops: float
    """FLOPs of training on `tokens`, including FLOPs recomputed in the backward pass."""
    tokens: int
    """Number of tokens that the planned model reads in this time."""
    steps: int
    largest: Largest | None
    why_none: str = ""
    """Reason why there is no largest model."""


def hours_for(budget: float, price: float, n_devices: int) -> float:
    """Return the hours for which a budget pays for all devices. `price` is for one device and one hour."""
    return budget / (price * n_devices)


def affordable(plan: Plan, hours: float) -> Affordable:
    """Return the training for which `hours` on the plan's devices suffice.

    Raises:
        UserError: the device's speed is unknown, or `hours` are too few for a step or more than `MOST_HOURS`.
    """
    if hours > MOST_HOURS:
        raise UserError(f"{hours:g} hours are more than {MOST_HOURS:,}: give fewer, or a smaller budget.")
    rate, seconds = plan.tokens_per_second, 3600 * hours
    if rate is None:
        raise UserError(
            f"what {hours:g} hours suffice for depends on the speed of {plan.device.name}, which is unknown: --device "
            f"this measures this machine's; --flops and --bandwidth give another device's."
        )
    tokens = int(rate * (seconds - plan.seconds_before_first_step))
    steps = max(0, tokens) // plan.tokens_per_step
    if not steps:
        raise UserError(f"{hours:g} hours are too few for a step of {plan.tokens_per_step:,} tokens.")
    largest, why = _largest(plan, seconds)
    per_token = plan.work.per_token + plan.work.again_per_token
    return Affordable(seconds, tokens * per_token, tokens, steps, largest, why)


def _largest(plan: Plan, seconds: float) -> tuple[Largest | None, str]:
    """Return the largest model, or None and the reason. Bisection works, because time and memory grow with the size."""
    recipe = plan.recipe
    if recipe.initialize_from or recipe.adapter or "text" not in recipe.objective.sources:
        return None, "a fine-tuned model has the size of its base"
    found: dict[int, tuple[Plan, tuple[str, ...]] | None] = {}

    def suffices(groups: int) -> bool:
        if groups not in found:
            found[groups] = _of_size(plan, groups)
        planned = found[groups]
        return planned is not None and planned[0].fits and _optimal_seconds(planned[0]) <= seconds

    groups = largest_that_fits(suffices, 0, MOST_GROUPS + 1)
    if not groups or (best := found[groups]) is None:
        return None, "not even the smallest of this shape has enough time and memory"
    next_larger = found.get(groups + 1)
    by_memory = next_larger is not None and not next_larger[0].fits and _optimal_seconds(next_larger[0]) <= seconds
    chosen, overrides = best
    tokens, took = COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER * chosen.parameters.total, _optimal_seconds(chosen)
    if by_memory and chosen.tokens_per_second is not None:
        tokens, took = int(chosen.tokens_per_second * seconds), seconds
    return Largest(overrides, chosen.parameters.total, tokens, took, by_memory), ""


def _optimal_seconds(plan: Plan) -> float:
    """Return the seconds that the compute-optimal number of tokens takes."""
    assert plan.tokens_per_second is not None
    return plan.compute_optimal_tokens / plan.tokens_per_second


def _of_size(plan: Plan, groups: int) -> tuple[Plan, tuple[str, ...]] | None:
    """Return the plan of the model with `groups` key/value heads, and its overrides; None if the model cannot be built
    or divided among the devices."""
    overrides = size_overrides(plan.recipe.model, groups)
    sized = plan.with_overrides(overrides, largest_micro_batch=True)
    if sized is None:
        return None
    if plan.measured is not None and plan.tokens_per_second is not None:  # assume the measured FLOP/s for every size
        rate = plan.tokens_per_second * plan.flops_per_token / sized.flops_per_token
        sized = replace(sized, measured=replace(plan.measured, tokens_per_second=rate))
    return sized, overrides


def size_overrides(model: ModelConfig, groups: int) -> tuple[str, ...]:
    """Return overrides for a model of the same shape with `groups` key/value heads (query heads, if there is only one
    key/value head): width, depth and the MLP's width change in proportion."""
    before = model.n_kv_heads if model.n_kv_heads > 1 else model.n_heads
    scale = groups / before

    def multiple(width: int) -> int:
        return WIDTH_MULTIPLE * max(1, round(width * scale / WIDTH_MULTIPLE))

    n_heads = groups * (model.n_heads // before)
    exact = model.d_model == model.n_heads * model.d_head
    sizes = {
        "n_layers": max(min(2, model.n_layers), ceil(model.n_layers * scale - 0.5)),
        "d_model": n_heads * model.d_head if exact else multiple(model.d_model),
        "n_heads": n_heads,
        "n_kv_heads": groups if model.n_kv_heads > 1 else 1,
        "d_head": model.d_head,
        "d_ff": multiple(model.d_ff),
    }
    return tuple(f"model.{name}={size}" for name, size in sizes.items())
