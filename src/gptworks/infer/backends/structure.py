"""A model in the form that the C++ kernels read: the structures of `entries`, with pointers to its tensors."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.kernels import entries
from gptworks.kernels.call import NUMBERS
from gptworks.kernels.entries import FUNCTION_OF_MLP
from gptworks.model.gpt import GPT
from gptworks.quantize.panels import panel_of, size_in_panels, to_panels

AT_ONCE_BYTES = 64
"""Rows of matrices are padded to a multiple of this many bytes, which products read together. int4 rows in panels are
not padded."""


@dataclass(eq=False)
class ModelStructure:
    """Builds the structures through which the C++ kernels read a model. A subclass decides where the tensors lie: in
    this process, or in a memory image that is written to a file."""

    types: ClassVar[Any] = entries
    """Namespace of the classes `Matrix`, `Norm`, `Layer` and `Model`, whose pointers have the kernels' size."""

    model: GPT
    n_slots: int
    capacity: int
    """Number of tokens in each slot."""
    cache_dtype: torch.dtype
    widest: dict[torch.dtype, int]
    """Maximum number of rows in a panel, for each dtype that the kernels multiply in panels."""
    n_threads: int
    """Number of threads among which panels are divided."""

    def place(self, tensor: Tensor) -> int:
        """Return the address of a contiguous tensor; the tensor must keep this address."""
        raise NotImplementedError

    def place_layers(self, layers: Any) -> int:
        """Return the address of the array of layers."""
        raise NotImplementedError

    def place_cache(self, i: int) -> tuple[int, int, int, int, int, int]:
        """Return the addresses of a layer's keys, key scales, values and value scales; then the bytes of the keys, and
        the bytes of the key scales."""
        raise NotImplementedError

    def place_history(self) -> tuple[int, int]:
        """Return the address and the number of bytes of the cached token ids, int32 [slots, capacity]."""
        raise NotImplementedError

    def build(self) -> Any:
        """Return the `Model` structure, which refers to the placed tensors."""
        model, config, types = self.model, self.model.config, self.types
        width, vocabulary, half = config.d_model, config.vocab_size, config.d_rotary // 2
        layers = (types.Layer * config.n_layers)(*map(self._layer, range(config.n_layers)))
        tables = [
            rotary.at(slice(0, self.capacity), self.capacity, torch.float32) if rotary else (None, None)
            for rotary in (model.rotary, model.window_rotary)
        ]
        embedding = self._matrix(model.token_embedding, vocabulary, width)
        head = embedding if model.untied_head is None else self._matrix(model.untied_head, vocabulary, width)
        pairs, history = types.Matrix(), (0, 0)
        if (bigrams := model.bigram_embedding) is not None:
            pairs, history = self._matrix(bigrams.table, config.bigram_vocab_size, width), self.place_history()
        position = None if model.position_embedding is None else model.position_embedding.weight[: self.capacity]
        return types.Model(
            width, config.n_heads, config.n_kv_heads, config.d_head, config.d_ff,
            config.d_rotary, self.n_slots, self.capacity, config.n_layers,
            FUNCTION_OF_MLP[config.mlp], config.norm == "layernorm", config.parallel_residual,
            NUMBERS[self.cache_dtype],
            config.norm_eps, config.score_scale, config.embedding_scale, config.residual_scale,
            1 / config.logit_divisor, 0 if bigrams is None else float(bigrams.scale.detach()),
            embedding, head, pairs,
            history[0], self._vector(position, self.capacity, width),
            *(self._vector(table, self.capacity, half) for pair in tables for table in pair),
            0 if position is None else 4 * self.capacity * width, 4 * self.capacity * half if model.rotary else 0,
            history[1],
            self._norm(model.norm, width), self.place_layers(layers),
        )  # fmt: skip

    def _layer(self, i: int) -> Any:
        block: Any = self.model.blocks[i]
        config, attention, mlp = self.model.config, block.attention, block.mlp
        width, inner, d_head, groups = config.d_model, config.d_ff, config.d_head, config.n_kv_heads
        d_query, d_key = config.n_heads * d_head, groups * d_head
        norms = (
            (block.norm1, width),
            (block.norm2, width),
            (attention.query_norm, d_head),
            (attention.key_norm, d_head),
            *((getattr(block, name, None), width) for name in ("norm1_after", "norm2_after")),
        )
        matrices = (
            (attention.query, d_query, width), (attention.key, d_key, width), (attention.value, d_key, width),
            (attention.out, width, d_query), (mlp.gate, inner, width), (mlp.up, inner, width), (mlp.down, width, inner),
        )  # fmt: skip
        window = attention.scores.window
        keys, key_scales, values, value_scales, cache_bytes, scale_bytes = self.place_cache(i)
        return self.types.Layer(
            *(self._norm(*norm) for norm in norms),
            *(self._matrix(*matrix) for matrix in matrices),
            keys, key_scales, values, value_scales, cache_bytes, scale_bytes,
            window or self.capacity,
            config.layer_rotates(i) * (2 if window is not None and self.model.window_rotary is not None else 1),
        )  # fmt: skip

    def _norm(self, norm: Any, width: int) -> Any:
        if norm is None or isinstance(norm, nn.Identity):
            return self.types.Norm()
        return self.types.Norm(
            self._vector(norm.weight, width), self._vector(getattr(norm, "bias", None), width), width
        )

    def _matrix(self, module: Any, rows: int, columns: int) -> Any:
        """Return a matrix [rows, columns] for the kernels: in panels, or with rows padded to `AT_ONCE_BYTES`."""
        if module is None:
            return self.types.Matrix()
        bias = self._vector(getattr(module, "bias", None), rows)
        weight: Tensor = module.weight.detach()
        scale: Any = getattr(module, "scale", None)
        kind, panel = weight.dtype, getattr(module, "panel", 0)
        each = 2 if kind == torch.uint8 else 1  # columns packed into one element
        in_panels = kind in self.widest
        line = 1 if in_panels and each == 2 else AT_ONCE_BYTES // kind.itemsize
        n_elements = -(-columns // (each * line)) * line
        if panel:
            check(weight, kind, size_in_panels(rows) * n_elements)
        else:
            check(weight, kind, rows, columns // each)
        if kind == torch.int8:
            check(scale, torch.float32, rows)
        elif kind == torch.uint8:
            check(scale, torch.float16, *((size_in_panels(rows) * columns // 32,) if panel else (rows, columns // 32)))
        if n_missing := 0 if panel else n_elements - columns // each:
            weight = F.pad(weight, (0, n_missing), value=0x88 if each == 2 else 0)
            scale = F.pad(scale, (0, n_missing // 16)) if each == 2 else scale
        if in_panels and not panel:  # the module is not a PackedMatrix, which would be in panels already
            panel = panel_of(rows, self.n_threads, self.widest[kind])
            weight, scale = to_panels(weight, panel), to_panels(scale, panel) if each == 2 else scale
        return self.types.Matrix(
            self._address(weight, kind, *weight.shape),
            0 if scale is None else self._address(scale, scale.dtype, *scale.shape),
            bias, rows, n_elements * each, NUMBERS[kind], panel,
            weight.nbytes, 0 if scale is None else scale.nbytes, 4 * rows if bias else 0,
        )  # fmt: skip

    def _vector(self, tensor: Tensor | None, *shape: int) -> int:
        return 0 if tensor is None else self._address(tensor.detach().float(), torch.float32, *shape)

    def _address(self, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int:
        """Return a tensor's address (0 for None), after checking its dtype and shape."""
        if tensor is None:
            return 0
        tensor = tensor.contiguous()
        check(tensor, dtype, *shape)
        return self.place(tensor)


def check(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    """Refuse a tensor that the kernels, which receive only its address, would read wrongly or beyond its end.

    Raises:
        TypeError: the tensor is missing, or its dtype, shape or device is not the expected one.
    """
    if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.device.type != "cpu":
        found = "no tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise TypeError(f"the native kernels need {dtype} {list(shape)} on the CPU and were given {found}")
