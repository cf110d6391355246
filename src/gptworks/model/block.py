"""A block, one layer of the model.

    x ─┬─► [norm] ─► attention ─► [norm] ─► dropout ─┬─► + ─┬─► [norm] ─► MLP ─► [norm] ─► dropout ─► + ─►
       └────────────────────────────────────────────►┘      └──────────────────────────────────────►┘

Norms are before attention and MLP (pre-norm; Xiong et al., 2020), after them (OLMo 2), or both (Gemma 2). With
experts, several MLPs and a router replace the MLP (moe.py). With a parallel residual, attention and MLP both read x.

Shapes: B batch, T time, C width, E experts, G key/value heads, D head width.
"""

from dataclasses import replace

from torch import Tensor

from gptworks.config import ModelConfig
from gptworks.kernels.dispatch import add
from gptworks.model.attention import Attention, AttentionInputs
from gptworks.model.cost import DROPOUT, Shapes, Stage
from gptworks.model.lab.stream import Carried, LabInputs, LabParts
from gptworks.model.layers import MLP, Dropout, Norm, build_norm, product_dtype
from gptworks.model.moe import MoE

BlockOutput = tuple[Tensor, Tensor | None, Tensor | None]
"""A block's results: the residual stream [B, T, C]; the router's logits [B, T, E], or None without experts; attention's
values [B, T, G·D] if later blocks read them, else None."""


class Block(LabParts):
    """Attention, then an MLP. Each has a norm before or after it, or both, and its result is added to the stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm1 = build_norm(config)
        self.attention = Attention(config, config.layer_window(layer))
        self.norm2 = build_norm(config)
        self.mlp = MoE(config) if config.n_experts else MLP(config, config.d_ff)
        self.dropout = Dropout(config.dropout_residual)
        self.scale, self.parallel = config.residual_scale, config.parallel_residual
        self.add_parts(config, layer)
        self.placement = config.norm_placement
        if self.placement == "both":
            self.norm1_after, self.norm2_after = build_norm(config), build_norm(config)

    def forward(self, x: Tensor, inputs: AttentionInputs, lab: LabInputs) -> BlockOutput:
        """Apply the block to the residual stream x [B, T, C]; see `BlockOutput` for the results."""
        norm1, norm2, behind1, behind2 = self.norms()
        x, inner = normalized(norm1, self.enter(x, lab))  # [B, T, C] each
        y, own = self.attend(inner, inputs, lab)
        y = self.dropout(y if behind1 is None else behind1(y))
        if self.parallel:
            x, inner = normalized(norm2, x)
            x = add(x, y, self.scale)
        else:
            x, inner = normalized(norm2, x, y, self.scale)
        y, router_logits = self.mlp(inner) if isinstance(self.mlp, MoE) else (self.mlp(inner), None)
        y = self.dropout(y if behind2 is None else behind2(y))
        return add(x, y, self.scale), router_logits, own

    def norms(self) -> tuple[Norm | None, Norm | None, Norm | None, Norm | None]:
        """Return the norms before attention, before the MLP, after attention and after the MLP, each None if absent."""
        if self.placement == "after":
            return None, None, self.norm1, self.norm2
        if self.placement == "both":
            return self.norm1, self.norm2, self.norm1_after, self.norm2_after
        return self.norm1, self.norm2, None, None

    def attend(self, inner: Tensor, inputs: AttentionInputs, lab: LabInputs) -> tuple[Tensor, Tensor | None]:
        """Return attention's output [B, T, C], and the layer's own values if later blocks read them, else None."""
        if self.values is None:
            return self.attention(inner, inputs), None
        own = self.attention.value(inner)
        y = self.attention(inner, inputs, self.values(inner, own, lab))
        return y, own if self.values.hands_on else None

    @staticmethod
    def cost(s: Shapes, layer: int) -> list[Stage]:
        """Return the memory of each of the block's operations, in order."""
        c = s.config
        # bytes of the gradient of attention's result; the gradient of the MLP's result has as many
        arrives = s.products(c.d_model) if c.norms_behind else _branch(s).leaves
        before1, before2 = Norm.cost(s, "norm1", reads_entry=True), Norm.cost(s, "norm2", not c.parallel_residual)
        if c.norm_placement == "after":
            before1 = before2 = _entry(s)
        behind = [Norm.cost_behind(s, _branch(s).leaves)] if c.norms_behind else []
        mlp = MoE.cost(s, arrives) if c.n_experts else MLP.cost(s, c.d_ff, arrives, s.n_tokens)
        there = _held_meanwhile(s, layer)
        return [
            *LabParts.entry_cost(s, layer),
            *(before1, *Attention.cost(s, layer, arrives), *behind, _branch(s)),
            *(before2, *(replace(stage, unsaved=stage.unsaved + there) for stage in mlp), *behind, _branch(s)),
            *LabParts.exit_cost(s, layer),
        ]

    @staticmethod
    def passing_bytes(s: Shapes, layer: int) -> int:
        """Peak bytes of a frozen block that keeps no activations. Attention uses a fused kernel; with softcap or
        dropout, it computes plain matrix products, whose scores are in memory."""
        c, stream, width = s.config, s.floats(s.config.d_model), s.products(s.config.d_model)
        window = s.config.layer_window(layer)
        q, k = s.products(c.n_heads * c.d_head), s.products(c.n_kv_heads * c.d_head)
        attention = 2 * q + 2 * k
        in_blocks = window is not None and s.length >= 2 * window
        if c.attention_softcap is not None or c.dropout_attention:
            pairs = s.length * (2 * window if window is not None and in_blocks else s.length)
            wide = 3 * s.floats(c.n_heads * c.d_head) if s.autocast and c.dropout_attention else 0
            causal = q + 4 * pairs if c.attention_softcap is None else 0  # torch makes a mask and scaled queries
            attention = q + wide + causal + 3 * 4 * s.batch_size * c.n_heads * pairs
        if in_blocks:
            attention += 8 * k  # banded attention stores each block of keys and values twice
        mlp = (4 if c.gated else 3 if c.mlp == "relu2" else 2) * s.products(c.d_ff)
        if c.n_experts:  # experts' inputs and outputs, sorted by expert and by token
            mlp = (3 * c.n_experts_per_token + 1) * width
        return (2 + Carried.kept_streams(c)) * stream + 2 * width + max(attention, mlp)


def normalized(norm: Norm | None, x: Tensor, branch: Tensor | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the stream x + scale · branch (x if `branch` is None), and the input of attention or MLP, in the products'
    dtype: the norm of that stream, or the stream itself if `norm` is None."""
    if norm is not None:
        return norm.of_sum(x, branch, scale)
    x = x if branch is None else add(x, branch, scale)
    return x, x.to(product_dtype(x))


def _entry(s: Shapes) -> Stage:
    """Memory of a stream that enters attention or MLP without a norm: autocast rounds it for the next product."""
    arrives, stream = s.products(s.config.d_model), s.floats(s.config.d_model)
    if not s.autocast:  # the arriving gradient is added to the stream's gradient as it is
        return Stage("entry", arrives=arrives)
    return Stage("entry", arrives=arrives, leaves=stream, merges=True, scratch=stream - arrives)


def _branch(s: Shapes) -> Stage:
    """Memory of adding a branch's result to the stream. In the backward pass the branch gets a rounded, scaled or
    masked copy of the stream's gradient. If it gets the gradient itself, `leaves` is 0."""
    width, dropout = s.config.d_model, s.config.dropout_residual > 0
    scaled = s.config.residual_scale != 1
    return Stage(
        "branch",
        {DROPOUT: s.mask(width) if dropout else 0},
        leaves=s.products(width) if dropout or scaled or s.autocast else 0,
        scratch=s.products(width) if dropout and s.autocast else 0,
    )


def _held_meanwhile(s: Shapes, layer: int) -> int:
    """Bytes of unsaved tensors in memory while the MLP is recomputed.

    These tensors are attention's result, and the stream plus this result if no operation saves that sum. Gradients of
    the block's last operations are also there: their backward pass needs no saved tensor, and so runs before the
    recomputation.
    """
    c = s.config
    rounded = c.norm_placement == "after" and s.autocast
    begun = [*LabParts.exit_cost(s, layer), *([] if c.dropout_residual else [_branch(s)])]
    grown = sum(stage.leaves - stage.arrives for stage in begun)
    return s.products(c.d_model) + (s.floats(c.d_model) if c.parallel_residual or rounded else 0) + grown
