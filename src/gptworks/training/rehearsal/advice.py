"""The changes that a rehearsal recommends, with the settings to write. A faster layout is planned before it is
recommended."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil

from gptworks.planning.fit import divisors
from gptworks.planning.layout import rank_config, shards_of
from gptworks.planning.params import count_parameters
from gptworks.planning.run import Plan
from gptworks.units import duration, readable

LEAST_GAIN = 1.05
"""Smallest ratio of speeds for which another layout is recommended: smaller ones are within the plan's errors."""

MOST_LOST_SECONDS = 1800
"""Time between checkpoints above which more checkpoints are recommended: a failure loses the steps since the last."""

LEAST_WRITE_SECONDS = 1
"""Time below which writing a checkpoint never counts as too slow."""

MOST_PADDING = 0.05
"""Share of padding in FSDP's tensors above which a number of ranks with less padding is recommended."""

MOST_EPOCHS = 4
"""Passes over the same text up to which repeating is nearly as good as new text (Muennighoff et al., 2023)."""


@dataclass(frozen=True)
class Advice:
    """A reason to change a run."""

    reason: str
    """A sentence."""
    settings: tuple[str, ...] = ()
    """Settings to write, as arguments of a command; empty: the reason says what to do."""


def advice(plan: Plan, write_seconds: float) -> Iterator[Advice]:
    """Yield the changes to recommend for a planned run.

    Args:
        write_seconds: the time to write a checkpoint.
    """
    if not plan.fits:
        settings = (plan.changes[0].words,) if plan.changes else ()
        would = "" if not plan.changes else "" if plan.changes[0].fits else " Not even this would fit."
        yield Advice(f"The run does not fit: {plan.need.missing}.{would}", settings)
    elif (found := _faster(plan)) is not None:
        yield found
    if plan.data.missing is not None:
        yield Advice(plan.data.missing)
    yield from _padding(plan)
    yield from _epochs(plan)
    yield from _pace(plan, write_seconds)


def _padding(plan: Plan) -> Iterator[Advice]:
    layout = plan.setting.layout
    share = _padding_share(plan, layout.data_parallel) if layout.n_shards > 1 else 0.0
    if share < MOST_PADDING:
        return
    tensor = layout.tensor_parallel
    fewer = (n for n in divisors(layout.data_parallel) if _padding_share(plan, n) < MOST_PADDING)
    ranks = next(fewer, 1) * tensor
    yield Advice(
        f"FSDP pads the rows of each tensor to a multiple of {layout.data_parallel:,} ranks, which adds {share:.0%} to "
        f"what is gathered and reduced. On {ranks:,} devices it adds {_padding_share(plan, ranks // tensor):.1%}.",
        (f"--world-size {ranks}",),
    )


def _padding_share(plan: Plan, n_shards: int) -> float:
    model = rank_config(plan.setting.model, plan.setting.layout.tensor_parallel)
    return shards_of(count_parameters(model), model, plan.trained, n_shards).padding


def _epochs(plan: Plan) -> Iterator[Advice]:
    read, there = plan.tokens, plan.data.train_tokens
    if read is None or not there or plan.recipe.data.records or plan.data.datasets:
        return
    if read / there > MOST_EPOCHS:
        yield Advice(
            f"The run reads its {there:,} tokens {read / there:.3g} times; beyond {MOST_EPOCHS} times, repeated text "
            f"teaches much less than new text. Add text, or stop earlier.",
            (f"train.epochs={MOST_EPOCHS}",),
        )


def _pace(plan: Plan, write_seconds: float) -> Iterator[Advice]:
    """Yield advice on the number of steps between checkpoints, and on the timeout after which a rank counts as lost."""
    if plan.tokens_per_second is None:
        return
    train, step_seconds = plan.train, plan.tokens_per_step / plan.tokens_per_second
    between = train.checkpoint_every * step_seconds
    if max(between, LEAST_WRITE_SECONDS) < write_seconds:
        every = ceil(2 * write_seconds / step_seconds)
        yield Advice(
            f"A checkpoint takes {duration(write_seconds)} to write, and the next is due after {duration(between)}.",
            (f"train.checkpoint_every={every}",),
        )
    elif min(between, plan.seconds or between) > MOST_LOST_SECONDS and 2 * write_seconds < MOST_LOST_SECONDS:
        every = max(1, int(MOST_LOST_SECONDS / step_seconds))
        yield Advice(
            f"A failure loses up to {duration(between)}: checkpoints are {train.checkpoint_every:,} steps apart. "
            f"{every:,} steps take {duration(every * step_seconds)}.",
            (f"train.checkpoint_every={every}",),
        )
    pass_seconds, limit = step_seconds / plan.micro_steps, train.parallel.timeout_seconds
    if plan.setting.layout.world_size > 1 and pass_seconds > limit / 2:
        yield Advice(
            f"A micro-batch takes {duration(pass_seconds)}, and a rank that is silent for {duration(limit)} is taken "
            f"for lost.",
            (f"train.parallel.timeout_seconds={ceil(4 * pass_seconds)}",),
        )


def _faster(plan: Plan) -> Advice | None:
    """Return advice to use a faster layout of the step; None if the gain is small, or the speed is unknown or measured.

    Of the layouts that fit and are within 1% of the fastest, the one with the fewest changes is recommended.
    """
    if plan.tokens_per_second is None or plan.measured is not None:
        return None
    fsdp, other = "train.parallel.strategy=fsdp", not plan.train.parallel.reshard_after_forward
    reshard = f"train.parallel.reshard_after_forward={str(other).lower()}"
    layouts = [(), ("train.parallel.strategy=ddp",), (fsdp,), (fsdp, reshard)]
    several: list[tuple[str, ...]] = layouts if plan.setting.layout.world_size > 1 else [()]
    kinds = [kind for kind in ("none", "selective", "block") if kind != plan.setting.checkpointing]
    recomputed = [(), *((f"train.activation_checkpointing={kind}",) for kind in kinds)]
    tried: list[tuple[tuple[str, ...], Plan]] = []
    for layout, again in product(several, recomputed):
        changed = plan.changed((*layout, *again))
        if changed is None:
            continue
        tried.append(((*layout, *again), changed))
        per_rank = changed.train.common_batch_size // changed.setting.layout.data_parallel
        group, largest = plan.recipe.objective.micro_batch_multiple, changed.largest_micro_batch_size
        size = next((n for n in divisors(per_rank) if n <= largest and n % group == 0), 0)
        if size and size != changed.setting.micro_batch_size:
            also = (*layout, *again, f"train.micro_batch_size={size}")
            if (larger := plan.changed(also)) is not None:
                tried.append((also, larger))
    fitting = [(settings, found) for settings, found in tried if found.fits and found.tokens_per_second]
    best = max((found.tokens_per_second or 0 for _, found in fitting), default=0)
    if best < LEAST_GAIN * plan.tokens_per_second:
        return None
    close = [one for one in fitting if (one[1].tokens_per_second or 0) * 1.01 >= best]
    settings, found = min(close, key=lambda one: len(one[0]))
    return Advice(
        f"Another layout of the step is planned to be {best / plan.tokens_per_second - 1:.0%} faster, "
        f"{found.tokens_per_second:,.0f} tokens/s at {readable(found.peak.total_bytes, 'B')} of a device's memory.",
        settings,
    )
