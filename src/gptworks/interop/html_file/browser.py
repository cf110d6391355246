"""Open a page in an installed browser, without a window, and evaluate JavaScript in the page.

The DevTools protocol (https://chromedevtools.github.io/devtools-protocol) controls Chromium, Chrome and Edge over a
pipe, not over a port. The browser reaches no network except this process's web server, if the page must be served. Its
profile is new, and is removed when the browser ends.
"""

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gptworks.errors import RunError, UserError

BROWSER = "GPTWORKS_BROWSER"
"""The environment variable that names the browser to use. If the variable is empty, no browser is used."""
_NAMES = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge",
    "microsoft-edge-stable", "msedge",
)  # fmt: skip
_APPS = ("Google Chrome", "Chromium", "Microsoft Edge")
_OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-breakpad",
    "--disable-dev-shm-usage", "--disable-gpu", "--mute-audio", "--password-store=basic", "--use-mock-keychain",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
_START = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(one), fcntl.F_DUPFD_CLOEXEC, 10) for one in sys.argv[1:3]]
os.closerange(3, 10)
for i, one in enumerate(pipes):
    os.dup2(one, 3 + i)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Script that starts Chromium with two pipes: Chromium reads commands from descriptor 3 and writes answers to 4."""
START_SECONDS = 60


class Unavailable(Exception):
    """No browser on this machine can open a file; the message states the reason."""


def find_browser() -> str:
    """Return the path of the browser that the environment variable in `BROWSER` names. If the variable is not set, find
    a browser on PATH or in macOS's Applications folders.

    Raises:
        Unavailable: there is no browser, the variable is empty, or the platform is Windows, where browsers take no
            pipe from Python.
        UserError: the variable names no program.
    """
    if (named := os.environ.get(BROWSER)) is not None:
        found = shutil.which(named) if named else None
        if named and found is None:
            raise UserError(f"{BROWSER}={named}: there is no such program. Name Chromium, Chrome or Edge, or unset it.")
    else:
        places = (f"{root}/Applications/{one}.app/Contents/MacOS/{one}" for root in ("", Path.home()) for one in _APPS)
        found = next(filter(None, map(shutil.which, (*_NAMES, *places))), None)
    if found is None or sys.platform == "win32":
        raise Unavailable("there is no Chromium, Chrome or Edge here that the export can open it in")
    return found


@contextlib.contextmanager
def opened(file: Path, seconds: float, served: bool = False) -> Iterator["Page"]:
    """Open a file whose name ends in .html in a browser, and yield the page; the browser ends with the context.

    Args:
        seconds: time limit for loading the page and computing in it.
        served: open the file from a local web server, which also serves the files next to it.

    Raises:
        Unavailable: there is no browser, or the browser does not start or may not read the file.
        UserError: see `find_browser`.
        RunError: the time limit is exceeded.
    """
    program = find_browser()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(_serving(file)) if served else file.absolute().as_uri()
        named = tempfile.TemporaryDirectory(prefix="gptworks-browser-", ignore_cleanup_errors=True)
        page = stack.enter_context(_running(program, stack.enter_context(named)))
        page.limit(START_SECONDS, Unavailable(f"{program} does not answer"))
        name, _, version = page.ask("Browser.getVersion")["product"].removeprefix("Headless").partition("/")
        page.program = f"{name} {version.partition('.')[0]}"
        target = page.ask("Target.createTarget", url="about:blank")["targetId"]
        page.session = page.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log"):
            page.ask(f"{part}.enable")
        if problem := page.ask("Page.navigate", url=url).get("errorText"):
            raise Unavailable(f"{program} may not read the file: {problem}")
        page.limit(seconds, RunError(f"{file}: {program} took more than {seconds:.0f} s to compute"))
        page.wait("Page.loadEventFired")
        yield page


@contextlib.contextmanager
def _serving(file: Path) -> Iterator[str]:
    """Serve a file's folder until the context ends. Yield the file's URL; it contains a secret that requests need."""
    secret = secrets.token_urlsafe(16)

    class Handler(SimpleHTTPRequestHandler):
        def send_head(self) -> Any:
            _, given, path = self.path.split("/", 2) if self.path.count("/") > 1 else ("", "", "")
            self.path = f"/{path}"
            return super().send_head() if given == secret else self.send_error(404)

        def end_headers(self) -> None:
            for policy, value in (("Opener", "same-origin"), ("Embedder", "require-corp")):
                self.send_header(f"Cross-Origin-{policy}-Policy", value)
            super().end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(file.parent))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/{secret}/{file.name}"
        finally:
            server.shutdown()


class Page:
    """A page in a browser. Messages to and from the browser are in JSON; a zero byte ends each message."""

    def __init__(self, to: int, back: int) -> None:
        self.program = ""
        """The browser's name and version, such as Chrome 140."""
        self._to, self._back = to, back
        self._read, self._waiting = bytearray(), deque[bytes]()
        self._n, self.session = 0, ""
        self.events: list[tuple[str, Any]] = []
        os.set_blocking(to, False)

    def limit(self, seconds: float, error: Exception) -> None:
        """Set a deadline `seconds` from now; waiting for the browser beyond it raises `error`."""
        self._end, self._late = time.monotonic() + seconds, error

    def ask(self, method: str, **values: Any) -> Any:
        """Call a method of the DevTools protocol; return the browser's answer. Raises Unavailable if the browser has
        ended or refuses the call."""
        self._n += 1
        message = {"id": self._n, "method": method, "params": values}
        rest = json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        while rest:
            self._ready(self._to, selectors.EVENT_WRITE)
            try:
                rest = rest[os.write(self._to, rest) :]
            except BrokenPipeError:
                raise Unavailable("the browser ended") from None
        while (answer := self._next()).get("id") != self._n:
            pass
        if "error" in answer:
            raise Unavailable(f"the browser refuses {method}: {answer['error'].get('message')}")
        return answer["result"]

    def wait(self, event: str) -> None:
        """Wait until the browser has reported an event."""
        while not any(name == event for name, _ in self.events):
            self._next()

    def _next(self) -> Any:
        while not self._waiting:
            self._ready(self._back, selectors.EVENT_READ)
            if not (part := os.read(self._back, 1 << 16)):
                raise Unavailable("the browser ended")
            first, *more = part.split(b"\0")
            self._read += first
            for one in more:
                self._waiting.append(bytes(self._read))
                self._read = bytearray(one)
        message = json.loads(self._waiting.popleft())
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    def _ready(self, descriptor: int, event: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            if not selector.select(max(0.0, self._end - time.monotonic())):
                raise self._late

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited.

        Raises:
            RunError: the expression throws, or the time limit is exceeded.
            Unavailable: the browser has ended.
        """
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if thrown := found.get("exceptionDetails"):
            raise RunError(f"the page fails in {self.program}: {_thrown(thrown)}")
        return found["result"].get("value")

    def faults(self) -> list[str]:
        """Return the errors that the page has reported so far, including violations of its security policy."""
        self.ask("Runtime.evaluate", expression="0")  # reads all earlier events
        found = []
        for event, content in self.events:
            if event == "Runtime.exceptionThrown":
                found.append(_thrown(content["exceptionDetails"]))
            elif event == "Log.entryAdded" and content["entry"]["level"] == "error":
                found.append(content["entry"]["text"])
            elif event == "Runtime.consoleAPICalled" and content["type"] in ("error", "assert"):
                found.append(" ".join(str(one.get("value", one.get("description"))) for one in content["args"]))
        return found


def _thrown(details: Any) -> str:
    said = details.get("exception", {}).get("description") or details["text"]
    return str(said)[:800]


@contextlib.contextmanager
def _running(program: str, profile: str) -> Iterator[Page]:
    """Run a browser and yield a `Page` that is not yet opened; the browser's processes end with the context."""
    with contextlib.ExitStack() as stack:
        commands, to, back, answers = (*os.pipe(), *os.pipe())
        for one in (to, back):
            stack.callback(os.close, one)
        options = [*_OPTIONS, f"--user-data-dir={profile}/profile"]
        if os.geteuid() == 0:  # Chromium has no sandbox for root
            options.append("--no-sandbox")
        folders = {"XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile}
        try:
            process = subprocess.Popen(
                [sys.executable, "-ISc", _START, str(commands), str(answers), program, *options],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=(commands, answers), start_new_session=True, env=os.environ | folders,
            )  # fmt: skip
        finally:
            os.close(commands)
            os.close(answers)
        stack.callback(_end, process)
        yield Page(to, back)


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
