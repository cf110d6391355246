"""A web server on this machine; its downloads are allowed while it runs."""

import http.server
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

Answer = bytes | tuple[int, dict[str, str], bytes] | Callable[[Any], None]
"""What is at a path: its bytes; or a status, headers and bytes; or a function of the request's handler."""


@contextmanager
def website(files: Mapping[str, Answer], context: Any = None) -> Iterator[str]:
    """Serve inside the `with`; yield the server's address. Uses TLS if a context is given."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = files.get(self.path, (404, {}, b""))
            if callable(found):
                found(self)
                return
            status, headers, body = (200, {}, found) if isinstance(found, bytes) else found
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, pytest.MonkeyPatch.context() as patch:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        patch.setenv("GPTWORKS_DOWNLOADS", "private")
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http{'' if context is None else 's'}://127.0.0.1:{server.server_port}"
        server.shutdown()
