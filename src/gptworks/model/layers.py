"""The small parts of a block: normalization and the MLP.

Under autocast the residual stream stays float32; a norm computes in float32 and hands on the dtype in which the
matrix products that follow are done, so that its result is cast once and not once a product.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.config import ModelConfig
from gptworks.model import cpu


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which matrix products with x are done here: autocast's, or x's own."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products are done in their operands' own dtype."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class Linear(nn.Linear):
    """torch's linear layer, whose products on a CPU are those of `gptworks.model.cpu`."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] → [..., O]."""
        return cpu.linear(x, self.weight, self.bias)


class Norm(nn.Module):
    """A normalization over the last dimension."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    eps: float

    def after(self, x: Tensor, branch: Tensor | None = None, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
        """x + alpha · branch, or x where there is no branch; and its norm.

        A block that reads on from the first has its gradients added in the norm's own backward pass.
        """
        if cpu.trains(x) or (branch is not None and cpu.trains(branch)):
            layer, dtype = isinstance(self, LayerNorm), product_dtype(x)
            return cpu.norm(x, self.weight, self.bias, self.eps, dtype, layer=layer, branch=branch, alpha=alpha)
        stream = x if branch is None else torch.add(x, branch, alpha=alpha)
        return stream, self(stream)


class LayerNorm(Norm):
    """LayerNorm (Ba et al., 2016) with an optional shift."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if cpu.trains(x):
            return cpu.layer_norm(x, self.weight, self.bias, self.eps, product_dtype(x))
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps).to(product_dtype(x))


class RMSNorm(Norm):
    """RMSNorm (Zhang & Sennrich, 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(width)), None

    def forward(self, x: Tensor) -> Tensor:
        if cpu.trains(x):
            return cpu.rms_norm(x, self.weight, self.eps, product_dtype(x))
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(product_dtype(x))


class HeadsNorm(RMSNorm):
    """RMSNorm over all heads of a token together."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, T, D] → [B, H, T, D]."""
        y = super().forward(x.transpose(1, 2).flatten(2))  # B T H·D
        return y.view(*y.shape[:2], x.size(1), -1).transpose(1, 2)


def build_head_norm(config: ModelConfig, n_heads: int) -> nn.Module:
    """The normalization of the queries' or the keys' heads, [B, H, T, D]."""
    if config.qk_norm == "whole":
        return HeadsNorm(n_heads * config.d_head, config.norm_eps)
    return RMSNorm(config.d_head, config.norm_eps) if config.qk_norm else nn.Identity()


def build_positions(config: ModelConfig) -> nn.Embedding | None:
    """A module whose `weight` [context, C] has a vector for each position, to be added; None: nothing is added."""
    return nn.Embedding(config.context_length, config.d_model) if config.position == "learned" else None


class Tables(nn.Module):
    """Buffers that follow from the configuration. They are in no checkpoint."""

    def reset(self, device: torch.device | None = None) -> None:
        """Compute them, on a device; None: torch's default."""
        raise NotImplementedError


def build_norm(config: ModelConfig) -> Norm:
    """The normalization of the residual stream."""
    if config.norm == "rmsnorm":
        return RMSNorm(config.d_model, config.norm_eps)
    return LayerNorm(config.d_model, config.norm_eps, config.norm_bias)


def add(x: Tensor, branch: Tensor, alpha: float) -> Tensor:
    """x + alpha · branch."""
    return cpu.add(x, branch, alpha) if cpu.trains(branch) else torch.add(x, branch, alpha=alpha)


class Dropout(nn.Module):
    """Dropout (Srivastava et al., 2014)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.probability:
            return x
        return cpu.dropout(x, self.probability) if cpu.trains(x) else F.dropout(x, self.probability)


class Scale(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def build_scale(factor: float) -> nn.Module:
    """What multiplies by a constant; nothing where it is 1."""
    return nn.Identity() if factor == 1 else Scale(factor)


def cap(x: Tensor, softcap: float | None) -> Tensor:
    """softcap · tanh(x / softcap), which is nearly x where x is small; x itself where there is no cap (Gemma 2)."""
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def relu2(x: Tensor) -> Tensor:
    """ReLU squared (So et al., 2021)."""
    return F.relu(x).square()


ACTIVATIONS = cpu.ACTIVATIONS | {"relu2": relu2}


class MLP(nn.Module):
    """Two matrices around an activation, or three where the activation gates (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig, d_ff: int) -> None:
        super().__init__()
        self.kind = config.mlp
        self.gate = Linear(config.d_model, d_ff, bias=config.mlp_bias) if config.gated else None
        self.up = Linear(config.d_model, d_ff, bias=config.mlp_bias)
        self.down = Linear(d_ff, config.d_model, bias=config.mlp_bias)
        self.dropout = Dropout(config.dropout_mlp)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] → [..., C]."""
        inner = self.up(x)
        if self.gate is None:
            inner = cpu.activate(inner, self.kind) if cpu.trains(inner) else ACTIVATIONS[self.kind](inner)
        else:
            gate = self.gate(x)
            trains = cpu.trains(gate) or cpu.trains(inner)
            inner = cpu.gated(gate, inner, self.kind) if trains else ACTIVATIONS[self.kind](gate) * inner
        out: Tensor = self.down(self.dropout(inner))
        return out
