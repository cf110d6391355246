"""Batches made ahead of the step that needs them, by a thread, so that the model never waits for data."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gptworks.data.batches import Batches
from gptworks.train.objectives import Batch, count_targets


class Feed:
    """Some micro-batches of each step. What is made ahead changes nothing: a batch is a function of its step."""

    def __init__(
        self, batches: Batches, micro_batch_size: int, micro_steps: Sequence[int], device: torch.device
    ) -> None:
        self._batches, self._size, self._micro_steps, self._device = batches, micro_batch_size, micro_steps, device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def step(self, step: int) -> tuple[list[Batch], int]:
        """These micro-batches of a step on the device, and how many targets they have; the next step's are begun."""
        held = self._ahead
        made = held[1].result() if held is not None and held[0] == step else self._make(step)
        self._ahead = (step + 1, self._pool.submit(self._make, step + 1))
        there = [(x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)) for x, y in made]
        return there, sum(count_targets(batch) for batch in made)

    def _make(self, step: int) -> list[Batch]:
        made = [self._batches.batch(step, i, self._size) for i in self._micro_steps]
        if self._device.type != "cuda":
            return made
        return [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in made]
