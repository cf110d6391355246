"""Measures a run's speed: seconds of a step's parts, tokens and FLOPs per second, and utilization of the device."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gptworks.config import ModelConfig
from gptworks.device import Precision, product_rate, synchronize
from gptworks.planning.flops import forward_flops

MEASURE_AFTER_SECONDS = 10.0
"""Training time of a session after which the device's rate is measured; shorter sessions report no utilization."""

MOST_MEASURED = 4
"""Maximum number of measurements of the device's rate. The rate is measured again if training
exceeds the measured rate."""


class Stopwatch:
    """Adds up the seconds of each part of a run, by name.

    On CUDA, two events on the device's stream time a part, so that steps need not wait for the device; time in which
    the device waits for Python is included. On MPS, each part waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self._running: deque[tuple[list[str], torch.cuda.Event, torch.cuda.Event]] = deque()
        self._open: list[str] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Return a context whose time is added to the part `name`, and not to the part around it."""
        self._open.append(name)
        on_cuda = self._device.type == "cuda"
        began = self._event() if on_cuda else None
        started = time.perf_counter()
        try:
            yield
        finally:
            names = self._open[:-3:-1]  # this part and the one around it
            self._open.pop()
            if began is not None:
                self._running.append((names, began, self._event()))
                while self._running and self._running[0][2].query():  # type: ignore[no-untyped-call]
                    self._count_first()
            else:
                synchronize(self._device)
                self._add(names, time.perf_counter() - started)

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, rounded to 0.1 ms. Waits for the device."""
        if self._running:
            self._running[-1][2].synchronize()
        while self._running:
            self._count_first()
        taken, self.seconds = self.seconds, {}
        return {name: round(seconds, 4) for name, seconds in taken.items()}

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _count_first(self) -> None:
        names, began, ended = self._running.popleft()
        self._add(names, began.elapsed_time(ended) / 1000)

    def _add(self, names: list[str], seconds: float) -> None:
        for name, change in zip(names, (seconds, -seconds), strict=False):
            self.seconds[name] = self.seconds.get(name, 0.0) + change


@dataclass(frozen=True)
class Pace:
    """A run's speed since its last report."""

    tokens_per_second: float
    flops_per_second: float
    """FLOPs of the model's matrix products, forward and backward, with full attention, without recomputation."""
    utilization: float | None
    """`flops_per_second` divided by the devices' measured rate of large products in the same precision. None if
    the rate is not measured yet, or is too low to be right."""

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
        """Return the speed since the last call, given the run's totals now; measure the device's rate when due."""
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
