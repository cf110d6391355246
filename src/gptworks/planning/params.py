"""Names, shapes and numbers of a model's parameters, and the part that a run trains, computed from the configuration.

Frozen parameters have no gradient and no optimizer state.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from gptworks.config import ADAPTED_MODULES, FreezeConfig, LoRAConfig, ModelConfig
from gptworks.config.optimizers import LEAST_IN_8_BITS, SCALED_TOGETHER
from gptworks.errors import UserError
from gptworks.model.outline import EMBEDDING_TABLES, ENTRY_GROUPS, GROUPS, Outline

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterGroup:
    """Tensors with the same purpose, by name. The shape of a matrix is (outputs, inputs)."""

    name: str
    tensors: dict[str, Shape]
    """Shapes by name. Names are relative to a block if the group is in blocks, else to the model."""
    layers: tuple[int, ...] | None = None
    """Indices of the blocks that have these tensors; None if the tensors are outside the blocks."""

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
        """Number of parameters that process a token: all except the experts that the router does not choose."""
        experts = self.groups["mlp_weights"].total + self.groups["mlp_biases"].total
        return self.total - round((1 - self.active_share) * experts)

    @property
    def embedding(self) -> int:
        """Number of parameters in the embeddings of tokens, positions, token pairs and values."""
        return sum(self.groups[name].total for name in EMBEDDING_TABLES if name in self.groups)

    def tensors(self) -> Iterator[tuple[ParameterGroup, str, Shape]]:
        """Yield each tensor's group, name and shape; a block's tensor only once (see `ParameterGroup.repeats`)."""
        return ((group, *tensor) for group in self.groups.values() for tensor in group.tensors.items())

    @property
    def non_embedding(self) -> int:
        """Number of parameters outside the embedding tables, including an untied head."""
        return self.total - self.embedding

    @cached_property
    def block_matrices(self) -> int:
        """Number of elements in the blocks' matrices, which Muon and similar optimizers train."""
        return sum(group.repeats * prod(s) for group, _, s in self.tensors() if group.in_block and len(s) == 2)

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


@dataclass(frozen=True)
class Trained:
    """The part of a model that is trained."""

    parameters: int
    """Number of parameters with a gradient, including an adapter's."""
    adapters: tuple[Shape, ...]
    """Shapes of the matrices that an adapter adds to the model."""
    share: float
    """Trained share of the model's own parameters, from 0 to 1."""
    matrices: tuple[Shape, ...]
    """Shapes of the blocks' trained matrices; an optimizer other than AdamW updates only these matrices."""
    head: bool
    """Whether the head's matrix is trained. A tied head's matrix is the embedding's matrix."""
    embedding: bool
    """Whether a parameter before the first block is trained, so that the backward pass reaches the embeddings."""
    outside: frozenset[str] = frozenset()
    """Names of the trained tensors outside the blocks."""
    modules: tuple[frozenset[str], ...] | None = None
    """For each layer, the last name parts (such as `query`) of modules with trained parameters. None if all modules
    have trained parameters."""
    rank: int = 0
    """Rank of the adapter; 0 without an adapter."""
    dropout: bool = False
    """Whether the adapter has dropout. With dropout, the adapter saves an input of its own."""
    targets: frozenset[str] = frozenset()
    """Last name parts of a block's linear layers that have adapters, such as `query`."""
    base: str = "full"
    """Format of the blocks' frozen matrices if there is an adapter: full, int8 or int4."""
    in_8_bits: tuple[int, int] = (0, 0)
    """Number of elements with 8-bit moments, and number of these moments' scales, if `optimizer_state` is int8."""
    n_still: int = 0
    """Number of block runs at the start of the forward pass without a backward pass, because no parameter in or before
    these blocks is trained."""

    @property
    def added(self) -> int:
        """Number of parameters that an adapter adds to the model."""
        return sum(map(prod, self.adapters))

    def moves(self, module: str, layer: int) -> bool:
        """Return whether a layer's module with this last name part has trained parameters of its own."""
        return self.modules is None or module in self.modules[layer]


def trains(parameter: str, adapter: LoRAConfig | None, freeze: FreezeConfig | None) -> bool:
    """Return whether the model's own parameter of this name is trained."""
    if adapter is not None:
        return adapter.trains(parameter)
    return freeze is None or not freeze.freezes(parameter)


def everything(count: ParameterCount) -> Trained:
    """Return the description of a model that is trained as a whole."""
    matrices = tuple(
        shape for group, _, shape in count.tensors() if group.in_block and len(shape) == 2 for _ in range(group.repeats)
    )
    return Trained(
        parameters=count.total,
        adapters=(),
        share=1.0,
        matrices=matrices,
        head=True,
        embedding=True,
        outside=frozenset(name for group, name, _ in count.tensors() if not group.in_block),
        in_8_bits=moments_in_8_bits(map(prod, matrices)),
    )


def moments_in_8_bits(sizes: Iterable[int]) -> tuple[int, int]:
    """Return the number of elements with 8-bit moments in matrices of these sizes, and the number of moments' scales.

    Sizes are numbers of elements. AdamW keeps the moments of matrices with fewer than `LEAST_IN_8_BITS` elements in
    float32.
    """
    large = [size for size in sizes if size >= LEAST_IN_8_BITS]
    return sum(large), 2 * sum(-(-size // SCALED_TOGETHER) for size in large)


@lru_cache(maxsize=16)
def trained(model: ModelConfig, adapter: LoRAConfig | None, freeze: FreezeConfig | None) -> Trained:
    """Return the trained part of a model."""
    count = count_parameters(model)
    if adapter is None and freeze is None:
        return everything(count)
    shapes = count.shapes
    own = {name: prod(shape) for name, shape in shapes.items() if trains(name, adapter, freeze)}
    matrices = tuple(shapes[name] for name in own if name.startswith("blocks.") and len(shapes[name]) == 2)
    modules: list[set[str]] = [set() for _ in range(model.n_layers)]
    for name in own:
        if name.startswith(("blocks.", "value_embeddings.")):
            group, layer, *path = name.split(".")
            modules[int(layer)].add(path[-2] if group == "blocks" else group)
    part = Trained(
        parameters=sum(own.values()),
        adapters=(),
        share=sum(own.values()) / count.total,
        matrices=matrices,
        head=own.keys() >= count.groups["token_embedding" if model.tie_embeddings else "head"].tensors.keys(),
        embedding=any(name in own and group.name in ENTRY_GROUPS for group, name, _ in count.tensors()),
        outside=frozenset(name for name in own if not name.startswith("blocks.")),
        modules=tuple(map(frozenset, modules)),
        in_8_bits=moments_in_8_bits(map(prod, matrices)),
    )
    if adapter is None:
        moving = [use for use, layer in enumerate(model.layer_uses) if modules[layer]]
        return replace(part, n_still=0 if part.embedding else min(moving, default=len(model.layer_uses)))
    adapted = [
        shape for name, shape in shapes.items() if len(shape) == 2 and adapter.adapts(name.removesuffix(".weight"))
    ]
    added = tuple(shape for n_out, n_in in adapted for shape in ((adapter.rank, n_in), (n_out, adapter.rank)))
    return replace(
        part,
        parameters=part.parameters + sum(map(prod, added)),
        adapters=added,
        rank=adapter.rank,
        dropout=adapter.dropout > 0,
        targets=frozenset(part for parts in ADAPTED_MODULES.values() for part in parts if adapter.adapts(part)),
        base=adapter.base,
        in_8_bits=moments_in_8_bits(adapter.rank * width for shape in adapted for width in shape),
    )
