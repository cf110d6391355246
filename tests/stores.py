"""An S3 server on loopback (moto's), and a proxy in front of it that fails as networks and stores do."""

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}

Choose = Callable[[str, str], str]
"""The fault for a request, by its method and path: "", slow, 503, cut-up, cut-down or flip."""


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to the server at `port`, except for those that `choose` gives a fault."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.to, self.faults = port, Counter[str]()
        self.choose: Choose = lambda method, path: ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silence: clients leave, and faults cut connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def _pass_on(self) -> None:
        n_bytes = int(self.headers.get("Content-Length") or 0)
        fault = self.server.choose(self.command, self.path)
        self.server.faults[fault] += 1
        if fault == "cut-up":
            self.rfile.read(n_bytes // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(n_bytes)
        if fault == "503":
            self._answer(503, {"Content-Type": "application/xml"}, b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault == "slow":
            time.sleep(1.0)
        if fault == "flip-up":
            body = _flipped(body)
        server = http.client.HTTPConnection("127.0.0.1", self.server.to, timeout=60)
        server.request(self.command, self.path, body, dict(self.headers))
        response = server.getresponse()
        data = response.read()
        headers = {name: value for name, value in response.getheaders() if name.lower() not in _HOP}
        if self.command == "HEAD":
            headers["Content-Length"] = response.getheader("Content-Length") or "0"
        server.close()
        if fault == "cut-down" and data:
            self._head(response.status, headers | {"Content-Length": str(len(data))})
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self._answer(response.status, headers, _flipped(data) if fault == "flip" else data)

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self._head(status, {"Content-Length": str(len(data))} | headers)
        self.wfile.write(data)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on


def _flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


@contextlib.contextmanager
def s3() -> Iterator[FaultyProxy]:
    """An S3 server with one empty bucket, behind a proxy."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        made = http.client.HTTPConnection("127.0.0.1", port)
        made.request("PUT", f"/{BUCKET}")
        assert made.getresponse().status == 200
        proxy = FaultyProxy(port)
        yield proxy
        proxy.shutdown()
    finally:
        server.stop()


def environment(proxy: FaultyProxy) -> dict[str, str]:
    """The variables by which s3fs finds the server."""
    return {"AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}  # fmt: skip


def random_faults(seed: int, share: float, kinds: tuple[str, ...]) -> Choose:
    chance, lock = random.Random(seed), threading.Lock()

    def choose(method: str, path: str) -> str:
        with lock:
            return chance.choice(kinds) if chance.random() < share else ""

    return choose
