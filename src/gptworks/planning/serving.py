"""Memory and speed of an engine that serves a model: weights, keys and values, and the workspace of a step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from gptworks.choices import CacheName, LoadedWeights
from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.kernels.step import refused_architecture
from gptworks.model.cost import Shapes
from gptworks.model.gpt import GPT
from gptworks.planning.bisection import largest_that_fits
from gptworks.planning.devices import Device
from gptworks.planning.inference import PRECISIONS, kv_cache_bytes, tensor_bytes, weights_bytes
from gptworks.planning.params import ParameterCount, count_parameters, require_vocab_size
from gptworks.planning.setting import PREFILL_TOKENS, UNPACKED_ELSEWHERE, UNPACKED_ON_CPU
from gptworks.planning.state import tables_bytes

CPU_ROWS = 128
"""Prompt tokens that the C++ engine computes in one step, in addition to a token of each other text."""

BLOCK = 16
"""Number of positions in a block of the C++ engine's cache."""

MOST_REQUESTS = 2**20
"""Largest number of requests that `Serving.most_requests` tries."""


@dataclass(frozen=True)
class Serving:
    """An engine with a slot of `context` tokens for each of `requests` texts. All slots are in use."""

    model: ModelConfig
    device: Device
    requests: int
    context: int
    weights: str
    """Format of the matrices in memory: fp32, bf16, int8 or int4."""
    cache: str
    """Format of the keys and values: fp32, bf16 or int8."""

    @property
    def parameters(self) -> ParameterCount:
        return count_parameters(self.model)

    @property
    def weights_bytes(self) -> int:
        return weights_bytes(self.parameters, self.weights)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of full slots."""
        length = -(-self.context // BLOCK) * BLOCK if _in_cpp(self.model, self.device) else self.context
        scale_bytes = 4 if self.cache == "int8" else 0
        return self.requests * kv_cache_bytes(self.model, length, CACHE_BYTES[self.cache], scale_bytes)

    @property
    def tables_bytes(self) -> int:
        """Bytes of the rotary tables, which cover the whole context of the model."""
        return tables_bytes(self.model)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of a step's tensors and scratch memory; on a CPU, an upper bound for any number of threads."""
        if not _in_cpp(self.model, self.device):
            on_cpu, cache_bytes = self.device.on_cpu, CACHE_BYTES[self.cache]
            in_place = on_cpu or self.device.has_flash
            step = step_bytes(self.model, self.requests, self.context, 4, cache_bytes, in_place, on_cpu)
            at_once = UNPACKED_ON_CPU if on_cpu else UNPACKED_ELSEWHERE
            unpacked = 4 * min(at_once, max(self.model.d_ff * self.model.d_model, 1))
            return step + (unpacked if self.weights != "fp32" else 0)
        c, rows = self.model, self.requests + CPU_ROWS
        heads = c.n_heads * c.d_head
        floats = rows * (4 * c.d_model + 3 * heads + 2 * c.n_kv_heads * c.d_head + 3 * c.d_ff)
        return 4 * (floats + 2 * self.requests * c.vocab_size)

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.tables_bytes + self.cache_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.device.memory_bytes

    @property
    def most_requests(self) -> int:
        """Largest number of requests, up to `MOST_REQUESTS`, that fits; 0 if the memory is too small for one."""
        return largest_that_fits(lambda n: replace(self, requests=n).fits, 0, MOST_REQUESTS + 1)

    @property
    def most_tokens_per_second(self) -> float | None:
        """Upper bound of the tokens generated per second for all requests; None if the device's bandwidth is unknown.

        Each step must read from memory the weights that a token uses.
        """
        if self.device.bandwidth is None:
            return None
        model, count = self.model, self.parameters
        lookups = 4 * model.d_model * model.context_length if model.position == "learned" else 0
        if not model.tie_embeddings:
            lookups += tensor_bytes((require_vocab_size(model), model.d_model), self.weights, in_block=False)
        return self.requests * self.device.bandwidth * count.total / (count.active * (self.weights_bytes - lookups))

    @property
    def alternatives(self) -> Iterator["Serving"]:
        """The same requests with the weights in each format, and last with weights in int4 and a cache in int8."""
        for weights in PRECISIONS:
            yield replace(self, weights=weights, cache=_cache("auto", weights, _in_cpp(self.model, self.device)))
        yield replace(self, weights=PRECISIONS[-1], cache="int8")


CACHE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Bytes of a number in each format of the cache; in int8, each vector has a scale of 4 bytes too."""


def serving(
    model: ModelConfig,
    device: Device,
    requests: int,
    context: int | None = None,
    weights: LoadedWeights = "auto",
    cache: CacheName = "auto",
) -> Serving:
    """Return the memory that serving a model needs on a device.

    Args:
        requests: number of texts that are generated at once.
        context: tokens of each text with its prompt; by default, the model's context.
        weights: format of the matrices. With auto, it is fp32, as training writes them.
        cache: format of the keys and values. With auto, the engine chooses it.

    Raises:
        UserError: a number is below 1, or the context is longer than the model's.
    """
    if requests < 1:
        raise UserError(f"--requests {requests} is below 1.")
    longest = model.context_length
    if context is not None and not 1 <= context <= longest:
        raise UserError(f"--context {context}: this model's context has {longest} tokens; give 1 to {longest}.")
    held = "fp32" if weights == "auto" else weights
    return Serving(model, device, requests, context or longest, held, _cache(cache, held, _in_cpp(model, device)))


def _in_cpp(model: ModelConfig, device: Device) -> bool:
    """Return whether the C++ engine runs the model, assuming that the engine can be built."""
    return device.on_cpu and refused_architecture(model) is None


def _cache(cache: str, weights: str, in_cpp: bool) -> str:
    """Return the format of the cache. For `auto`, it is bf16 in C++ if the weights are not fp32, and else fp32."""
    return cache if cache != "auto" else "bf16" if in_cpp and weights != "fp32" else "fp32"


@lru_cache(maxsize=64)
def step_bytes(
    model: ModelConfig,
    n_texts: int,
    length: int,
    product_bytes: int,
    cache_bytes: int,
    in_place: bool = False,
    on_cpu: bool = False,
) -> int:
    """Return the peak bytes of an engine's step in torch, in addition to weights, keys and values. A step computes a
    part of a prompt or one token of each text, and then the logits. Attention may copy a layer's keys and values.

    Args:
        length: tokens of each text.
        product_bytes, cache_bytes: bytes per number of activations and of the cache.
        in_place: whether attention reads the slots in place, as Triton's kernel does on NVIDIA GPUs with flash
            attention. A CPU also reads them in place, one text at a time.
        on_cpu: whether heads share keys and values without copies, as a CPU's fused attention does.
    """
    chunk = min(PREFILL_TOKENS, length)
    shapes = Shapes(model, 1, chunk, product_bytes, on_cpu=False)
    kinds = {model.layer_kind(layer): layer for layer in range(model.n_layers)}
    block = max(GPT.layer_cost(shapes, layer).passing_bytes for layer in kinds.values())
    prompt = block + 5 * chunk * length  # the mask, boolean and as a bias in float32
    if cache_bytes == 1:  # unpacked to float32 and then to the products' dtype
        prompt += (4 + product_bytes) * 2 * model.n_kv_heads * model.d_head * length
    if model.attention_softcap is not None:  # weights of all pairs: scaled, capped and masked
        prompt += 3 * 4 * model.n_heads * chunk * length
    if not on_cpu or model.attention_softcap is not None:
        prompt += product_bytes * 2 * _repeated_heads(model) * model.d_head * length
    texts = 0 if in_place else attention_copies_bytes(model, n_texts, length, product_bytes, cache_bytes)
    return max(prompt, texts) + 4 * n_texts * model.vocab_size


def attention_copies_bytes(
    model: ModelConfig, n_texts: int, length: int, product_bytes: int, cache_bytes: int | None = None
) -> int:
    """Return the bytes of one layer's keys and values that attention copies on an accelerator to compute a token of
    each of several texts at once. Keys and values are copied from each text's slot. If query heads share them, they are
    repeated for each query head. A single text is read in place."""
    if n_texts < 2:
        return 0
    groups, width = model.n_kv_heads, model.d_head
    both = 2 * product_bytes * (groups + _repeated_heads(model)) * width
    # With an int8 cache: unpacked keys, and the values' elements, scales and products in one or two dtypes.
    unpacking = groups * (width * (product_bytes + 1 + 4 + product_bytes % 4) + 4) if cache_bytes == 1 else 0
    return n_texts * length * max(both, unpacking)


def _repeated_heads(model: ModelConfig) -> int:
    """Return the number of heads for which CUDA's kernels with a mask need repeated keys and values, or 0."""
    return model.n_heads if model.n_heads != model.n_kv_heads else 0
