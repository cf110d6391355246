"""Where the time of a run goes, in seconds by part."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up durations by name. On an accelerator each part ends with a wait for the device, or its work would be
    counted where the next wait is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what runs inside as `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type in ("cuda", "mps"):
                torch.accelerator.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """The sums since the last call, in seconds rounded to 0.1 ms."""
        taken, self.seconds = self.seconds, {}
        return {name: round(seconds, 4) for name, seconds in taken.items()}
