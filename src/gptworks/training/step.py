"""The training step: forward and backward passes over micro-batches, then an update. The training loop runs training
steps, and so do the trace and the measurement of a step (rehearsal/)."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gptworks.config import TrainConfig
from gptworks.data.samples import Batch
from gptworks.device import Precision, Scalars, deterministic
from gptworks.model.gpt import GPT
from gptworks.training.distributed.parallel import Parallel
from gptworks.training.objectives.next_token import LossFunction
from gptworks.training.optim.optimizer import Optimizer
from gptworks.training.record.speed import Stopwatch


@dataclass
class StepLosses:
    """Mean losses of a step over the targets of all ranks. The host reads all values when one of them is first used."""

    scalars: Scalars
    """The mean `loss`; the sum of each figure, as `sum/FIGURE`; and the divisor of each figure in `counted`, as
    `count/FIGURE`. The divisor of other figures is `n_targets`."""
    n_targets: int
    names: Sequence[str]
    """The names of all figures."""
    counted: Collection[str]
    expert_tokens: Tensor | None
    """Number of tokens routed to each expert of each layer on all ranks, int64 [L, E]; None without experts."""

    @cached_property
    def loss(self) -> float:
        return self.scalars["loss"]

    @cached_property
    def figures(self) -> dict[str, float]:
        """Means of the objective's other figures, by name, rounded to five significant digits."""
        found, n, counted = self.scalars, self.n_targets, self.counted
        counts = {name: found[f"count/{name}"] if name in counted else n for name in self.names}
        return {name: float(f"{found[f'sum/{name}'] / max(1, count):.5g}") for name, count in counts.items()}


@dataclass
class Step:
    """The results of one training step."""

    rate_factor: float
    """The step's learning rate divided by the peak learning rate."""
    losses: StepLosses
    norm: float
    """Norm of the gradients before clipping."""
    skipped: str | None
    """The reason why the gradients were not applied; None if they were applied."""
    by_layer: dict[str, list[float]]
    """Root mean square of each layer's outputs, and norm of its gradients; empty if this step does not record them."""


class TrainStep:
    """Trains a model. For each step, the loop calls `accumulate` and `gradient_norm`, then `apply`, or `skip` if the
    step is anomalous."""

    def __init__(
        self, model: GPT, train: TrainConfig, loss: LossFunction, precision: Precision, parallel: Parallel
    ) -> None:
        """
        Args:
            model: the model that `parallel` has built or placed on its device.
        """
        self.model, self.loss, self.precision = model, loss, precision
        self.parallel, self.ranks = parallel, parallel.ranks
        self.stopwatch = Stopwatch(model.device)
        self.optimizer = Optimizer(model, train, parallel.mesh)
        self.scaler = torch.amp.GradScaler(model.device.type, enabled=precision.needs_scaler)
        self._grad_clip, self._same_bits = train.grad_clip, train.deterministic
        self._scalars = Scalars()

    def accumulate(
        self,
        micro_batches: Sequence[Batch],
        n_targets: int,
        seed: tuple[int, ...] = (0,),
        numbers: Sequence[int] | None = None,
    ) -> StepLosses:
        """Accumulate the gradients of the mean loss over all of the step's targets, and return the step's losses.

        Args:
            micro_batches: this rank's micro-batches, on the model's device.
            n_targets: number of targets in all micro-batches of all ranks.
            seed: the step's seed. Dropout depends only on the seed and the micro-batch's number, so that a resumed run
                needs no generator state.
            numbers: the number of each micro-batch within the step; None means 0, 1, ….
        """
        total = torch.zeros((), device=self.model.device)
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        expert_tokens: Tensor | None = None
        exchange = "gradients of all ranks" if self.ranks.size > 1 else "backward"
        self.model.train()
        numbers = range(len(micro_batches)) if numbers is None else numbers
        for number, batch in zip(numbers, micro_batches, strict=True):
            self.ranks.count_point()
            torch.manual_seed(int(np.random.SeedSequence((*seed, number)).generate_state(1, np.uint64)[0]))
            with self.stopwatch.part("forward"), self._determinism(), self.precision.autocast():
                losses = self.loss(self.model, batch)
            if number == numbers[-1]:
                self.parallel.begin_all_reduce(lambda: self.stopwatch.part(exchange))
            with self.stopwatch.part("backward"), self._determinism():
                self.scaler.scale(losses.objective / max(1, n_targets)).backward()  # type: ignore[no-untyped-call]
            total += losses.loss
            for name, value in losses.figures.items():
                sums[name] = sums.get(name, 0) + value
            for name, value in losses.counts.items():
                counts[name] = counts.get(name, 0) + value
            if losses.expert_tokens is not None:
                expert_tokens = losses.expert_tokens if expert_tokens is None else expert_tokens + losses.expert_tokens
        with self.stopwatch.part(exchange):
            self.parallel.finish_gradients()
        if expert_tokens is not None:
            expert_tokens = self.parallel.all_reduce(expert_tokens)
        self._scalars = Scalars()
        for kind, values in (("sum", sums), ("count", counts)):
            for name, value in values.items():
                self._scalars[f"{kind}/{name}"] = self.parallel.all_reduce(value)
        self._scalars["loss"] = self.parallel.all_reduce(total) / max(1, n_targets)
        return StepLosses(self._scalars, n_targets, list(sums), counts, expert_tokens)

    def _determinism(self) -> AbstractContextManager[None]:
        return deterministic(self.model.device) if self._same_bits else nullcontext()

    def gradient_norm(self) -> float:
        """Undo the loss scaling of the step's gradients, and return their norm over all ranks. On CUDA, the host reads
        the step's losses together with the norm, so that it waits for the device only once a step."""
        self.optimizer.unscale(self.scaler)
        return self.parallel.gradient_norm(scalars=self._scalars)

    def apply(self, norm: float, rate_factor: float = 1.0) -> None:
        """Clip the gradients, whose norm is `norm`, and update the parameters at `rate_factor` · peak learning rate."""
        if self._grad_clip and norm > self._grad_clip:
            self.parallel.clip_gradients(self._grad_clip, norm)
        self.optimizer.set_rate(rate_factor)
        self.optimizer.step(self.scaler)
        self.optimizer.zero_grad()

    def skip(self) -> None:
        """Discard the gradients, leave the parameters unchanged, and update the scaler's factor."""
        self.scaler.update()
        self.optimizer.zero_grad()


class LayerNorms:
    """Measures the norms of each block's outputs and gradients every `every` steps. The norms show where a deep
    model diverges."""

    def __init__(self, model: GPT, parallel: Parallel, every: int) -> None:
        self._model, self._parallel, self._every = model, parallel, every

    def begin_step(self, n_done: int) -> None:
        """Make the model record the root mean square of its blocks' outputs if step `n_done` + 1 is a multiple of
        `every`."""
        self._model.watched = [] if (n_done + 1) % self._every == 0 else None

    def figures(self) -> dict[str, list[float]]:
        """Return figures for metrics.jsonl: the root mean square of each block's output (at the block's last use) in
        the rank's first micro-batch, and the norm of the block's gradients; empty at steps not divisible by `every`."""
        outputs, self._model.watched = self._model.watched, None
        if not outputs:
            return {}
        n_layers, uses = len(self._model.blocks), self._model.config.layer_uses
        last = dict(zip(uses, torch.stack(outputs[: len(uses)]).tolist(), strict=True))
        found = {
            "activation_rms_by_layer": [last[layer] for layer in range(n_layers)],
            "gradient_norm_by_layer": [self._parallel.gradient_norm(f"blocks.{layer}.") for layer in range(n_layers)],
        }
        return {name: [float(f"{value:.5g}") for value in values] for name, values in found.items()}
