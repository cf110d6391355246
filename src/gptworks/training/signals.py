"""Catches signals, so that work can stop at a good point."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def stop_signals(
    wanted: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[Callable[[], str | None]]:
    """Catch signals; yield a function that returns the name of the first, or None. A repeated signal acts as usual."""
    asked: list[str] = []
    previous: dict[signal.Signals, Any] = {}

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)
        signal.signal(number, previous[signal.Signals(number)])

    if threading.current_thread() is threading.main_thread():  # only the main thread can set handlers
        previous = {number: signal.signal(number, ask) for number in wanted}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
