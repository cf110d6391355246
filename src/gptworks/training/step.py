"""The training step: forward and backward over micro-batches, then an update. The loop, the trace and the measurement
of a step all run it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gptworks.config import TrainConfig
from gptworks.data.samples import Batch
from gptworks.device import Precision
from gptworks.model.gpt import GPT
from gptworks.training.distributed.parallel import Parallel
from gptworks.training.objectives.next_token import LossFunction
from gptworks.training.optim.optimizer import Optimizer
from gptworks.training.record.stopwatch import Stopwatch


@dataclass
class StepLosses:
    """Mean losses of a step, over the targets of all ranks."""

    loss: float
    figures: dict[str, float] = field(default_factory=dict)
    """Additional means that the objective reports, by name."""
    expert_tokens: Tensor | None = None
    """Tokens that each expert of each layer got, int64 [L, E]."""


class TrainStep:
    """A model, its optimizer and a loss. A step is `accumulate`, then `apply`, or `skip` if gradients would do harm."""

    def __init__(
        self,
        model: GPT,
        train: TrainConfig,
        loss: LossFunction,
        precision: Precision,
        parallel: Parallel,
    ) -> None:
        """
        Args:
            model: the model that `parallel.place` returned.
        """
        self.model, self.loss, self.precision = model, loss, precision
        self.parallel, self.ranks = parallel, parallel.ranks
        self.stopwatch = Stopwatch(model.device)
        self.optimizer = Optimizer(model, train, parallel.mesh)
        self.scaler = torch.amp.GradScaler(model.device.type, enabled=precision.needs_scaler)
        self._grad_clip = train.grad_clip

    def accumulate(
        self,
        micro_batches: Sequence[Batch],
        n_targets: int,
        seed: tuple[int, ...] = (0,),
        numbers: Sequence[int] | None = None,
    ) -> StepLosses:
        """Accumulate the gradients of the step's mean loss over all targets, for any division into micro-batches.

        Args:
            micro_batches: this rank's micro-batches, on the model's device.
            n_targets: number of targets in all micro-batches of all ranks.
            seed: the step's seed. Dropout depends only on it and the micro-batch's number: a resumed run needs no
                generator state.
            numbers: the number within the step of each micro-batch; None: 0, 1, ….
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
            with self.stopwatch.part("forward"), self.precision.autocast():
                losses = self.loss(self.model, batch)
            if number == numbers[-1]:
                self.parallel.begin_all_reduce(lambda: self.stopwatch.part(exchange))
            with self.stopwatch.part("backward"):
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
        totals = {name: self.parallel.all_reduce(value).item() for name, value in sums.items()}
        divisors = {name: self.parallel.all_reduce(value).item() for name, value in counts.items()}
        figures = {name: float(f"{n / max(1, divisors.get(name, n_targets)):.5g}") for name, n in totals.items()}
        return StepLosses((self.parallel.all_reduce(total) / max(1, n_targets)).item(), figures, expert_tokens)

    def gradient_norm(self) -> float:
        """Unscale the step's gradients, and return their norm over all ranks."""
        self.optimizer.unscale(self.scaler)
        return self.parallel.gradient_norm()

    def apply(self, norm: float, rate_factor: float = 1.0) -> None:
        """Clip gradients of this norm, and update the parameters with `rate_factor` times their peak learning rate."""
        if self._grad_clip and norm > self._grad_clip:
            self.parallel.clip_gradients(self._grad_clip, norm)
        self.optimizer.set_rate(rate_factor)
        self.optimizer.step(self.scaler)
        self.optimizer.zero_grad()

    def skip(self) -> None:
        """Drop the gradients and leave the parameters as they are."""
        self.scaler.update()
        self.optimizer.zero_grad()
