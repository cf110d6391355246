"""Memory of inference: weights in each precision, and the key/value cache."""

from dataclasses import dataclass
from math import prod

from gptworks.config import ModelConfig
from gptworks.model.outline import stays_whole
from gptworks.planning.params import ParameterCount, Shape, count_parameters

BATCHES = (1, 8, 32)
"""Numbers of sequences for which the cache is shown."""

PRECISIONS = ("fp32", "bf16", "int8", "int4")
INT4_GROUP = 32
"""Elements of a row that share a scale of two bytes, as in llama.cpp's Q4_0."""


@dataclass(frozen=True)
class InferenceMemory:
    """Memory of decoding with weights of one precision; the cache is float32 with float32 weights, else bf16."""

    weights: str
    weights_bytes: int
    cache_bytes: dict[int, int]
    """Bytes of the cache with full contexts, by the number of sequences."""

    def total_bytes(self, batch_size: int) -> int:
        return self.weights_bytes + self.cache_bytes[batch_size]


def kv_cache_bytes(config: ModelConfig, length: int | None = None, bytes_per_value: int = 2) -> int:
    """Bytes of one sequence of `length` tokens (default: the context), as `SlotCache` allocates them: every layer, also
    a banded one, keeps all keys and values. The ids are included if the model reads the previous token."""
    length = config.context_length if length is None else length
    of_layers = 2 * len(config.layer_uses) * config.n_kv_heads * config.d_head * length * bytes_per_value
    return of_layers + kept_ids_bytes(config, length)


def kept_ids_bytes(config: ModelConfig, length: int) -> int:
    """Bytes of the token ids, int32, that a cache keeps for `length` tokens."""
    return 4 * length if config.reads_previous_token else 0


def inference_memory(model: ModelConfig) -> list[InferenceMemory]:
    """Memory for each precision of the weights, widest first."""
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
    """Bytes of all weights as `gptworks quantize` writes them; outside=False: weights outside the blocks stay fp32.

    Only matrices have a lower precision; norms, biases, positions, gates and the routers of experts stay fp32.
    With int4, the embedding and the head are in int8, and so is a matrix whose rows cannot be divided into groups.
    """
    total = 4 * parameters.total
    if precision == "fp32":
        return total
    for group in parameters.groups.values():
        for name, shape in group.tensors.items():
            if len(shape) == 2 and not stays_whole(name) and (outside or group.in_block):
                total += group.repeats * (tensor_bytes(shape, precision, group.in_block) - 4 * prod(shape))
    return total


def tensor_bytes(shape: Shape, precision: str, in_block: bool) -> int:
    """Bytes of a matrix in this precision, or of a tensor in fp32."""
    if precision == "fp32":
        return 4 * prod(shape)
    rows, columns = shape
    if precision == "bf16":
        return 2 * rows * columns
    if precision == "int4" and in_block and columns % INT4_GROUP == 0:
        return rows * columns // 2 + 2 * rows * columns // INT4_GROUP
    return rows * columns + 4 * rows  # a scale for each row
