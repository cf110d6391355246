"""Names, shapes and numbers of a model's parameters, computed from its configuration."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.model.outline import EMBEDDING_TABLES, GROUPS, Outline

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterGroup:
    """Tensors with the same purpose, by name. The shape of a matrix is (outputs, inputs)."""

    name: str
    tensors: dict[str, Shape]
    """Shapes by name: within one block if the group is in blocks, else within the model."""
    layers: tuple[int, ...] | None = None
    """Indices of the blocks that have these tensors; None: the tensors are outside the blocks."""

    @property
    def in_block(self) -> bool:
        return self.layers is not None

    @property
    def repeats(self) -> int:
        """Number of blocks that have the group; 1 for a group outside the blocks."""
        return 1 if self.layers is None else len(self.layers)

    @property
    def per_layer(self) -> int:
        """Number of parameters of the group in one block, or in the model if the group is outside the blocks."""
        return sum(map(prod, self.tensors.values()))

    @property
    def total(self) -> int:
        """Number of parameters of the group in the model."""
        return self.repeats * self.per_layer


@dataclass(frozen=True)
class ParameterCount:
    """A model's parameters by group. The twelve groups in `GROUPS` are always present, but may have no tensors. Groups
    of experimental settings are present only if the settings are on."""

    groups: dict[str, ParameterGroup]
    active_share: float = 1.0
    """Fraction of a layer's experts that process each token; 1 without experts."""

    @property
    def total(self) -> int:
        """Number of parameters; a tied head counts once, as the embedding."""
        return sum(group.total for group in self.groups.values())

    @property
    def active(self) -> int:
        """Number of parameters that process a token: all except those of experts that the router does not choose."""
        experts = self.groups["mlp_weights"].total + self.groups["mlp_biases"].total
        return self.total - round((1 - self.active_share) * experts)

    @property
    def embedding(self) -> int:
        """Number of parameters in the embeddings of tokens, positions, token pairs and values."""
        return sum(self.groups[name].total for name in EMBEDDING_TABLES if name in self.groups)

    def tensors_of(self, group: str) -> dict[str, Shape]:
        """Return the shapes of the group's tensors by name; empty if the model has no such group."""
        return self.groups[group].tensors if group in self.groups else {}

    @property
    def non_embedding(self) -> int:
        """Number of parameters outside the embedding tables, including an untied head."""
        return self.total - self.embedding

    @cached_property
    def block_matrices(self) -> int:
        """Number of elements in the blocks' matrices, which Muon and similar optimizers train."""
        return sum(
            group.repeats * prod(shape)
            for group in self.groups.values()
            for shape in group.tensors.values()
            if group.in_block and len(shape) == 2
        )

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each tensor by its name in the model's `named_parameters`."""
        return {
            f"blocks.{i}.{name}" if group.in_block else name: shape
            for group in self.groups.values()
            for i in ((0,) if group.layers is None else group.layers)
            for name, shape in group.tensors.items()
        }


def require_vocab_size(config: ModelConfig) -> int:
    """Return the model's vocabulary size; raise a UserError if it is unknown (0)."""
    if not config.vocab_size:
        raise UserError(
            "model.vocab_size=0: nothing can be counted before the vocabulary is known. "
            "Set model.vocab_size, or prepare the data first: its tokenizer sets it."
        )
    return config.vocab_size


@lru_cache(maxsize=16)  # a result takes 4 MB with 4,096 experts
def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of the model that `config` describes, exactly.

    Raises:
        UserError: the vocabulary size is unknown.
    """
    require_vocab_size(config)
    found = _Tensors(config, config.n_future_tokens - 1).shapes
    everywhere = tuple(range(config.n_layers))
    groups = [
        *(ParameterGroup(name, found[name], everywhere if in_block else None) for name, in_block in GROUPS.items()),
        *(ParameterGroup(*added) for added in config.laboratory_tensors()),
    ]
    active_share = config.n_experts_per_token / config.n_experts if config.n_experts else 1.0
    return ParameterCount({group.name: group for group in groups}, active_share)


class _Tensors(Outline):
    """Collects the shapes of a model's tensors by group and name; visits one block, because all blocks are alike."""

    def __init__(self, config: ModelConfig, n_future: int) -> None:
        super().__init__(config, n_future)
        self.layers = (0,)
        self.shapes: defaultdict[str, dict[str, Shape]] = defaultdict(dict)
        self.walk()

    def tensor(self, group: str, name: str, *shape: int) -> bool:
        self.shapes[group][name] = shape
        return True
