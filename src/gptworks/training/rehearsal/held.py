"""Counts the memory of tensors during a step of a run, to compare it with the plan.

The process grows by more than these tensors: also by freed memory that the allocator keeps, torch's code, and files.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from gptworks.device import peak_growth_bytes, reset_peak
from gptworks.training.record.card import MemoryPeaks
from gptworks.training.rehearsal.trace import LiveBytes
from gptworks.training.setup import PreparedRun


class StepMemory:
    """Counts the memory of tensors during one step of a run.

    Counting takes some hundredths of a second and changes no result.
    """

    def __init__(self, setup: PreparedRun) -> None:
        """Start to measure the growth of the process; the model must not be built yet."""
        self._setup, self._n_whole = setup, 0
        self._counts = setup.device.type == "cpu" and setup.ranks.size == 1 and setup.recipe.train.compile != "block"
        self._before_bytes = reset_peak(setup.device)
        self.peak_bytes: int | None = None
        """Peak memory of tensors in the counted step; None before it, and always on GPUs, on several ranks, or with
        compiled blocks."""

    @contextmanager
    def counted(self, is_whole: bool) -> Iterator[None]:
        """Return a context for a step; in the second full step, when the optimizer has its state, it counts memory.

        Args:
            is_whole: whether the step is full: it has the batch and row sizes that the plan assumes.
        """
        self._n_whole += is_whole
        if not (self._counts and is_whole and self._n_whole == 2):
            yield
            return
        with LiveBytes() as held:
            yield
        self.peak_bytes = held.found_bytes + held.peak_bytes

    def peaks(self, copied_bytes: int) -> MemoryPeaks:
        """Return the run's planned and measured peak memory.

        Args:
            copied_bytes: size of the largest copy that was made for a checkpoint.
        """
        setup, step_bytes = self._setup, self.peak_bytes
        grown_bytes = peak_growth_bytes(setup.device, self._before_bytes) or None
        if setup.device.type == "cuda":  # only tensors increase GPU memory
            step_bytes, grown_bytes = grown_bytes, None
        elif step_bytes is not None:
            step_bytes += copied_bytes
        assert setup.need is not None, "a run that ends was planned"
        return MemoryPeaks(setup.need.peak.total_bytes, step_bytes, grown_bytes)
