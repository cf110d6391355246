"""A dress rehearsal of a run: the checks before its start, a step on fake tensors, and recommended changes of settings.

The step is compared with the plan. The machine needs none of the run's devices.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.planning.fit import divisors
from gptworks.planning.layout import rank_config, shards_of
from gptworks.planning.memory import training_peak
from gptworks.planning.network import collectives
from gptworks.planning.params import count_parameters
from gptworks.planning.run import Plan
from gptworks.training.rehearsal.fake_cuda import FakeStep, step_on_fake_cuda
from gptworks.training.rehearsal.fake_ranks import Placement, RankSteps, Sent, place_ranks
from gptworks.training.rehearsal.trace import Rehearsal
from gptworks.training.setup import start_checks
from gptworks.units import duration, readable

DISK_GB_PER_SECOND = 1.0
"""Assumed GB/s at which all ranks together write a checkpoint."""

CLOSE, CLOSE_BYTES = 0.01, 4096
"""Relative tolerance, and tolerance in bytes, between counted and planned bytes. Plans leave out the flags by which
each DDP rank shows which tensors have gradients."""

LEAST_GAIN = 1.05
"""Smallest ratio of speeds for which another layout is recommended. Smaller gains are within the plan's errors."""

MOST_LOST_SECONDS = 1800
"""Time between checkpoints above which more checkpoints are recommended."""

LEAST_WRITE_SECONDS = 1
"""Time below which writing a checkpoint never counts as too slow."""

MOST_PADDING = 0.05
"""Share of padding in FSDP's tensors above which a number of ranks with less padding is recommended."""

MOST_EPOCHS = 4
"""Passes over the same text up to which repeating is nearly as good as new text (Muennighoff et al., 2023)."""


@dataclass(frozen=True)
class Check:
    """A check that training makes before it starts."""

    what: str
    problem: str | None
    """The error that training would report; None if the check passed."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of the collectives of one kind along one mesh dimension in a step of the first rank."""

    kind: str
    dimension: str
    what: tuple[str, ...]
    """Identifiers of the planned tensors, as in `Collective.what`."""
    shown_bytes: int
    """Bytes counted in the rehearsal."""
    planned_bytes: int

    @property
    def as_planned(self) -> bool:
        return abs(self.shown_bytes - self.planned_bytes) <= max(CLOSE * self.planned_bytes, CLOSE_BYTES)


@dataclass(frozen=True)
class Advice:
    """A reason to change a run."""

    reason: str
    """The reason, as a sentence."""
    settings: tuple[str, ...] = ()
    """Settings to write, as arguments of a command. If empty, the reason says what to do."""


@dataclass(frozen=True)
class Rehearsed:
    """The results of a dress rehearsal."""

    plan: Plan
    checks: tuple[Check, ...]
    """The checks before a start; empty for a preset, which is not a recipe that training could start."""
    step: FakeStep | None
    """A step of one device with the whole model, on fake CUDA tensors; None if the device is not a CUDA GPU."""
    placement: Placement | None
    """The ranks placed on a fake process group; None if the run has one device."""
    disk_gb_per_second: float

    @property
    def write_seconds(self) -> float:
        """Seconds to write a checkpoint."""
        return self.plan.checkpoint_bytes / (1e9 * self.disk_gb_per_second)

    @property
    def traffic(self) -> list[Traffic]:
        """The collectives of a step, as counted in the rehearsal and as planned; empty if no rank was placed."""
        if self.placement is None or not self.placement.ranks:
            return []
        shown = _step_bytes(self.placement.ranks[0], self.plan.micro_steps)
        planned: Counter[tuple[str, str]] = Counter()
        what: dict[tuple[str, str], list[str]] = {}
        for one in collectives(self.plan.setting):
            if one.when == "generation":  # the ranks only train
                continue
            of = one.kind, one.dimension
            planned[of] += one.n_bytes * (self.plan.micro_steps if one.in_each_micro_batch else 1)
            what.setdefault(of, []).append(one.what)
        return [
            Traffic(*of, tuple(dict.fromkeys(what.get(of, ()))), shown[of], planned[of])
            for of in dict.fromkeys((*planned, *shown))
            if planned[of] or shown[of]
        ]

    @property
    def step_bytes(self) -> int:
        """Planned peak memory of a rank's step on a CPU, because the ranks' fake tensors are on the CPU."""
        setting = replace(self.plan.setting, on_cpu=True, saves=False, averages=False, shorter_lengths=())
        return training_peak(setting).total_bytes

    @property
    def in_order(self) -> bool:
        """Whether the first and the last rank take part in the same collectives in the same order. Otherwise, a rank
        would wait for a collective that the other does not begin. Bytes of an all_to_all may differ."""
        orders = {
            tuple((one.kind, one.dimension, 0 if one.kind == "all_to_all" else one.n_bytes) for one in rank.second)
            for rank in (self.placement.ranks if self.placement is not None else ())
        }
        return len(orders) <= 1

    @property
    def advice(self) -> list[Advice]:
        """The recommended changes: first for failed checks, then for the plan."""
        problems = [Advice(check.problem) for check in self.checks if check.problem is not None]
        return [*problems, *advice(self.plan, self.write_seconds)]


def rehearse(plan: Plan, checks: bool = True, disk_gb_per_second: float = DISK_GB_PER_SECOND) -> Rehearsed:
    """Rehearse a planned run and return the results.

    Args:
        checks: whether to check the recipe's inputs as training does; false for a preset, which has no inputs.
        disk_gb_per_second: GB/s at which all ranks together write a checkpoint.
    """
    n_ranks = plan.setting.layout.world_size
    checked = tuple(_checked(plan.recipe, n_ranks)) if checks else ()
    step = step_on_fake_cuda(Rehearsal.of(plan, "cuda")) if plan.device.kind == "cuda" else None
    placement = place_ranks(plan) if n_ranks > 1 else None
    return Rehearsed(plan, checked, step, placement, disk_gb_per_second)


def _checked(recipe: Recipe, n_ranks: int) -> Iterator[Check]:
    for what, check in start_checks(recipe, n_ranks=n_ranks):
        try:
            check()
        except UserError as error:
            yield Check(what, str(error))
        else:
            yield Check(what, None)


def _step_bytes(rank: RankSteps, micro_steps: int) -> Counter[tuple[str, str]]:
    """Return the bytes of a step's collectives by kind and dimension. Each further micro-batch adds the
    difference between the second and the first step."""
    first, second = _by_kind(rank.first), _by_kind(rank.second)
    more = micro_steps - rank.n_second
    return Counter({of: second[of] + more * (second[of] - first[of]) for of in {*first, *second}})


def _by_kind(sent: list[Sent]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for one in sent:
        found[one.kind, one.dimension] += one.n_bytes
    return found


def advice(plan: Plan, write_seconds: float) -> Iterator[Advice]:
    """Yield the changes to recommend for a planned run; writing a checkpoint takes `write_seconds`."""
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

    The recommended layout has the fewest changes among all layouts that fit and are within 1% of the fastest.
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
        changed = plan.with_overrides((*layout, *again))
        if changed is None:
            continue
        tried.append(((*layout, *again), changed))
        per_rank = changed.train.common_batch_size // changed.setting.layout.data_parallel
        group, largest = plan.recipe.objective.micro_batch_multiple, changed.largest_micro_batch_size
        size = next((n for n in divisors(per_rank) if n <= largest and n % group == 0), 0)
        if size and size != changed.setting.micro_batch_size:
            also = (*layout, *again, f"train.micro_batch_size={size}")
            if (larger := plan.with_overrides(also)) is not None:
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
