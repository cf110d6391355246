"""Write files so that neither a crash nor a planted link damages them.

A file is written under a new random name, flushed, and renamed over the old one, all relative to a folder that is
opened once. A link at the target is replaced, not followed. A temporary file is locked while its writer lives; the next
writer of the same target removes temporary files that a killed writer left.
"""

import contextlib
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path
from typing import BinaryIO

from gptworks.errors import RunError, UserError
from gptworks.files.disk import DISK_FAILS, naming_disk_errors
from gptworks.files.folder import (
    BY_DESCRIPTOR,
    FLUSHED,
    NO_SURPRISE,
    O_NOFOLLOW,
    O_NONBLOCK,
    PREFIX,
    Folder,
    lock_open,
    named,
    new_file,
    new_private_folder,
    remove_leftovers_of,
    set_mode,
)
from gptworks.files.read import check_inside, check_kind, check_names, held, open_regular
from gptworks.files.schemes import SCHEMES

_ADVICE = "No part of it is left; make room or permission there and try again."
_COPIED_BYTES = 1 << 20
_MOST_BYTES = 1 << 30
"""Maximum bytes of one write call; Linux writes less than 2 GiB at once."""
_one_writes = threading.Lock()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk; no effect without permission to open `path`, or for a folder
    on Windows."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, FLUSHED)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and flush their names to the disk. Raises UserError for a URL."""
    _check_local(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        with held(folder.parent) as parent:
            parent.sync()


def _check_local(path: Path) -> None:
    """Raise a UserError if the path is a URL."""
    if any(part.removesuffix(":") in SCHEMES and part.endswith(":") for part in path.parts):
        raise UserError(f"{path} is a URL: give a path on this machine here.")


def link_or_copy(file: Path, to: Path) -> None:
    """Make `to` a hard link of a file, or a copy if that fails, such as on another file system."""
    try:
        to.hardlink_to(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in DISK_FAILS:
            raise
        copy_file(file, to)


@contextlib.contextmanager
def replacing(path: Path, *, inside: Path | None = None, private: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces `path` at the end: readers see the old or the new file, never a part. If
    writing fails, the old file stays. The new file has the old file's mode or, without an old file, the umask's mode.

    Args:
        inside: a folder above `path` that no link may lead out of; None: links are followed, as in a path that the user
            named.
        private: only the owner may read the file.

    Raises:
        UserError: `path` is a FIFO, socket or device, or a link leads out of `inside`.
        RunError: the disk is full or fails, permissions are missing, `path` is a folder, or the folder above it is
            missing.
    """
    with naming_disk_errors(f"{path} could not be written", path, _ADVICE), held(path.parent, inside) as folder:
        mode = 0o600 if private else _mode_of(path, folder)
        with named(path):
            name, descriptor = new_file(path.name, folder, 0o666 if mode is None else mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                with named(path):
                    file.flush()
                    set_mode(descriptor, mode)
                    os.fsync(descriptor)
                    if not BY_DESCRIPTOR:  # Windows renames no open file
                        file.close()
                    folder.replace(name, folder, path.name)
        except BaseException:
            with contextlib.suppress(OSError):
                folder.remove_file(name)
            raise
        with named(path):
            folder.sync()


@contextlib.contextmanager
def replacing_by_name(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Like `replacing`, for a library that opens its output by name: yield a path to write to, in a private folder.
    Missing folders above `path` are made first."""
    with naming_disk_errors(f"{path} could not be written", path, _ADVICE):
        make_folder(path.absolute().parent)
        with held(path.parent) as folder, new_private_folder(path, folder) as (name, aside, _):
            mode = 0o600 if private else _mode_of(path, folder)
            yield path.with_name(name) / path.name
            with named(path):
                descriptor = aside.open(path.name, FLUSHED)
                try:
                    set_mode(descriptor, mode)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                aside.replace(path.name, folder, path.name)
                folder.sync()


def write_whole(
    path: Path, data: str | bytes, *, inside: Path | None = None, private: bool = False, new: bool = False
) -> None:
    """Write a whole small file, text in UTF-8, in place of an old one: see `replacing`; with `new`, see `making`."""
    encoded = data.encode("utf-8") if isinstance(data, str) else data
    with (making if new else replacing)(path, inside=inside, private=private) as file:
        file.write(encoded)


@contextlib.contextmanager
def new_folder(out: Path, needed_bytes: int | None = None, *, inside: Path | None = None) -> Iterator[Path]:
    """Yield a private folder to fill, which is flushed and renamed to `out` at the end: `out` is complete or missing.
    At the start, `out` must be missing or an empty folder; see `check_free`. `needed_bytes`: bytes that will be
    written; None: unknown. `inside` and errors: see `replacing`."""
    place = out.absolute()
    advice = "No part of it is kept. Make room or permission there, or give another place, and try again."
    with naming_disk_errors(f"{out} could not be written", out, advice, needed_bytes):
        make_folder(place.parent)
        with held(out.parent, inside) as folder, new_private_folder(place, folder) as (name, aside, mode):
            path = out.with_name(name)
            yield path
            for each in path.rglob("*"):
                if not each.is_symlink():
                    sync(each)
            with named(out):
                aside.set_mode(mode)
                aside.sync()
                with contextlib.suppress(FileNotFoundError):
                    folder.remove_empty(place.name)
                folder.replace(name, folder, place.name)
                try:
                    folder.sync()
                except OSError:  # a crash may still undo the rename: report the folder as not written
                    folder.replace(place.name, folder, name)
                    raise


def open_new(path: Path, *, inside: Path | None = None, private: bool = False) -> BufferedRandom:
    """Open a new file to write to; `inside` and `private` as in `replacing`. Raises UserError if a link leads out of
    `inside`; FileExistsError if the path exists, even as a link; another OSError if the file cannot be made."""
    with held(path.parent, inside) as folder, named(path):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_SURPRISE
        return os.fdopen(folder.open(path.name, flags, 0o600 if private else 0o666), "w+b")


def open_to_append(path: Path, *, inside: Path | None = None) -> BufferedRandom:
    """Open a regular file to append to, made if it is missing; it can also be read and truncated. `inside`: a folder
    that no link may lead out of; None: the user named the file. With `inside`, `path` itself must not be a link.

    Raises:
        UserError: the path is a folder, FIFO, socket or device; with `inside`, also if it is a link or has other names.
        OSError: the file cannot be opened.
    """
    return os.fdopen(_open_regular(path, os.O_CREAT | os.O_APPEND, inside), "a+b")


def open_to_change(path: Path, *, inside: Path | None = None) -> BufferedRandom:
    """Open a regular file to read and to overwrite, while other processes write other parts of it. All processes share
    a lock: without it, Linux's NFS client writes whole pages, and so overwrites other machines' bytes with older ones.
    `inside` and errors: see `open_to_append`."""
    descriptor = _open_regular(path, 0, inside)
    lock_open(descriptor, shared=True)
    return os.fdopen(descriptor, "r+b")


def _open_regular(path: Path, flags: int, inside: Path | None) -> int:
    """Return the descriptor of a regular file, open for reading and writing."""
    with held(path.parent, inside) as folder, named(path):
        with contextlib.suppress(FileNotFoundError):
            check_kind(path, folder.status(path.name, follow_symlinks=inside is None))
        flags |= os.O_RDWR | O_NONBLOCK | (O_NOFOLLOW if inside is not None else 0)
        descriptor = folder.open(path.name, flags)
        try:
            found = os.fstat(descriptor)
            check_kind(path, found)
            if inside is not None:
                check_names(path, found)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def write_at(descriptor: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` to an open file, from byte `at` on. Threads may write other parts at the same time."""
    rest = memoryview(data)
    while rest:
        if hasattr(os, "pwrite"):
            n_bytes = os.pwrite(descriptor, rest[:_MOST_BYTES], at)
        else:  # on Windows
            with _one_writes:
                os.lseek(descriptor, at, os.SEEK_SET)
                n_bytes = os.write(descriptor, rest[:_MOST_BYTES])
        rest, at = rest[n_bytes:], at + n_bytes


@contextlib.contextmanager
def making(path: Path, *, inside: Path | None = None, private: bool = False) -> Iterator[BinaryIO]:
    """Yield a new file to write to, which is flushed at the end, or removed if writing fails. Arguments and errors: see
    `replacing`; also raises UserError if the path exists."""
    with naming_disk_errors(f"{path} could not be written", path, _ADVICE), held(path.parent, inside) as folder:
        try:
            opened = open_new(path, inside=inside, private=private)
        except FileExistsError:
            raise UserError(f"{path} exists and is not overwritten: give another place, or delete it.") from None
        try:
            with opened as file:
                yield file
                with named(path):
                    file.flush()
                    os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                folder.remove_file(path.name)
            raise
        with named(path):
            folder.sync()


def copy_file(file: Path, to: Path, max_bytes: int | None = None, *, inside: Path | None = None) -> None:
    """Copy the bytes of a regular file to a new file with the umask's mode. `max_bytes` and `inside` apply to `file`.
    Errors: see `open_regular` and `making`; also raises RunError if the file is larger than the free space."""
    with open_regular(file, inside=inside, max_bytes=max_bytes) as source, making(to) as target:
        n_bytes, free_bytes = os.fstat(source.fileno()).st_size, shutil.disk_usage(to.parent).free
        if n_bytes > free_bytes:  # also if the file is sparse and takes little space now
            raise RunError(
                f"{file} has {n_bytes:,} bytes, and {free_bytes:,} are free at {to.parent}: make room there."
            )
        shutil.copyfileobj(source, target, _COPIED_BYTES)


def copy_folder(folder: Path, to: Path, *, inside: Path) -> None:
    """Copy the files of a folder, but not the folders in it, to a new folder; see `copy_file`. Raises OSError if `to`
    exists."""
    check_inside(folder, inside)
    to.mkdir()
    for file in sorted(folder.iterdir()):
        if not file.is_dir() and not file.name.startswith(PREFIX):
            copy_file(file, to / file.name, inside=inside)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed writers of `path` left next to it. Live writers' files stay."""
    with contextlib.suppress(OSError), held(path.parent) as folder:
        remove_leftovers_of(path.name, folder)


def remove_tree(path: Path) -> None:
    """Delete a folder with its contents, a file, or a link without its target. Raises OSError if that fails."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_free(out: Path) -> None:
    """Raise a UserError if the path is a URL, a file, or a folder that is not empty."""
    _check_local(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: give another place, or delete it.")


def _mode_of(path: Path, folder: Folder) -> int | None:
    """Return the permission bits of the file to replace; None if it does not exist, or is a link or a folder. Raises
    UserError if the path is a FIFO, socket or device, which must not be replaced."""
    try:
        found = folder.status(path.name).st_mode
    except OSError:
        return None
    if not (stat.S_ISREG(found) or stat.S_ISLNK(found) or stat.S_ISDIR(found)):
        raise UserError(f"{path} is a FIFO, socket or device: give a name for a regular file.")
    return found & 0o777 if stat.S_ISREG(found) else None
