"""Names in an open folder, and the temporary files and folders that writers make next to their targets."""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from gptworks.files.read import O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK, open_folder

PREFIX, _TOKEN_BYTES = ".writing-", 6
"""A temporary file's name has this prefix, the target's name, a dot, and this many random bytes in hex."""
NO_SURPRISE = O_NOFOLLOW | O_NONBLOCK
"""Flags for `os.open`: do not follow a link, do not wait for a FIFO."""
_MOST_NAME_BYTES = 200
"""Longest target name that is kept in a temporary file's name; file systems allow 255 bytes in all."""


@contextlib.contextmanager
def held(folder: Path, inside: Path | None = None) -> Iterator[int]:
    """Yield the descriptor of a folder, for calls relative to it; see `open_folder`."""
    with named(folder):
        descriptor = open_folder(folder, inside=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Within the context, set the full path in an OSError, since a call relative to a folder knows only a name."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def sync_names(descriptor: int) -> None:
    """Flush the names in an open folder; no effect if it was opened with O_PATH."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise


def _stem(name: str) -> str:
    """Return the prefix of the names of all temporary files for a target's name."""
    encoded = os.fsencode(name)
    short = name if len(encoded) <= _MOST_NAME_BYTES else hashlib.sha256(encoded).hexdigest()
    return f"{PREFIX}{short}."


def new_file(name: str, folder: int, mode: int) -> tuple[str, int]:
    """Make a temporary file to write to, locked while it is open; return its name and descriptor."""
    remove_leftovers_of(name, folder)
    while True:
        aside = _stem(name) + secrets.token_hex(_TOKEN_BYTES)
        descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_SURPRISE, mode, dir_fd=folder)
        if lock_open(descriptor):
            return aside, descriptor
        os.close(descriptor)


@contextlib.contextmanager
def new_private_folder(path: Path, folder: int) -> Iterator[tuple[str, int, int]]:
    """Make a locked folder next to `path` that only the owner may enter; yield its name, its descriptor, and the
    umask's mode for folders. At the end delete the folder, unless it was renamed."""
    with named(path):
        remove_leftovers_of(path.name, folder)
        while True:
            name = _stem(path.name) + secrets.token_hex(_TOKEN_BYTES)
            os.mkdir(name, dir_fd=folder)
            descriptor = os.open(name, os.O_RDONLY | O_DIRECTORY | NO_SURPRISE, dir_fd=folder)
            if lock_open(descriptor):
                break
            os.close(descriptor)
        mode = os.fstat(descriptor).st_mode & 0o777
        os.fchmod(descriptor, 0o700)
    try:
        yield name, descriptor, mode
    finally:
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        os.close(descriptor)


def lock_open(descriptor: int, *, shared: bool = False) -> bool:
    """Lock a file or folder until it is closed; return False if another process has removed it meanwhile."""
    with contextlib.suppress(OSError, ImportError):  # without locks, leftovers stay
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    return os.fstat(descriptor).st_nlink > 0


def remove_leftovers_of(name: str, folder: int) -> None:
    """Remove this user's temporary files and folders for the target `name` that no process has locked."""
    pattern = re.compile(re.escape(_stem(name)) + rf"[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
    try:
        import fcntl

        found = [each for each in os.listdir(folder) if pattern.fullmatch(each)]
    except (OSError, ImportError):  # the folder cannot be listed, or there are no locks
        return
    for each in found:
        with contextlib.suppress(OSError):
            descriptor = os.open(each, os.O_RDONLY | NO_SURPRISE, dir_fd=folder)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(descriptor)
                if status.st_uid != os.geteuid():
                    continue
                if stat.S_ISREG(status.st_mode):
                    os.unlink(each, dir_fd=folder)
                elif stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(each, ignore_errors=True, dir_fd=folder)
            finally:
                os.close(descriptor)
