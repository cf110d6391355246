"""The memory of a training step, counted from the step itself, with nothing allocated.

The step runs on torch's fake tensors, which have shapes, dtypes and storages but no contents, and every storage is
counted from its birth to its death. Not seen is what kernels take inside themselves, what the allocator keeps, and
Python.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptworks.config import (
    DistillationObjective,
    FreezeConfig,
    LoRAConfig,
    ModelConfig,
    NextTokenObjective,
    ObjectiveConfig,
    PreferenceObjective,
    TrainConfig,
)
from gptworks.device import Precision, choose_precision
from gptworks.errors import UserError
from gptworks.model import GPT
from gptworks.recipe import load_recipe
from gptworks.train.objectives.distillation import distillation
from gptworks.train.objectives.next_token import Batch, Losses, Objective, count_targets, next_token, routing_weights
from gptworks.train.objectives.preference import preference
from gptworks.train.optim.optimizer import Optimizer
from gptworks.train.optim.trainable import trained_part

NEXT_TOKEN = NextTokenObjective()


@dataclass(frozen=True)
class Trace:
    """Bytes that stood at once, at most, in each part of a training step, model and optimizer included."""

    forward_backward_bytes: int
    optimizer_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_backward_bytes, self.optimizer_bytes)


def trace_step(
    model_config: ModelConfig,
    train: TrainConfig,
    device: str = "cpu",
    precision: str = "fp32",
    adapter: LoRAConfig | None = None,
    freeze: FreezeConfig | None = None,
    objective: ObjectiveConfig = NEXT_TOKEN,
    several_texts: bool = False,
) -> Trace:
    """The peak of a step after the first, in which the optimizer has its state. Experts are taken as evenly used.

    Args:
        device: cpu, or cuda; the latter needs a torch built for it and a GPU, though nothing runs there.
        precision: fp32, bf16 or fp16.
        objective: what is learned from batches of `train.batch_size` rows; of pairs, both answers are rows.
        several_texts: whether rows hold texts one after the other.

    Raises:
        UserError: this torch cannot follow the step on that device.
    """
    place = torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise UserError(f"--trace follows steps on cpu and cuda, not on {place.type}: leave --trace out.")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--trace for cuda needs a machine with a CUDA GPU: leave --trace out, or trace for the CPU.")
    live = LiveBytes()
    with FakeTensorMode(), live:
        step = Step(model_config, train, place, choose_precision(precision, place), adapter, freeze, objective)
        tokens = torch.zeros(train.batch_size, model_config.context_length, dtype=torch.int64, device=place)
        for parameter in step.optimizer.parameters.values():  # as good as a first step for making the optimizer's state
            parameter.grad = torch.zeros_like(parameter)
        step.update()
        live.peak_bytes = 0
        step.accumulate_gradients((tokens, tokens, tokens) if several_texts else (tokens, tokens))
        forward_backward_bytes, live.peak_bytes = live.peak_bytes, 0
        step.update()
        return Trace(forward_backward_bytes, live.peak_bytes)


class Step:
    """A training step of a new model as `gptworks.train.loop` takes it, without data, log or schedule."""

    def __init__(
        self,
        model_config: ModelConfig,
        train: TrainConfig,
        device: torch.device,
        precision: Precision,
        adapter: LoRAConfig | None = None,
        freeze: FreezeConfig | None = None,
        objective: ObjectiveConfig = NEXT_TOKEN,
    ) -> None:
        self.train, self.precision = train, precision
        with device:
            self.model = trained_part(GPT(model_config), adapter, freeze).train()
            self.objective = _objective(objective, train)
        self.model.activation_checkpointing = train.activation_checkpointing
        self.optimizer = Optimizer(self.model, train)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision.needs_scaler)

    def __call__(self, batch: Batch) -> None:
        """A whole step over inputs and targets [batch_size, T]."""
        self.accumulate_gradients(batch)
        self.update()

    def accumulate_gradients(self, batch: Batch) -> None:
        """Forward and backward over each micro-batch of inputs, targets and, with several texts a row, positions."""
        n_targets = count_targets(batch)
        sizes = self.train.micro_batch_size
        for micro_batch in zip(*(torch.split(tensor, sizes) for tensor in batch), strict=True):
            with self.precision.autocast():
                losses = self.objective(self.model, micro_batch)
            self.scaler.scale(losses.objective / n_targets).backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Clip, optimize, and drop the gradients."""
        self.optimizer.unscale(self.scaler)
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.train.grad_clip or 1.0, norm)
        self.optimizer.step(self.scaler)
        self.optimizer.zero_grad()


def _objective(config: ObjectiveConfig, train: TrainConfig) -> Objective:
    """An objective's loss, without the data that its task reads; a teacher is as new as the model."""
    routing = routing_weights(train)
    if isinstance(config, PreferenceObjective):

        def pairs(model: GPT, batch: Batch) -> Losses:
            reference = torch.zeros(len(batch[0]), device=model.device)
            return preference(config, model, (*batch, reference), **routing)

        return pairs
    if isinstance(config, DistillationObjective):
        teacher = GPT(load_recipe(config.teacher).model).requires_grad_(False).eval()
        return partial(distillation, config, teacher, **routing)
    return partial(next_token, **routing)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations make, while they live, and the most there were at once.

    `torch.distributed._tools.mem_tracker.MemTracker` counts the same, which a test holds, in six times the time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = self.peak_bytes = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _ANSWERS and any(isinstance(argument, torch._subclasses.FakeTensor) for argument in args):
            return _ANSWERS[function](*args, **(kwargs or {}))
        out = _run(function, args, kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        self.now_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, n_bytes: int) -> None:
        self.now_bytes -= n_bytes


def _run(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operation; where it takes what a fake mask is true for, it takes all."""
    if function in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default):
        x, indices, *rest = args
        if [index.dtype for index in indices] == [torch.bool]:
            args = (x, [torch.arange(len(x), device=x.device)], *rest)
    return function(*args, **kwargs)


_ANSWERS: dict[Any, Any] = {
    torch.ops.aten._local_scalar_dense.default: lambda tensor: 1,
    torch.ops.aten.bincount.default: lambda tensor, weights=None, minlength=0: tensor.new_zeros(minlength),
}
"""What is said where a step asks a fake tensor for its numbers: `.item()`, and the tokens of each expert."""
