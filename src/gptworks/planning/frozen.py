"""What an operation saves where its matrices are packed, gathered as they are used, or frozen beside an adapter."""

from collections import Counter
from dataclasses import replace

from gptworks.model.cost import ADAPTER, COPIES, Shapes, Stage
from gptworks.planning.trained import Trained

INPUT_SHARED_BY = {
    "query": {"query", "key", "value", "gating", "projection"}, "attention out": {"out"}, "gather": {"gate", "up"},
    "gate": {"gate", "up"}, "up": {"up"}, "down": {"down"},
}  # fmt: skip
"""The modules that share the input that a stage saves."""

MODULES = {
    "attention out": "out", "QK-norm": "query_norm", "norm of the result": "norm1_after",
    "value residual": "scalars", "gate of heads": "gating",
}  # fmt: skip
"""The modules of stages that are not named after them."""


def as_trained(stage: Stage, trained: Trained, shapes: Shapes, layer: int, no_copies: bool) -> Stage:
    """A stage of a block as a run trains it. What only the gradients of frozen parameters need is not saved: the input
    of a matrix is where that matrix, or one that reads the same, is trained or has an adapter, which with dropout saves
    its own.

    Args:
        no_copies: whether products take the matrices as they are held.
    """
    saved, module = dict(stage.saved), MODULES.get(stage.name, stage.name)
    if no_copies:
        saved.pop(COPIES, None)
    readers = INPUT_SHARED_BY.get(stage.name, set())
    saving = {reader for reader in readers if trained.moves(reader, layer)}
    saving |= set() if trained.dropout else trained.targets & readers
    if readers and not saving:
        saved = {part: n_bytes for part, n_bytes in saved.items() if part == COPIES}
    if trained.moves(module, layer):
        return replace(stage, saved=saved)
    saved = dict(Counter(saved) - Counter(stage.for_own))
    if module in trained.targets:
        saved[ADAPTER] = _adapter_bytes(stage, trained, shapes)
    stage = replace(stage, saved=saved, scratch=stage.scratch - stage.own_scratch)
    return stage if trained.rank else replace(stage, matrices=0, vectors=0)  # an adapter's come with its matrices'


def as_first(stage: Stage, trained: Trained, shapes: Shapes, layer: int) -> Stage:
    """A stage of the first block with a backward pass, as a run trains it, where nothing before it is trained: the
    gradient of what enters is not made."""
    is_norm_trained, saved = trained.moves("norm1", layer), dict(stage.saved)
    if stage.name == "norm1":
        if not is_norm_trained:
            return replace(stage, saved={})  # else torch's own norm saves the normalized input in place of the input
    elif stage.name in ("query", "key", "value") and not is_norm_trained:
        saved.pop(COPIES, None)
        if trained.dropout and ADAPTER in saved:
            saved[ADAPTER] -= shapes.mask(shapes.config.d_model)
    return replace(stage, saved=saved)


def _adapter_bytes(stage: Stage, trained: Trained, shapes: Shapes) -> int:
    """What a matrix's adapter saves: r numbers for each of its tokens, and with dropout its input and mask too."""
    c = shapes.config
    width = stage.matrices // c.d_model if stage.name in ("attention out", "down") else c.d_model
    own = shapes.products(width) + shapes.mask(width) if trained.dropout else 0
    of_experts = c.n_experts and stage.name in ("gate", "up", "down")
    share = c.n_experts_per_token / c.n_experts if of_experts else 1
    return round(share * (shapes.products(trained.rank) + own))
