"""Batches made ahead of the step that needs them, by a thread, so that the model never waits for data."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gptworks.train.objectives.base import Task
from gptworks.train.objectives.next_token import Batch


class Feed:
    """Some micro-batches of each step. What is made ahead changes nothing: a batch is a function of its position."""

    def __init__(self, task: Task, micro_batch_size: int, micro_steps: Sequence[int], device: torch.device) -> None:
        self._batch_size = task.recipe.train.batch_size
        self._task, self._size, self._micro_steps, self._device = task, micro_batch_size, micro_steps, device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def step(self, position: int) -> tuple[list[Batch], int, int]:
        """These micro-batches of the step that begins at a position (in samples) on the device, their targets and their
        tokens; the next step's are begun."""
        held, following = self._ahead, position + self._batch_size
        made = held[1].result() if held is not None and held[0] == position else self._make(position)
        self._ahead = (following, self._pool.submit(self._make, following))
        there = [tuple(x.to(self._device, non_blocking=True) for x in batch) for batch in made]
        return there, sum(map(self._task.count, made)), sum(batch[0].numel() for batch in made)

    def _make(self, position: int) -> list[Batch]:
        made = [self._task.batch(position, i, self._size) for i in self._micro_steps]
        if self._device.type != "cuda":
            return made
        return [tuple(x.pin_memory() for x in batch) for batch in made]
