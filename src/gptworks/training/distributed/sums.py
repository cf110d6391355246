"""All-reduce of gradients over ranks, one bucket at a time, while the backward pass computes the next bucket."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, distributed, nn

from gptworks.planning.layout import BUCKET_BYTES
from gptworks.training.distributed.shards import local

Timed = Callable[[], AbstractContextManager[None]]


class GradientSums:
    """All-reduces the gradients of replicated parameters over the ranks of a group.

    The buckets and their order depend only on the parameters. All ranks thus send the same buckets in the same order,
    even if a rank lacks some gradients. At most one bucket is in flight, so memory holds the copy of one bucket only.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: distributed.ProcessGroup) -> None:
        """`parameters` are replicated, in about the order in which a backward pass computes their gradients."""
        self._buckets: list[list[nn.Parameter]] = []  # each bucket has about BUCKET_BYTES of parameters
        self._awaited: list[int] = []  # number of gradients of each bucket that are not computed yet
        self._n_sent = 0
        self._under_way: tuple[list[nn.Parameter], list[int], Tensor, distributed.Work] | None = None
        self._group = group
        self._timed: Timed = nullcontext
        for parameter in parameters:
            if not self._buckets or sum(each.nbytes for each in self._buckets[-1]) >= BUCKET_BYTES:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
            made = partial(self._made, len(self._buckets) - 1)
            parameter.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]

    def begin(self, timed: Timed) -> None:
        """Let the next backward pass send the buckets in order, each as soon as its gradients are ready.

        Call this method before the step's last backward pass. `timed` returns a context that measures the wait for
        other ranks.
        """
        self._awaited, self._timed = [len(bucket) for bucket in self._buckets], timed

    def finish(self) -> None:
        """Finish the all-reduce of all buckets after the last backward pass. Gradients that no rank has stay None."""
        self._awaited = []
        while self._n_sent < len(self._buckets):
            self._send()
        self._receive()
        self._n_sent = 0

    def _made(self, number: int, _: Tensor) -> None:
        if self._awaited:  # empty before the last micro-batch, because later micro-batches add to the gradient
            self._awaited[number] -= 1
            while self._n_sent < len(self._buckets) and not self._awaited[self._n_sent]:
                with self._timed():
                    self._send()

    def _send(self) -> None:
        self._receive()
        bucket = self._buckets[self._n_sent]
        self._n_sent += 1
        missing = [i for i, parameter in enumerate(bucket) if parameter.grad is None]
        there = torch.ones(len(bucket), device=bucket[0].device)
        for i in missing:
            bucket[i].grad, there[i] = torch.zeros_like(bucket[i]), 0
        joined = torch.cat([*(gradient.flatten() for gradient in _gradients(bucket)), there])
        work = distributed.all_reduce(joined, group=self._group, async_op=True)
        self._under_way = bucket, missing, joined, work

    def _receive(self) -> None:
        if self._under_way is None:
            return
        bucket, missing, joined, work = self._under_way
        self._under_way = None
        work.wait()
        gradients = _gradients(bucket)
        *sums, there = torch.split(joined, [*(gradient.numel() for gradient in gradients), len(bucket)])
        for gradient, part in zip(gradients, sums, strict=True):
            gradient.copy_(part.view_as(gradient))
        for i in missing:
            bucket[i].grad = bucket[i].grad if there[i] else None


def _gradients(bucket: list[nn.Parameter]) -> list[Tensor]:
    return [local(parameter.grad) for parameter in bucket if parameter.grad is not None]
