"""Batches made ahead of the step that needs them, by a thread, so that the model never waits for data."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gptworks.train.objectives import Batch
from gptworks.train.task import Task


class Feed:
    """Some micro-batches of each step. What is made ahead changes nothing: a batch is a function of its step."""

    def __init__(self, task: Task, micro_batch_size: int, micro_steps: Sequence[int], device: torch.device) -> None:
        self._task, self._size, self._micro_steps, self._device = task, micro_batch_size, micro_steps, device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def step(self, step: int) -> tuple[list[Batch], int, int]:
        """These micro-batches of a step on the device, their targets and their tokens; the next step's are begun."""
        held = self._ahead
        made = held[1].result() if held is not None and held[0] == step else self._make(step)
        self._ahead = (step + 1, self._pool.submit(self._make, step + 1))
        there = [tuple(x.to(self._device, non_blocking=True) for x in batch) for batch in made]
        return there, sum(map(self._task.count, made)), sum(batch[0].numel() for batch in made)

    def _make(self, step: int) -> list[Batch]:
        made = [self._task.batch(step, i, self._size) for i in self._micro_steps]
        if self._device.type != "cuda":
            return made
        return [tuple(x.pin_memory() for x in batch) for batch in made]
