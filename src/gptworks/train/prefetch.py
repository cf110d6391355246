"""Prefetched batches: a thread makes the next step's while the model is busy with this one's."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gptworks.train.objectives.base import Objective
from gptworks.train.objectives.next_token import Batch


class Prefetcher:
    """This rank's micro-batches of each step. A batch is a function of its position, so prefetching changes nothing."""

    def __init__(
        self, objective: Objective, micro_batch_size: int, micro_steps: Sequence[int], device: torch.device
    ) -> None:
        self._batch_size = objective.recipe.train.batch_size
        self._objective, self._size, self._micro_steps, self._device = objective, micro_batch_size, micro_steps, device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def step(self, position: int) -> tuple[list[Batch], int, int]:
        """The micro-batches of the step that begins at a position (in samples), on the device; their number of targets
        and of tokens. Starts to make the next step's."""
        is_prefetched = self._next is not None and self._next[0] == position
        made = self._next[1].result() if self._next and is_prefetched else self._make(position)
        following = position + self._batch_size
        self._next = (following, self._pool.submit(self._make, following))
        batches = [tuple(x.to(self._device, non_blocking=True) for x in batch) for batch in made]
        return batches, sum(map(self._objective.count, made)), sum(batch[0].numel() for batch in made)

    def _make(self, position: int) -> list[Batch]:
        made = [self._objective.batch(position, i, self._size) for i in self._micro_steps]
        if self._device.type != "cuda":
            return made
        return [tuple(x.pin_memory() for x in batch) for batch in made]
