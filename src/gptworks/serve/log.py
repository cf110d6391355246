"""The server's log: errors, and a line for each request except requests for /health.

A separate thread writes the lines, so a full pipe delays no request.
"""

import logging
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler

from starlette.types import Scope

_REQUESTS = logging.getLogger("gptworks.requests")
_ALL = logging.getLogger("gptworks")
_MAX_LINES = 10_000
"""Maximum number of lines that wait to be written; further lines are lost."""
_LAST_LINES_SECONDS = 2.0
"""Maximum time for writing the waiting lines when the server ends."""


def log_request(scope: Scope, status: int | None, seconds: float, n_tokens: int) -> None:
    """Log one line about a request: address, method, path, status, milliseconds, tokens read and written.

    status: None if the client left before the answer; the line then has 499, as in nginx.
    """
    if not _REQUESTS.isEnabledFor(logging.INFO):
        return
    path = scope.get("raw_path", b"").decode("latin-1")[:200]
    shown = "".join(one if one.isascii() and one.isprintable() else "?" for one in path)
    address = (scope.get("client") or ("-",))[0]
    _REQUESTS.info(f"{address} {scope['method']} {shown} {status or 499} {seconds * 1000:.0f} ms {n_tokens} tokens")


class _Lossy(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self.queue.put_nowait(record)


@contextmanager
def logged_to_stderr() -> Iterator[None]:
    """Write the log to standard error inside the `with` block."""
    lines: queue.Queue[logging.LogRecord | None] = queue.Queue(_MAX_LINES)
    handler, writer = _Lossy(lines), logging.StreamHandler(sys.stderr)
    writer.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))

    def write() -> None:
        while (record := lines.get()) is not None:
            writer.handle(record)

    thread = threading.Thread(target=write, name="gptworks log", daemon=True)
    thread.start()
    level = _ALL.level
    _ALL.addHandler(handler)
    _ALL.setLevel(logging.INFO)
    try:
        yield
    finally:
        _ALL.removeHandler(handler)
        _ALL.setLevel(level)
        with suppress(queue.Full):
            lines.put_nowait(None)
        thread.join(_LAST_LINES_SECONDS)
