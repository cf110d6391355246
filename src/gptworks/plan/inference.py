"""Memory of inference: weights in each precision, and the key/value cache."""

from dataclasses import dataclass
from math import prod

from gptworks.config import ModelConfig
from gptworks.plan.params import ParameterCount, count_parameters
from gptworks.plan.published import kv_cache_bytes

BATCHES = (1, 8, 32)
"""Sequences at once for which the cache is shown."""

_BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 8.0, "int4": 4.5}
"""Bits of a matrix's element; int4 with a two-byte scale for each 32, as llama.cpp's Q4_0 has it."""


@dataclass(frozen=True)
class InferenceMemory:
    """What decoding takes with weights of one precision; the cache is float32 beside float32 weights, else bf16."""

    weights: str
    weights_bytes: int
    cache_bytes: dict[int, int]
    """Of full contexts, by the number of sequences."""

    def total_bytes(self, batch_size: int) -> int:
        return self.weights_bytes + self.cache_bytes[batch_size]


def inference_memory(model: ModelConfig) -> list[InferenceMemory]:
    """One for each precision of the weights, widest first. Windowed layers cache their window."""
    parameters = count_parameters(model)
    return [
        InferenceMemory(
            weights,
            weights_bytes(parameters, weights),
            {batch: batch * kv_cache_bytes(model, bytes_per_value=4 if weights == "fp32" else 2) for batch in BATCHES},
        )
        for weights in _BITS
    ]


def weights_bytes(parameters: ParameterCount, precision: str) -> int:
    """All weights; int8 and int4 are of the matrices, with a float32 scale for each row of int8; the rest is bf16."""
    if precision in ("fp32", "bf16"):
        return round(parameters.total * _BITS[precision] / 8)
    matrices = [
        (shape, group.repeats)
        for group in parameters.groups.values()
        for shape in group.tensors.values()
        if len(shape) == 2 and group.name != "position_embedding"
    ]
    elements = sum(repeats * prod(shape) for shape, repeats in matrices)
    scales = sum(4 * repeats * shape[0] for shape, repeats in matrices) if precision == "int8" else 0
    return round(elements * _BITS[precision] / 8) + scales + 2 * (parameters.total - elements)
