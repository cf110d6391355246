"""The native backend, which computes steps in C++ (step.cpp; library.py builds and loads it), and `choose_backend`.

Prefill, decoding and the check of draft tokens use the same call, with one row per token of any text; a long chunk
takes several calls. The bits of a row's result depend neither on other rows nor on how its text is split into chunks.

Activations are float32. If the processor can multiply narrower numbers, they are rounded before a product: to bf16 for
bf16 weights, as in torch (AVX512_BF16, AMX); to 16 bits with one scale per row, which is finer, for 8-bit and 4-bit
weights (AVX2, AVX512_VNNI; AMX for int8). With a bf16 cache, queries and attention weights are rounded to bf16.
"""

import ctypes
import warnings
from array import array
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.choices import BackendName
from gptworks.errors import UserError
from gptworks.infer.backends.backend import Backend, Chunk, TorchBackend
from gptworks.infer.backends.cache import SlotCache
from gptworks.infer.backends.placement import matrices, settle, widest_panels
from gptworks.kernels.build import Unavailable
from gptworks.kernels.call import NUMBERS, call
from gptworks.kernels.entries import FUNCTION_OF_MLP, Layer, Matrix, Model, Norm
from gptworks.kernels.library import library
from gptworks.model.gpt import GPT
from gptworks.model.lora import has_adapter
from gptworks.quantize.panels import UNIT, panel_of, size_in_panels, to_panels
from gptworks.units import counted

STEP_TOKENS, STEP_TOKENS_WITH_AMX = 128, 512
"""Maximum tokens of a chunk in one call: enough that reading the weights again in the next call costs little."""

_ACTIVATIONS = ("gelu", "gelu_tanh", "relu2", "swiglu", "geglu")
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8)
"""The dtypes of matrices that the kernels multiply."""

_AT_ONCE_BYTES = 64
"""Rows of matrices are padded to a multiple of this many bytes, which products read together."""


def choose_backend(
    model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None, name: BackendName = "auto"
) -> Backend:
    """Return a backend for a model on its device: native on a CPU if the model is not in training, otherwise torch.

    Warns (UserWarning), once, if torch replaces the native backend. The result's `description` names the backend.

    Args:
        n_slots, capacity: number of slots, and of tokens in each slot.
        dtype: the caches' dtype; None: the backend's default.
        name: auto: as above. native: the native backend, or an error. torch: the model's own forward pass.

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
    config = model.config
    if model.device.type != "cpu":
        return f"the model is on {model.device}."
    if config.n_experts:
        return "it has no mixture of experts."
    if config.laboratory:
        return f"it has no {config.laboratory[0]}."
    if config.norms_behind:
        return "it has no norms behind attention and MLP."
    if config.mlp not in _ACTIVATIONS:
        return f"it has no mlp={config.mlp}."
    for name in ("attention_softcap", "logit_softcap"):
        if getattr(config, name) is not None:
            return f"it has no {name}."
    if config.qk_norm == "whole":
        return "it has no norm over all heads together."
    if config.window_rope_theta is not None:
        return "it has no separate rotary base of windowed layers."
    if config.rope_scaling is not None and config.rope_scaling.by_length:
        return f"it has no {config.rope_scaling.type} rotary scaling."
    if has_adapter(name for name, _ in model.named_parameters()):
        return "it adds no adapter to the weights."
    for name in ("d_head", "d_model", "d_ff"):
        if (width := getattr(config, name)) % 16:
            return f"{name}={width} is not a multiple of 16."
    strange = {module.weight.dtype for module in model.modules() if hasattr(module, "weight")} - set(WEIGHTS)
    return f"it has no weights in {strange.pop()}." if strange else None


class NativeBackend(Backend):
    """Computes a model in C++ on the CPU. Moves the model's matrices (placement.py) and keeps their addresses: do
    not replace a matrix later; only fp32 matrices may be changed in place."""

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
        self._kept: list[Tensor] = []
        self._widest = widest_panels(kernels)
        settle(list(matrices(model)), self._widest)
        self.model = model
        self._model = self._structure(model)

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
        call(self._kernels, "logits", (rows, logits), model=self._model)
        return logits.view(*features.shape[:-1], -1)

    def grow(self, n_slots: int, capacity: int, held: Sequence[int]) -> None:
        super().grow(n_slots, capacity, held)
        self._kept = []
        self._model = self._structure(self.model)

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
        call(self._kernels, "step", (tokens, slots, positions, wanted, logits, features), model=self._model)

    # -------------------------------------------------------------------------------- the model as step.cpp reads it

    def _structure(self, model: GPT) -> Model:
        config = model.config
        width, vocabulary, half = config.d_model, config.vocab_size, config.d_rotary // 2
        layers = (Layer * config.n_layers)(*(self._layer(model, i) for i in range(config.n_layers)))
        cos, sin = (
            model.rotary.at(slice(0, self.capacity), self.capacity, torch.float32) if model.rotary else (None,) * 2
        )
        head = model.token_embedding if model.untied_head is None else model.untied_head
        position = None if model.position_embedding is None else model.position_embedding.weight[: self.capacity]
        structure = Model(
            width, config.n_heads, config.n_kv_heads, config.d_head, config.d_ff,
            config.d_rotary, self.n_slots, self.capacity, config.n_layers,
            FUNCTION_OF_MLP[config.mlp], config.norm == "layernorm", config.parallel_residual,
            NUMBERS[self.cache.dtype],
            config.norm_eps, config.score_scale, config.embedding_scale, config.residual_scale,
            1 / config.logit_divisor,
            self._matrix(model.token_embedding, vocabulary, width), self._matrix(head, vocabulary, width),
            self._vector(position, self.capacity, width), self._vector(cos, self.capacity, half),
            self._vector(sin, self.capacity, half),
            0 if position is None else 4 * self.capacity * width, 0 if cos is None else 4 * self.capacity * half,
            self._norm(model.norm, width), ctypes.addressof(layers),
        )  # fmt: skip
        structure.kept = layers
        return structure

    def _layer(self, model: GPT, i: int) -> Layer:
        block: Any = model.blocks[i]
        config, attention, mlp = model.config, block.attention, block.mlp
        width, inner, d_head, groups = config.d_model, config.d_ff, config.d_head, config.n_kv_heads
        d_query, d_key = config.n_heads * d_head, groups * d_head
        norms = (
            (block.norm1, width),
            (block.norm2, width),
            (attention.query_norm, d_head),
            (attention.key_norm, d_head),
        )
        matrices = (
            (attention.query, d_query, width), (attention.key, d_key, width), (attention.value, d_key, width),
            (attention.out, width, d_query), (mlp.gate, inner, width), (mlp.up, inner, width), (mlp.down, width, inner),
        )  # fmt: skip
        slots = self.cache.keys[i].data.size(0)
        cached, room = [], size_in_panels(self.capacity)
        for vectors in (self.cache.keys[i], self.cache.values[i]):
            cached.append(self._address(vectors.data, self.cache.dtype, slots, groups, room, d_head))
            cached.append(self._address(vectors.scale, torch.float32, slots, groups, room))
        return Layer(
            *(self._norm(*norm) for norm in norms),
            *(self._matrix(*matrix) for matrix in matrices),
            *cached,
            self.cache.keys[i].data.nbytes,
            0 if (scale := self.cache.keys[i].scale) is None else scale.nbytes,
            attention.scores.window or self.capacity,
            config.layer_rotates(i),
        )

    def _norm(self, norm: Any, width: int) -> Norm:
        if isinstance(norm, nn.Identity):
            return Norm()
        return Norm(self._vector(norm.weight, width), self._vector(getattr(norm, "bias", None), width), width)

    def _matrix(self, module: Any, rows: int, columns: int) -> Matrix:
        """Return a matrix [rows, columns] for the kernels: in panels, or with rows padded to `_AT_ONCE_BYTES`."""
        if module is None:
            return Matrix()
        bias = self._vector(getattr(module, "bias", None), rows)
        weight: Tensor = module.weight.detach()
        scale: Any = getattr(module, "scale", None)
        kind, panel = weight.dtype, getattr(module, "panel", 0)
        each = 2 if kind == torch.uint8 else 1  # columns packed into one element
        in_panels = kind in self._widest
        line = 1 if in_panels and each == 2 else _AT_ONCE_BYTES // kind.itemsize
        n_elements = -(-columns // (each * line)) * line
        if panel:
            _check(weight, kind, size_in_panels(rows) * n_elements)
        else:
            _check(weight, kind, rows, columns // each)
        if kind == torch.int8:
            _check(scale, torch.float32, rows)
        elif kind == torch.uint8:
            _check(scale, torch.float16, *((size_in_panels(rows) * columns // 32,) if panel else (rows, columns // 32)))
        if n_missing := 0 if panel else n_elements - columns // each:
            weight = F.pad(weight, (0, n_missing), value=0x88 if each == 2 else 0)
            scale = F.pad(scale, (0, n_missing // 16)) if each == 2 else scale
        if in_panels and not panel:  # the module is not a PackedMatrix, which would be in panels already
            panel = panel_of(rows, torch.get_num_threads(), self._widest[kind])
            weight, scale = to_panels(weight, panel), to_panels(scale, panel) if each == 2 else scale
        return Matrix(
            self._address(weight, kind, *weight.shape),
            None if scale is None else self._address(scale, scale.dtype, *scale.shape),
            bias, rows, n_elements * each, NUMBERS[kind], panel,
            weight.nbytes, 0 if scale is None else scale.nbytes, 0 if bias is None else 4 * rows,
        )  # fmt: skip

    def _vector(self, tensor: Tensor | None, *shape: int) -> int | None:
        return None if tensor is None else self._address(tensor.detach().float(), torch.float32, *shape)

    def _address(self, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
        """Return a tensor's address (None for None). Checks dtype and shape, makes it contiguous and keeps it alive."""
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        _check(tensor, dtype, *shape)
        assert tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _check(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    """Refuse a tensor that the kernels, which receive only its address, would read wrongly or beyond its end.

    Raises:
        TypeError: the tensor is missing, or its dtype, shape or device is not the expected one.
    """
    if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device.type != "cpu":
        found = "no tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise TypeError(f"the native kernels need {dtype} {list(shape)} on the CPU and were given {found}")


def _part(chunk: Chunk, first: int, n: int) -> Chunk:
    """Return the part of a chunk with up to `n` tokens from index `first` on, for one call of the kernels."""
    tokens = chunk.tokens[first : first + n]
    after = len(chunk.tokens) - first - len(tokens)
    n_logits = min(len(tokens), max(0, chunk.n_logits - after))
    return Chunk(chunk.slot, chunk.start + first, tokens, n_logits, chunk.room)
