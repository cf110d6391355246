"""Locks between processes, each on an empty file."""

import contextlib
import os
from pathlib import Path

from filelock import FileLock

from gptworks.files.folder import NO_SURPRISE
from gptworks.files.read import check_kind, check_names


def file_lock(path: Path, *, timeout: float = -1, mode: int = 0o644) -> FileLock:
    """Return a lock between processes, not acquired yet. `timeout`: seconds to wait for the lock, before
    `filelock.Timeout`; -1: no limit.

    Acquiring the lock makes a missing file and may truncate an existing file. Raises UserError if the path is a file
    that has contents and other names (hard links), or a link, folder, FIFO, socket or device.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = path.lstat()
        check_kind(path, found)
        if found.st_size:
            check_names(path, found)
    return FileLock(path, timeout=timeout, mode=mode)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the `file_lock` of a path; False if unknown, as on Windows. This function writes
    nothing and follows no link."""
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDONLY | NO_SURPRISE)
    except (ImportError, OSError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)  # this also releases the lock
    return False
