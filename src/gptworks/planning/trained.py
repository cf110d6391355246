"""The part of a model that a run trains; frozen parameters have no gradient and no optimizer state."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from gptworks.config import ADAPTED_MODULES, FreezeConfig, LoRAConfig, ModelConfig
from gptworks.config.optimizers import LEAST_IN_8_BITS, SCALED_TOGETHER
from gptworks.model.outline import ENTRY_GROUPS
from gptworks.planning.params import ParameterCount, Shape, count_parameters


@dataclass(frozen=True)
class Trained:
    """The part of a model that is trained."""

    parameters: int
    """Number of parameters with a gradient, including an adapter's."""
    adapters: tuple[Shape, ...]
    """Shapes of the matrices that an adapter adds to the model's own."""
    share: float
    """Trained share of the model's own parameters, from 0 to 1."""
    matrices: tuple[Shape, ...]
    """Shapes of the blocks' trained matrices; an optimizer other than AdamW updates only these."""
    head: bool
    """Whether the head's matrix is trained, which is the embedding's matrix if they are tied."""
    embedding: bool
    """Whether a parameter before the first block is trained, so that the backward pass reaches the embeddings."""
    outside: frozenset[str] = frozenset()
    """Names of the trained tensors outside the blocks."""
    modules: tuple[frozenset[str], ...] | None = None
    """For each layer, the last name parts (such as `query`) of modules with trained parameters; None: all modules."""
    rank: int = 0
    """Rank of the adapter; 0: no adapter."""
    dropout: bool = False
    """Whether the adapter has dropout, so that it saves its own input."""
    targets: frozenset[str] = frozenset()
    """Last name parts of a block's linear layers that have adapters, such as `query`."""
    base: str = "full"
    """Format of the blocks' frozen matrices if there is an adapter: full, int8 or int4."""
    in_8_bits: tuple[int, int] = (0, 0)
    """Number of elements with 8-bit moments, and number of these moments' scales, if `optimizer_state` is int8."""
    n_still: int = 0
    """Number of block runs at the start without a backward pass: no parameter in or before them is trained."""

    @property
    def added(self) -> int:
        """Number of parameters that an adapter adds to the model's own."""
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
        shape
        for group in count.groups.values()
        for shape in group.tensors.values()
        if group.in_block and len(shape) == 2
        for _ in range(group.repeats)
    )
    return Trained(
        parameters=count.total,
        adapters=(),
        share=1.0,
        matrices=matrices,
        head=True,
        embedding=True,
        outside=frozenset(name for group in count.groups.values() if not group.in_block for name in group.tensors),
        in_8_bits=moments_in_8_bits(map(prod, matrices)),
    )


def moments_in_8_bits(sizes: Iterable[int]) -> tuple[int, int]:
    """Return how many elements of matrices of these sizes have 8-bit moments, and the number of both moments' scales.
    AdamW keeps the moments of matrices with fewer than `LEAST_IN_8_BITS` elements in float32."""
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
        embedding=any(name in own for group in ENTRY_GROUPS for name in count.tensors_of(group)),
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
