"""Locks among processes, each on a file that holds nothing."""

import contextlib
from pathlib import Path

from filelock import FileLock

from gptworks.files.read import check_kind, check_names


def file_lock(path: Path, *, timeout: float = -1, mode: int = 0o644) -> FileLock:
    """A lock that is not acquired yet. Its file is made where it is missing; releases of filelock empty one that is
    there, so one that holds something under another name is refused.

    Args:
        timeout: seconds to wait when it is acquired, before `filelock.Timeout`; -1: without end.
        mode: of the file that is made.

    Raises:
        UserError: it is a link, a folder, FIFO, socket or device, or as said.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = path.lstat()
        check_kind(path, found)
        if found.st_size:
            check_names(path, found)
    return FileLock(path, timeout=timeout, mode=mode)
