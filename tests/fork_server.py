"""A server that has imported torch and gptworks and forks commands: `python fork_server.py SOCKET [MODULE]...`.
commands.py starts it; it also imports the given modules.

Each message on the socket asks for one command: its arguments, environment and folder as JSON, and four descriptors:
its stdin, stdout and stderr, and a socket on which it is told the command's process id and, in the end, its exit
status. The server computes nothing and starts no thread, so that what it forks is as a process that has just begun.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import selectors
import socket
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
"""What commands import when they run, beside gptworks' own modules."""


def import_all() -> None:
    import gptworks
    from gptworks.errors import UserError

    names = [module.name for module in pkgutil.walk_packages(gptworks.__path__, "gptworks.")]
    for name in (*names, *IMPORTED):
        if not name.endswith("__main__"):
            with contextlib.suppress(ImportError, UserError):  # an extra is not installed; the command will say so
                importlib.import_module(name)


def serve(control: socket.socket) -> list[str]:
    """Fork for each message until the socket is closed; return in each child, with its arguments."""
    selector, ends = selectors.DefaultSelector(), dict[int, tuple[int, socket.socket]]()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                message, descriptors, *_ = socket.recv_fds(control, 1 << 20, 4)
                if not message:
                    os._exit(0)
                asked, (*streams, end) = json.loads(message), descriptors
                if (pid := os.fork()) == 0:
                    for each in (selector, control, *(teller for _, teller in ends.values())):
                        each.close()
                    for descriptor in (end, *ends):
                        os.close(descriptor)
                    become(asked, streams)
                    return asked["arguments"]
                process, teller = os.pidfd_open(pid), socket.socket(fileno=end)
                ends[process] = pid, teller
                selector.register(process, selectors.EVENT_READ)
                for stream in streams:
                    os.close(stream)
                tell(teller, pid)
            else:
                pid, teller = ends.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                tell(teller, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                teller.close()


def tell(teller: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        teller.send(struct.pack("q", number))


def become(asked: dict, streams: list[int]) -> None:
    """Make this child like a newly started process."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(asked["environment"])
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    as_asked: Any = {"encoding": encoding or None, "errors": errors or None, "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, **as_asked)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", **as_asked)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, **as_asked | {"errors": "backslashreplace"})  # noqa: SIM115
    os.chdir(asked["folder"])
    tempfile.tempdir = None
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def go(arguments: list[str]) -> None:
    """Do what `python ARGUMENTS` does."""
    first, *rest = arguments
    if first in ("-m", "-c"):
        what, *rest = rest
        sys.argv, sys.path[0] = [first, *rest], str(Path.cwd()) if first == "-m" else ""
        if first == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = arguments, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def end(status: int) -> None:
    """End this child like Python, but without the slow cleanup of the modules that the server has imported."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # a stream is broken or closed: Python knows what to do
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status & 0xFF)
    sys.exit(status)


if __name__ == "__main__":
    import_all()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    os.fsync = lambda descriptor: None  # as in conftest.py
    gc.freeze()
    try:
        go(serve(socket.socket(fileno=int(sys.argv[1]))))
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        end(ended.code or 0)
    end(0)
