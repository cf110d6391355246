"""The memory in use along a step's timeline, by part, and its peak."""

from collections import Counter
from dataclasses import dataclass

from gptworks.model.cost import Stage

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
        """Add `n_bytes` to the bytes held by `part`; a negative number frees them."""
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
