"""The memory in use along a step's timeline, by part, and its peak; the stages of a model that is partly frozen."""

from collections import Counter
from dataclasses import dataclass, replace

from gptworks.model.cost import ADAPTER, COPIES, Shapes, Stage
from gptworks.planning.params import Trained

WEIGHTS, AVERAGE, GRADIENTS, OPTIMIZER = "weights", "weights_average", "gradients", "optimizer_state"
LOSS, TEMPORARY, COMMUNICATION, TOKENS = "logits_and_loss", "temporary", "communication", "tokens"
CACHE = "keys_and_values"
CHECKPOINT, OTHER_MODELS, STARTING = "checkpoint_being_written", "other_models", "starting_weights"
"""Keys of `Peak.parts`, in addition to the kinds of saved tensors in `gptworks.model.cost`."""


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is in use, and the bytes in use by part."""

    moment: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


class Timeline:
    """Adds up the memory in use, moment by moment, and records the peak."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()  # bytes in use by part
        self.total_bytes = 0
        self.peak = Peak("start", {})
        self.peak_bytes = 0

    def hold(self, part: str, n_bytes: int) -> None:
        """Add `n_bytes` to the bytes held by `part`; a negative number frees bytes."""
        self.held[part] += n_bytes
        self.total_bytes += n_bytes

    def hold_saved(self, stage: Stage, sign: int = 1) -> None:
        """Hold the tensors that an operation saves; `sign=-1` frees them."""
        for part, n_bytes in stage.saved.items():
            self.hold(part, sign * n_bytes)

    def mark(self, moment: str, momentary: int = 0, part: str = TEMPORARY) -> None:
        """Record a new peak if the bytes in use, with `momentary` more for `part`, exceed the peak so far."""
        if self.total_bytes + momentary > self.peak_bytes:
            self.peak_bytes = self.total_bytes + momentary
            parts = self.held + Counter({part: momentary})
            self.peak = Peak(moment, {name: n_bytes for name, n_bytes in parts.items() if n_bytes})


def as_trained(stage: Stage, trained: Trained, shapes: Shapes, layer: int, no_copies: bool) -> Stage:
    """Return a block's stage without the saved tensors that only gradients of frozen parameters need.

    A matrix's input is saved if this matrix, or another that reads the same input, is trained or has an adapter without
    dropout. An adapter with dropout saves its own input.

    With `no_copies`, autocast copies no matrices: the matrices are quantized or are gathered in the products' dtype.
    """
    saved, module = dict(stage.saved), stage.module or stage.name
    if no_copies:
        saved.pop(COPIES, None)
    readers = set(stage.readers)
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
    return stage if trained.rank else replace(stage, matrices=0, vectors=0)  # `_Step._gain` adds an adapter's gradients


def as_first(stage: Stage, trained: Trained, shapes: Shapes, layer: int) -> Stage:
    """Return the stage without the saved tensors that only the gradient of its block's input needs. This is for the
    first block with a backward pass, if no parameter before the block is trained."""
    if not stage.reads_entry or trained.moves("norm1", layer):  # a trained norm needs its input
        return stage
    saved = dict(stage.saved)
    if not stage.matrices:
        return replace(stage, saved={})
    saved.pop(COPIES, None)
    if trained.dropout and ADAPTER in saved:
        saved[ADAPTER] -= shapes.mask(shapes.config.d_model)
    return replace(stage, saved=saved)


def _adapter_bytes(stage: Stage, trained: Trained, shapes: Shapes) -> int:
    """Return the bytes that a matrix's adapter saves: x·Aᵀ [N, rank]; with dropout, also its input and the mask."""
    width = stage.n_in or shapes.config.d_model
    own = shapes.products(width) + shapes.mask(width) if trained.dropout else 0
    return round(stage.share * (shapes.products(trained.rank) + own))
