"""An open folder, in which names are opened, replaced and removed, and the temporary files and folders of its writers.

Linux and macOS do this relative to a descriptor of the folder, so a link put in the folder's place later changes
nothing. Windows has no such descriptors: there, each call uses the folder's path, and two more rules hold. An open file
cannot be renamed or replaced, and only files that are open for writing can be flushed.
"""

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

O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK = (getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"))
"""Flags for `os.open`; 0 on Windows, which lacks them."""
NO_SURPRISE = O_NOFOLLOW | O_NONBLOCK
"""Flags for `os.open`: do not follow a link, do not wait for a FIFO."""
BY_DESCRIPTOR = os.open in os.supports_dir_fd
"""Whether folders have descriptors here: on Linux and macOS, not on Windows."""
FLUSHED = NO_SURPRISE | (os.O_RDONLY if BY_DESCRIPTOR else os.O_RDWR)
"""Flags to open a file that is to be flushed."""
PREFIX, _TOKEN_BYTES = ".writing-", 6
"""A temporary file's name has this prefix, the target's name, a dot, and this many random bytes in hex."""
_MOST_NAME_BYTES = 200
"""Longest target name in a temporary file's name. Longer names are hashed, because file systems allow 255 bytes."""
_BINARY = getattr(os, "O_BINARY", 0)
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | O_DIRECTORY
"""Flags to open a folder above a file, even if the folder is not readable."""
_JUNCTION = 0xA0000003
"""IO_REPARSE_TAG_MOUNT_POINT of Windows: a link to a folder that `stat` does not call a link."""


class Folder:
    """An open folder. Each `name` is a name in it, without separators; `os.curdir` is the folder itself."""

    def __init__(self, path: Path | str, *, within: "Folder | None" = None, lists: bool = True) -> None:
        """Open a folder.

        Args:
            within: the open folder that contains the name `path`; the name must not be a link. None: follow links.
            lists: whether the folder's names can be listed and flushed afterwards, if permissions allow this.
        """
        self._path = os.fspath(path) if within is None else within._at(os.fspath(path))
        self._descriptor: int | None = None
        if not BY_DESCRIPTOR:
            if not stat.S_ISDIR(self.status(os.curdir, follow_symlinks=within is None).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self._path)
            return
        above, more = (None, 0) if within is None else (within._descriptor, NO_SURPRISE)
        if lists:
            with contextlib.suppress(PermissionError):
                self._descriptor = os.open(self._path, os.O_RDONLY | O_DIRECTORY | more, dir_fd=above)
        if self._descriptor is None:
            self._descriptor = os.open(self._path, _FOLDER | more, dir_fd=above)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _at(self, name: str) -> str:
        return name if self._descriptor is not None else os.path.join(self._path, name)  # noqa: PTH118 text is faster

    def status(self, name: str = os.curdir, *, follow_symlinks: bool = False) -> os.stat_result:
        return os.stat(self._at(name), dir_fd=self._descriptor, follow_symlinks=follow_symlinks)

    def link_target(self, name: str, found: os.stat_result) -> str | None:
        """Return the target of a name with the status `found` if it is a link or a junction (Windows), else None."""
        if stat.S_ISLNK(found.st_mode) or getattr(found, "st_reparse_tag", 0) == _JUNCTION:
            return os.readlink(self._at(name), dir_fd=self._descriptor)
        return None

    def names(self) -> list[str]:
        return os.listdir(self._path if self._descriptor is None else self._descriptor)  # noqa: PTH208 or a descriptor

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Return the descriptor of a file; see `os.open`."""
        return os.open(self._at(name), flags | _BINARY, mode, dir_fd=self._descriptor)

    def make_folder(self, name: str) -> None:
        os.mkdir(self._at(name), dir_fd=self._descriptor)

    def replace(self, name: str, to: "Folder", new_name: str) -> None:
        """Rename a file or folder to `new_name` in `to`, in place of a file or empty folder of that name."""
        source, target = self._at(name), to._at(new_name)
        os.replace(source, target, src_dir_fd=self._descriptor, dst_dir_fd=to._descriptor)

    def remove_file(self, name: str) -> None:
        os.unlink(self._at(name), dir_fd=self._descriptor)

    def remove_empty(self, name: str) -> None:
        os.rmdir(self._at(name), dir_fd=self._descriptor)

    def remove_tree(self, name: str) -> None:
        """Delete a folder with its contents, as far as possible."""
        shutil.rmtree(self._at(name), ignore_errors=True, dir_fd=self._descriptor)

    def sync(self) -> None:
        """Flush the names; no effect if the folder was not opened to list them, or on Windows."""
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                if error.errno != errno.EBADF:  # the folder was opened with O_PATH
                    raise

    def set_mode(self, mode: int) -> None:
        """Set the folder's permissions; no effect on Windows."""
        if self._descriptor is not None:
            os.fchmod(self._descriptor, mode)

    def lock(self) -> bool:
        """Lock the folder until it is closed; see `lock_open`."""
        return self._descriptor is None or lock_open(self._descriptor)


def set_mode(descriptor: int, mode: int | None) -> None:
    """Set an open file's permissions; no effect if `mode` is None, or on Windows."""
    if mode is not None and BY_DESCRIPTOR:
        os.fchmod(descriptor, mode)


def lock_open(descriptor: int, *, shared: bool = False) -> bool:
    """Lock a file or folder until it is closed; return False if another process has removed it meanwhile."""
    with contextlib.suppress(OSError, ImportError):  # without locks, nothing removes leftovers
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    return os.fstat(descriptor).st_nlink > 0


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Within the context, set the full path in an OSError, since a call relative to a folder knows only a name."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


# --------------------------------------------------------------------------------------------- temporary names


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
