"""Work on untrusted input, such as templates, grammars and documents, in processes with limits of time and memory.

    parent                                     child (confined/child.py and a module that answers)
    Confined.ask(question) ──► a line of JSON ──► set the limits, answer, lift them
                           ◄── a line of JSON ◄──

Children are reused, since a start takes about 0.1 s and an answer 0.1 ms. A child ends early in three cases: it exceeds
a limit; `Task.abandon` kills it because its answer is no longer needed; or it has grown by more than `keep_bytes`. The
next question then starts another child.

The time limit is for the child's CPU time, so that a busy machine accepts the same questions as an idle one. The memory
limit is for the growth of the child's address space after the question arrives (RLIMIT_AS). macOS does not enforce
RLIMIT_AS: there, only the time limit applies, which also limits how much memory can be allocated. Windows has neither
limit: there, the parent kills a child that has not answered within its time limit plus `START_SECONDS`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict, dataclass
from typing import Any

from gptworks.confined.child import HAS_LIMITS

START_SECONDS = 20.0
"""Seconds that a child may take to start, on systems where only the parent's clock limits its time."""
_MAX_REPLY_BYTES = 1 << 27
_ABANDONED = "the answer is no longer needed."
_PROCESSES = 2
"""Maximum number of children of one `Confined` that work at the same time; further questions wait."""
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that the children inherit. The children must not see other variables, such as API keys."""
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits for a child process that answers one question."""

    seconds: float
    """Seconds of CPU time."""
    n_bytes: int
    """Bytes by which the child's address space may grow after it has received the question."""


class Exceeded(Exception):
    """Answering a question exceeded a limit, or ended the child in another way; the message names the cause."""


class Abandoned(Exception):
    """The child gave no answer because `Task.abandon` killed it."""


class Refused(Exception):
    """The child could not answer the question. The message comes from the child."""


class Task:
    """A handle for stopping the process that works on a question. Use a new handle for each call of `ask`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.abandoned = False

    def abandon(self) -> None:
        """Kill the process that works on the question, now or as soon as the process starts. Thread-safe."""
        with self._lock:
            self.abandoned = True
            if self._process is not None:
                self._process.kill()

    def hold(self, process: "subprocess.Popen[bytes] | None") -> None:
        """Set the process that `abandon` kills; None: no process. Only `Confined` calls this method."""
        with self._lock:
            if self.abandoned and process is not None:
                raise Abandoned(_ABANDONED)
            self._process = process


class Confined:
    """Sends questions to child processes that all run one module. Thread-safe."""

    def __init__(
        self, kind: str, setup: Any, limits: Limits, *, setup_limits: Limits | None = None, keep_bytes: int = 1 << 26
    ) -> None:
        """Store the settings; `ask` and `start` start the children.

        Args:
            kind: the module whose `main` answers.
            setup: the first question of each child, a JSON value.
            setup_limits: limits for the setup; None: `limits`.
            keep_bytes: a child is not reused if its resident memory has grown by more than this since the setup.
        """
        self.limits = limits
        self._kind, self._setup, self._keep_bytes = kind, setup, keep_bytes
        self._setup_limits = setup_limits or limits
        self._places = threading.BoundedSemaphore(_PROCESSES)
        self._idle: list[_Child] = []
        self._owner = os.getpid()
        self._finalize = weakref.finalize(self, _kill_all, self._idle)

    def ask(self, question: Any, task: Task | None = None) -> Any:
        """Return a child's answer to a question. Both are JSON values. Raises Refused, with the child's message, if the
        child could not answer; Exceeded if answering the question exceeded a limit; Abandoned if the task was
        abandoned."""
        task = task or Task()
        with self._places:
            if task.abandoned:
                raise Abandoned(_ABANDONED)
            child = self._take(task)
            with _working(child, task):
                reply = child.ask(question, self.limits)
            if reply["grown_bytes"] > self._keep_bytes:
                child.kill()
            if child.alive:
                self._idle.append(child)
        return _answer(reply)

    def start(self) -> None:
        """Start a child now, to find out whether the setup works. Raises Refused or Exceeded if the setup failed."""
        with self._places:
            self._idle.append(self._take(Task()))

    def close(self) -> None:
        """End the idle child processes. The next question starts a new one."""
        _kill_all(self._idle)

    def _take(self, task: Task) -> "_Child":
        if self._owner != os.getpid():  # in a fork: the children answer the process that started them
            self._idle.clear()
            self._owner = os.getpid()
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread has taken the child
                child = self._idle.pop()
                if child.alive:
                    return child
        child = _Child(self._kind)
        with _working(child, task):
            _answer(child.ask(self._setup, self._setup_limits))
        return child


class _Child:
    def __init__(self, kind: str) -> None:
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        command = [sys.executable, "-P", "-c", _START.format(kind), json.dumps(sys.path)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self._is_late = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, question: Any, limits: Limits) -> dict[str, Any]:
        """Return the child's reply: `answer` or `error`, and `grown_bytes` (of resident memory). Raises Exceeded if the
        child exceeded a limit."""
        assert self.process.stdin is not None and self.process.stdout is not None
        line = json.dumps([asdict(limits), question]).encode("ascii") + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the child has ended; its exit code gives the reason
            self.process.stdin.write(line)
            self.process.stdin.flush()
        clock = threading.Timer(limits.seconds + START_SECONDS, self._end_late)
        if not HAS_LIMITS:
            clock.start()
        reply = self.process.stdout.readline(_MAX_REPLY_BYTES)
        clock.cancel()
        if not reply.endswith(b"\n"):
            self.process.kill()
            code = self.process.wait()
            raise Exceeded(f"it takes more than {limits.seconds:g} seconds." if self._is_late else _cause(code, limits))
        tree: dict[str, Any] = json.loads(reply)
        if tree.get("out_of_memory"):
            raise Exceeded(_cause(-signal.SIGABRT, limits))
        return tree

    def _end_late(self) -> None:
        self._is_late = True
        self.process.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


@contextlib.contextmanager
def _working(child: _Child, task: Task) -> Any:
    """Context in which `task` can kill the child. An exception also kills the child."""
    try:
        task.hold(child.process)
        try:
            yield
        finally:
            task.hold(None)
    except BaseException:
        child.kill()
        if task.abandoned:
            raise Abandoned(_ABANDONED) from None
        raise


def _cause(code: int, limits: Limits) -> str:
    if code in (-getattr(signal, "SIGPROF", 27), -getattr(signal, "SIGXCPU", 24)):
        return f"it takes more than {limits.seconds:g} seconds of processor time."
    if code in (-signal.SIGABRT, -getattr(signal, "SIGKILL", 9)):  # these signals end a process that lacks memory
        return f"it takes more than {limits.n_bytes >> 20} MiB of memory."
    name = next((one.name for one in signal.Signals if one == -code), f"exit code {code}")
    return f"it ended the process that worked on it ({name})."


def _answer(reply: dict[str, Any]) -> Any:
    if "error" in reply:
        raise Refused(reply["error"])
    return reply["answer"]


def _kill_all(children: list[_Child]) -> None:
    while children:
        children.pop().kill()
