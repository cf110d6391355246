"""Measures how much time the parts of a step take: forward, backward, data and so on."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gptworks.device import synchronize


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
