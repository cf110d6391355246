"""Computes a run's speed: tokens per second, model FLOPs per second, and utilization of the device."""

from dataclasses import dataclass

import torch

from gptworks.config import ModelConfig
from gptworks.device import Precision, product_rate
from gptworks.planning.flops import forward_flops

MEASURE_AFTER_SECONDS = 10.0
"""Training time of a session after which the device's rate is measured; shorter sessions report no utilization."""

MOST_MEASURED = 4
"""Maximum number of measurements of the device's rate. The rate is measured again if training exceeds it."""


@dataclass(frozen=True)
class Pace:
    """A run's speed since its last report."""

    tokens_per_second: float
    flops_per_second: float
    """FLOPs of the model's matrix products, forward and backward, with full attention, without recomputation."""
    utilization: float | None
    """`flops_per_second` divided by the devices' measured rate of large products in the same precision. None: not
    measured yet, or the measured rate is too low to be right."""

    @property
    def record(self) -> dict[str, float]:
        """The figures for metrics.jsonl, rounded."""
        known = {} if self.utilization is None else {"utilization": round(self.utilization, 4)}
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "flops_per_second": round(self.flops_per_second),
            **known,
        }


class Throughput:
    """Computes a run's speed from its totals of tokens and seconds."""

    def __init__(self, model: ModelConfig, device: torch.device, precision: Precision, n_devices: int) -> None:
        self._model = model
        self._flops_per_token = forward_flops(model).training_per_token_dense
        self._saved_flops = 0.0
        self._device, self._precision, self._n_devices = device, precision, n_devices
        self._rate: float | None = None
        self._n_measured = 0
        self.start(0, 0.0)

    def count_short(self, tokens: int, length: int) -> None:
        """Correct the next `pace` for `tokens` in rows of `length`: rows shorter than the context take fewer FLOPs."""
        self._saved_flops += tokens * (
            self._flops_per_token - forward_flops(self._model, length).training_per_token_dense
        )

    def start(self, tokens: int, seconds: float) -> None:
        """Start to measure the speed from the run's present totals of tokens and seconds."""
        self._tokens, self._seconds = tokens, seconds
        self._begun_seconds = seconds

    def pace(self, tokens: int, seconds: float) -> Pace:
        """Return the speed since the last call, given the run's totals now; measures the device's rate when due."""
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
