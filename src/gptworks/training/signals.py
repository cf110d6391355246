"""Catches signals, so that work can stop at a good point."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that stop a run after its step, with a checkpoint. Schedulers send SIGUSR1 first, SIGTERM later."""

SCHEDULERS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that a scheduler sends before it ends a job."""

UNFINISHED = os.EX_TEMPFAIL
"""Exit code of a run that SIGTERM or SIGUSR1 has stopped: a scheduler may requeue it, and --resume continues it."""


def exit_code_of(stop: str | None) -> int:
    """Return the exit code of a run that the signal `stop` has stopped; 0 after SIGINT (Ctrl-C) or None (no signal)."""
    return 0 if stop in (None, signal.SIGINT.name) else UNFINISHED


@contextmanager
def exits_unfinished() -> Iterator[None]:
    """Return a context in which a scheduler's signal ends the process with `UNFINISHED`, since there is nothing to save
    yet; also one that has come while `hold_signals` held it back."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(UNFINISHED)

    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only the main thread can set handlers
        previous = {number: signal.signal(number, leave) for number in SCHEDULERS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SCHEDULERS)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def hold_signals() -> None:
    """Hold a scheduler's signals back until the program that replaces this process's is in `exits_unfinished`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SCHEDULERS)


@contextmanager
def stop_signals(wanted: Sequence[signal.Signals] = STOPS) -> Iterator[Callable[[], str | None]]:
    """Catch signals; yield a function that returns the name of the first, or None.

    After the first SIGINT or SIGTERM, a second one acts as usual and ends the process. SIGUSR1 never ends it, because a
    scheduler sends SIGUSR1 first and SIGTERM when the time is over.
    """
    asked: list[str] = []
    previous: dict[signal.Signals, Any] = {}

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)
        if number != signal.SIGUSR1:
            for each in previous.keys() - {signal.SIGUSR1}:
                signal.signal(each, previous[each])

    if threading.current_thread() is threading.main_thread():  # only the main thread can set handlers
        previous = {number: signal.signal(number, ask) for number in wanted}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
