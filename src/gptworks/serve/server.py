"""Start and end the server: uvicorn with our protocol. After a first signal, the server finishes current requests."""

import asyncio
import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from socket import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from gptworks.errors import RunError, UserError
from gptworks.serve.protocol import SWEEP_SECONDS, bounded_by, sweep
from gptworks.serve.service import Service
from gptworks.serve.settings import ServerSettings

_TICKS_PER_SECOND = 10  # of uvicorn's main loop
_CLOSING_SECONDS = 2
"""Maximum number of seconds that the server waits for its connections to close when it ends."""
_SPARE_FILES = 128
"""Number of open files that are reserved for other uses than connections."""
_BACKLOG = 100
"""Maximum number of connections that wait to be accepted; each takes an open file."""
_FEWEST_FILES = 16
_SHORT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Server(uvicorn.Server):
    """A uvicorn server that runs until a signal comes or an engine fails.

    The server then refuses new requests, and lets the current requests finish within `drain_seconds`. A second signal
    ends the server immediately.
    """

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[int], None]) -> None:
        super().__init__(config)
        self._service, self._tell_started = service, started
        self._drain_ends: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self._service.draining = True

    def run(self, sockets: list[socket] | None = None) -> None:
        """Serve until a signal or a failed engine ends the server; raises a RunError after a failed engine."""
        super().run(sockets)
        if (failure := self._service.failure) is not None:
            raise RunError(f"{failure}: the server has ended. The log above has the error.")

    async def startup(self, sockets: Any = None) -> None:
        loop, said = asyncio.get_running_loop(), False

        def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            """Log a lack of file descriptors or memory only once, since asyncio tries again many times a second."""
            nonlocal said
            error = context.get("exception")
            if not isinstance(error, OSError) or error.errno not in _SHORT_OF_FILES:
                loop.default_exception_handler(context)
            elif not said:
                said = True
                logging.getLogger("gptworks").error("no connections are accepted for now: %s", error.strerror)

        loop.set_exception_handler(handle)
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        service, now = self._service, time.monotonic()
        if counter == 0:
            self._tell_started(self.servers[0].sockets[0].getsockname()[1])
        if counter % round(SWEEP_SECONDS * _TICKS_PER_SECOND) == 0:
            sweep(self.server_state.connections)
        service.draining = service.draining or service.failure is not None
        if service.draining:
            self._drain_ends = self._drain_ends or now + service.settings.drain_seconds
            if now > self._drain_ends:
                service.close()  # unfinished requests are answered with 503
            if service.in_flight == 0 or now > self._drain_ends:
                return True
        return await super().on_tick(counter)


def make_server(app: FastAPI, host: str, port: int, started: Callable[[int], None] = lambda port: None) -> Server:
    """Return a server for the app; its `run` starts it.

    Args:
        port: 0 means any free port.
        started: called with the port once the server listens.

    Raises:
        UserError: the limit of open files is too low for any connection.
    """
    service: Service = app.state.service
    settings: ServerSettings = service.settings
    most, backlog = _connections(settings.max_connections)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=bounded_by(replace(settings, max_connections=most)),
        backlog=backlog,
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )
    return Server(config, service, started)


def _connections(most: int) -> tuple[int, int]:
    """Return the number of connections that the limit of open files allows, at most `most`, and the number that may
    wait to be accepted. If needed, raise the process's limit as far as allowed.

    Raises:
        UserError: the limit is too low for any connection.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return most, _BACKLOG
    wanted = most + _SPARE_FILES + _BACKLOG
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most, _BACKLOG
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
            )
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = soft - len(os.listdir("/dev/fd"))  # noqa: PTH208
    if free < _FEWEST_FILES:
        raise UserError(f"{soft} files may be open, and {max(0, free)} are left: raise the limit with ulimit -n 1024.")
    backlog = min(_BACKLOG, free // 4)
    return min(most, free - backlog - min(_SPARE_FILES, free // 2)), backlog
