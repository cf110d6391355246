"""Start, watch and stop training runs, each in its own process. The processes continue when the studio ends."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

from gptworks.errors import UserError
from gptworks.files import open_regular, open_to_append
from gptworks.files.fetch import REACH
from gptworks.training.run_folder import CONSOLE, is_in_use
from gptworks.training.signals import ASK, OWN_GROUP, UNFINISHED

MOST_LINES = 12
MOST_CHARACTERS = 400
"""Maximum length of a line of a run's output; the rest is not shown."""
_TAIL_BYTES = 1 << 14
_KEPT = 32
"""Maximum number of ended processes that are still shown."""
_ASKED = "was asked to stop: it ends its step, saves a checkpoint and stops."
COMMAND = ("-m", "gptworks")


@dataclass
class Training:
    """A process that trains in a run folder."""

    name: str
    folder: Path
    process: "Popen[bytes]"
    asked: bool = False
    """Whether the process was asked to stop."""

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The process's exit code, with 0 for a process that stopped on request; None while the process runs."""
        code = self.process.poll()
        return 0 if code == UNFINISHED else code


@dataclass
class Processes:
    """Starts and stops training runs. Thread-safe."""

    most: int = 1
    """Maximum number of runs that this studio may train at the same time."""
    started: dict[str, Training] = field(default_factory=dict)
    """Processes that this studio has started, by the run's name, newest last; the oldest ended ones are dropped."""
    asked: dict[str, int] = field(default_factory=dict)
    """Ids of processes that were started elsewhere and asked to stop here, by the run's name."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check_room(self) -> None:
        """Raise a UserError if `most` runs that were started here are training."""
        running = [one.name for one in list(self.started.values()) if one.is_running]
        if len(running) >= self.most:
            raise UserError(
                f"{', '.join(running)} still trains, and the page trains {self.most} at once: stop it, wait for it, or "
                f"start the studio with --at-once {self.most + 1}."
            )

    def start(self, name: str, folder: Path, arguments: Sequence[str]) -> Training:
        """Start `gptworks train ARGUMENTS`. Its output goes to a file in the run folder.

        Raises:
            UserError: the limit of training runs is reached, or the output's file is a link or not a regular file.
            OSError: the output's file cannot be opened.
        """
        with self._lock:
            self.check_room()
            with open_to_append(folder / CONSOLE, inside=folder) as console:
                process = Popen(
                    [sys.executable, *COMMAND, "train", *arguments], stdin=DEVNULL, stdout=console, stderr=STDOUT,
                    start_new_session=True, creationflags=OWN_GROUP, env=os.environ | {REACH: "guarded"},
                )  # fmt: skip
            self.started.pop(name, None)
            self.started[name] = Training(name, folder, process)
            ended = [one for one, training in self.started.items() if not training.is_running]
            for one in ended[:-_KEPT]:
                del self.started[one]
            return self.started[name]

    def stop(self, name: str, folder: Path | None) -> None:
        """Ask the process that trains a run to save and stop after its current step, or to end before its first step.

        Args:
            folder: the run's folder, to find a process that was started elsewhere; None if unknown.

        Raises:
            UserError: no process trains the run; the process was already asked to stop; or a process started elsewhere
                cannot be found, or cannot be signalled safely on this system.
        """
        with self._lock:
            training = self.started.get(name)
            if training is not None and training.is_running:
                if training.asked:
                    raise UserError(f"{name} {_ASKED}")
                training.asked = True
                training.process.send_signal(ASK)
                return
            if folder is None or not is_in_use(folder):
                raise UserError(f"{name} is not training: there is nothing to stop.")
            found = _holder(folder)
            if found is None or not hasattr(os, "pidfd_open"):
                raise UserError(
                    f"{name} was not started here, and its process is not visible: stop it where it was started."
                )
            if self.asked.get(name) == found:  # a second signal would kill the run before it saves
                raise UserError(f"{name} {_ASKED}")
            self.asked[name] = found
            _ask_holder(found, folder)

    def is_stopping(self, name: str, folder: Path) -> bool:
        """Return whether a process that was started elsewhere trains the run, and this studio has asked it to stop."""
        return name in self.asked and _holder(folder) == self.asked[name]


def console_lines(folder: Path) -> list[str]:
    """Return the last lines, except empty ones, that a run's process printed; none if no studio started the run."""
    try:
        with open_regular(folder / CONSOLE, inside=folder) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except (OSError, UserError):
        return []
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [line[:MOST_CHARACTERS] for line in lines if line][-MOST_LINES:]


# -------------------------------------------------------------------------------------- processes started elsewhere


def _ask_holder(found: int, folder: Path) -> None:
    """Ask the process `found` to stop if it still holds the run folder's lock. The system may have given the id to
    another process."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(found)
        try:
            if _holder(folder) == found:
                signal.pidfd_send_signal(descriptor, ASK)
        finally:
            os.close(descriptor)


def _holder(folder: Path) -> int | None:
    """Return the id of this user's `gptworks train` process that holds a run folder's lock; None if not found."""
    try:
        lock = (folder / ".lock").stat(follow_symlinks=False)
        processes = [one for one in Path("/proc").iterdir() if one.name.isdigit()]
    except OSError:
        return None
    for process in processes:
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.getuid() and _trains(process) and _holds(process, lock):
                return int(process.name)
    return None


def _trains(process: Path) -> bool:
    """Return whether a process is `python -m gptworks train` or the script `gptworks train`."""
    words = (process / "cmdline").read_bytes().split(b"\0")
    commands = [i for i, word in enumerate(words[:-1]) if Path(os.fsdecode(word)).name == "gptworks"]
    return any(words[i + 1] == b"train" for i in commands)


def _holds(process: Path, lock: os.stat_result) -> bool:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            opened = descriptor.stat()
            if (opened.st_dev, opened.st_ino) == (lock.st_dev, lock.st_ino):
                return "FLOCK" in (process / "fdinfo" / descriptor.name).read_text()
    return False
