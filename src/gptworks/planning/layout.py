"""The layout of a model and its batches on devices, and the sizes of the tensors that ranks hold, gather and reduce."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import prod

from gptworks.choices import Sharding
from gptworks.config import ModelConfig
from gptworks.planning.params import ParameterCount, Shape, Trained

BUCKET_BYTES = 32 * 2**20
"""Approximate bytes of gradients in one all-reduce, a compromise between few messages and little memory."""


@dataclass(frozen=True)
class Layout:
    """The arrangement of a model and its batches on devices."""

    sharding: str = "none"
    """none: each data-parallel rank holds everything (DDP with several ranks). fsdp: weights, gradients and optimizer
    state are sharded, and each block is gathered for its forward and again for its backward pass (Zhao et al., 2023).
    zero2: like fsdp, but a block stays gathered until its backward pass."""
    data_parallel: int = 1
    """Number of ranks, or groups of tensor-parallel ranks, that read different sequences."""
    tensor_parallel: int = 1
    """Number of ranks that divide each block's heads and inner width (Shoeybi et al., 2019)."""
    gathers: str = "fp32"
    """Precision in which a block's sharded matrices are gathered: fp32 or bf16. The shards themselves, parameters
    outside the blocks, vectors and routers are always fp32."""

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tensor_parallel

    @property
    def n_shards(self) -> int:
        """Number of ranks of FSDP that divide each tensor; 1 if not sharded."""
        return 1 if self.sharding == "none" else self.data_parallel

    @property
    def n_parts(self) -> int:
        """Number of ranks that divide each matrix of a block; 1 if each rank holds whole matrices."""
        return self.n_shards * self.tensor_parallel

    @property
    def sums_in_backward(self) -> bool:
        """Whether DDP all-reduces gradients during the backward pass. With tensor parallelism the all-reduce comes
        after the pass, because tensor-parallel ranks first have to agree on their gradients."""
        return self.data_parallel > 1 and self.tensor_parallel == 1 and self.sharding == "none"


ONE_DEVICE = Layout()


def parallel_overrides(sharding: Sharding | None, tensor_parallel: int | None) -> list[str]:
    """Return the recipe overrides that correspond to the options `--sharding` and `--tensor-parallel`."""
    strategies = {
        "auto": ["train.parallel.strategy=auto"],
        "none": ["train.parallel.strategy=ddp"],
        "zero2": ["train.parallel.strategy=fsdp", "train.parallel.reshard_after_forward=false"],
        "fsdp": ["train.parallel.strategy=fsdp", "train.parallel.reshard_after_forward=true"],
    }
    split = [] if tensor_parallel is None else [f"train.parallel.tensor_parallel={tensor_parallel}"]
    return [*(strategies[sharding] if sharding is not None else []), *split]


@dataclass(frozen=True)
class Shards:
    """Sizes of the groups of tensors that FSDP gathers and reduces together, in elements on a tensor-parallel rank.

    FSDP shards a tensor by rows and pads them to a multiple of the number of ranks; the sizes of sharded groups include
    the padding.
    """

    block: int
    """Elements of one block's matrices, including an adapter's."""
    outside: int
    """Elements of all tensors outside the blocks."""
    whole: int
    """Elements of all blocks' vectors and routers, which are not sharded."""
    trained_block: int
    trained_outside: int
    trained_whole: int
    """Trained elements of `block`, `outside` and `whole`. This assumes that `outside` is trained as a whole or not
    at all, and that the trained share in `block` and `whole` is the same."""
    largest: int
    """Elements of the largest tensor, without padding."""
    n_shards: int
    """Number of ranks that shard each tensor; 1 if not sharded."""
    padding: float
    """Elements of padding for each element without padding, in the sharded tensors: the blocks' matrices and all
    tensors outside the blocks."""

    def rank_bytes(self, n_bytes: int, whole_bytes: int) -> int:
        """Return the bytes that the first rank holds of tensors with `n_bytes`: `whole_bytes` that are not sharded, and
        its shard of the rest, with padding."""
        if self.n_shards == 1:
            return n_bytes
        return round((n_bytes - whole_bytes) * (1 + self.padding)) // self.n_shards + whole_bytes


def padded(shape: Shape, n_shards: int) -> int:
    """Return the elements of a tensor whose rows are padded to a multiple of `n_shards`."""
    return -(-shape[0] // n_shards) * n_shards * prod(shape[1:]) if shape else 1


def shards_of(parameters: ParameterCount, model: ModelConfig, trained: Trained, n_shards: int) -> Shards:
    """Return the sizes of the groups that `gptworks.training.distributed.parallel.ManyDevices.place` makes.

    Args:
        n_shards: number of ranks that shard each tensor; 1 if not sharded.
    """
    whole = matrices = outside = 0
    for group, _, shape in parameters.tensors():
        if not group.in_block:
            outside += padded(shape, n_shards)
        elif len(shape) < 2 or group.name == "router":
            whole += group.repeats * prod(shape)
        else:
            matrices += group.repeats * padded(shape, n_shards)
    block = matrices // model.n_layers
    added = sum(padded(shape, n_shards) for shape in trained.adapters) // model.n_layers
    in_blocks = sum(group.total for group in parameters.groups.values() if group.in_block)
    is_outside = trained.embedding or trained.head
    own_outside = is_outside * (parameters.total - in_blocks)
    of_blocks = max(0, trained.parameters - trained.added - own_outside) / max(in_blocks, 1)
    return Shards(
        n_shards=n_shards,
        padding=(matrices + outside) / max(1, parameters.total - whole) - 1,
        block=block + added,
        outside=outside,
        whole=whole,
        trained_block=round(of_blocks * block) + added,
        trained_outside=outside * is_outside,
        trained_whole=round(of_blocks * whole),
        largest=max(prod(shape) for _, _, shape in parameters.tensors()),
    )


def divided(work: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Divide tasks among ranks, about equally in work: the costliest first, each to the rank with the least work.

    Args:
        work: the cost of each task.

    Returns:
        Each rank's tasks by their index, the costliest first. Tasks of equal cost keep their order.
    """
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    least = [(0, rank) for rank in range(n_ranks)]  # a heap of (work, rank)
    for task in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        before, rank = heappop(least)
        shares[rank].append(task)
        heappush(least, (before + work[task], rank))
    return shares


def rank_config(config: ModelConfig, tensor_parallel: int) -> ModelConfig:
    """Return the configuration of a tensor-parallel rank's model: fewer heads, smaller inner width, all else equal."""
    if tensor_parallel == 1:
        return config
    return config.model_copy(
        update={
            "n_heads": config.n_heads // tensor_parallel,
            "n_kv_heads": max(1, config.n_kv_heads // tensor_parallel),
            "d_ff": -(-config.d_ff // tensor_parallel),
            "d_ff_shared": -(-config.d_ff_shared // tensor_parallel),
        }
    )
