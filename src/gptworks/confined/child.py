"""The child's side of `gptworks.confined`: read a question, answer it within limits, again and again."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = Callable[[Any], Any]
"""A question's answer; both JSON. An exception's text is told instead."""


def serve(prepare: Callable[[Any], Answer]) -> None:
    """Answer until the parent closes the pipe. The first question is the setup."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no reply
    answer: Answer | None = None
    before = 0
    for line in sys.stdin.buffer:
        limits, question = json.loads(line)
        reply: dict[str, Any] = {}
        _limit(limits["seconds"], limits["n_bytes"])
        try:
            if answer is None:
                answer = prepare(question)
                reply["answer"] = None
            else:
                reply["answer"] = answer(question)
            text = json.dumps(reply)
        except MemoryError:
            text = ""
        except Exception as error:
            text = json.dumps({"error": " ".join(str(error).split())[:2000] or type(error).__name__})
        _lift()
        before = before or resident_bytes()
        told = json.loads(text) if text else {"out_of_memory": True}
        replies.write(json.dumps(told | {"grown_bytes": resident_bytes() - before}).encode("ascii") + b"\n")
        replies.flush()


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    return _statm(1)


def _statm(column: int) -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _limit(seconds: float, n_bytes: int) -> None:
    import resource
    import signal

    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if used := _statm(0):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = used + n_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _lift() -> None:
    import resource
    import signal

    signal.setitimer(signal.ITIMER_PROF, 0)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
