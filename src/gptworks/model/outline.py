"""A model's tensors and matrix products, from its configuration, without torch.

Each method of `Outline` follows the `forward` of one module. Subclasses in `gptworks.planning` count parameters, FLOPs
and gradients; a module's `cost` gives its memory. This file imports no torch, so that `gptworks presets` and `gptworks
describe`, which do not need it, answer four times as fast.

Letters: C width, Q query heads × their width, K key/value heads × their width, F MLP width, V vocabulary.
"""

from collections.abc import Sequence

from gptworks.config import ModelConfig

GROUPS = {
    "token_embedding": False, "position_embedding": False, "attention_weights": True, "attention_biases": True,
    "qk_norms": True, "router": True, "mlp_weights": True, "mlp_biases": True, "shared_expert": True, "norms": True,
    "final_norm": False, "head": False,
}  # fmt: skip
"""For each group of tensors, whether it is in the blocks. `ModelConfig.laboratory_tensors` has further groups."""

EMBEDDING_TABLES = ("token_embedding", "position_embedding", "bigram_embedding", "value_embeddings")
"""Groups whose tensors are lookup tables, indexed by token, position or token pair."""

ENTRY_GROUPS = ("token_embedding", "position_embedding", "bigram_embedding", "smear")
"""Groups whose tensors compute the first block's input."""

Sizes = tuple[int, int]
"""Numbers of inputs and outputs of a matrix."""

_PLACED = (
    "value_residual", "value_embeddings", "value_projections", "value_gates", "attention_gates", "future_heads",
)  # fmt: skip
"""Laboratory groups that `Outline` visits by name. Other laboratory groups change the input of the first
block or of each block."""


def formed_pairs(length: int, window: int | None) -> int:
    """Number of (query, key) pairs whose scores attention computes without a fused kernel, masked ones included."""
    if window is None or length < 2 * window:
        return length**2
    return -(-length // window) * window * 2 * window


def stays_whole(parameter: str) -> bool:
    """Whether the matrix with this name stays fp32 where others get a lower precision: positions, routers and gates."""
    return parameter.endswith(("position_embedding.weight", "mlp.router.weight", ".gating.weight"))


class Outline:
    """Visitor of a model's tensors and matrix products, in the order of the forward pass.

    Each module's method takes whether its input has a gradient (`x`, `inner`), and returns whether its result has a
    gradient.
    """

    def __init__(self, config: ModelConfig, n_future: int) -> None:
        """`n_future` is the number of tokens beyond the next that the loss also predicts."""
        self.config, self.n_future = config, n_future
        self.layers: Sequence[int] = config.layer_uses
        """Indices of the blocks to visit, in order. A subclass that treats all blocks alike visits only one."""
        self.experts_a_visit = 1
        """Number of experts that one visit stands for. A subclass that treats all experts alike visits only one."""
        self.layer: int | None = None
        """Index of the block being visited; None outside the blocks."""
        self.entry = self.first_values = False
        """Whether the first block's input, and the first layer's values, have a gradient."""
        self.tables: dict[int, bool] = {}
        """Whether a layer's table of value embeddings has a gradient, by layer index."""
        self.laboratory = {group: (tensors, layers) for group, tensors, layers in config.laboratory_tensors()}

    def tensor(self, group: str, name: str, *shape: int) -> bool:
        """Visit a parameter and return whether it is trained. `name` is relative to the current block, if any."""
        raise NotImplementedError

    def product(self, part: str, module: str, sizes: Sizes, x: bool, trained: bool, share: int | None = None) -> None:
        """Visit a product of activations with a matrix of these sizes; `part` names the kind of work.

        Args:
            share: fraction of the tokens in the product, in units of 1 / n_experts; None for all tokens.
        """

    def adapter(self, module: str, sizes: Sizes, x: bool, share: int | None) -> bool:
        """Visit a linear layer's adapter; return whether the layer has one."""
        return False

    def scores(self, module: str, window: int | None, q: bool, k: bool, v: bool) -> None:
        """Visit attention's two products: queries with keys, and weights with values."""

    def walk(self) -> None:
        """Visit the model from the embeddings to the heads."""
        c, width = self.config, self.config.d_model
        x = table = self.tensor("token_embedding", "token_embedding.weight", c.vocab_size, width)
        if c.position == "learned":
            x |= self.tensor("position_embedding", "position_embedding.weight", c.context_length, width)
        for group, (_, layers) in self.laboratory.items():
            if layers is None and group not in _PLACED:
                x |= self.added(group)
        tables, _ = self.laboratory.get("value_embeddings", ({}, None))
        for name, shape in tables.items():
            self.tables[int(name.split(".")[1])] = self.tensor("value_embeddings", name, *shape)
        self.entry = x
        for layer in self.layers:
            self.layer = layer
            x = self.block(layer, x)
        self.layer = None
        x = self.norm("norm", x, "final_norm")
        if not c.tie_embeddings:
            table = self.tensor("head", "untied_head.weight", c.vocab_size, width)
        heads = [f"future_heads.{i}" for i in range(self.n_future)]
        led = [self.linear("future_heads", "future_heads", name, (width, width), x) for name in heads]
        x |= any(led)  # all heads' losses share one backward pass
        self.product("head", "head", (width, c.vocab_size), x, table)
        for name in heads:
            self.product("future_heads", name, (width, c.vocab_size), x, table)

    def linear(
        self,
        part: str,
        group: str,
        name: str,
        sizes: Sizes,
        x: bool,
        bias_group: str | None = None,
        share: int | None = None,
    ) -> bool:
        """Visit a linear layer; `name` is relative to the current block. bias_group: the group of its bias, if any."""
        n_in, n_out = sizes
        module = name if self.layer is None else f"blocks.{self.layer}.{name}"
        weight = self.tensor(group, f"{name}.weight", n_out, n_in)
        bias = bias_group is not None and self.tensor(bias_group, f"{name}.bias", n_out)
        self.product(part, module, sizes, x, weight, share)
        return self.adapter(module, sizes, x, share) or x or weight or bias

    def added(self, group: str, x: bool = False) -> bool:
        """Visit a laboratory group, if the current block has it. x: whether its matrices' input has a gradient."""
        tensors, layers = self.laboratory.get(group, ({}, ()))
        if layers is not None and self.layer not in layers:
            return False
        y = False
        for name, shape in tensors.items():
            if layers is not None and len(shape) == 2:
                y |= self.linear("laboratory", group, name.removesuffix(".weight"), (shape[1], shape[0]), x)
            else:
                y |= self.tensor(group, name, *shape)
        return y

    def norm(self, name: str, x: bool, group: str = "norms") -> bool:
        """Visit a `gptworks.model.layers.Norm`."""
        x |= self.tensor(group, f"{name}.weight", self.config.d_model)
        return x | (self.config.norm_bias and self.tensor(group, f"{name}.bias", self.config.d_model))

    def block(self, layer: int, x: bool) -> bool:
        """Visit a `gptworks.model.block.Block`."""
        c, before = self.config, self.config.norm_placement != "after"
        behind1, behind2 = c.norms_behind or ("", "")
        for group, (_, layers) in self.laboratory.items():
            if layers is not None and group not in _PLACED:
                x |= self.added(group, x)
        out = self.attention(layer, self.norm("norm1", x) if before else x)
        out = self.norm(behind1, out) if behind1 else out
        entry = x if c.parallel_residual else x | out
        inner = self.norm("norm2", entry) if before else entry
        given = self.experts(inner) if c.n_experts else self.mlp("mlp", c.d_ff, inner)
        return x | out | (self.norm(behind2, given) if behind2 else given)

    def attention(self, layer: int, x: bool) -> bool:
        """Visit a `gptworks.model.attention.Attention`."""
        c = self.config
        queries, keys = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
        biases = "attention_biases" if c.qkv_bias else None
        q, k, v = (
            self.linear("query_key_value", "attention_weights", f"attention.{name}", (c.d_model, width), x, biases)
            for name, width in (("query", queries), ("key", keys), ("value", keys))
        )
        v = self.values(layer, x, v)
        if c.qk_norm:
            normed = (queries, keys) if c.qk_norm == "whole" else (c.d_head, c.d_head)
            q |= self.tensor("qk_norms", "attention.query_norm.weight", normed[0])
            k |= self.tensor("qk_norms", "attention.key_norm.weight", normed[1])
        self.scores(f"blocks.{layer}.attention", c.layer_window(layer), q, k, v)
        y = q | k | v | self.added("attention_gates", x)
        biases = "attention_biases" if c.out_bias else None
        return self.linear("attention_output", "attention_weights", "attention.out", (queries, c.d_model), y, biases)

    def values(self, layer: int, inner: bool, own: bool) -> bool:
        """Visit a `gptworks.model.lab.stream.Values`. own: whether the layer's own projected values have a gradient."""
        v = own | self.added("value_residual")
        if self.config.value_residual and layer:
            v |= self.first_values
        elif self.config.value_residual:
            self.first_values = own
        v |= self.tables.get(layer, False) | self.added("value_projections", self.entry)
        return v | self.added("value_gates", inner)

    def experts(self, inner: bool) -> bool:
        """Visit a `gptworks.model.moe.MoE`."""
        c, at_once = self.config, self.experts_a_visit
        share = at_once * c.n_experts_per_token
        y = self.linear("mlp", "router", "mlp.router", (c.d_model, c.n_experts), inner)
        for e in range(0, c.n_experts, at_once):
            y |= self.mlp(f"mlp.experts.{e}", c.d_ff, inner, share=share)
        return y | (c.d_ff_shared > 0 and self.mlp("mlp.shared", c.d_ff_shared, inner, ("shared_expert",) * 2))

    def mlp(
        self,
        module: str,
        d_ff: int,
        inner: bool,
        groups: tuple[str, str] = ("mlp_weights", "mlp_biases"),
        share: int | None = None,
    ) -> bool:
        """Visit a `gptworks.model.layers.MLP`. groups: group of its weights, and group of its biases."""
        c, (weights, biases) = self.config, groups
        bias_group = biases if c.mlp_bias else None
        wide = [
            self.linear("mlp", weights, f"{module}.{name}", (c.d_model, d_ff), inner, bias_group, share)
            for name in (("gate", "up") if c.gated else ("up",))
        ]
        return self.linear("mlp", weights, f"{module}.down", (d_ff, c.d_model), any(wide), bias_group, share)
