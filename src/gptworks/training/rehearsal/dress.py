"""A dress rehearsal of a run: the checks before its start, and a step on fake tensors, compared with the plan. The
machine may have none of the run's devices."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.planning.memory import training_peak
from gptworks.planning.network import collectives
from gptworks.planning.run import Plan
from gptworks.training.rehearsal.advice import Advice, advice
from gptworks.training.rehearsal.fake_cuda import FakeStep, step_on_fake_cuda
from gptworks.training.rehearsal.fake_ranks import Placement, RankSteps, Sent, place_ranks
from gptworks.training.rehearsal.trace import Rehearsal
from gptworks.training.setup import start_checks

DISK_GB_PER_SECOND = 1.0
"""Assumed GB/s at which all ranks together write a checkpoint."""

CLOSE, CLOSE_BYTES = 0.01, 4096
"""Relative tolerance, and tolerance in bytes, of counted against planned bytes: plans leave out the flags by which each
DDP rank shows which tensors have gradients."""


@dataclass(frozen=True)
class Check:
    """A check that training makes before it starts."""

    what: str
    problem: str | None
    """The error that training would report; None: passed."""


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
class Rehearsed:
    """The results of a dress rehearsal."""

    plan: Plan
    checks: tuple[Check, ...]
    """Empty for a preset, which is not a recipe that training could start."""
    step: FakeStep | None
    """A step of one device with the whole model, on fake CUDA tensors; None: the device is not a CUDA GPU."""
    placement: Placement | None
    """None: the run has one device."""
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
        """Whether the first and the last rank take part in the same collectives in the same order, so that none waits
        for a collective that the other does not begin. In an all_to_all, ranks may send different amounts."""
        orders = {
            tuple((one.kind, one.dimension, 0 if one.kind == "all_to_all" else one.n_bytes) for one in rank.second)
            for rank in (self.placement.ranks if self.placement is not None else ())
        }
        return len(orders) <= 1

    @property
    def advice(self) -> list[Advice]:
        """The recommended changes: first those for failed checks, then those for the plan."""
        problems = [Advice(check.problem) for check in self.checks if check.problem is not None]
        return [*problems, *advice(self.plan, self.write_seconds)]


def rehearse(
    plan: Plan,
    checks: bool = True,
    disk_gb_per_second: float = DISK_GB_PER_SECOND,
) -> Rehearsed:
    """Rehearse a planned run and return the results.

    Args:
        checks: whether to check the recipe's inputs as training does; not for a preset, which has none.
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
    """Return the bytes of a step's collectives by kind and dimension. Micro-batches are alike: each further one adds
    the difference of the second and the first step."""
    first, second = _by_kind(rank.first), _by_kind(rank.second)
    more = micro_steps - rank.n_second
    return Counter({of: second[of] + more * (second[of] - first[of]) for of in {*first, *second}})


def _by_kind(sent: list[Sent]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for one in sent:
        found[one.kind, one.dimension] += one.n_bytes
    return found
