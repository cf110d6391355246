"""Settings of a model: its architecture and experimental additions (`LABORATORY`), with the tensors that these add.

To add an experimental setting, write the setting and its tensors here, and its computation in `gptworks.model.lab`.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.architecture import MOST_LAYERS, Architecture, LayerPattern
from gptworks.config.base import Fixed, PositiveInt

Shape = tuple[int, ...]
Times = Annotated[int, Field(ge=1, le=MOST_LAYERS)]

LABORATORY = (
    "unet_skips", "value_residual", "value_embeddings", "attention_gate", "smear", "bigram_vocab_size",
    "layer_repeats",
)  # fmt: skip
"""Experimental settings from speedruns and recent papers, which no architecture of transformers or llama.cpp has.
Tensor parallelism supports none of them, and the C++ engine supports only `bigram_vocab_size`."""


class ModelConfig(Architecture):
    """A decoder-only transformer, with experimental settings."""

    removed: ClassVar[Mapping[str, Any]] = {"residual_scalars": False}

    bigram_vocab_size: Fixed[int] = Field(
        0,
        ge=0,
        le=100_000_000,
        description="Rows of an embedding of token pairs, indexed by a hash, which is added to the token embedding "
        "times a learned scale (Huang et al., 2025; modded-nanogpt). 0: none.",
    )
    unet_skips: Fixed[bool] = Field(
        False,
        description="Each layer of the second half adds the output of its mirror in the first half, times a learned "
        "scalar, initially 1 (modded-nanogpt).",
    )
    value_residual: Fixed[bool] = Field(
        False,
        description="From the second layer on, values are a · the layer's + b · the first layer's. a and b are "
        "learned, initially 0.5 (Zhou et al., 2024).",
    )
    value_embeddings: Fixed[LayerPattern[Literal["none", "table", "projected"]]] = Field(
        ("none",),
        description="Pattern over the layers: what is added to values, gated per head. table: an embedding of the "
        "token for this layer (modded-nanogpt, nanochat). projected: a projection of the first block's input.",
    )
    attention_gate: Fixed[bool] = Field(
        False, description="Multiply each head's output by a sigmoid of attention's input (Qiu et al., 2025)."
    )
    smear: Fixed[bool] = Field(
        False,
        description="Add the previous token's embedding to each token's, times λ and a sigmoid gate, both learned; λ "
        "is initially 0 (modded-nanogpt).",
    )
    gate_channels: Fixed[PositiveInt | None] = Field(
        None, description="Number of first channels that gates read (nanochat: 32, modded-nanogpt: 12). None: all."
    )

    layer_repeats: Fixed[Times | Annotated[tuple[Times, ...], Field(max_length=MOST_LAYERS)]] = Field(
        1,
        description="How often blocks run with the same weights. One number: the whole stack in sequence (Dehghani et "
        "al., 2018; with n_layers=1, Lan et al., 2019). One per block: each block in a row (Liu et al., 2024).",
    )

    n_future_tokens: Fixed[int] = Field(
        1,
        ge=1,
        le=64,
        description="Tokens predicted from each position in training (Gloeckle et al., 2024). Each token beyond the "
        "next has a head, features + SiLU(W · features) (Cai et al., 2024); they share the unembedding. The next "
        "token's logits do not depend on them. 1: no such heads.",
    )

    @property
    def laboratory(self) -> tuple[str, ...]:
        """Names of the settings in `LABORATORY` that differ from their defaults."""
        return tuple(name for name in LABORATORY if getattr(self, name) != type(self).model_fields[name].default)

    @property
    def d_gate(self) -> int:
        """Number of input channels that each gate reads, from the first channel on."""
        return self.gate_channels or self.d_model

    def layer_value_embedding(self, layer: int) -> str:
        """Return the kind of embedding added to a layer's values: none, table or projected."""
        return self.value_embeddings[layer % len(self.value_embeddings)]

    def layer_skips(self, layer: int) -> bool:
        """Return whether a skip connection adds the output of layer n_layers - 1 - layer to this layer's input."""
        return self.unet_skips and layer >= self.n_layers - self.n_layers // 2

    def layer_is_skipped_to(self, layer: int) -> bool:
        """Return whether a skip connection adds this layer's output to a later layer's input."""
        return self.unet_skips and layer < self.n_layers // 2

    def layer_kind(self, layer: int) -> tuple[int | None, str, bool, bool, bool]:
        """Return a key that is equal for layers with the same memory and FLOPs."""
        skips, is_skipped_to = self.layer_skips(layer), self.layer_is_skipped_to(layer)
        first_values = self.value_residual and layer > 0
        return self.layer_window(layer), self.layer_value_embedding(layer), first_values, skips, is_skipped_to

    @property
    def layer_uses(self) -> tuple[int, ...]:
        """Block indices in the order in which a forward pass runs the blocks: 0 … n_layers - 1 without repeats."""
        layers = range(self.n_layers)
        if isinstance(self.layer_repeats, int):
            return tuple(layers) * self.layer_repeats
        return tuple(layer for layer in layers for _ in range(self.layer_repeats[layer]))

    @property
    def repeats_layers(self) -> bool:
        """Whether a block runs more than once."""
        return len(self.layer_uses) > self.n_layers

    @property
    def reads_previous_token(self) -> bool:
        """Whether a token's embedding depends on the previous token, so that a KV cache must also keep token ids."""
        return self.smear or self.bigram_vocab_size > 0

    def laboratory_tensors(self) -> Iterator[tuple[str, dict[str, Shape], tuple[int, ...] | None]]:
        """Yield each group of tensors that experimental settings add: its name, the shapes by tensor name, and the
        layers that have the tensors, or None if the tensors are outside the blocks."""
        layers, key_width = tuple(range(self.n_layers)), self.n_kv_heads * self.d_head
        tables, projected = (
            tuple(i for i in layers if self.layer_value_embedding(i) == kind) for kind in ("table", "projected")
        )
        if self.smear:
            yield "smear", {"smear.weight": (self.d_gate,), "smear.scale": (1,)}, None
        if rows := self.bigram_vocab_size:
            pairs = {"bigram_embedding.table.weight": (rows, self.d_model), "bigram_embedding.scale": (1,)}
            yield "bigram_embedding", pairs, None
        if self.unet_skips:
            yield "unet_skips", {"skip.weight": (1,)}, tuple(filter(self.layer_skips, layers))
        if self.value_residual:
            yield "value_residual", {"values.scalars.weight": (2,)}, layers[1:]
        if tables:
            shape = (self.vocab_size, key_width)
            yield "value_embeddings", {f"value_embeddings.{i}.weight": shape for i in tables}, None
        if projected:
            yield "value_projections", {"values.projection.weight": (key_width, self.d_model)}, projected
        if gated := tuple(sorted(tables + projected)):
            yield "value_gates", {"values.gating.weight": (self.n_kv_heads, self.d_gate)}, gated
        if self.n_future_tokens > 1:
            square, heads = (self.d_model, self.d_model), range(self.n_future_tokens - 1)
            yield "future_heads", {f"future_heads.{i}.weight": square for i in heads}, None
        if self.attention_gate:
            yield "attention_gates", {"attention.gating.weight": (self.n_heads, self.d_gate)}, layers

    @model_validator(mode="after")
    def _check_laboratory(self) -> Self:
        self._at_most("n_future_tokens", "context_length", "predict at most as many tokens as a row has")
        if self.bigram_vocab_size == 1:
            raise ValueError(
                "bigram_vocab_size=1 has a row only for a text's first token: pairs of tokens need at least one more; "
                "choose a multiple of the vocabulary, or 0"
            )
        if not isinstance(self.layer_repeats, int) and len(self.layer_repeats) != self.n_layers:
            raise ValueError(
                f"layer_repeats has {len(self.layer_repeats)} numbers and n_layers={self.n_layers}: give one per "
                f"block, or a single number for the whole stack"
            )
        repeats = self.layer_repeats
        if (n_run := self.n_layers * repeats if isinstance(repeats, int) else sum(repeats)) > MOST_LAYERS:
            raise ValueError(
                f"layer_repeats runs {n_run:,} layers with n_layers={self.n_layers}: repeat at most {MOST_LAYERS:,}"
            )
        placed = [name for name in self.laboratory if name not in ("bigram_vocab_size", "layer_repeats", "smear")]
        if self.repeats_layers and placed:
            raise ValueError(
                f"layer_repeats and {placed[0]} are both set: {placed[0]} needs blocks that run once; drop one of them"
            )
        for name in ("unet_skips", "value_residual"):
            if getattr(self, name) and self.n_layers < 2:
                raise ValueError(f"{name}=true and n_layers={self.n_layers}: it needs at least 2 layers; drop it")
        embeds = {self.layer_value_embedding(layer) for layer in range(self.n_layers)}
        if embeds == {"none"} != set(self.value_embeddings):
            raise ValueError(
                f"value_embeddings has {len(self.value_embeddings)} entries and n_layers={self.n_layers}: all layers "
                f"get `none`; shorten the pattern"
            )
        if self.gate_channels is not None and not self.attention_gate and not self.smear and embeds == {"none"}:
            raise ValueError(
                f"gate_channels={self.gate_channels} is set and the model has no gate: set attention_gate, smear or "
                f"value_embeddings, or drop it"
            )
        self._at_most("gate_channels", "d_model", "choose at most d_model")
        self._check_induction()
        return self

    def _check_induction(self) -> None:
        if self.init != "induction":
            return
        obstacles = {
            f"n_layers={self.n_layers}": self.n_layers < 2,
            "first two layers that are not both rotated": not (self.layer_rotates(0) and self.layer_rotates(1)),
            f"{self.d_rotary} rotated elements a head": self.d_rotary < 4,
            "window_rope_theta": self.window_rope_theta is not None,
            f"norm_placement={self.norm_placement}": self.norm_placement != "before",
            "qk_norm=whole": self.qk_norm == "whole",
            "layer_repeats": self.repeats_layers,
            f"d_model={self.d_model}": self.d_model < 4,
        }
        for what, is_there in obstacles.items():
            if is_there:
                raise ValueError(
                    f"init=induction with {what}: it needs a head of at least 4 rotated elements in each of the first "
                    f"two layers, after a norm of the block's input; choose another init"
                )
