"""Memory of inference: the weights in each precision, and the KV cache."""

from dataclasses import dataclass
from math import prod

from gptworks.config import ModelConfig
from gptworks.model.outline import stays_whole
from gptworks.planning.params import ParameterCount, Shape, count_parameters

BATCHES = (1, 8, 32)
"""Batch sizes for which `InferenceMemory.cache_bytes` has a value."""

PRECISIONS = ("fp32", "bf16", "int8", "int4")
INT4_GROUP = 32
"""Number of consecutive elements in a row that share a two-byte scale, as in llama.cpp's Q4_0."""


@dataclass(frozen=True)
class InferenceMemory:
    """Memory of decoding with weights in one precision. The KV cache is fp32 with fp32 weights, else bf16."""

    weights: str
    weights_bytes: int
    cache_bytes: dict[int, int]
    """Bytes of the KV cache with full contexts, by batch size."""

    def total_bytes(self, batch_size: int) -> int:
        return self.weights_bytes + self.cache_bytes[batch_size]


def kv_cache_bytes(
    config: ModelConfig, length: int | None = None, bytes_per_value: int = 2, scale_bytes: int = 0
) -> int:
    """Return the bytes of one sequence in a `SlotCache`.

    The cache keeps the keys and values of all tokens, even in windowed layers. It also keeps the token ids if the model
    reads the previous token.

    Args:
        length: number of tokens; by default, the context length.
        scale_bytes: bytes of the scale of each vector; an int8 cache has scales of 4 bytes.
    """
    length = config.context_length if length is None else length
    vector_bytes = config.d_head * bytes_per_value + scale_bytes
    of_layers = 2 * len(config.layer_uses) * config.n_kv_heads * length * vector_bytes
    return of_layers + kept_ids_bytes(config, length)


def kept_ids_bytes(config: ModelConfig, length: int) -> int:
    """Return the bytes of the int32 token ids that a cache keeps; 0 if the model does not read the previous token."""
    return 4 * length if config.reads_previous_token else 0


def inference_memory(model: ModelConfig) -> list[InferenceMemory]:
    """Return the memory of decoding in each precision of the weights, the widest first."""
    parameters = count_parameters(model)
    return [
        InferenceMemory(
            weights,
            weights_bytes(parameters, weights),
            {batch: batch * kv_cache_bytes(model, bytes_per_value=4 if weights == "fp32" else 2) for batch in BATCHES},
        )
        for weights in PRECISIONS
    ]


def weights_bytes(parameters: ParameterCount, precision: str, outside: bool = True) -> int:
    """Return the bytes of all weights as `gptworks quantize` writes them in a precision by default.

    Norms, biases, positions, gates and routers stay fp32. If `outside` is False, all weights outside the blocks stay
    fp32 too. With int4, matrices outside the blocks, and matrices whose rows cannot be divided into groups, are int8.
    """
    total = 4 * parameters.total
    if precision == "fp32":
        return total
    for group, name, shape in parameters.tensors():
        if len(shape) == 2 and not stays_whole(name) and (outside or group.in_block):
            total += group.repeats * (tensor_bytes(shape, precision, group.in_block) - 4 * prod(shape))
    return total


def tensor_bytes(shape: Shape, precision: str, in_block: bool) -> int:
    """Return the bytes of a tensor in a precision; except in fp32, it must be a matrix.

    int4 applies only to matrices of blocks whose rows can be divided into groups; others are then in int8.
    """
    if precision == "fp32":
        return 4 * prod(shape)
    rows, columns = shape
    if precision == "bf16":
        return 2 * rows * columns
    if precision == "int4" and in_block and columns % INT4_GROUP == 0:
        return rows * columns // 2 + 2 * rows * columns // INT4_GROUP
    return rows * columns + 4 * rows  # int8 elements, and an fp32 scale for each row
