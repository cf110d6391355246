"""A model: its architecture, with the settings of the laboratory and what they add to it.

To add a setting of the laboratory, write it here, with its tensors, and what it computes in `gptworks.model.lab`.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.architecture import MOST_LAYERS, Architecture
from gptworks.config.base import Fixed, PositiveInt

Shape = tuple[int, ...]
Times = Annotated[int, Field(ge=1, le=MOST_LAYERS)]

LABORATORY = (
    "residual_scalars", "unet_skips", "value_residual", "value_embeddings", "attention_gate", "smear",
    "bigram_vocab_size", "layer_repeats",
)  # fmt: skip
"""Settings from speedruns and recent papers that no architecture of transformers or llama.cpp has. The native engine
does not compute them, and tensor parallelism does not divide them."""


class ModelConfig(Architecture):
    """A decoder-only transformer, its laboratory's settings included."""

    bigram_vocab_size: Fixed[int] = Field(
        0,
        ge=0,
        le=100_000_000,
        description="Rows of a table, indexed by a hash of each token and the one before it, whose vectors are added "
        "to the token embedding with a learned scale (Huang et al., 2025; modded-nanogpt). 0: none.",
    )
    residual_scalars: Fixed[bool] = Field(
        False,
        description="What enters block l is λ_l · stream + μ_l · embedding, both learned, from 1 and 0 on (nanochat, "
        "after modded-nanogpt).",
    )
    unet_skips: Fixed[bool] = Field(
        False,
        description="Each layer of the second half adds what its mirror in the first half gave, times a learned scalar "
        "that starts at 1 (modded-nanogpt).",
    )
    value_residual: Fixed[bool] = Field(
        False,
        description="From the second layer on, values are a · the layer's own + b · the first layer's, both learned, "
        "from 0.5 on (Zhou et al., 2024).",
    )
    value_embeddings: Fixed[tuple[Literal["none", "table", "projected"], ...]] = Field(
        ("none",),
        min_length=1,
        max_length=MOST_LAYERS,
        description="Repeated over the layers: what is added to values, gated for each head. table: a vector of the "
        "token, from a table of the layer's own (modded-nanogpt, nanochat). projected: a projection of what entered "
        "the first block.",
    )
    attention_gate: Fixed[bool] = Field(
        False,
        description="Each head's result is multiplied by a sigmoid of what attention reads (Qiu et al., 2025).",
    )
    smear: Fixed[bool] = Field(
        False,
        description="To each token's embedding that of the token before it is added, times λ and a sigmoid of its own, "
        "both learned; λ starts at 0 (modded-nanogpt).",
    )
    gate_channels: Fixed[PositiveInt | None] = Field(
        None,
        description="Number of channels that gates read, from the first (nanochat: 32, modded-nanogpt: 12). None: all.",
    )

    layer_repeats: Fixed[Times | Annotated[tuple[Times, ...], Field(max_length=MOST_LAYERS)]] = Field(
        1,
        description="How often blocks are run with the same weights. A number: the whole stack, this many times one "
        "after the other (Dehghani et al., 2018; with n_layers=1, Lan et al., 2019). A number for each block: that "
        "block this many times in a row (Liu et al., 2024).",
    )

    n_future_tokens: Fixed[int] = Field(
        1,
        ge=1,
        le=64,
        description="Tokens that are predicted from each position in training: for each beyond the next a head of its "
        "own, features + SiLU(W · features) (Cai et al., 2024), and the unembedding of all (Gloeckle et al., 2024). "
        "The next token's logits do not depend on them. 1: none.",
    )

    @property
    def laboratory(self) -> tuple[str, ...]:
        """Those of LABORATORY that are on."""
        return tuple(name for name in LABORATORY if getattr(self, name) != type(self).model_fields[name].default)

    @property
    def d_gate(self) -> int:
        """Channels that gates read."""
        return self.gate_channels or self.d_model

    def layer_value_embedding(self, layer: int) -> str:
        """What is added to the values of one layer: none, table or projected."""
        return self.value_embeddings[layer % len(self.value_embeddings)]

    def layer_skips(self, layer: int) -> bool:
        """Whether one layer adds what layer n_layers - 1 - layer gave."""
        return self.unet_skips and layer >= self.n_layers - self.n_layers // 2

    def layer_is_skipped_to(self, layer: int) -> bool:
        """Whether a later layer adds what one layer gave."""
        return self.unet_skips and layer < self.n_layers // 2

    def layer_kind(self, layer: int) -> tuple[int | None, str, bool, bool, bool]:
        """What makes one layer take other memory than another."""
        skips, is_skipped_to = self.layer_skips(layer), self.layer_is_skipped_to(layer)
        first_values = self.value_residual and layer > 0
        return self.layer_window(layer), self.layer_value_embedding(layer), first_values, skips, is_skipped_to

    @property
    def layer_uses(self) -> tuple[int, ...]:
        """The number of the block that is run at each step of a forward pass: 0 … n_layers - 1 where none repeats."""
        layers = range(self.n_layers)
        if isinstance(self.layer_repeats, int):
            return tuple(layers) * self.layer_repeats
        return tuple(layer for layer in layers for _ in range(self.layer_repeats[layer]))

    @property
    def repeats_layers(self) -> bool:
        """Whether a block is run more than once."""
        return len(self.layer_uses) > self.n_layers

    @property
    def reads_previous_token(self) -> bool:
        """Whether a token's embedding depends on the token before it, so that a cache keeps tokens too."""
        return self.smear or self.bigram_vocab_size > 0

    def laboratory_tensors(self) -> Iterator[tuple[str, dict[str, Shape], tuple[int, ...] | None]]:
        """What the settings that are on add: a group's name, its tensors' shapes by name as in the built model, and the
        layers that each have them; None: they are outside the blocks."""
        layers, key_width = tuple(range(self.n_layers)), self.n_kv_heads * self.d_head
        tables, projected = (
            tuple(i for i in layers if self.layer_value_embedding(i) == kind) for kind in ("table", "projected")
        )
        if self.residual_scalars:
            yield "residual_scalars", {"scalars.weight": (2,)}, layers
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
        if self.n_future_tokens > self.context_length:
            raise ValueError(
                f"n_future_tokens={self.n_future_tokens} is more than context_length={self.context_length}: a row has "
                f"no token so far ahead"
            )
        if self.bigram_vocab_size == 1:
            raise ValueError(
                "bigram_vocab_size=1 has a row only for a text's first token: pairs of tokens need at least one more; "
                "choose a multiple of the vocabulary, or 0"
            )
        if not isinstance(self.layer_repeats, int) and len(self.layer_repeats) != self.n_layers:
            raise ValueError(
                f"layer_repeats has {len(self.layer_repeats)} numbers and n_layers={self.n_layers}: give one for each "
                f"block, or a single number for the whole stack"
            )
        repeats = self.layer_repeats
        if (n_run := self.n_layers * repeats if isinstance(repeats, int) else sum(repeats)) > MOST_LAYERS:
            raise ValueError(
                f"layer_repeats makes {n_run:,} layers of n_layers={self.n_layers}: at most {MOST_LAYERS:,} are run"
            )
        placed = [name for name in self.laboratory if name not in ("bigram_vocab_size", "layer_repeats", "smear")]
        if self.repeats_layers and placed:
            raise ValueError(
                f"layer_repeats runs a block at several places, and {placed[0]} was made for one place of each: drop "
                f"one of them"
            )
        for name in ("unet_skips", "value_residual"):
            if getattr(self, name) and self.n_layers < 2:
                raise ValueError(
                    f"{name}=true and n_layers={self.n_layers}: a later layer reads what an earlier one gave"
                )
        embeds = {self.layer_value_embedding(layer) for layer in range(self.n_layers)}
        if embeds == {"none"} != set(self.value_embeddings):
            raise ValueError(
                f"value_embeddings has {len(self.value_embeddings)} entries and n_layers={self.n_layers}: no layer has "
                f"one; shorten the pattern"
            )
        if self.gate_channels is not None and not self.attention_gate and not self.smear and embeds == {"none"}:
            raise ValueError(
                f"gate_channels={self.gate_channels} is set and the model has no gate: set attention_gate, smear or "
                f"value_embeddings, or drop it"
            )
        if self.gate_channels is not None and self.gate_channels > self.d_model:
            raise ValueError(
                f"gate_channels={self.gate_channels} is more than d_model={self.d_model}: gates read the first of these"
            )
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
                    f"init=induction with {what}: it lays two heads into the first two layers, of at least 4 rotated "
                    f"elements each, behind norms of the block's input; choose another init"
                )
