"""Starting and ending: uvicorn with our protocol, and a drain between the first signal and the end."""

import contextlib
import time
from collections.abc import Callable
from socket import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from gptworks.errors import RunError
from gptworks.serve.protocol import SWEEP_SECONDS, bounded_by, sweep
from gptworks.serve.service import Service
from gptworks.serve.settings import ServerSettings

_TICKS_PER_SECOND = 10  # uvicorn's
_CLOSING_SECONDS = 2
"""For connections to be closed, at the end."""
_SPARE_FILES = 128
"""Open files beside connections."""


class Server(uvicorn.Server):
    """Serves until a signal comes, or an engine is dead; then lets requests finish and refuses others, up to the time
    for that. A second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[int], None]) -> None:
        super().__init__(config)
        self._service, self._tell_started = service, started
        self._drain_ends: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self._service.draining = True

    def run(self, sockets: list[socket] | None = None) -> None:
        """Serve until the end.

        Raises:
            RunError: an engine has failed, so that the server ended by itself.
        """
        super().run(sockets)
        if (failure := self._service.failure) is not None:
            raise RunError(f"{failure}: the server has ended. The log above says how.")

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
                service.close()  # what still runs is answered with 503
            if service.in_flight == 0 or now > self._drain_ends:
                return True
        return await super().on_tick(counter)


def make_server(app: FastAPI, host: str, port: int, started: Callable[[int], None] = lambda port: None) -> Server:
    """A server of the app, to be run by its `run`.

    Args:
        port: 0 takes a free one.
        started: called with the port when the server listens.
    """
    service: Service = app.state.service
    settings: ServerSettings = service.settings
    _allow_open_files(settings.max_connections + _SPARE_FILES)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=bounded_by(settings),
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )
    return Server(config, service, started)


def _allow_open_files(n: int) -> None:
    """Raise the process' own limit to what the connections need, where the system lets it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = n if hard == resource.RLIM_INFINITY else min(n, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
