"""Counts the memory of a training step by running it without allocating memory.

The step runs on torch's fake tensors, which have shapes, dtypes and storages but no contents; each storage is counted
while it exists. Kernels' scratch memory, freed memory that the allocator keeps, and Python's memory are not counted.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptworks.config import FreezeConfig, LoRAConfig, ModelConfig, ObjectiveConfig, TrainConfig
from gptworks.config.objective import NEXT_TOKEN
from gptworks.data.samples import Batch
from gptworks.device import choose_precision
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.planning.run import Plan
from gptworks.training.distributed.parallel import Parallel
from gptworks.training.objectives.base import objective_of
from gptworks.training.optim.trainable import trainable_model
from gptworks.training.step import TrainStep


@dataclass(frozen=True)
class Rehearsal:
    """The settings of a new model's training step on one device, to trace or measure the step."""

    model: ModelConfig
    train: TrainConfig
    """The training settings; the step reads `batch_size` rows, and each answer of a pair is a row."""
    device: str = "cpu"
    precision: str = "fp32"
    adapter: LoRAConfig | None = None
    freeze: FreezeConfig | None = None
    objective: ObjectiveConfig = NEXT_TOKEN
    several_texts: bool = False
    """Whether a row holds several texts, so that batches include the tokens' positions in their texts."""

    @classmethod
    def of(cls, plan: Plan, device: str) -> Self:
        """Return the settings of one step of a planned run, with at most two micro-batches. No data is needed."""
        recipe, setting = plan.recipe, plan.setting
        return cls(
            recipe.model, plan.one_step, device, setting.precision, recipe.adapter, recipe.freeze, recipe.objective,
            setting.several_texts,
        )  # fmt: skip

    @property
    def row_length(self) -> int:
        """Length of a row in tokens."""
        return self.train.row_length(self.model.context_length)

    @property
    def tokens_per_step(self) -> int:
        return self.train.batch_size * self.row_length

    def new_model(self) -> GPT:
        """Build a new model on torch's default device."""
        return trainable_model(self.model, self.adapter, self.freeze)

    def batch(self, tokens: Tensor) -> Batch:
        """Return a batch whose inputs and targets are `tokens`, int64 [B, T]. If `several_texts`, each row is one
        text, and the batch also has the positions and starts of texts."""
        if not self.several_texts:
            return tokens, tokens
        n_rows, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        starts = torch.full((n_rows, 2), length, dtype=torch.int32, device=tokens.device)
        starts[:, 0] = 0
        return tokens, tokens, positions, starts

    def new_step(self, parallel: Parallel | None = None) -> TrainStep:
        """Build a new model and return its training step, with uncompiled blocks.

        `parallel` builds and places the model; without it, the whole model is on the device.
        """
        device = torch.device(self.device)
        if parallel is None:
            parallel = Parallel(self.train)
            with device:
                model = self.new_model()
            parallel.parameters = dict(model.named_parameters())  # `parallel.place` would move fake tensors
        else:
            model = parallel.build(self.new_model, device)
        with device:
            loss = objective_of(self.objective, self.train).loss_without_data(model)
        model.activation_checkpointing = self.train.activation_checkpointing
        return TrainStep(model, self.train, loss, choose_precision(self.precision, device), parallel)


_MOST_SKIPPED = 32
"""Maximum number of steps in fp16 that `take` skips. Each skip halves the factor of the loss, at first 2^16."""


@dataclass(frozen=True)
class Trace:
    """Peak bytes in the two parts of a training step, including model and optimizer."""

    forward_backward_bytes: int
    optimizer_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.forward_backward_bytes, self.optimizer_bytes)


def trace_step(rehearsal: Rehearsal) -> Trace:
    """Return the peak memory of a step whose optimizer has its state, assuming that experts get equally many tokens.

    Raises:
        UserError: the device is neither cpu nor cuda, or it is cuda and the machine has no CUDA GPU.
    """
    train, place = rehearsal.train, torch.device(rehearsal.device)
    if place.type not in ("cpu", "cuda"):
        raise UserError(f"--trace follows steps on cpu and cuda, not on {place.type}: leave --trace out.")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--trace for cuda needs a machine with a CUDA GPU: leave --trace out, or trace for the CPU.")
    live = LiveBytes()
    with FakeTensorMode(), live:
        step = rehearsal.new_step()
        tokens = torch.zeros(train.batch_size, rehearsal.row_length, dtype=torch.int64, device=place)
        for parameter in step.optimizer.parameters.values():  # create the optimizer's state, as a first step does
            parameter.grad = torch.zeros_like(parameter)
        step.apply(step.gradient_norm())
        live.peak_bytes = 0
        accumulate(step, train, rehearsal.batch(tokens))
        forward_backward_bytes, live.peak_bytes = live.peak_bytes, 0
        step.gradient_norm()
        step.apply(math.inf)  # an infinite norm, so that gradients are clipped
        return Trace(forward_backward_bytes, live.peak_bytes)


def accumulate(step: TrainStep, train: TrainConfig, batch: Batch) -> None:
    """Accumulate the gradients of a batch of `train.batch_size` rows, in micro-batches of `train.micro_batch_size`. No
    target is ignored."""
    micro_batches = list(zip(*(torch.split(tensor, train.micro_batch_size) for tensor in batch), strict=True))
    step.accumulate(micro_batches, batch[1].numel())


def take(step: TrainStep, train: TrainConfig, batch: Batch) -> None:
    """Do a whole training step, with its update, on a batch of `train.batch_size` rows. As in training, steps in fp16
    whose gradient is not finite are skipped; each skip halves the factor of the loss.

    Raises:
        UserError: no step's gradient is finite.
    """
    for _ in range(_MOST_SKIPPED if step.scaler.is_enabled() else 1):
        accumulate(step, train, batch)
        norm = step.gradient_norm()
        if math.isfinite(norm) or not step.scaler.is_enabled():
            step.apply(norm)
            return
        step.skip()
    raise UserError(f"the gradients of {_MOST_SKIPPED} steps in fp16 are not finite: set train.precision=bf16 or fp32.")


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages. `now_bytes` and `peak_bytes` count storages that operations create, while they
    exist; `found_bytes` counts storages that existed before, which are assumed to exist throughout.

    Tensors on the meta device have no memory, but count as if they had if `counts_meta`. Storages may change their
    size: FSDP frees gathered parameters by resizing their storages.
    `torch.distributed._tools.mem_tracker.MemTracker` counts the same bytes (a test checks it), but is six times slower.
    """

    def __init__(self, counts_meta: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts_meta = counts_meta
        self.now_bytes = self.peak_bytes = self.found_bytes = 0
        self._held: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Self:
        self._resize = resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, n_bytes: int) -> Any:
            result = resize(storage, n_bytes)
            self._count(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operation on this rank's part is dispatched here next
        for tensor in tree_leaves((args, kwargs)):
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                continue
            if (storage := tensor.untyped_storage()) not in self._held:
                self._held[storage] = [storage.nbytes()]
                self.found_bytes += storage.nbytes()
        is_fake = any(isinstance(argument, torch._subclasses.FakeTensor) for argument in args)
        out = answered(function, args, kwargs or {}) if is_fake else function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (self._counts_meta or not tensor.is_meta):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._held:
            self._held[storage] = held = [0]
            weakref.finalize(storage, self._change, held, 0)
        self._change(self._held[storage], storage.nbytes())

    def _change(self, held: list[int], n_bytes: int) -> None:
        self.now_bytes += n_bytes - held[0]
        held[0] = n_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


_aten = torch.ops.aten
INDEXING = (_aten.index, _aten.index_put_, _aten.index_put)


def answered(function: Any, args: Sequence[Any], kwargs: dict[str, Any], selected: int = 1) -> Any:
    """Run an operation on fake tensors, or return substitutes for missing values: a scalar is 1 or true, and a
    mask selects one in `selected` elements."""
    packet = function.overloadpacket
    if packet is _aten._local_scalar_dense:
        return True if args[0].dtype == torch.bool else 1.0 if args[0].dtype.is_floating_point else 1
    if packet is _aten.equal:
        return True
    if packet is _aten.bincount:
        return args[0].new_zeros(max(1, kwargs.get("minlength", args[2] if len(args) > 2 else 0)))
    if packet is _aten.nonzero:
        return args[0].new_zeros(max(1, args[0].numel() // selected), args[0].ndim, dtype=torch.int64)
    if packet is _aten.masked_select:
        return args[0].new_empty(max(1, args[0].numel() // selected))
    if packet in INDEXING:
        x, given, *rest = args
        indices: list[Tensor | None] = []
        for index in given:
            if index is not None and index.dtype == torch.bool:
                n = max(1, index.numel() // selected)
                indices += [torch.zeros(n, dtype=torch.int64, device=x.device)] * index.ndim
            else:
                indices.append(index)
        args = (x, indices, *rest)
    return function(*args, **kwargs)
