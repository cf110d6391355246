"""Prefetches batches: a thread builds the next step's batches while the current step runs."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from gptworks.data.samples import Batch
from gptworks.training.distributed.parallel import Parallel
from gptworks.training.objectives.base import Objective
from gptworks.training.objectives.next_token import StepBatches


class Prefetcher:
    """Provides this rank's micro-batches of each step. A batch depends only on its position and its step's number, so
    prefetching does not change results."""

    def __init__(self, objective: Objective, parallel: Parallel, device: torch.device) -> None:
        self._objective, self._train = objective, objective.recipe.train
        self._parallel, self._device = parallel, device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._next: tuple[tuple[int, int], Future[tuple[range, list[Batch]]]] | None = None

    def step(self, position: int, step: int) -> StepBatches:
        """Return the micro-batches of step `step` (from 0), whose first sample has index `position`. Start to prefetch
        the next step. The batches are on the device, or on the CPU if the objective generates answers for them."""
        is_prefetched = self._next is not None and self._next[0] == (position, step)
        numbers, made = self._next[1].result() if self._next and is_prefetched else self._make(position, step)
        following = position + self._train.batch_size_at(step), step + 1
        self._next = (following, self._pool.submit(self._make, *following))
        # batches of prompts without answers hold only the prompts' indices, which the CPU reads
        to = torch.device("cpu") if self._objective.generates else self._device
        rows = [tuple(x.to(to, non_blocking=to.type == "cuda") for x in batch) for batch in made]
        n_targets, n_tokens = sum(map(self._objective.count, made)), sum(batch[0].numel() for batch in made)
        return StepBatches(numbers, rows, n_targets, n_tokens)

    def _make(self, position: int, step: int) -> tuple[range, list[Batch]]:
        numbers = self._parallel.micro_steps(self._train.batch_size_at(step))
        size, whole = self._parallel.micro_batch_size, self._objective.context_length
        if (length := self._train.length_at(step, whole)) < whole:
            made = [self._cut(position + i * size, size, length) for i in numbers]
        else:
            made = [self._objective.batch(position, i, size) for i in numbers]
        if self._device.type == "cuda":
            made = [tuple(x.pin_memory() for x in batch) for batch in made]
        return numbers, made

    def _cut(self, first: int, size: int, length: int) -> Batch:
        rows: list[Batch] = []
        for sample, number, n in cut_windows(first, size, self._objective.context_length // length):
            part = slice(number * length, (number + 1) * length)
            rows.append(tuple(x[:, part] for x in self._objective.batch(sample, 0, n)))
        return tuple(map(torch.cat, zip(*rows, strict=True)))


BLOCK = 256
"""Number of samples in a block. If windows are cut into rows, a run reads the first row of each window of a block, then
the second row of each window, and so on."""


def cut_windows(first: int, size: int, n_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield the rows to read for `size` samples from index `first`, if each sample's window is cut into `n_rows` rows.

    Up to `BLOCK` successive rows come from different windows, because rows of one window are similar. The run's k-th
    row depends only on k and `n_rows`. A complete block contains each row of its windows once.

    Yields:
        index of a sample, index of a row, and n: read this row in the windows of n samples from this sample on.
    """
    row, end = first * n_rows, (first + size) * n_rows
    while row < end:
        block, within = divmod(row, BLOCK * n_rows)
        number, sample = divmod(within, BLOCK)
        n = min(BLOCK - sample, end - row)
        yield block * BLOCK + sample, number, n
        row += n
