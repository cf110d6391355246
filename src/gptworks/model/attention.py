"""Causal attention: the arithmetic (`attend`), the rotary embedding, and the layer that uses both.

Shapes: B batch, T queries, S keys, H query heads, G key/value heads, D head width, C model width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.config import ModelConfig
from gptworks.model import cpu
from gptworks.model.cache import LayerCache
from gptworks.model.layers import RMSNorm


def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, dropout: float = 0.0) -> Tensor:
    """Scaled dot-product attention in which the T queries are the last T of the S key positions.

    Args:
        q: [B, H, T, D]. k, v: [B, G, S, D] with S ≥ T; each key/value head serves H / G query heads.
        window: a query sees this many keys, its own included; None: all up to its own.
        dropout: probability of dropping an attention weight.

    Returns:
        [B, H, T, D], in q's dtype.
    """
    n_queries, n_keys = q.size(2), k.size(2)
    if cpu.trains(q) and n_keys <= cpu.LONGEST:
        bias = torch.zeros(n_queries, n_keys, dtype=q.dtype)
        bias.masked_fill_(~causal_mask(n_queries, n_keys, window, q.device), -math.inf)
        return cpu.attention(q, k, v, bias, window, dropout)
    banded = window is not None and window < n_keys
    if n_queries == 1 and not banded:
        mask, is_causal = None, False
    elif n_queries == n_keys and not banded:
        mask, is_causal = None, True
    else:
        mask, is_causal = causal_mask(n_queries, n_keys, window, q.device), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=q.size(1) != k.size(1)
    )


def causal_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Boolean [T, S], true where the query may look. The queries are the last T of the S positions."""
    query = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    key = torch.arange(n_keys, device=device)[None, :]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
    """`attend` written as the definition, one query at a time. For tests."""
    (_, heads, n_queries, width), n_keys = q.shape, k.size(2)
    out = torch.empty_like(q)
    for head in range(heads):
        group = head * k.size(1) // heads
        for i in range(n_queries):
            last = n_keys - n_queries + i
            first = 0 if window is None else max(0, last - window + 1)
            keys, values = k[:, group, first : last + 1], v[:, group, first : last + 1]  # B s D
            scores = torch.einsum("bd,bsd->bs", q[:, head, i], keys) / math.sqrt(width)
            out[:, head, i] = torch.einsum("bs,bsd->bd", scores.softmax(-1), values)
    return out


class Rotary(nn.Module):
    """Cosines and sines of the rotary embedding (Su et al., 2021), pairing element i with i + D/2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.reset()

    def reset(self, device: torch.device | None = None) -> None:
        """Compute the tables, [context_length, D/2], in float32."""
        exponent = torch.arange(0, self.config.d_head, 2, device=device, dtype=torch.float64) / self.config.d_head
        position = torch.arange(self.config.context_length, device=device, dtype=torch.float64)
        angle = torch.outer(position, self.config.rope_theta**-exponent)
        self.cos, self.sin = angle.cos().float(), angle.sin().float()

    def forward(self, start: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables for positions start to start + length, each [length, D/2]."""
        return self.cos[start : start + length].to(dtype), self.sin[start : start + length].to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + D/2) of x [..., T, D] by the angle of its position."""
    cos, sin = table
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Multi-head self-attention, grouped-query where n_kv_heads < n_heads."""

    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.d_head, self.window, self.dropout = config.d_head, window, config.dropout_attention
        query_width, key_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.query = nn.Linear(config.d_model, query_width, bias=config.attention_bias)
        self.key = nn.Linear(config.d_model, key_width, bias=config.attention_bias)
        self.value = nn.Linear(config.d_model, key_width, bias=config.attention_bias)
        self.out = nn.Linear(query_width, config.d_model, bias=config.attention_bias)
        self.query_norm = RMSNorm(config.d_head, config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(config.d_head, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: LayerCache | None) -> Tensor:
        """x [B, T, C] → [B, T, C]. `rotary` holds the tables of these T positions."""
        q, k, v = (  # B H T D, B G T D, B G T D
            project(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = self.query_norm(q), self.key_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if cache is not None:
            k, v = cache.extend(k, v)  # B G S D
        y = attend(q, k, v, window=self.window, dropout=self.dropout if self.training else 0.0)  # B H T D
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # B T C
        return out
