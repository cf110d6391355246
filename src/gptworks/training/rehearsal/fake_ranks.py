"""Rehearses ranks of a run on a process group whose collectives send nothing. A new process runs:

python -m gptworks.training.rehearsal.fake_ranks < ranks.json

The group is torch's backend `fake`: the process is one rank, the others do not exist, and a collective returns at once.
Model, placement, step and optimizer are those of training. The rehearsal has two parts:

    build   the first rank makes its parts with their random numbers: the host's memory and the time are measured
    step    each rank runs two steps on fake tensors, which have no contents: collectives and memory are counted
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch._subclasses import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptworks.config import TrainConfig
from gptworks.confined.child import limit_growth
from gptworks.device import peak_growth_bytes, reset_peak, return_freed_memory
from gptworks.machine import available_memory_bytes
from gptworks.model.gpt import GPT
from gptworks.planning.host import PROCESS_BYTES, building_bytes
from gptworks.planning.layout import Layout
from gptworks.planning.run import Plan
from gptworks.training.distributed.parallel import ManyDevices, mesh_of
from gptworks.training.distributed.ranks import Ranks
from gptworks.training.distributed.shards import local
from gptworks.training.rehearsal.new_process import ProcessFailed, answer, ask
from gptworks.training.rehearsal.trace import LiveBytes, Rehearsal
from gptworks.units import readable

CPU = torch.device("cpu")

MOST_SECONDS = 1200.0
"""Maximum time of the process that rehearses all ranks."""

MOST_DRAWN = 4 * 10**9
"""Maximum number of parameters of a model that is built in memory. About 100 million are drawn at random per second."""


@dataclass(frozen=True)
class Asked:
    """Ranks to rehearse, one after another."""

    rehearsal: Rehearsal
    layout: Layout
    ranks: tuple[int, ...]
    seed: int
    builds: bool
    """Whether the first of `ranks` also makes its parts in memory."""
    memory_bytes: int
    """Bytes by which the process's memory may grow after its start."""


@dataclass(frozen=True)
class Built:
    """The parts of a model that a rank made in memory."""

    seconds: float
    grown_bytes: int | None
    """Growth of the process's memory at its peak; None if unknown on this system."""
    held_bytes: int
    """Bytes of the parts."""


@dataclass(frozen=True)
class Sent:
    """A collective."""

    kind: str
    """all_gather, reduce_scatter, all_reduce, broadcast or all_to_all."""
    dimension: str
    """Mesh dimension along which the ranks communicate: data, tensor or all."""
    n_bytes: int
    """Bytes of the unsharded tensors; for all_to_all, bytes that this rank sends, also to itself. 0 if the tensors are
    only counts or losses. `gptworks.planning.network.Collective` counts bytes in the same way."""


@dataclass(frozen=True)
class RankSteps:
    """Two training steps of a rank on fake tensors."""

    rank: int
    held_bytes: int
    """Bytes of the rank's parts of the model."""
    peak_bytes: int
    """Peak memory of the second step's tensors, with the optimizer's state."""
    first: list[Sent]
    """Collectives of a step with one micro-batch."""
    second: list[Sent]
    """Collectives of a step with two micro-batches, or with one if the run's steps have only one."""
    n_second: int
    """Number of micro-batches of the second step."""
    seconds: float


@dataclass(frozen=True)
class Placement:
    """Ranks of a run, placed on a fake process group."""

    ranks: tuple[RankSteps, ...] = ()
    """The first and the last rank; empty if nothing was checked."""
    built: Built | None = None
    """The first rank's parts; None if they were not built."""
    not_checked: str | None = None
    """The reason why no rank was placed; None if ranks were placed."""
    not_built: str | None = None
    """The reason not to make parts in memory; None if parts were made, or if the process that makes them failed."""


def place_ranks(plan: Plan) -> Placement:
    """Place the first and the last rank of a planned run of several ranks, and run their steps, in a new process."""
    rehearsal, not_built = Rehearsal.of(plan, "cpu"), _why_not_built(plan)
    uncompiled = rehearsal.train.model_copy(update={"compile": "none"})
    layout = plan.setting.layout
    asked = Asked(
        replace(rehearsal, train=uncompiled), layout, (0, layout.world_size - 1), plan.recipe.seed, not_built is None,
        available_memory_bytes(),
    )  # fmt: skip
    try:
        found = ask("fake_ranks", given=asked, returns=Placement, seconds=MOST_SECONDS)
    except ProcessFailed as failed:
        fewer = f"model.n_layers={max(1, plan.recipe.model.n_layers // 4)}"
        why = f"the ranks' process failed: {failed}. Perhaps fewer layers suffice: {fewer}."
        return Placement(not_checked=why, not_built=not_built)
    return replace(found, not_built=not_built)


def _why_not_built(plan: Plan) -> str | None:
    """Return why this machine should not make a rank's parts in memory; None if it can."""
    n = plan.parameters.total
    if n > MOST_DRAWN:
        return f"{n:,} random numbers are drawn on each rank, and the rehearsal draws at most {MOST_DRAWN:,}"
    needed = PROCESS_BYTES + building_bytes(replace(plan.setting, on_cpu=True))
    there = available_memory_bytes()
    if needed > there:
        return f"a rank holds {readable(needed, 'B')} while it builds, and this machine has {readable(there, 'B')}"
    return None


# --------------------------------------------------------------------------------------------- in the new process

KINDS = {
    "allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce", "broadcast": "broadcast",
    "alltoall": "all_to_all",
}  # fmt: skip
"""Kind of collective by a part of the name of torch's operation, without `_`."""

MOST_FIGURES = 8
"""Collectives of at most this many elements exchange only counts or losses. Plans leave them out."""


class Traffic(TorchDispatchMode):
    """Context that records this process's collectives and changes none."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh` has all ranks, in dimensions data and tensor."""
        super().__init__()  # type: ignore[no-untyped-call]
        data, tensor = (mesh.get_group(name) for name in ("data", "tensor"))
        everyone = "data" if tensor.size() == 1 else "tensor" if data.size() == 1 else "all"
        world = distributed.group.WORLD
        assert world is not None, "a mesh has a process group"
        self._dimensions = {
            world.group_name: everyone, data.group_name: "data", tensor.group_name: "tensor"
        }  # fmt: skip
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operation on this rank's part is dispatched here next
        out = function(*args, **(kwargs or {}))
        name = function.name()
        if "c10d" in name and "wait" not in name:
            operation = name.replace("_", "")
            kind = next((kind for part, kind in KINDS.items() if part in operation), None)
            if kind is not None:
                self.sent.append(Sent(kind, self._dimension(args), _n_bytes(kind, args, kwargs)))
        return out

    def _dimension(self, args: Any) -> str:
        """Return the mesh dimension of the process group that an operation's arguments include, as object or name."""
        for argument in args:
            group: Any = argument if isinstance(argument, str) else None
            if isinstance(argument, torch.ScriptObject):
                try:
                    group = ProcessGroup.unbox(argument).group_name
                except RuntimeError:  # another object, such as the kind of reduction
                    continue
            if group in self._dimensions:
                return self._dimensions[group]
        raise AssertionError("a collective of a group outside the mesh")


def _n_bytes(kind: str, args: Any, kwargs: Any) -> int:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if max(tensor.numel() for tensor in tensors) <= MOST_FIGURES:
        return 0
    counted = tensors[1] if kind == "all_to_all" else max(tensors, key=lambda tensor: tensor.nbytes)
    return counted.nbytes


class _FakeRanks(Ranks):
    """One rank among others that do not exist."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class _Measured(ManyDevices):
    """Measures the growth of the process's memory until the rank's parts are made.

    The measurement ends before FSDP first gathers parts, because on a GPU, gathered parts are not in the host's memory.
    """

    grown_bytes: int | None = None

    def build(self, make: Callable[[], GPT], device: torch.device) -> GPT:
        self._before = reset_peak(CPU)
        return super().build(make, device)

    def _placed(self, model: GPT) -> GPT:
        self.grown_bytes = peak_growth_bytes(CPU, self._before)
        return super()._placed(model)


class _OnFakeTensors(ManyDevices):
    """Builds the model on the meta device, and replaces its parts by fake tensors once the model is divided."""

    def build_on_meta(self, make: Callable[[], GPT]) -> None:
        """Build the model on the meta device and divide it, outside of `FakeTensorMode`: modules cannot exchange fake
        tensors for others."""
        with torch.device("meta"):
            self._on_meta = make()
        self._divide(self._on_meta, CPU)

    def build(self, make: Callable[[], GPT], device: torch.device) -> GPT:
        self._on_meta.to_empty(device=device)
        self._on_meta.reset_tables(device)
        return self._placed(self._on_meta)


def _place(asked: Asked) -> Placement:
    limit_growth("RLIMIT_DATA", asked.memory_bytes)
    found, built = [], None
    for number, rank in enumerate(asked.ranks):
        if asked.builds and not number:
            with _joined(rank, asked) as parallel:
                built = _build(asked, _Measured(*parallel))
        with _joined(rank, asked) as parallel:
            found.append(_steps(asked.rehearsal, _OnFakeTensors(*parallel)))
    return Placement(tuple(found), built)


@contextlib.contextmanager
def _joined(rank: int, asked: Asked) -> Iterator[tuple[TrainConfig, Ranks, DeviceMesh, Layout]]:
    """Context in which this process is a rank of a fake group. It yields the arguments of the rank's `ManyDevices`."""
    layout = asked.layout
    distributed.init_process_group("fake", rank=rank, world_size=layout.world_size)
    try:
        yield asked.rehearsal.train, _FakeRanks(rank, layout.world_size), mesh_of(layout, CPU), layout
    finally:
        distributed.destroy_process_group()


def _build(asked: Asked, parallel: _Measured) -> Built:
    rehearsal = asked.rehearsal
    return_freed_memory()
    torch.manual_seed(asked.seed)
    started = time.perf_counter()
    parallel.build(rehearsal.new_model, CPU)
    return Built(time.perf_counter() - started, parallel.grown_bytes, _held_bytes(parallel))


def _held_bytes(parallel: ManyDevices) -> int:
    return sum(local(parameter).nbytes for parameter in parallel.parameters.values())


def _steps(rehearsal: Rehearsal, parallel: _OnFakeTensors) -> RankSteps:
    rows, started = rehearsal.train.micro_batch_size, time.perf_counter()
    parallel.build_on_meta(rehearsal.new_model)
    n_second = rehearsal.train.batch_size // rows
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        step = rehearsal.new_step(parallel)
        held_bytes = _held_bytes(parallel)
        tokens = torch.zeros(rows, rehearsal.row_length, dtype=torch.int64)
        batch = rehearsal.batch(tokens)
        sent: list[list[Sent]] = []
        for n in (1, n_second):
            live.peak_bytes = live.now_bytes
            with Traffic(parallel.mesh) as traffic:
                step.accumulate([batch] * n, n * tokens.numel())
                step.gradient_norm()
                step.apply(math.inf)  # an infinite norm, so that gradients are clipped
            sent.append(traffic.sent)
        peak_bytes = live.found_bytes + live.peak_bytes
    seconds = time.perf_counter() - started
    return RankSteps(parallel.ranks.rank, held_bytes, peak_bytes, sent[0], sent[1], n_second, seconds)


if __name__ == "__main__":
    answer(Asked, _place)
