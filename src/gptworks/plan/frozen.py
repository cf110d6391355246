"""What an operation saves where its matrices are packed, gathered as they are used, or frozen beside an adapter."""

from collections import Counter
from dataclasses import replace

from gptworks.plan.shapes import COPIES, Stage
from gptworks.plan.trained import Trained

INPUT_SHARED_BY = {
    "query": {"query", "key", "value"}, "attention out": {"out"}, "gate": {"gate", "up"}, "up": {"up"},
    "down": {"down"},
}  # fmt: skip
"""The matrices that share the input that a stage saves."""


def as_trained(stage: Stage, trained: Trained, no_copies: bool) -> Stage:
    """A stage as a run trains it. Beside an adapter the model's own parameters are frozen: the input of a matrix is
    saved by its adapter alone, which with dropout has its own, and what only their gradients need is not.

    Args:
        no_copies: whether products take the matrices as they are held.
    """
    saved = dict(stage.saved)
    if no_copies:
        saved.pop(COPIES, None)
    if not trained.rank:
        return replace(stage, saved=saved)
    adapted = trained.targets & INPUT_SHARED_BY.get(stage.name, set())
    if stage.name in INPUT_SHARED_BY and (trained.dropout or not adapted):
        saved = {part: n_bytes for part, n_bytes in saved.items() if part == COPIES}
    saved = dict(Counter(saved) - Counter(stage.for_own))
    return replace(stage, saved=saved, scratch=stage.scratch - stage.own_scratch)
