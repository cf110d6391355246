"""The part of a model that a run trains: frozen parameters have no gradient and no optimizer state."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from gptworks.config import ADAPTED_MODULES, FreezeConfig, LoRAConfig, ModelConfig
from gptworks.config.optimizers import LEAST_IN_8_BITS, SCALED_TOGETHER
from gptworks.model.outline import ENTRY_GROUPS
from gptworks.planning.params import ParameterCount, Shape, count_parameters


@dataclass(frozen=True)
class Trained:
    """The part of a model that is trained."""

    parameters: int
    """Parameters with a gradient, an adapter's included."""
    added: int
    """Parameters of an adapter, in addition to the model's own."""
    share: float
    """Share of the model's own parameters that are trained."""
    matrices: tuple[Shape, ...]
    """The trained matrices of the blocks: the ones that an optimizer other than AdamW updates."""
    head: bool
    """Whether the head's matrix, or the embedding that it is tied to, is trained."""
    embedding: bool
    """Whether something before the first block is trained, so that the backward pass reaches the embeddings."""
    outside: frozenset[str] = frozenset()
    """The trained tensors outside the blocks, by name."""
    modules: tuple[frozenset[str], ...] | None = None
    """The modules of each layer with trained parameters of their own, by the last part of their names; None: all."""
    rank: int = 0
    """Rank of the adapter; 0: no adapter."""
    dropout: bool = False
    """Whether each adapter keeps a copy of its input."""
    targets: frozenset[str] = frozenset()
    """The layers of a block that have adapters, by the last part of their names."""
    base: str = "full"
    """The precision of the blocks' frozen matrices beneath an adapter: full, int8 or int4."""
    in_8_bits: tuple[int, int] = (0, 0)
    """Number of elements whose moments are in 8 bits with `optimizer_state: int8`, and of both moments' scales."""
    n_still: int = 0
    """Number of first block runs with nothing trained in or before them: they have no backward pass."""

    def moves(self, module: str, layer: int) -> bool:
        """Whether a block's module of this name has trained parameters of its own."""
        return self.modules is None or module in self.modules[layer]


def trains(parameter: str, adapter: LoRAConfig | None, freeze: FreezeConfig | None) -> bool:
    """Whether a parameter of the model itself is trained, by its name."""
    if adapter is not None:
        return adapter.trains(parameter)
    return freeze is None or not freeze.freezes(parameter)


def everything(count: ParameterCount) -> Trained:
    """The whole model as the trained part."""
    matrices = tuple(
        shape
        for group in count.groups.values()
        for shape in group.tensors.values()
        if group.in_block and len(shape) == 2
        for _ in range(group.repeats)
    )
    return Trained(
        parameters=count.total,
        added=0,
        share=1.0,
        matrices=matrices,
        head=True,
        embedding=True,
        outside=frozenset(name for group in count.groups.values() if not group.in_block for name in group.tensors),
        in_8_bits=moments_in_8_bits(map(prod, matrices)),
    )


def moments_in_8_bits(sizes: Iterable[int]) -> tuple[int, int]:
    """Number of elements, in matrices of these sizes, whose moments AdamW keeps in 8 bits; and of their scales."""
    large = [size for size in sizes if size >= LEAST_IN_8_BITS]
    return sum(large), 2 * sum(-(-size // SCALED_TOGETHER) for size in large)


def trained(model: ModelConfig, adapter: LoRAConfig | None, freeze: FreezeConfig | None) -> Trained | None:
    """The trained part of a model; None if all of it is trained."""
    if adapter is None and freeze is None:
        return None
    count = count_parameters(model)
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
        added=0,
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
    added = adapter.rank * sum(map(sum, adapted))
    return replace(
        part,
        parameters=part.parameters + added,
        added=added,
        rank=adapter.rank,
        dropout=adapter.dropout > 0,
        targets=frozenset(part for parts in ADAPTED_MODULES.values() for part in parts if adapter.adapts(part)),
        base=adapter.base,
        in_8_bits=moments_in_8_bits(adapter.rank * width for shape in adapted for width in shape),
    )
