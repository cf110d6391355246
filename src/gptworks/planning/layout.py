"""The layout of a model and its batches on devices, and the sizes that ranks hold, gather and reduce."""

from dataclasses import dataclass
from math import prod

from gptworks.choices import Sharding
from gptworks.config import ModelConfig
from gptworks.planning.params import ParameterCount
from gptworks.planning.trained import Trained

BUCKET_BYTES = 32 * 2**20
"""Gradients that are whole on each rank are added up in buckets of about this size: fewer messages, little memory."""


@dataclass(frozen=True)
class Layout:
    """The arrangement of a model and its batches on devices."""

    sharding: str = "none"
    """none: all on each device (DDP if there are several); fsdp: weights, gradients and optimizer state in equal
    shares, each block gathered as it is used (Zhao et al., 2023); zero2: the same, but a block that was gathered in the
    forward pass stays gathered until its backward pass."""
    data_parallel: int = 1
    """Ranks that see different sequences."""
    tensor_parallel: int = 1
    """Ranks that share each matrix: heads and inner width (Shoeybi et al., 2019)."""
    gathers: str = "fp32"
    """Precision in which sharded matrices of a block are gathered: fp32 or bf16. The shards, parameters outside the
    blocks, vectors and routers are always float32."""

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tensor_parallel

    @property
    def n_parts(self) -> int:
        """Number of ranks that divide each matrix of a block; 1: each rank holds it whole."""
        return (1 if self.sharding == "none" else self.data_parallel) * self.tensor_parallel

    @property
    def sums_in_backward(self) -> bool:
        """Whether the backward pass overlaps with the all-reduce of gradients that each rank has in full;
        tensor-parallel ranks have to agree on theirs first."""
        return self.data_parallel > 1 and self.tensor_parallel == 1 and self.sharding == "none"


ONE_DEVICE = Layout()


def parallel_overrides(sharding: Sharding | None, tensor_parallel: int | None) -> list[str]:
    """The recipe's overrides for the options `--sharding` and `--tensor-parallel`."""
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
    """Number of elements in each group that is gathered or reduced at once, on one tensor-parallel rank."""

    block: int
    """Elements of the matrices of a block, an adapter's included."""
    outside: int
    """Elements of all tensors outside the blocks."""
    whole: int
    """Elements of the vectors and routers of all blocks, which are not sharded."""
    trained_block: int
    trained_outside: int
    trained_whole: int
    """Trained elements of `block`, `outside` and `whole`; the blocks' trained share is assumed equal in all groups."""
    largest: int
    """Elements of the largest tensor."""


def shards_of(parameters: ParameterCount, model: ModelConfig, trained: Trained) -> Shards:
    """Sizes of the groups that `gptworks.training.distributed.parallel.ManyDevices.place` makes."""
    groups = parameters.groups.values()
    in_blocks = sum(group.total for group in groups if group.in_block)
    whole = sum(
        group.repeats * prod(shape)
        for group in groups
        for shape in group.tensors.values()
        if group.in_block and (len(shape) < 2 or group.name == "router")
    )
    outside, block = parameters.total - in_blocks, (in_blocks - whole) // model.n_layers
    added = trained.added // model.n_layers
    trained_outside = outside if trained.embedding or trained.head else 0
    of_blocks = max(0, trained.parameters - trained.added - trained_outside) / max(in_blocks, 1)
    return Shards(
        block=block + added,
        outside=outside,
        whole=whole,
        trained_block=round(of_blocks * block) + added,
        trained_outside=trained_outside,
        trained_whole=round(of_blocks * whole),
        largest=max(prod(shape) for group in groups for shape in group.tensors.values()),
    )


def rank_config(config: ModelConfig, tensor_parallel: int) -> ModelConfig:
    """The model that one tensor-parallel rank holds: its share of heads and inner width, and all of the vocabulary."""
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
