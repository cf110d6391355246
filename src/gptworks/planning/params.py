"""Every parameter of a model, from its configuration alone: names, shapes and counts."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from gptworks.config import ModelConfig
from gptworks.errors import UserError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterGroup:
    """Tensors of one purpose. Names and shapes are those of the built model, a matrix being [out, in]."""

    name: str
    tensors: dict[str, Shape]
    """One layer's tensors where the group is in blocks, else the model's."""
    layers: tuple[int, ...] | None = None
    """The blocks that have them; None: they are outside the blocks."""

    @property
    def in_block(self) -> bool:
        return self.layers is not None

    @property
    def repeats(self) -> int:
        """Copies."""
        return 1 if self.layers is None else len(self.layers)

    @property
    def per_layer(self) -> int:
        """Parameters of one copy."""
        return sum(map(prod, self.tensors.values()))

    @property
    def total(self) -> int:
        """Parameters of all copies."""
        return self.repeats * self.per_layer


@dataclass(frozen=True)
class ParameterCount:
    """A model's parameters by group. Twelve groups are always present, an absent part without
    tensors; those of the laboratory's settings are where these are on."""

    groups: dict[str, ParameterGroup]
    active_share: float = 1.0
    """Share of the experts that a token is sent to; 1 where there are none."""

    @property
    def total(self) -> int:
        """Every parameter once: a tied head adds nothing."""
        return sum(group.total for group in self.groups.values())

    @property
    def active(self) -> int:
        """Parameters that take part for one token: all but the experts it is not sent to."""
        experts = self.groups["mlp_weights"].total + self.groups["mlp_biases"].total
        return self.total - round((1 - self.active_share) * experts)

    @property
    def embedding(self) -> int:
        """Tables of tokens, of positions, of token pairs and of values."""
        tables = ("token_embedding", "position_embedding", "bigram_embedding", "value_embeddings")
        return sum(self.groups[name].total for name in tables if name in self.groups)

    @property
    def non_embedding(self) -> int:
        """All but those tables; an untied head, a matrix product like any other, is included."""
        return self.total - self.embedding

    @cached_property
    def block_matrices(self) -> int:
        """Weights of the blocks' linear layers: what Muon optimizes."""
        return sum(
            group.repeats * prod(shape)
            for group in self.groups.values()
            for shape in group.tensors.values()
            if group.in_block and len(shape) == 2
        )

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each tensor by its name in the built model's `named_parameters`."""
        return {
            f"blocks.{i}.{name}" if group.in_block else name: shape
            for group in self.groups.values()
            for i in ((0,) if group.layers is None else group.layers)
            for name, shape in group.tensors.items()
        }


def require_vocab_size(config: ModelConfig) -> int:
    """The model's vocabulary, an error where it is not known yet."""
    if not config.vocab_size:
        raise UserError(
            "model.vocab_size=0: nothing can be counted before the vocabulary is known. "
            "Set model.vocab_size, or prepare the data first: its tokenizer sets it."
        )
    return config.vocab_size


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of the model that `config` describes, exactly.

    Raises:
        UserError: the vocabulary is not known yet.
    """
    vocab_size, width = require_vocab_size(config), config.d_model
    query_width, key_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    attention = {
        "query": (query_width, width),
        "key": (key_width, width),
        "value": (key_width, width),
        "out": (width, query_width),
    }
    biased = {"qkv": ("query", "key", "value"), "out": ("out",), True: tuple(attention), False: ()}
    mlp, shared = (
        ({"gate": (inner, width)} if config.gated else {}) | {"up": (inner, width), "down": (width, inner)}
        for inner in (config.d_ff, config.d_ff_shared)
    )
    mlps = [f"mlp.experts.{e}" for e in range(config.n_experts)] or ["mlp"]
    norms = dict.fromkeys(("norm1", "norm2", *(config.norms_behind or ())))
    norm_parts = ("weight", "bias") if config.norm_bias else ("weight",)

    def once(name: str, tensors: dict[str, Shape]) -> ParameterGroup:
        return ParameterGroup(name, tensors)

    def every_layer(name: str, tensors: dict[str, Shape], present: bool = True) -> ParameterGroup:
        return ParameterGroup(name, tensors if present else {}, tuple(range(config.n_layers)))

    def weights(module: str, matrices: dict[str, tuple[int, int]]) -> dict[str, Shape]:
        return {f"{module}.{name}.weight": shape for name, shape in matrices.items()}

    def biases(module: str, matrices: dict[str, tuple[int, int]]) -> dict[str, Shape]:
        return {f"{module}.{name}.bias": shape[:1] for name, shape in matrices.items()}

    def mlp_tensors(module: str, matrices: dict[str, tuple[int, int]]) -> dict[str, Shape]:
        return weights(module, matrices) | (biases(module, matrices) if config.mlp_bias else {})

    learned, tied, whole = config.position == "learned", config.tie_embeddings, config.qk_norm == "whole"
    normed = {"query": query_width, "key": key_width} if whole else dict.fromkeys(("query", "key"), config.d_head)
    groups = (
        once("token_embedding", {"token_embedding.weight": (vocab_size, width)}),
        once("position_embedding", {"position_embedding.weight": (config.context_length, width)} if learned else {}),
        every_layer("attention_weights", weights("attention", attention)),
        every_layer(
            "attention_biases", biases("attention", {name: attention[name] for name in biased[config.attention_bias]})
        ),
        every_layer(
            "qk_norms", {f"attention.{x}_norm.weight": (size,) for x, size in normed.items()}, bool(config.qk_norm)
        ),
        every_layer("router", {"mlp.router.weight": (config.n_experts, width)}, config.n_experts > 0),
        every_layer("mlp_weights", {name: shape for part in mlps for name, shape in weights(part, mlp).items()}),
        every_layer(
            "mlp_biases", {name: shape for part in mlps for name, shape in biases(part, mlp).items()}, config.mlp_bias
        ),
        every_layer("shared_expert", mlp_tensors("mlp.shared", shared), config.d_ff_shared > 0),
        every_layer("norms", {f"{norm}.{part}": (width,) for norm in norms for part in norm_parts}),
        once("final_norm", {f"norm.{part}": (width,) for part in norm_parts}),
        once("head", {} if tied else {"untied_head.weight": (vocab_size, width)}),
        *(ParameterGroup(*added) for added in config.laboratory_tensors()),
    )
    active_share = config.n_experts_per_token / config.n_experts if config.n_experts else 1.0
    return ParameterCount({group.name: group for group in groups}, active_share)


def laboratory_matrices(config: ModelConfig) -> Iterator[int]:
    """Elements of each matrix of the blocks that a token is multiplied by for the laboratory's settings."""
    for _, tensors, layers in config.laboratory_tensors():
        if layers is not None:
            yield from (len(layers) * prod(shape) for shape in tensors.values() if len(shape) == 2)


def stays_whole(parameter: str) -> bool:
    """Whether a matrix keeps its precision where others are packed, by its name: positions, routers and gates."""
    return parameter.endswith(("position_embedding.weight", "mlp.router.weight", ".gating.weight"))
