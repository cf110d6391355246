"""Runs commands in processes of their own, as users start them; on Linux without the seconds that importing torch
takes.

There, a server that has imported torch and gptworks forks each process. It has its own id, environment, folder, streams
and exit status, and ends and is killed as any other. A new Python starts on other systems, where a variable is changed
that libraries read when they are loaded, and where a test asks for it.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("fork_server.py")
CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")

READ_WHEN_LOADED = (
    "ATEN", "CUDA", "DNNL", "GOMP", "KMP", "LD_", "MALLOC", "MKL", "OMP", "ONEDNN", "OPENBLAS", "PYTHON", "PYTORCH",
    "TORCH_",
)  # fmt: skip
"""How the names of variables begin that a process obeys only if they are set before it loads its libraries."""

SET_BY_LIBRARIES = {"CUDA_MODULE_LOADING", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""Such variables that libraries set in the tests' own process, when they are loaded there."""

OBEYED = {"PYTHONIOENCODING"}
"""Such variables that a forked process obeys as well."""


class Forked:
    """A process that the server forked, with the attributes of `subprocess.Popen`."""

    def __init__(
        self, server: socket.socket, arguments: list[str], environment: dict[str, str], **options: Any
    ) -> None:
        self.args, self.returncode = arguments, None
        self.stdin = self.stdout = self.stderr = None
        given = []
        for name, mode in (("stdin", "w"), ("stdout", "r"), ("stderr", "r")):
            wanted = options.get(name)
            if wanted == subprocess.PIPE:
                ends = os.pipe()
                given.append(ends[mode == "r"])
                end = open(ends[mode == "w"], mode, encoding=options.get("encoding"))  # noqa: PTH123, SIM115
                setattr(self, name, end)
            elif wanted == subprocess.STDOUT:
                given.append(os.dup(given[1]))
            elif wanted == subprocess.DEVNULL:
                given.append(os.open(os.devnull, os.O_RDWR))
            else:
                given.append(os.dup(len(given) if wanted is None else wanted.fileno()))
        self._told, teller = socket.socketpair()
        asked = {"arguments": arguments, "environment": environment, "folder": str(options.get("cwd") or Path.cwd())}
        try:
            socket.send_fds(server, [json.dumps(asked).encode()], [*given, teller.fileno()])
        finally:
            teller.close()
            for descriptor in given:
                os.close(descriptor)
        self.pid = self._hear()

    def _hear(self) -> int:
        said = self._told.recv(8)
        if not said:
            raise RuntimeError("the server that forks has ended")
        return struct.unpack("q", said)[0]

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._hear()
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Write `input` to stdin, and read stdout and stderr to their ends. Kills a process that takes longer than the
        timeout."""
        read: dict[str, str] = {}
        undecoded: list[UnicodeDecodeError] = []
        streams = {name: stream for name in ("stdout", "stderr") if (stream := getattr(self, name))}
        deadline = None if timeout is None else time.monotonic() + timeout

        def take(name: str) -> None:
            try:
                read[name] = streams[name].read()
            except UnicodeDecodeError as error:
                undecoded.append(error)
            except ValueError:  # closed below, too late
                pass

        readers = [threading.Thread(target=take, args=(name,), daemon=True) for name in streams]
        for reader in readers:
            reader.start()
        if self.stdin:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(input or "")
                self.stdin.close()
        for reader in readers:
            reader.join(None if deadline is None else max(deadline - time.monotonic(), 0))
            if reader.is_alive():
                self.kill()
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(deadline - time.monotonic(), 1))
        for stream in streams.values():
            stream.close()
        if undecoded:
            raise undecoded[0]
        return read.get("stdout"), read.get("stderr")

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream:
                stream.close()
        self.wait()


Process = Forked | subprocess.Popen[str]


@functools.cache
def _server(*imported: str, **loading: str) -> tuple[socket.socket, dict[str, str]]:
    """Return the server's socket and the environment that it started with: this process's, plus `loading`. imported:
    modules that it imports."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **loading}
    command = [sys.executable, str(SERVER), str(its.fileno()), *imported]
    server = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    its.close()
    atexit.register(server.wait)
    atexit.register(ours.close)  # done first: it ends the server
    return ours, environment


def _obeyed(environment: dict[str, str], began: dict[str, str]) -> bool:
    """Whether a process forked by a server that started with another environment behaves as in the wanted
    environment."""
    changed = {name for name in environment.keys() | began.keys() if environment.get(name) != began.get(name)}
    return not any(name.startswith(READ_WHEN_LOADED) for name in changed - SET_BY_LIBRARIES - OBEYED)


def start(
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    new: bool = False,
    loading: dict[str, str] | None = None,
    imported: tuple[str, ...] = (),
    **options: Any,
) -> Process:
    """Start `python ARGUMENTS`, with `env` added to this process's environment.

    Args:
        new: in a new Python.
        loading: variables that libraries obey when they are loaded, which many commands have: a server of their own
            has loaded them so.
        imported: modules that such a server has imported too.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(loading or {}), **(env or {})}
    if CAN_FORK and not new and "preexec_fn" not in options:
        server, began = _server(*imported, **loading or {})
        if _obeyed(environment, began):
            return Forked(server, [str(argument) for argument in arguments], environment, **options)
    return subprocess.Popen([sys.executable, *map(str, arguments)], env=environment, text=True, **options)


def run(*arguments: str | Path, input: str | None = None, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS` to its end and return its output; it is killed after 240 seconds."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    options["stdin"] = subprocess.DEVNULL if input is None else subprocess.PIPE
    with start(*arguments, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=options.pop("timeout", 240))
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
