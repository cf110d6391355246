"""The attention layer: projections around `gptworks.model.scores.attend`.

Shapes: B batch, T queries, H query heads, G key/value heads, D head width, C model width.
"""

from torch import Tensor, nn

from gptworks.config import ModelConfig
from gptworks.model.cache import SlotLayer
from gptworks.model.lab.stream import build_gating
from gptworks.model.layers import Linear, build_head_norm
from gptworks.model.rotary import rotate
from gptworks.model.scores import attend, attend_slots


class Attention(nn.Module):
    """Multi-head self-attention, grouped-query where n_kv_heads < n_heads."""

    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.d_head, self.window, self.dropout = config.d_head, window, config.dropout_attention
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        query_width, key_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.query = Linear(config.d_model, query_width, bias=config.qkv_bias)
        self.key = Linear(config.d_model, key_width, bias=config.qkv_bias)
        self.value = Linear(config.d_model, key_width, bias=config.qkv_bias)
        self.out = Linear(query_width, config.d_model, bias=config.out_bias)
        self.query_norm = build_head_norm(config, config.n_heads)
        self.key_norm = build_head_norm(config, config.n_kv_heads)
        self.gating = build_gating(config)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        cache: SlotLayer | None,
        bias: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """x [B, T, C] → [B, T, C]. `rotary` holds the tables of these T positions; `bias` as for `attend`.

        values: [B, T, G·D] instead of what the layer's own projection gives.
        """
        gate = None if self.gating is None else self.gating(x)  # B T H
        q, k, v = self.heads(x, rotary, values)
        if cache is not None:
            y = attend_slots(q, k, v, cache, window=self.window, scale=self.scale, softcap=self.softcap)  # 1 H N D
        else:
            y = attend(  # B H T D
                q, k, v, window=self.window, dropout=self.dropout if self.training else 0.0, scale=self.scale,
                bias=bias, softcap=self.softcap,
            )  # fmt: skip
        if gate is not None:
            y = y * gate.transpose(1, 2).unsqueeze(-1)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # B T C
        return out

    def heads(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, C] → queries [B, H, T, D], keys and values [B, G, T, D], normalized and turned by position."""
        q, k, v = (
            projected.unflatten(-1, (-1, self.d_head)).transpose(1, 2)
            for projected in (self.query(x), self.key(x), self.value(x) if values is None else values)
        )
        q, k = self.query_norm(q), self.key_norm(k)
        return (q, k, v) if rotary is None else (rotate(q, rotary), rotate(k, rotary), v)
