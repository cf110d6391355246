"""Open the folder of a writer's target, and make and remove the temporary files and folders next to the target."""

import contextlib
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from gptworks.files.folder import NO_SURPRISE, Folder, lock_open
from gptworks.files.read import open_folder

PREFIX, _TOKEN_BYTES = ".writing-", 6
"""A temporary file's name has this prefix, the target's name, a dot, and this many random bytes in hex."""
_MOST_NAME_BYTES = 200
"""Longest target name in a temporary file's name; longer ones are hashed, as file systems allow 255 bytes in all."""


@contextlib.contextmanager
def held(folder: Path, inside: Path | None = None) -> Iterator[Folder]:
    """Yield an open folder; see `open_folder`."""
    with named(folder):
        opened = open_folder(folder, inside=inside)
    with opened:
        yield opened


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Within the context, set the full path in an OSError, since a call relative to a folder knows only a name."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def _stem(name: str) -> str:
    """Return the prefix of the names of all temporary files for a target's name."""
    encoded = os.fsencode(name)
    short = name if len(encoded) <= _MOST_NAME_BYTES else hashlib.sha256(encoded).hexdigest()
    return f"{PREFIX}{short}."


def new_file(name: str, folder: Folder, mode: int) -> tuple[str, int]:
    """Remove leftovers for the target `name`, and make a temporary file, locked while it is open. Return its name and
    descriptor."""
    remove_leftovers_of(name, folder)
    while True:
        aside = _stem(name) + secrets.token_hex(_TOKEN_BYTES)
        descriptor = folder.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_SURPRISE, mode)
        if lock_open(descriptor):
            return aside, descriptor
        os.close(descriptor)


@contextlib.contextmanager
def new_private_folder(path: Path, folder: Folder) -> Iterator[tuple[str, Folder, int]]:
    """Make a locked folder next to `path` that only the owner may enter; yield its name, the open folder, and the mode
    that the umask gives new folders. At the end delete the folder, unless it was renamed."""
    with named(path):
        remove_leftovers_of(path.name, folder)
        while True:
            name = _stem(path.name) + secrets.token_hex(_TOKEN_BYTES)
            folder.make_folder(name)
            made = Folder(name, within=folder)
            if made.lock():
                break
            made.close()
        mode = made.status().st_mode & 0o777
        made.set_mode(0o700)
    with made:
        try:
            yield name, made, mode
        finally:
            folder.remove_tree(name)


def remove_leftovers_of(name: str, folder: Folder) -> None:
    """Remove this user's temporary files and folders for the target `name` that no process has locked."""
    pattern = re.compile(re.escape(_stem(name)) + rf"[0-9a-f]{{{2 * _TOKEN_BYTES}}}")
    try:
        import fcntl

        found = [each for each in folder.names() if pattern.fullmatch(each)]
    except (OSError, ImportError):  # the folder cannot be listed, or there are no locks
        return
    for each in found:
        with contextlib.suppress(OSError):
            descriptor = folder.open(each, os.O_RDONLY | NO_SURPRISE)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(descriptor)
                if status.st_uid != os.geteuid():
                    continue
                if stat.S_ISREG(status.st_mode):
                    folder.remove_file(each)
                elif stat.S_ISDIR(status.st_mode):
                    folder.remove_tree(each)
            finally:
                os.close(descriptor)
