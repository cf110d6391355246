"""How much of a model a run trains, where not all: what is frozen has no gradient and no optimizer state."""

from dataclasses import dataclass
from math import prod

from gptworks.config import FreezeConfig, LoRAConfig, ModelConfig
from gptworks.plan.params import count_parameters


@dataclass(frozen=True)
class Trained:
    """The part of a model that is trained."""

    parameters: int
    """Those with a gradient, an adapter's included."""
    added: int
    """Parameters of an adapter, which stand beside the model's."""
    share: float
    """Of the model's own parameters, those that are trained."""
    head: bool
    """Whether the head's matrix, or the embedding that it is tied to, is trained."""
    embedding: bool
    rank: int
    """Of the adapter; 0: none."""
    dropout: bool
    """Whether each adapter keeps a copy of its input."""
    inputs: int
    """Elements of the inputs of the adapters of a block, for each token."""
    n_adapted: int
    """Adapters of a block."""
    n_still: int
    """Blocks from the first on that nothing trained stands before or in: their backward pass is left out."""


def trained(model: ModelConfig, adapter: LoRAConfig | None, freeze: FreezeConfig | None) -> Trained | None:
    """What is trained of a model; None where that is all of it."""
    if adapter is None and freeze is None:
        return None
    count = count_parameters(model)
    shapes = count.shapes
    if adapter is not None:
        adapted = [
            shape for name, shape in shapes.items() if len(shape) == 2 and adapter.adapts(name.removesuffix(".weight"))
        ]
        added = adapter.rank * sum(map(sum, adapted))
        n_adapted = len(adapted) // model.n_layers
        inputs = sum(shape[1] for shape in adapted) // model.n_layers
        own = sum(prod(shape) for name, shape in shapes.items() if adapter.trains(name))
        return Trained(
            parameters=added + own,
            added=added,
            share=own / count.total,
            head=adapter.embeddings,
            embedding=adapter.embeddings,
            rank=adapter.rank,
            dropout=adapter.dropout > 0,
            inputs=inputs,
            n_adapted=n_adapted,
            n_still=0,
        )
    assert freeze is not None
    moving = {name: prod(shape) for name, shape in shapes.items() if not freeze.freezes(name)}
    embedding = any(name in moving for name in ("token_embedding.weight", "position_embedding.weight"))
    blocks = [name.split(".")[1] for name in moving if name.startswith("blocks.")]
    return Trained(
        parameters=sum(moving.values()),
        added=0,
        share=sum(moving.values()) / count.total,
        head=("token_embedding.weight" if model.tie_embeddings else "untied_head.weight") in moving,
        embedding=embedding,
        rank=0,
        dropout=False,
        inputs=0,
        n_adapted=0,
        n_still=0 if embedding else min(map(int, blocks), default=model.n_layers),
    )
