"""Communication between ranks in a training step: bytes, time, and the part that overlaps with computing.

Collectives are assumed to run as rings, as NCCL's do for large tensors. For S bytes, each of n ranks sends and receives

    all_gather, reduce_scatter, broadcast    (n - 1) / n · S bytes
    all_to_all (S: bytes of one rank)        (n - 1) / n · S
    all_reduce                               2 (n - 1) / n · S

("bus bandwidth" in nccl-tests' PERFORMANCE.md; Patarasuk & Yuan, 2009). A ring over several nodes enters and leaves
each node once. NCCL makes a ring for each network card, so a group uses the cards of all its members. With k members
in each node, a collective takes

    max(sent / intra, sent / (k · inter)) seconds

where intra is the bytes/s of a device within its node and inter the bytes/s of its network card. In a single node, a
collective takes sent / intra. Latency is ignored, so a step with many ranks and small tensors takes longer than
estimated.

    ddp      all gradients are reduced in float32 once per step, during its last backward pass (after it if tensor > 1)
    fsdp     in each micro-batch, blocks and the root are gathered in the forward pass, blocks again in the backward
             pass, and gradients are reduced in float32 (Rajbhandari et al., 2020, section 7; Zhao et al., 2023)
    zero2    like fsdp, but blocks are not gathered again in the backward pass
    tensor   in each micro-batch, each block all-reduces the residual stream 4 times, and 2 more times if it is
             recomputed (Shoeybi et al., 2019, section 3)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod

from gptworks.config import computes_again
from gptworks.config.optimizers import OPTIMIZERS, Ownership
from gptworks.planning.devices import Device
from gptworks.planning.layout import BUCKET_BYTES, Layout, Shards, shards_of
from gptworks.planning.setting import Setting


@dataclass(frozen=True)
class Collective:
    """A collective operation of a step, or several of the same kind added up."""

    what: str
    """Identifier of the transferred tensors, such as `gradients`."""
    kind: str
    """The operation: all_gather, reduce_scatter, all_reduce, broadcast or all_to_all."""
    dimension: str
    """Mesh dimension along which ranks communicate: data, tensor or all."""
    n_bytes: int
    """Bytes of the unsharded tensors (all_to_all: of one rank's tensors), per micro-batch if `in_each_micro_batch`,
    else per step."""
    when: str
    """The computation that the transfer overlaps with: forward or backward (of each micro-batch), or last_backward (of
    the last micro-batch). Without overlap: exposed, or generation (before answers are generated)."""
    exposed_bytes: int = 0
    """The part of `n_bytes` that is sent before or after all computation, and so does not overlap with it."""
    in_each_micro_batch: bool = True


@dataclass(frozen=True)
class StepTime:
    """Seconds per step of computation and communication on one rank."""

    compute: float
    communication: float
    exposed: float
    """The part of `communication` that does not overlap with computation."""

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def collectives(s: Setting) -> Iterator[Collective]:
    """Yield the collectives of a step; none for a single rank."""
    layout = s.layout
    parameters, trained = s.of_rank
    shards = shards_of(parameters, s.rank_model, trained, layout.n_shards)
    sharded = layout.n_shards > 1
    if sharded:
        yield from _of_shares(layout, shards, s.model.n_layers)
        if (rollouts := s.objective.rollouts) is not None:
            gathered = (_gathered_bytes(layout, shards) * s.model.n_layers + 4 * shards.outside) // rollouts.steps
            yield Collective("weights_to_generate", "all_gather", "data", gathered, "generation", 0, False)
    elif layout.data_parallel > 1:
        tail = min(4 * trained.parameters, max(BUCKET_BYTES, 4 * shards.trained_outside))
        when = "last_backward" if layout.sums_in_backward else "exposed"
        yield Collective("gradients", "all_reduce", "data", 4 * trained.parameters, when, tail, False)
    if (ownership := OPTIMIZERS[s.optimizer].ownership) is not None:
        yield from _of_owners(s, ownership)
    if layout.tensor_parallel > 1:
        yield from _of_tensor_parallel(s, shards, sharded)


def _of_shares(layout: Layout, shards: Shards, n_layers: int) -> Iterator[Collective]:
    block, root = _gathered_bytes(layout, shards), 4 * shards.outside
    yield Collective("weights", "all_gather", "data", n_layers * block + root, "forward", block + root)
    if layout.sharding == "fsdp":
        yield Collective("weights_again", "all_gather", "data", n_layers * block, "backward", block)
    gradients, last = 4 * n_layers * shards.trained_block, 4 * shards.trained_outside
    yield Collective("gradients", "reduce_scatter", "data", gradients + last, "backward", last or gradients // n_layers)
    if shards.trained_whole:
        whole = 4 * shards.trained_whole
        yield Collective("whole_gradients", "all_reduce", "data", whole, "exposed", whole, False)


def _gathered_bytes(layout: Layout, shards: Shards) -> int:
    """Return the bytes of a block's matrices, as FSDP gathers them."""
    return (2 if layout.gathers == "bf16" else 4) * shards.block


def _of_owners(s: Setting, ownership: Ownership) -> Iterator[Collective]:
    """Yield the collectives that send matrices to their owners, and updates from the owners back; see
    `gptworks.training.distributed.shards`."""
    layout, n_parts = s.layout, s.layout.n_parts
    n_copies = layout.world_size // n_parts
    matrices = s.whole[1].matrices
    held = ownership.element_bytes * sum(map(prod, matrices)) // n_parts
    if n_parts > 1:
        sharded = "data" if layout.tensor_parallel == 1 else "all"
        dimension = "tensor" if n_parts == layout.tensor_parallel else sharded
        for what in ("gathered_matrices", "updates"):
            yield Collective(what, "all_to_all", dimension, held // n_copies, "exposed", held // n_copies, False)
    if n_copies > 1:
        yield Collective("updates", "broadcast", "data", held, "exposed", held, False)


def _of_tensor_parallel(s: Setting, shards: Shards, sharded: bool) -> Iterator[Collective]:
    product = 4 if s.precision == "fp32" else 2
    stream = s.micro_batch_size * s.objective.rows_per_sample * s.row_length * s.model.d_model * product
    again = sum(computes_again(s.checkpointing, layer) for layer in range(s.model.n_layers))
    n_bytes = (4 * s.model.n_layers + 2 * again) * stream
    yield Collective("activations", "all_reduce", "tensor", n_bytes, "exposed", n_bytes)
    alike = 4 * (shards.trained_outside // (s.layout.data_parallel if sharded else 1) + shards.trained_whole)
    yield Collective("gradients_alike", "broadcast", "tensor", alike, "exposed", alike, False)


def sent_bytes(collective: Collective, layout: Layout, micro_steps: int, n_bytes: int | None = None) -> float:
    """Return the bytes that a rank sends, and also receives, in a step.

    Args:
        n_bytes: bytes of the tensors to send; by default, the collective's `n_bytes`.
    """
    n = _group_size(collective, layout)
    times = micro_steps if collective.in_each_micro_batch else 1
    factor = (2 if collective.kind == "all_reduce" else 1) * (n - 1) / n
    return factor * times * (collective.n_bytes if n_bytes is None else n_bytes)


def _group_size(collective: Collective, layout: Layout) -> int:
    sizes = {"data": layout.data_parallel, "tensor": layout.tensor_parallel, "all": layout.world_size}
    return sizes[collective.dimension]


def ring_bandwidth(collective: Collective, layout: Layout, device: Device) -> float:
    """Return the bytes/s that each rank sends, in the slowest group of ranks along the collective's mesh dimension.

    Tensor-parallel ranks are neighbors; the members of a data-parallel group are `tensor_parallel` ranks apart.
    """
    tensor, size = layout.tensor_parallel, _group_size(collective, layout)
    alike = tensor if collective.dimension == "data" else 1  # distance between neighboring members of a group
    in_node = min(size, max(1, device.per_node // alike))
    if size <= in_node:
        return device.intra_node
    across = in_node * device.inter_node
    return min(device.intra_node, across) if in_node > 1 else across


def step_time(
    setting: Setting, device: Device, micro_steps: int, forward_seconds: float, backward_seconds: float
) -> StepTime:
    """Estimate the seconds of a step on each rank.

    FSDP gathers a block while the previous block is computed, so each pass takes the longer of gathering and computing,
    plus the transfers without overlap: of the root, of the first block and of the last gradients. DDP reduces gradients
    during the last micro-batch's backward pass. Tensor-parallel ranks wait for each all-reduce.

    Args:
        forward_seconds, backward_seconds: seconds of computation in these passes, of all micro-batches of a step.
    """
    layout = setting.layout
    spent = dict.fromkeys(("forward", "backward", "last_backward", "generation", "exposed"), 0.0)
    for one in collectives(setting):
        rate = ring_bandwidth(one, layout, device)
        exposed_bytes = one.n_bytes if one.when == "exposed" else one.exposed_bytes
        before_or_after = sent_bytes(one, layout, micro_steps, exposed_bytes) / rate
        spent["exposed"] += before_or_after
        spent[one.when] += sent_bytes(one, layout, micro_steps) / rate - before_or_after
    exposed = spent["exposed"] + spent["generation"] + max(0.0, spent["forward"] - forward_seconds)
    exposed += max(0.0, spent["backward"] - backward_seconds)
    exposed += max(0.0, spent["last_backward"] - backward_seconds / micro_steps)
    return StepTime(forward_seconds + backward_seconds, sum(spent.values()), exposed)


def machines(layout: Layout, device: Device) -> int:
    """Return the number of nodes that the ranks of a layout occupy."""
    return ceil(layout.world_size / device.per_node)
