"""A local substitute for the Hugging Face hub: serves and receives folders through the requests of its library."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
READER, WRITER = "hf_reader", "hf_writer"
"""Tokens: one whose account has accepted every licence and may write nowhere, and one that may write."""


class Hub(ThreadingHTTPServer):
    """Serves `folder`/ORG/NAME as models with one commit, named `main` and `v1`; those in `gated` need a token."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.gated: set[str] = set()
        self.requests: list[str] = []
        """Method and path of each request."""
        self.received: dict[str, dict[str, bytes]] = {}
        """Files that were pushed, by model."""
        self.deleted: list[str] = []
        self.created: list[dict[str, Any]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self) -> set[str]:
        """The files that were requested."""
        return {
            path.split(f"/resolve/{COMMIT}/")[1]
            for path in self.requests
            if path.startswith("GET") and "/resolve/" in path
        }


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        if path.startswith("/api/") and not path.startswith("/api/models/"):
            return self._refuse(404, "EntryNotFound")
        if path.startswith("/api/models/"):
            owner, name, *rest = path.removeprefix("/api/models/").split("/")
            return self._about(f"{owner}/{name}", *rest)
        owner, name, _, revision, *rest = path.strip("/").split("/")
        return self._file(f"{owner}/{name}", revision, "/".join(rest))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.requests.append(f"POST {self.path}")
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if self._token() != WRITER:
            return self._refuse(403, "Forbidden")
        if self.path == "/api/repos/create":
            wanted = json.loads(sent)
            self.server.created.append(wanted)
            return self._answer({"url": f"{self.server.address}/{wanted['organization']}/{wanted['name']}"})
        owner, name, what, _ = self.path.removeprefix("/api/models/").split("/")
        if what == "preupload":
            files = json.loads(sent)["files"]
            return self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        for line in map(json.loads, sent.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.received.setdefault(f"{owner}/{name}", {})[line["value"]["path"]] = content
            elif line["key"] == "deletedFile":
                self.server.deleted.append(line["value"]["path"])
        return self._answer({"commitUrl": f"{self.server.address}/{owner}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def _about(self, model: str, what: str = "revision", revision: str = "main") -> None:
        folder = self.server.folder / model
        if not folder.is_dir():
            return self._refuse(401, "RepoNotFound")  # as the hub answers one who is not logged in
        if revision not in ("main", "v1", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if what == "tree":
            names = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]
            return self._answer([{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in names])
        siblings = [{"rfilename": path.relative_to(folder).as_posix()} for path in files]
        return self._answer({"id": model, "sha": COMMIT, "private": False, "siblings": siblings})

    def _file(self, model: str, revision: str, name: str) -> None:
        if model in self.server.gated and self._token() != READER:
            return self._refuse(401 if self._token() is None else 403, "GatedRepo")
        path = self.server.folder / model / name
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        return self._answer(path.read_bytes(), {"ETag": f'"{abs(hash(path)):040x}"', "X-Repo-Commit": COMMIT})

    def _token(self) -> str | None:
        return (self.headers["Authorization"] or "").removeprefix("Bearer ") or None

    def _refuse(self, status: int, code: str) -> None:
        self._answer({"error": code}, {"X-Error-Code": code}, status)

    def _answer(self, what: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        body = what if isinstance(what, bytes) else json.dumps(what).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
