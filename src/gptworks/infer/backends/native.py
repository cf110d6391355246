"""The native backend, which computes steps in C++ (step.cpp, loaded by library.py), and `choose_backend`.

Prefill, decoding and the check of draft tokens use the same call, with one row per token of any text. A long chunk
takes several calls. The bits of a row's result depend neither on other rows nor on how its text is split into chunks.

Activations are float32. If the processor can multiply narrower numbers, activations are rounded before a product. With
bf16 weights, activations are rounded to bf16, as in torch (AVX512_BF16, AMX). With 8-bit and 4-bit weights, activations
are rounded to 16 bits with one scale per row, which is finer than bf16 (AVX2, AVX512_VNNI, ARM's dot products; AMX for
int8). With a bf16 cache and AVX512_BF16, queries and attention weights are rounded to bf16.
"""

import ctypes
import warnings
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gptworks.choices import BackendName
from gptworks.errors import UserError
from gptworks.infer.backends.backend import Backend, Chunk, TorchBackend
from gptworks.infer.backends.cache import SlotCache
from gptworks.infer.backends.placement import matrices, settle, widest_panels
from gptworks.infer.backends.structure import ModelStructure
from gptworks.kernels.build import Unavailable
from gptworks.kernels.call import call
from gptworks.kernels.library import library
from gptworks.kernels.step import refused_architecture
from gptworks.model.gpt import GPT
from gptworks.model.lora import has_adapter
from gptworks.quantize.panels import UNIT, size_in_panels
from gptworks.units import counted

STEP_TOKENS, STEP_TOKENS_WITH_AMX = 128, 512
"""Maximum tokens of a chunk in one call, without and with AMX. The numbers are large enough that reading the weights
once per call costs little."""

WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)
"""The dtypes of matrices that the kernels multiply."""


def choose_backend(
    model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None, name: BackendName = "auto"
) -> Backend:
    """Return a backend for a model on its device: native on a CPU if the model is not in training, otherwise torch.

    Warns (UserWarning), once, if torch replaces the native backend. The result's `description` names the backend.

    Args:
        n_slots, capacity: number of slots, and of tokens in each slot.
        dtype: the caches' dtype; None: the backend's default.
        name: auto: choose as above. native: the native backend, or an error. torch: the model's own forward pass.

    Raises:
        UserError: name="native", and the native backend is unavailable.
    """
    if name == "torch" or (name == "auto" and (model.device.type != "cpu" or model.training)):
        return TorchBackend(model, n_slots, capacity, dtype=dtype)
    try:
        is_fp16 = model.token_embedding.weight.dtype == torch.float16
        if name == "auto" and is_fp16 and refusal(model) is None and not library().has_wide_vectors:
            # Without F16C, software converts each fp16 weight. Other weights are at least as fast as in torch.
            raise Unavailable("without AVX2 it is 12 times slower than torch for weights in fp16.")
        return NativeBackend(model, n_slots, capacity, dtype=dtype)
    except Unavailable as error:
        if name == "native":
            raise UserError(f"backend=native cannot compute this model here: {error} Take auto or torch.") from None
        message = f"the native engine is not used: {error} torch computes instead."
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, stacklevel=2)
        return TorchBackend(model, n_slots, capacity, dtype=dtype)


_warned: set[str] = set()


# ------------------------------------------------------------------------------------------------------ the backend


def refusal(model: GPT) -> str | None:
    """Return the reason why the kernels cannot compute a model; None if they can."""
    if model.device.type != "cpu":
        return f"the model is on {model.device}."
    if reason := refused_architecture(model.config):
        return reason
    if has_adapter(name for name, _ in model.named_parameters()):
        return "it adds no adapter to the weights."
    strange = {module.weight.dtype for module in model.modules() if hasattr(module, "weight")} - set(WEIGHTS)
    return f"it has no weights in {strange.pop()}." if strange else None


class NativeBackend(Backend):
    """Computes a model in C++ on the CPU. Moves the model's matrices (placement.py) and keeps their addresses.

    Do not replace a matrix later. Only fp32 matrices whose rows are a multiple of 64 bytes may be changed in place.
    The kernels may read copies of the other matrices.
    """

    invariant = True

    def __init__(self, model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        """Allocate `n_slots` slots of `capacity` tokens, and move the model's matrices.

        Args:
            model: a model in fp32, or with matrices in bf16, fp16, int8 or int4 (gptworks.quantize).
            dtype: the cache's dtype: fp32, bf16 or int8; None: fp32 for a model in fp32, else bf16.

        Raises:
            Unavailable: the kernels cannot compute the model (see `refusal`), or cannot be built or loaded.
        """
        if reason := refusal(model):
            raise Unavailable(reason)
        self._kernels = kernels = library()
        self._step_tokens = STEP_TOKENS_WITH_AMX if kernels.has_amx else STEP_TOKENS
        n_threads = counted(torch.get_num_threads(), "thread")
        self.description = f"native ({kernels.instructions}, {kernels.origin}, {n_threads})"
        kind = model.token_embedding.weight.dtype
        dtype = dtype or (torch.float32 if kind == torch.float32 else torch.bfloat16)
        self.cache = SlotCache(model.config, n_slots, capacity, dtype=dtype, unit=UNIT)
        self.vocab_size = model.config.vocab_size
        self.widest = widest_panels(kernels)
        settle(list(matrices(model)), self.widest)
        self.model = model
        self._structure = _InProcess(self)

    def compute(self, chunks: Sequence[Chunk], on_cuda: bool = False) -> list[Tensor]:
        longest = max(len(chunk.tokens) for chunk in chunks)
        at_once = self._step_tokens
        if longest <= at_once:
            return self._compute(chunks)
        logits: list[list[Tensor]] = [[] for _ in chunks]
        for first in range(0, longest, at_once):
            here = [(i, chunk) for i, chunk in enumerate(chunks) if len(chunk.tokens) > first]
            parts = [_part(chunk, first, at_once) for _, chunk in here]
            for (i, _), part in zip(here, self._compute(parts), strict=True):
                logits[i].append(part)
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in logits]

    def read(self, tokens: Sequence[int]) -> Tensor:
        parts = []
        for first in range(0, len(tokens), self._step_tokens):
            part = tokens[first : first + self._step_tokens]
            features = torch.empty(len(part), self.model.config.d_model)
            self._run([Chunk(0, first, part, len(part))], None, features)
            parts.append(self.model.feature_scale(features))
        return torch.cat(parts)

    def logits(self, features: Tensor) -> Tensor:
        rows = features.float().reshape(-1, features.size(-1)).contiguous()
        logits = torch.empty(len(rows), self.vocab_size)
        call(self._kernels, "logits", (rows, logits), model=self._structure.root)
        return logits.view(*features.shape[:-1], -1)

    def grow(self, n_slots: int, capacity: int, held: Sequence[int]) -> None:
        super().grow(n_slots, capacity, held)
        self._structure = _InProcess(self)

    def _compute(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Compute one step over all rows of the chunks; return each chunk's logits, fp32 [n, V]."""
        n_wanted = sum(chunk.n_logits for chunk in chunks)
        logits = torch.empty(n_wanted, self.vocab_size)
        features = None if self.features is None else torch.empty(n_wanted, self.model.config.d_model)
        self._run(chunks, logits, features)
        if features is not None:
            self._keep(chunks, self.model.feature_scale(features))
        return list(torch.split(logits, [chunk.n_logits for chunk in chunks]))

    def _run(self, chunks: Sequence[Chunk], logits: Tensor | None, features: Tensor | None) -> None:
        """Compute a step over all rows of the chunks. Write the last rows of each chunk to `logits` and `features`."""
        tokens, slots, positions, wanted = (array("q") for _ in range(4))
        for chunk in chunks:
            n = len(chunk.tokens)
            assert chunk.start + n <= self.capacity, f"{chunk.start + n} tokens in a slot of {self.capacity}"
            tokens.extend(chunk.tokens)
            slots.extend([chunk.slot] * n)
            positions.extend(range(chunk.start, chunk.start + n))
            wanted.extend(range(len(tokens) - chunk.n_logits, len(tokens)))
        call(self._kernels, "step", (tokens, slots, positions, wanted, logits, features), model=self._structure.root)


class _InProcess(ModelStructure):
    """A model's structures for this process. They point to the model's tensors, which this object keeps alive."""

    def __init__(self, backend: NativeBackend) -> None:
        super().__init__(
            backend.model, backend.n_slots, backend.capacity, backend.cache.dtype, backend.widest,
            torch.get_num_threads(),
        )  # fmt: skip
        self.cache = backend.cache
        self.kept: list[Tensor] = []
        self.root = self.build()

    def place(self, tensor: Tensor) -> int:
        assert tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        self.kept.append(tensor)
        return tensor.data_ptr()

    def place_layers(self, layers: Any) -> int:
        self.layers = layers
        return ctypes.addressof(layers)

    def place_history(self) -> tuple[int, int]:
        tokens = self.cache.tokens
        assert tokens is not None
        return self._address(tokens, torch.int32, self.n_slots, self.capacity), tokens.nbytes

    def place_cache(self, i: int) -> tuple[int, int, int, int, int, int]:
        config, (keys, values) = self.model.config, (self.cache.keys[i], self.cache.values[i])
        shape = keys.data.size(0), config.n_kv_heads, size_in_panels(self.capacity)
        scale_bytes = 0 if keys.scale is None else keys.scale.nbytes
        key, key_scale, value, value_scale = (
            address
            for vectors in (keys, values)
            for address in (
                self._address(vectors.data, self.cache_dtype, *shape, config.d_head),
                self._address(vectors.scale, torch.float32, *shape),
            )
        )
        return key, key_scale, value, value_scale, keys.data.nbytes, scale_bytes


def _part(chunk: Chunk, first: int, n: int) -> Chunk:
    """Return the part of a chunk with up to `n` tokens from index `first` on, for one call of the kernels."""
    tokens = chunk.tokens[first : first + n]
    after = len(chunk.tokens) - first - len(tokens)
    n_logits = min(len(tokens), max(0, chunk.n_logits - after))
    return Chunk(chunk.slot, chunk.start + first, tokens, n_logits, chunk.room)
