"""The attention layer: projections before and after `gptworks.model.scores.attend`.

Shapes: B batch, T queries, H query heads, G key/value heads, D head width, C model width.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from gptworks.config import ModelConfig
from gptworks.model.cache import SlotLayer
from gptworks.model.cost import ATTENTION, RESIDUAL, Shapes, Stage
from gptworks.model.lab.stream import Gating, Values
from gptworks.model.layers import Linear, build_head_norm
from gptworks.model.rotary import rotate
from gptworks.model.scores import Scores, attend, attend_slots, output_is_shared, saves_output, scores_cost


class AttentionInputs(NamedTuple):
    """Inputs of an attention layer other than the residual stream."""

    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the rotary angles at the T positions; None if the layer has no rotary embedding."""
    cache: SlotLayer | None = None
    """Cached keys and values of the texts' earlier tokens; None if the batch contains each text from its beginning."""
    bias: Tensor | None = None
    """Bias that prevents attention between several texts in one row (see `Scores`); None if not needed."""
    bounds: Tensor | None = None
    """Bounds of the texts in rows of several texts, in place of the bias (see `Scores`); None if not needed."""
    fuses_groups: bool = True
    """Whether the device has fused attention for grouped queries (see `Scores`)."""


class Attention(nn.Module):
    """Multi-head self-attention; grouped-query attention if n_kv_heads < n_heads."""

    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.d_head, self.dropout = config.d_head, config.dropout_attention
        self.scores = Scores(window, scale=config.attention_scale, softcap=config.attention_softcap)
        query_width, key_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.query = Linear(config.d_model, query_width, bias=config.qkv_bias)
        self.key = Linear(config.d_model, key_width, bias=config.qkv_bias)
        self.value = Linear(config.d_model, key_width, bias=config.qkv_bias)
        self.out = Linear(query_width, config.d_model, bias=config.out_bias)
        self.query_norm = build_head_norm(config, config.n_heads)
        self.key_norm = build_head_norm(config, config.n_kv_heads)
        self.gating = Gating(config.d_gate, config.n_heads) if config.attention_gate else None
        """Gates that scale each head's output (Qiu et al., 2025, `Gated Attention for Large Language Models`)."""

    def forward(self, x: Tensor, inputs: AttentionInputs, values: Tensor | None = None) -> Tensor:
        """Return attention's output [B, T, C] for x [B, T, C]. `values`: [B, T, G·D]; None to project x."""
        gate = None if self.gating is None else self.gating(x)  # [B, T, H]
        q, k, v = self.heads(x, inputs.rotary, values)
        fixed, bias, bounds = self.scores, inputs.bias, inputs.bounds  # torch 2.11 cannot compile `_replace`
        dropout = self.dropout if self.training and inputs.cache is None else 0.0
        given = Scores(fixed.window, dropout, fixed.scale, fixed.softcap, bias, bounds, inputs.fuses_groups)
        # [B, H, T, D]
        y = attend(q, k, v, given) if inputs.cache is None else attend_slots(q, k, v, inputs.cache, given)
        if gate is not None:
            y = y * gate.transpose(1, 2).unsqueeze(-1)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # [B, T, C]
        return out

    def heads(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, H, T, D], keys and values [B, G, T, D].

        Queries and keys are normalized if the layer has QK-norm, and rotated if `rotary` is given.
        """
        q, k, v = (
            projected.unflatten(-1, (-1, self.d_head)).transpose(1, 2)
            for projected in (self.query(x), self.key(x), self.value(x) if values is None else values)
        )
        q, k = self.query_norm(q), self.key_norm(k)
        return (q, k, v) if rotary is None else (rotate(q, rotary), rotate(k, rotary), v)

    @staticmethod
    def cost(s: Shapes, layer: int, arrives: int) -> Iterator[Stage]:
        """Yield the memory of each operation of attention; the gradient of attention's result has `arrives` bytes."""
        c, window = s.config, s.config.layer_window(layer)
        q_width, k_width = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
        q, k, normalized = s.products(q_width), s.products(k_width), s.products(c.d_model)
        projections = [("query", q_width, q), ("key", k_width, k), ("value", k_width, k)]
        if changed := list(Values.cost(s, layer)):  # a layer with `Values` projects its values first
            projections = [projections[2], *projections[:2]]
        for name, width, output in projections:
            first, last = name == projections[0][0], name == projections[-1][0]  # the backward pass begins at `last`
            yield Stage(
                name,
                ({RESIDUAL: normalized} if first else {}) | s.copies(c.d_model * width),
                arrives=output,
                leaves=normalized,
                merges=not last,
                matrices=c.d_model * width,
                vectors=width if c.qkv_bias else 0,
                readers=("query", "key", "value", "gating", "projection") if name == "query" else (),
                reads_entry=True,
            )
            if first:
                yield from changed
                yield from [Gating.cost(s, c.n_heads)] * c.attention_gate
        if c.qk_norm:
            statistics = 4 * s.n_tokens * (2 if c.qk_norm == "whole" else c.n_heads + c.n_kv_heads)
            saved = q + k if s.on_cpu else s.floats(q_width + k_width)
            wide = s.floats(q_width)
            yield Stage(
                "QK-norm",
                {ATTENTION: saved + statistics},
                arrives=q + k,
                leaves=q + k,
                scratch=(3 if s.on_cpu else 2) * wide - 2 * q - k if s.autocast else 0,
                vectors=q_width + k_width if c.qk_norm == "whole" else 2 * c.d_head,
                module="query_norm",
            )
        if c.position == "rope":
            yield Stage("rotation", arrives=q + k, leaves=q + k, scratch=q)
        yield scores_cost(s, window)
        if c.attention_gate:
            kept = 0 if saves_output(s, window) else q
            yield Stage("gated heads", {ATTENTION: kept}, arrives=q, leaves=q, scratch=q)
        shared = output_is_shared(s, window) and not c.attention_gate
        yield Stage(
            "attention out",
            {ATTENTION: 0 if shared else q} | s.copies(c.d_model * q_width),
            arrives=arrives,
            leaves=q,
            matrices=c.d_model * q_width,
            vectors=c.d_model if c.out_bias else 0,
            module="out",
            readers=("out",),
            n_in=q_width,
        )
