"""uvicorn's HTTP protocol with limits on incomplete requests, and on clients that do not read their answers.

A connection ends if its headers are too long or take too long, if it sends far more bytes than a body may have, or if
its answers stay unread for too long. If there are too many connections, the server closes the connection that has been
idle longest. If no connection is idle, the server refuses the new connection.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gptworks.serve.errors import APIError
from gptworks.serve.settings import ServerSettings

SWEEP_SECONDS = 0.5
"""Seconds between two checks of the connections."""

KERNEL_BYTES = 1 << 17
"""Size of a connection's send buffer; the system's default takes megabytes for each slow reader."""

_LOOKS = (0.02, 0.1)
"""Delays, in seconds after a client stops sending, of two checks of the connection. Later, each sweep checks it."""


class GuardedProtocol(HttpToolsProtocol):
    """A client's connection, with the limits in `settings`; `bounded_by` makes a class for given settings."""

    settings: ServerSettings

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._waiting_since: float | None = time.monotonic()  # when the wait for headers began
        self._idle_since: float | None = self._waiting_since
        self._stuck_since: float | None = None
        self._in_headers, self._too_long = True, False
        self._n_header_bytes = self._n_fed_bytes = self._n_bytes = 0
        self._n_hosts, self._coding, self._half_closed = 0, b"", False
        super().connection_made(transport)
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        if len(self.connections) > self.settings.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        idle = [(c._idle_since, c) for c in _guarded(self.connections) if c._idle_since is not None and c != self]
        if idle:
            min(idle, key=lambda pair: pair[0])[1].transport.abort()
        else:
            self._refuse(APIError(503, "the server is at its limit of connections.", code="too_many_connections"))

    def data_received(self, data: bytes) -> None:
        if self._idle and self._waiting_since is None:
            self._waiting_since = time.monotonic()
        self._n_bytes += len(data)
        self._n_fed_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_headers and self._n_fed_bytes > self.settings.max_header_bytes:  # the headers are too long already
            self._refuse_headers()
        elif self._n_bytes > 2 * self.settings.max_discarded_bytes:
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to finish the current answer after the client stops sending, since the client may still read.

        A client that closed the connection looks the same. Browser pages and readers of `Service.watch` streams are
        assumed to have closed the connection. To test other clients, the server sends `100 Continue` in HTTP/1.1 if no
        answer has begun. Clients ignore this line, but if the connection is closed, the client's system answers with a
        reset.
        """
        if self._idle or self.cycle.more_body or self.transport.is_closing():
            return False  # asyncio then closes the transport
        caller = self.cycle.scope.get("state", {}).get("caller")
        if caller is not None and (caller.is_page or caller.watches):
            return False
        self._half_closed = True
        if self.scope["http_version"] == "1.1" and not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        for seconds in _LOOKS:
            self.loop.call_later(seconds, self._leave_if_gone)
        return True

    def _leave_if_gone(self) -> None:
        """End a half-closed connection after a reset, which asyncio would notice only at its next read or write."""
        socket_ = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            if self._half_closed and socket_ is not None and socket_.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.transport.abort()

    @property
    def _idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._n_bytes = self._n_header_bytes = self._n_hosts = 0
        self._coding = b""
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def _count(self, n_bytes: int) -> None:
        """Count header bytes as the parser reads them, since headers of any length may arrive in one part."""
        self._n_header_bytes += n_bytes
        if self._n_header_bytes > self.settings.max_header_bytes:
            self._too_long = True
            raise ValueError("the headers are too long")  # answered with 431

    def on_headers_complete(self) -> None:
        self._waiting_since = self._idle_since = None
        self._in_headers = False
        if len(self.pipeline) >= self.settings.max_pipelined:
            raise ValueError("too many requests ahead of their answers")  # answered with 400
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._n_fed_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._idle and self._half_closed:
            self.transport.close()
        if self._idle:
            self._idle_since = time.monotonic()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        if self._in_headers:  # ignore trailers, which come after the body
            lower = name.lower()
            self._n_hosts += lower == b"host"
            if self._n_hosts > 1:
                raise ValueError("it has two Host headers")  # answered with 400
            if lower == b"transfer-encoding":
                self._coding += b"," * bool(self._coding) + value.strip().lower()
                if self._coding != b"chunked":
                    raise ValueError("its transfer coding is unknown")  # answered with 501
            super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        if self._too_long:
            self._refuse_headers()
            return
        if self._coding not in (b"", b"chunked"):
            self._refuse(APIError(501, "the only supported transfer coding is chunked.", code="transfer_coding"))
            return
        self._refuse(APIError(400, f"this is not valid HTTP: {msg}", code="invalid_http"))

    def _refuse_headers(self) -> None:
        most = self.settings.max_header_bytes
        self._refuse(APIError(431, f"the headers have more than {most} bytes.", code="headers_too_long"))

    def _refuse(self, error: APIError) -> None:
        """Answer with an error before the request reaches the app, and close the connection."""
        if self.transport.is_closing():
            return
        body = bytes(error.response().body)
        head = [STATUS_LINE[error.status], b"content-type: application/json\r\n", b"connection: close\r\n"]
        self.transport.write(b"".join([*head, b"content-length: %d\r\n\r\n" % len(body), body]))
        self.transport.close()

    def sweep(self, now: float) -> None:
        """End the connection if it is too slow or its client has gone."""
        self._leave_if_gone()
        settings = self.settings
        stuck = self.flow.write_paused or self.transport.is_closing()
        self._stuck_since = (self._stuck_since or now) if stuck else None
        late = self._waiting_since is not None and now - self._waiting_since > settings.header_seconds
        if late or (self._stuck_since is not None and now - self._stuck_since > settings.stall_seconds):
            self.transport.abort()


def bounded_by(settings: ServerSettings) -> type[GuardedProtocol]:
    """Return the protocol class for a server with these settings."""
    return type("BoundedProtocol", (GuardedProtocol,), {"settings": settings})


def sweep(connections: Iterable[Any]) -> None:
    """End the connections that are too slow or whose clients have gone."""
    now = time.monotonic()
    for connection in _guarded(connections):
        connection.sweep(now)


def _guarded(connections: Iterable[Any]) -> list[GuardedProtocol]:
    return [connection for connection in connections if isinstance(connection, GuardedProtocol)]
