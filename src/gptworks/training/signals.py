"""Catches signals, so that work can stop at a good point."""

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

NOTICE: signal.Signals | None = getattr(signal, "SIGUSR1", None)
"""The signal that a scheduler sends before its SIGTERM; None on Windows, which has no SIGUSR1."""

SCHEDULERS = (signal.SIGTERM,) if NOTICE is None else (signal.SIGTERM, NOTICE)
"""Signals that a scheduler sends before it ends a job."""

_BREAK: signal.Signals | None = getattr(signal, "SIGBREAK", None)  # on Windows only; Ctrl-Break and `ASK` send it

STOPS = (signal.SIGINT, *SCHEDULERS) if _BREAK is None else (signal.SIGINT, signal.SIGTERM, _BREAK)
"""Signals that stop a run after its step, with a checkpoint."""

ASK: signal.Signals = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM)
"""The signal that makes another process stop its run after a step, as Ctrl-C does. Before the first step, it ends the
process. Unlike SIGINT, it is not lost while Python imports modules. On Windows, it is CTRL_BREAK_EVENT, because SIGTERM
would end a run without saving; the process must be started with `OWN_GROUP`."""

OWN_GROUP: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
"""Value of `creationflags` of `subprocess.Popen` for a process that `ASK` can be sent to."""

UNFINISHED = 75
"""Exit code (EX_TEMPFAIL of sysexits.h) of a run that SIGTERM or SIGUSR1 has stopped: a scheduler may requeue it, and
--resume continues it."""


def exit_code_of(stop: str | None) -> int:
    """Return the exit code of a run that the signal `stop` has stopped; 0 for SIGINT (Ctrl-C) or None (no signal)."""
    return 0 if stop in (None, signal.SIGINT.name) else UNFINISHED


@contextmanager
def exits_unfinished() -> Iterator[None]:
    """Return a context in which a scheduler's signal ends the process with `UNFINISHED`, since there is nothing to save
    yet. A signal that `hold_signals` has held back ends the process on entry."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(UNFINISHED)

    previous: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only the main thread can set handlers
        previous = {number: signal.signal(number, leave) for number in SCHEDULERS}
        _mask("SIG_UNBLOCK")
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def hold_signals() -> None:
    """Hold a scheduler's signals back until the program that replaces this one by exec enters `exits_unfinished`."""
    _mask("SIG_BLOCK")


def _mask(how: str) -> None:
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(getattr(signal, how), SCHEDULERS)


@contextmanager
def stop_signals(wanted: Sequence[signal.Signals] = STOPS) -> Iterator[Callable[[], str | None]]:
    """Catch signals; yield a function that returns the name of the first signal caught, or None.

    After the first SIGINT or SIGTERM, a second one acts as usual and ends the process. SIGUSR1 never ends it, because a
    scheduler sends SIGUSR1 first and SIGTERM when the time is over. Outside the main thread, no signal is caught.
    """
    asked: list[str] = []
    previous: dict[signal.Signals, Any] = {}

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(number).name)
        if number != NOTICE:
            for each in previous.keys() - {NOTICE}:
                signal.signal(each, previous[each])

    if threading.current_thread() is threading.main_thread():  # only the main thread can set handlers
        previous = {number: signal.signal(number, ask) for number in wanted}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
