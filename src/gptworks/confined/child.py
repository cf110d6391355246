"""The child's side of `gptworks.confined`: read questions, and answer each within its limits."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptworks.errors import reason_of

Answer = Callable[[Any], Any]
"""A function that returns the answer to a question (both JSON values). If the function raises an exception, the child
sends the exception's message."""


def serve(prepare: Callable[[Any], Answer]) -> None:
    """Answer questions until the pipe closes. `prepare` makes the `Answer` from the first question, the setup."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # redirect the output of libraries to stderr, so that it does not look like replies
    answer: Answer | None = None
    before = 0
    for line in sys.stdin.buffer:
        limits, question = json.loads(line)
        _limit(limits["seconds"], limits["n_bytes"])
        try:
            reply: dict[str, Any] = {"answer": None}
            if answer is None:
                answer = prepare(question)
            else:
                reply["answer"] = answer(question)
            text = json.dumps(reply)
        except MemoryError:
            text = '{"out_of_memory": true}'
        except Exception as error:
            text = json.dumps({"error": reason_of(error, 2000)})
        _lift()
        before = before or resident_bytes()
        reply = json.loads(text) | {"grown_bytes": resident_bytes() - before}
        replies.write(json.dumps(reply).encode("ascii") + b"\n")
        replies.flush()


def resident_bytes() -> int:
    """Return the resident bytes of this process; 0 if the system has no /proc."""
    return _statm(1)


def _statm(column: int) -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def limit_growth(limit: str, n_bytes: int) -> None:
    """Let allocations of this process fail once its memory has grown by `n_bytes`; no effect without /proc. `limit` is
    RLIMIT_AS for the whole address space, or RLIMIT_DATA for private writable memory, such as the heap."""
    if used := _statm({"RLIMIT_AS": 0, "RLIMIT_DATA": 5}[limit]):
        import resource

        number, wanted = getattr(resource, limit), used + n_bytes
        hard = resource.getrlimit(number)[1]
        resource.setrlimit(number, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


HAS_LIMITS = hasattr(signal, "setitimer")
"""Whether the system can limit a process's CPU time and, on Linux, its memory. False on Windows, where the parent kills
a child that takes too long."""


def _limit(seconds: float, n_bytes: int) -> None:
    if not HAS_LIMITS:
        return
    import resource

    signal.setitimer(signal.ITIMER_PROF, seconds)  # the timer's signal ends the process
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_growth("RLIMIT_AS", n_bytes)


def _lift() -> None:
    if not HAS_LIMITS:
        return
    import resource

    signal.setitimer(signal.ITIMER_PROF, 0)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
