"""Runs gptworks in a Linux process that lacks what Windows or macOS lack; tests/test_systems.py starts it.

    python foreign_system.py windows|macos COMMAND...

runs `gptworks COMMAND`, one after the other, until one fails; then it imports all modules, and its last line has the
errors of those that fail.

Only gptworks sees another system: other packages have their own ways for each. What stays Linux's: how paths look, how
processes start, what a child process sees, and what torch computes.
"""

import builtins
import ctypes
import importlib
import json
import os
import pkgutil
import shlex
import shutil
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

LACKS = {
    "macos": {"os": "pidfd_open sched_getaffinity O_PATH", "signal": "pidfd_send_signal", "modules": ""},
    "windows": {
        "os": "pidfd_open sched_getaffinity O_PATH O_DIRECTORY O_NOFOLLOW O_NONBLOCK EX_TEMPFAIL fchmod fork getegid "
        "geteuid getgid getuid kill killpg mkfifo nice pread pwrite setsid statvfs sysconf uname wait",
        "signal": "SIGUSR1 SIGUSR2 SIGHUP SIGKILL SIGPROF SIGXCPU SIGSTOP SIGCONT ITIMER_PROF SIG_BLOCK SIG_UNBLOCK "
        "pthread_sigmask setitimer pidfd_send_signal",
        "modules": "fcntl resource grp pwd termios tty pty readline",
    },
}
"""By system: attributes of two modules, and modules, that it lacks."""


def is_ours(depth: int) -> bool:
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("gptworks")


def held_files() -> set[str]:
    """Return the files that this process has open or mapped: Windows does not rename, replace or delete them."""
    found = {os.path.realpath(each.path) for each in os.scandir("/proc/self/fd")}
    with REAL_OPEN("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        return found | {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}


REAL_OPEN = open


def check_free(*paths: Any) -> None:
    held = held_files()
    for path in (Path(one) for one in paths if isinstance(one, str | os.PathLike)):
        place = str(path.parent.resolve() / path.name)
        if any(each == place or each.startswith(f"{place}/") for each in held):
            raise PermissionError(13, "The process cannot access the file because it is being used", str(path))


def hides_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that finds nothing below /proc and /sys."""

    def call(path: Any, *arguments: Any, **named: Any) -> Any:
        if is_ours(2) and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/proc", "/sys")):
            if function.__name__ == "exists":
                return False
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *arguments, **named)

    return call


def as_windows(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `os`, or a method of a path, as it is on Windows."""

    def call(*arguments: Any, **named: Any) -> Any:
        if name in vars(Path) and not is_ours(2):
            return function(*arguments, **named)
        if any(value is not None for key, value in named.items() if key.endswith("dir_fd")):
            raise NotImplementedError(f"{name}: dir_fd unavailable on this platform")
        if name in ("open", "mkdir") and set(Path(arguments[0]).name) & set('<>:"|?*'):
            raise OSError(22, "Invalid argument", arguments[0])
        if name == "open" and Path(arguments[0]).is_dir():
            raise PermissionError(13, "Permission denied", arguments[0])
        if name in ("replace", "rename", "unlink", "remove", "rmdir", "rmtree"):
            check_free(*arguments[:2])
        if name == "symlink_to":
            raise OSError(1314, "A required privilege is not held by the client")
        if name == "fsync":
            with REAL_OPEN(f"/proc/self/fdinfo/{arguments[0]}", encoding="ascii") as info:
                if not int(info.read().split("flags:")[1].split()[0], 8) & (os.O_WRONLY | os.O_RDWR):
                    raise OSError(9, "Bad file descriptor")
        return function(*arguments, **named)

    return call


class Kernel32:
    """The part of Windows' library of this name that gptworks calls."""

    @staticmethod
    def GlobalMemoryStatusEx(found: Any) -> int:
        assert found._obj.length == 64  # sizeof(MEMORYSTATUSEX)
        found._obj.available_bytes = 8 << 30
        return 1


def become(system: str) -> None:
    """Let gptworks see another system from now on."""
    lacks = {kind: set(names.split()) for kind, names in LACKS[system].items()}
    seen: dict[str, types.ModuleType] = {}
    for module in (os, signal, shutil, sys):
        copy = seen[module.__name__] = types.ModuleType(module.__name__)
        vars(copy).update({k: v for k, v in vars(module).items() if k not in lacks.get(module.__name__, ())})
    vars(seen["sys"])["platform"] = {"windows": "win32", "macos": "darwin"}[system]
    changed: dict[Any, str] = {}
    if system == "windows":
        vars(seen["os"])["supports_dir_fd"] = vars(seen["os"])["supports_fd"] = set()
        changed = {
            seen["os"]: "open stat mkdir readlink replace rename unlink remove rmdir fsync",
            seen["shutil"]: "rmtree",
            Path: "replace rename unlink rmdir symlink_to",
        }
        ctypes.windll = types.SimpleNamespace(kernel32=Kernel32)  # type: ignore[attr-defined]
    for owner, names in changed.items():
        for name in names.split():
            setattr(owner, name, as_windows(name, getattr(owner, name)))
    for name in ("read_text", "read_bytes", "iterdir", "exists"):
        setattr(Path, name, hides_proc(getattr(Path, name)))
    builtins.open = hides_proc(builtins.open)  # type: ignore[assignment]
    found = builtins.__import__

    def sees(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and str((globals or {}).get("__name__", "")).startswith("gptworks"):
            if name in lacks["modules"]:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in seen:
                return seen[name]
        return found(name, globals, locals, fromlist, level)

    builtins.__import__ = sees


def failing_modules() -> dict[str, str]:
    """Import all modules; return the errors of those that cannot be imported."""
    import gptworks

    failed = {}
    for one in pkgutil.walk_packages(gptworks.__path__, "gptworks."):
        try:
            importlib.import_module(one.name)
        except Exception as error:
            failed[one.name] = traceback.format_exception_only(error)[0].strip()
    return failed


if __name__ == "__main__":
    become(sys.argv[1])
    warnings.filterwarnings("ignore", category=EncodingWarning)
    warnings.filterwarnings("error", category=EncodingWarning, module=r"gptworks")
    for command in sys.argv[2:]:
        sys.argv = ["gptworks", *shlex.split(command)]
        from gptworks.cli import main

        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
    print(json.dumps(failing_modules()))
