"""The speed of a run: tokens and model FLOPs per second, and utilization, their share of the device's measured rate."""

from dataclasses import dataclass

import torch

from gptworks.config import ModelConfig
from gptworks.device import Precision, product_rate
from gptworks.planning.flops import forward_flops

MEASURE_AFTER_SECONDS = 10.0
"""Training time before the device's rate is measured; shorter runs have no utilization."""

MOST_MEASURED = 4
"""Most measurements of the device: if training is faster, other programs had slowed the last one, so it is repeated."""


@dataclass(frozen=True)
class Pace:
    """Speed since the last report."""

    tokens_per_second: float
    flops_per_second: float
    """FLOPs of the model's matrix products, forward and backward, with full attention, without recomputation."""
    utilization: float | None
    """Share of the measured rate of large products in the same precision on all devices. None: not measured yet, or the
    measured rate is too low to be right."""

    @property
    def record(self) -> dict[str, float]:
        """The throughput's figures for metrics.jsonl."""
        known = {} if self.utilization is None else {"utilization": round(self.utilization, 4)}
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "flops_per_second": round(self.flops_per_second),
            **known,
        }


class Throughput:
    """Turns the tokens and seconds of training steps into rates."""

    def __init__(self, model: ModelConfig, device: torch.device, precision: Precision, n_devices: int) -> None:
        self._model = model
        self._flops_per_token = forward_flops(model).training_per_token_dense
        self._saved_flops = 0.0
        self._device, self._precision, self._n_devices = device, precision, n_devices
        self._rate: float | None = None
        self._n_measured = 0
        self.start(0, 0.0)

    def count_short(self, tokens: int, length: int) -> None:
        """Count tokens of rows that are shorter than the context, which take fewer operations each."""
        self._saved_flops += tokens * (
            self._flops_per_token - forward_flops(self._model, length).training_per_token_dense
        )

    def start(self, tokens: int, seconds: float) -> None:
        """Begin to count from these totals of the run."""
        self._tokens, self._seconds = tokens, seconds
        self._begun_seconds = seconds

    def pace(self, tokens: int, seconds: float) -> Pace:
        """Rates since the last call, from the run's totals."""
        taken = seconds - self._seconds
        speed = (tokens - self._tokens) / taken if taken > 0 else 0.0
        self._tokens, self._seconds = tokens, seconds
        flops = speed * self._flops_per_token
        if self._saved_flops and taken > 0:
            flops -= self._saved_flops / taken
        self._saved_flops = 0.0
        due = self._rate is None and seconds - self._begun_seconds >= MEASURE_AFTER_SECONDS
        if due or (self._rate is not None and flops > self._rate and self._n_measured < MOST_MEASURED):
            self._n_measured += 1
            rate = self._n_devices * product_rate(self._device, self._precision.dtype)
            self._rate = max(self._rate or 0.0, rate)
        share = None if self._rate is None else flops / self._rate
        return Pace(speed, flops, share if share is not None and share <= 1 else None)
