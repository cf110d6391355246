"""The small parts of a block: linear layers, norms, dropout and the MLP.

Under autocast the residual stream stays float32. A norm computes in float32 and returns the dtype of the matrix
products that follow, so that its result is cast once and not once per product.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gptworks.config import ModelConfig
from gptworks.kernels import dispatch
from gptworks.model.cost import DROPOUT, MLP_INNER, RESIDUAL, Shapes, Stage

AUTOCASTS = tuple(device for device in ("cpu", "cuda", "mps") if torch.amp.is_autocast_available(device))
"""Device types with autocast; `meta` has none. Calling torch's check in a block would split torch 2.11's graph."""


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: autocast's if enabled, else x's own."""
    device = x.device.type
    if device in AUTOCASTS and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast, in which products keep their operands' dtype."""
    if device.type not in AUTOCASTS:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class Linear(nn.Linear):
    """torch's linear layer, computed by `gptworks.kernels.dispatch`."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        return dispatch.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """Norm over the last dimension: LayerNorm (Ba et al., 2016), or RMSNorm (Zhang & Sennrich, 2019)."""

    def __init__(self, width: int, eps: float, centers: bool = False, bias: bool = False) -> None:
        """With `centers`, the norm subtracts the mean, as LayerNorm does and RMSNorm does not."""
        super().__init__()
        self.eps, self.centers = eps, centers
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def of_sum(self, x: Tensor, branch: Tensor | None = None, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return x + alpha · branch (x without a branch), and the norm of that sum.

        In training on a CPU, one C++ kernel computes both results, and another their gradients; torch needs several.
        """
        return dispatch.norm(x, self.weight, self.bias, self.eps, product_dtype(x), self.centers, branch, alpha)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., C]; the result has the dtype of the matrix products that follow."""
        return self.of_sum(x)[1]

    @staticmethod
    def cost(s: Shapes, name: str, saves_input: bool = True, reads_entry: bool = False) -> Stage:
        """Return the memory of a norm. It saves its input, the residual stream. The next product saves the result.

        The gradient arrives in the products' precision, is converted to float32 and added to the stream's gradient.
        """
        c, stream, arrives = s.config, s.floats(s.config.d_model), s.products(s.config.d_model)
        return Stage(
            name,
            {RESIDUAL: _statistics(s) + stream * saves_input},
            arrives=arrives,
            leaves=stream,
            merges=True,
            scratch=stream - arrives,
            vectors=c.d_model * (1 + c.norm_bias),
            reads_entry=reads_entry,
        )

    @staticmethod
    def cost_behind(s: Shapes, arrives: int) -> Stage:
        """Return the memory of a norm after attention or the MLP. The norm saves its input."""
        c, stream, given = s.config, s.floats(s.config.d_model), s.products(s.config.d_model)
        return Stage(
            "norm of the result",
            {RESIDUAL: _statistics(s) + (given if s.on_cpu else stream)},
            arrives=arrives,
            leaves=given,
            scratch=stream * s.autocast,
            vectors=c.d_model * (1 + c.norm_bias),
            module="norm1_after",
        )


def _statistics(s: Shapes) -> int:
    """Bytes of the per-token statistics that a norm saves."""
    return s.floats(1) * (2 if s.config.norm == "layernorm" else 1)


class HeadsNorm(Norm):
    """RMSNorm over all of a token's heads together."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [B, H, T, D] over H and D."""
        y = super().forward(x.transpose(1, 2).flatten(2))  # [B, T, H·D]
        return y.view(*y.shape[:2], x.size(1), -1).transpose(1, 2)


def build_head_norm(config: ModelConfig, n_heads: int) -> nn.Module:
    """Build the norm of queries or keys [B, n_heads, T, D] that `config.qk_norm` names; the identity if it is None."""
    if config.qk_norm == "whole":
        return HeadsNorm(n_heads * config.d_head, config.norm_eps)
    return Norm(config.d_head, config.norm_eps) if config.qk_norm else nn.Identity()


def build_norm(config: ModelConfig) -> Norm:
    """Build a norm of the residual stream, of the kind that `config.norm` names."""
    return Norm(config.d_model, config.norm_eps, config.norm == "layernorm", config.norm_bias)


class Dropout(nn.Module):
    """Dropout (Srivastava et al., 2014)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.probability:
            return x
        return dispatch.dropout(x, self.probability)


class Scale(nn.Module):
    """A module that multiplies its input by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def build_scale(factor: float) -> nn.Module:
    """Build a module that multiplies by `factor`; the identity if `factor` is 1."""
    return nn.Identity() if factor == 1 else Scale(factor)


def cap(x: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(x / softcap), which is nearly x for small x (Gemma 2); x if `softcap` is None."""
    return x if softcap is None else softcap * torch.tanh(x / softcap)


Layer = Callable[[Tensor], Tensor]


class MLP(nn.Module):
    """Two linear layers around an activation, or three if the activation is gated (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, d_ff: int) -> None:
        super().__init__()
        self.kind = config.mlp
        self.gate = Linear(config.d_model, d_ff, bias=config.mlp_bias) if config.gated else None
        self.up = Linear(config.d_model, d_ff, bias=config.mlp_bias)
        self.down = Linear(d_ff, config.d_model, bias=config.mlp_bias)
        self.dropout = Dropout(config.dropout_mlp)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., C]."""
        return self.through(x, self.up, self.gate, self.down)

    def through(self, x: Tensor, up: Layer, gate: Layer | None, down: Layer) -> Tensor:
        """Map x [..., C] to [..., C] by these layers instead of the MLP's own."""
        inner = up(x)
        inner = dispatch.activate(inner, self.kind) if gate is None else dispatch.activate(gate(x), self.kind, inner)
        return down(self.dropout(inner))

    @staticmethod
    def cost(
        s: Shapes, d_ff: int, arrives: int, n_tokens: float, expert: bool = False, n_grouped: int = 0
    ) -> Iterator[Stage]:
        """Yield the memory of each operation of the MLP on `n_tokens` tokens; the gradient of its result has `arrives`
        bytes. For an `expert`, input and gradient cost nothing: they are slices of tensors that `MoE.cost` counts.

        Args:
            n_grouped: number of experts computed by grouped products; `n_tokens` then counts the tokens of all experts.
                Each product copies the experts' matrices into one tensor, and frees this copy before the equally
                large gradient exists.
        """
        c, p = s.config, s.product_bytes
        inner, outer = round(n_tokens * d_ff * p), round(n_tokens * c.d_model * p)
        matrix, biases = max(1, n_grouped) * c.d_model * d_ff, max(1, n_grouped) * c.mlp_bias
        source = {} if expert else {RESIDUAL: outer}
        copy = {} if n_grouped else s.copies(matrix)
        share = c.n_experts_per_token / c.n_experts if c.n_experts else 1.0
        into = Stage("up", copy, inner, outer, matrices=matrix, vectors=biases * d_ff, readers=("up",), share=share)
        if c.gated:
            yield replace(into, name="gate", saved=source | copy, merges=True, readers=("gate", "up"))
            if not s.on_cpu:
                yield Stage("activation", {MLP_INNER: inner}, inner, inner)
            yield into
            yield Stage("gate × up", {MLP_INNER: 2 * inner}, inner, 2 * inner)
        else:
            yield replace(into, saved=source | copy)
            wide = round(n_tokens * d_ff * 4) if c.mlp == "relu2" and not s.on_cpu else 0  # autocast squares in fp32
            yield Stage("activation", {MLP_INNER: inner + (wide if s.autocast else 0)}, inner, inner, scratch=2 * wide)
        if c.dropout_mlp:
            booleans = inner // p
            there = 2 * inner + booleans * s.on_cpu  # `forward` keeps the activation's result until it returns
            kept = inner if s.on_cpu else booleans
            yield Stage("MLP dropout", {DROPOUT: kept}, inner, inner, unsaved=there)
        yield Stage(
            "down",
            {MLP_INNER: inner} | copy,
            arrives=0 if expert else arrives,
            leaves=inner,
            unsaved=inner * (c.dropout_mlp > 0) + outer * (expert or s.saves_result or s.multiplies),
            matrices=matrix,
            vectors=biases * c.d_model,
            readers=("down",),
            n_in=d_ff,
            share=share,
        )
