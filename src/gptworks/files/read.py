"""Read untrusted files: a file must be regular, inside its folder, and bounded in bytes.

Opening a FIFO would block, reading a device would never end, and a link could lead to any file of the user. So each
name on the way from the folder to the file is opened separately, without following a link, relative to an open folder:
the file that was checked is the one that is read. A link that stays inside the folder is resolved in the same way, as
is a link from `snapshots/REVISION/` to `blobs/` in Hugging Face's cache.
"""

import codecs
import contextlib
import os
import select
import stat
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gptworks.errors import UserError, nearest
from gptworks.files.folder import NO_SURPRISE, O_NONBLOCK, Folder, named

if TYPE_CHECKING:
    import numpy.typing as npt

_MOST_LINKS = 40
PIPE_SECONDS = 1.0
"""Longest wait for a pipe's writer. It is short, because a shell opens both ends before it starts a command."""
_CHUNK_BYTES = 1 << 16
_LFS, _MOST_POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
"""First bytes, and maximum size in bytes, of a pointer file, which Git LFS puts in place of a large file."""


def open_regular(path: Path, *, inside: Path | None = None, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file to read its bytes.

    Args:
        inside: a folder above `path` that no link may lead out of; None: follow links, as the user named the file.
        max_bytes: largest size; None: any.

    Raises:
        UserError: the path is a folder, FIFO, socket or device, a link that leads outside, too large, or a pointer of
            Git LFS.
        OSError: the file cannot be opened; FileNotFoundError if it does not exist.
    """
    if inside is None:
        descriptor = _open_anywhere(path)
    else:
        with _inside(path, inside) as (folder, name):
            descriptor = folder.open(name, os.O_RDONLY | NO_SURPRISE)
    try:
        found = os.fstat(descriptor)
        check_kind(path, found, max_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    file = os.fdopen(descriptor, "rb")
    if len(_LFS) < found.st_size < _MOST_POINTER_BYTES and file.peek(len(_LFS)).startswith(_LFS):
        file.close()
        raise UserError(f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder.")
    return file


def check_regular(path: Path, max_bytes: int | None = None, *, inside: Path | None = None) -> None:
    """Raise the errors of `open_regular`; call this before a library opens a file by name."""
    open_regular(path, inside=inside, max_bytes=max_bytes).close()


def read_regular(path: Path, max_bytes: int, *, inside: Path | None = None) -> bytes:
    """Read the bytes of a regular file, at most `max_bytes`; arguments and errors: see `open_regular`."""
    with open_regular(path, inside=inside, max_bytes=max_bytes) as file:
        return _bounded(file, path, max_bytes)


def read_text(path: Path, max_bytes: int, *, inside: Path | None = None) -> str:
    """Read the text of a regular file, with its line ends unchanged; see `open_regular`. Raises UserError also if it is
    not UTF-8."""
    return _decoded(read_regular(path, max_bytes, inside=inside), path)


def open_given(path: Path, max_bytes: int) -> BinaryIO:
    """Open a file that a command's option names: a regular file, or a pipe such as a shell's `<(command)` or
    /dev/stdin. A pipe is copied to a temporary file, so that the reader can seek.

    Raises:
        UserError: the path is a folder, socket or device, has more than `max_bytes`, or is a pipe without a writer.
        OSError: the file cannot be opened; FileNotFoundError if it does not exist.
    """
    if not stat.S_ISFIFO(path.stat().st_mode):
        return open_regular(path, max_bytes=max_bytes)
    descriptor = os.open(path, os.O_RDONLY | O_NONBLOCK)
    try:
        return _copied(descriptor, path, max_bytes)
    finally:
        os.close(descriptor)


def read_given(path: Path, max_bytes: int) -> str:
    """Read the text of a file or pipe that a command's option names, without a byte order mark; see `open_given`.
    Raises UserError also if it is not UTF-8."""
    with open_given(path, max_bytes) as file:
        return _decoded(_bounded(file, path, max_bytes).removeprefix(codecs.BOM_UTF8), path)


def _copied(pipe: int, path: Path, max_bytes: int) -> BinaryIO:
    is_ready = bool(select.select([pipe], [], [], PIPE_SECONDS)[0])
    try:
        data = os.read(pipe, _CHUNK_BYTES)
    except BlockingIOError:  # the writer has written nothing yet
        os.set_blocking(pipe, True)
        data = os.read(pipe, _CHUNK_BYTES)
    else:
        if not data and not is_ready:
            raise UserError(f"{path} is a pipe that nobody writes to: start its writer first, or give a regular file.")
    os.set_blocking(pipe, True)
    n_bytes, copy = 0, tempfile.TemporaryFile()  # noqa: SIM115 the caller closes it
    try:
        while data:
            n_bytes += copy.write(data)
            if n_bytes > max_bytes:
                raise UserError(f"{path} has more than {max_bytes} bytes, which is the limit for such a file.")
            data = os.read(pipe, _CHUNK_BYTES)
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy


def _bounded(file: BinaryIO, path: Path, max_bytes: int) -> bytes:
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:  # the file has grown since its check
        raise UserError(f"{path} has more than {max_bytes} bytes, which is the limit for such a file.")
    return data


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        kind = " but UTF-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else ""
        raise UserError(f"{path} is not UTF-8{kind}: byte {error.start} cannot be read. Save it as UTF-8.") from None


def path_like(path: Path) -> str:
    """Return the end of a message about a missing path: the most similar name in its folder, or `Check the path.`"""
    folder = path.parent
    names = (one.name for one in folder.iterdir()) if folder.is_dir() else ()
    near = nearest(path.name, names)
    return f"; did you mean {folder / near}?" if near else ". Check the path."


def read_array(path: Path, dtype: "npt.DTypeLike", *, inside: Path | None = None) -> "npt.NDArray[Any]":
    """Read a regular file's bytes as a 1-D array of `dtype`; errors: see `open_regular`."""
    import numpy as np

    with open_regular(path, inside=inside) as file:
        return np.fromfile(file, dtype)


def map_array(path: Path, dtype: "npt.DTypeLike", *, inside: Path | None = None) -> "npt.NDArray[Any]":
    """Map a file to memory as a read-only 1-D array; errors as `read_array`. The file must not be empty."""
    import numpy as np

    with open_regular(path, inside=inside) as file:
        return np.memmap(file, dtype, mode="r")


Stamp = tuple[int, int, int]
"""A file's inode, size and modification time in nanoseconds, which change with its contents."""


def stamp(path: Path) -> Stamp | None:
    """Return the `Stamp` of a file or folder; None if it does not exist or cannot be reached."""
    try:
        found = os.stat(path)  # noqa: PTH116 half the time of Path.stat, for hundreds of runs each second
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def check_inside(path: Path, inside: Path) -> None:
    """Raise a UserError if a link leads `path`, which need not exist, out of the folder `inside`, or if it is a FIFO,
    socket or device. Call this before a library opens the path by name."""
    with contextlib.suppress(FileNotFoundError), _inside(path, inside):
        pass


def check_links(folder: Path) -> None:
    """Raise a UserError if a folder has a link that leads out of it; call this before writing to the folder. Among
    hidden names only `.lock` is checked: the program replaces other hidden files, so it follows no link there."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink() and (path.name == ".lock" or not path.name.startswith(".")):
            check_inside(path, folder)


def check_tree(folder: Path) -> None:
    """Check a folder, except hidden names, before a library opens files in it whose names this package does not know.
    Raises UserError if a link leads out of the folder, or an entry is neither a folder nor a regular file; OSError if
    an entry's status, or a linked file, cannot be read."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in (*folders, *names):
            path = Path(parent, name)
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                if stat.S_ISLNK(found.st_mode) and path.is_dir():
                    check_inside(path, folder)
                elif stat.S_ISLNK(found.st_mode) and not name.startswith("."):
                    check_regular(path, inside=folder)
                elif not stat.S_ISDIR(found.st_mode) and not name.startswith("."):
                    check_kind(path, found)


@contextlib.contextmanager
def held(path: Path, inside: Path | None = None) -> Iterator[Folder]:
    """Yield an open folder. Raises UserError if a link leads out of `inside`; OSError if it is not a folder or cannot
    be opened."""
    with named(path):
        if inside is None:
            folder = Folder(path)
        else:
            with _inside(path, inside) as (above, name):
                folder = Folder(name, within=above)
    with folder:
        yield folder


def check_names(path: Path, found: os.stat_result) -> None:
    """Raise a UserError if a file that is to be changed has other names (hard links)."""
    if found.st_nlink > 1:
        raise UserError(f"{path} has another name elsewhere (a hard link), which would change too: copy it.")


def check_kind(path: Path, found: os.stat_result, max_bytes: int | None = None) -> None:
    """Raise a UserError unless `found`, a file's status, describes a regular file of at most `max_bytes`; None: any
    size."""
    if stat.S_ISLNK(found.st_mode):
        raise UserError(f"{path} is a link, and links are not written through: put a file there, or delete the link.")
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a FIFO, socket or device"
        raise UserError(f"{path} is {kind}: give a regular file.")
    if max_bytes is not None and found.st_size > max_bytes:
        raise UserError(f"{path} has {found.st_size} bytes; such a file may have {max_bytes}.")


def _open_anywhere(path: Path) -> int:
    """Return an open descriptor of a file that the user named, following links."""
    _check_name(path)
    found = path.stat()  # first, since opening a device may have an effect
    if not stat.S_ISREG(found.st_mode):
        check_kind(path, found)
    return os.open(path, os.O_RDONLY | O_NONBLOCK)


def _check_name(path: Path) -> None:
    """Raise a UserError for a name that no file can have. JSON may contain such a name, for which system calls raise
    other errors."""
    try:
        if b"\0" not in os.fsencode(path):
            return
    except UnicodeEncodeError:
        pass
    raise UserError(f"{str(path)!a} has a NUL or half a surrogate pair in its name, which no file has: correct it.")


@contextlib.contextmanager
def _inside(path: Path, inside: Path) -> Iterator[tuple[Folder, str]]:
    """Yield the open folder that holds the file or folder at `path`, and the last name, which is not a link. Each
    folder on the way from `inside` is opened from the folder above it, so that no link leads out."""
    _check_name(path)
    root, names = Path(os.path.realpath(inside)), Path(os.path.normpath(path.relative_to(inside)))
    try:
        for _ in range(_MOST_LINKS):
            if names.is_absolute() and names.is_relative_to(root):
                names = names.relative_to(root)
            if names.is_absolute() or names.parts[:1] == (os.pardir,):
                if root.parent.name != "snapshots" or names.parts[:-1] != (os.pardir, os.pardir, "blobs"):
                    raise UserError(
                        f"{path} leads out of {inside}, to {names}; files outside are not read or written. If you "
                        "trust that file, put it there in place of the link."
                    )
                root, names = root.parents[1], Path(*names.parts[2:])
            folder, found = _walk(root, names)
            if isinstance(found, Path):
                names = Path(os.path.normpath(found))
                continue
            with folder:
                if not stat.S_ISDIR(found.st_mode):
                    check_kind(path, found)
                yield folder, names.name or os.curdir
            return
    except OSError as error:
        error.filename = str(path)
        raise
    raise UserError(f"{path} is a link in a circle of links: put a file there.")


def _walk(root: Path, names: Path) -> tuple[Folder, os.stat_result | Path]:
    """Open each folder on the way to the last name. Return the open folder that holds the last name, and the name's
    status. At the first link, return a closed folder instead, and the names with this link resolved."""
    held, parts = Folder(root, lists=False), names.parts or (os.curdir,)
    try:
        for n, name in enumerate(parts):
            found = held.status(name)
            if (target := held.link_target(name, found)) is not None:
                held.close()
                return held, Path(*parts[:n], target, *parts[n + 1 :])
            if n + 1 < len(parts):
                below = Folder(name, within=held, lists=False)
                held.close()
                held = below
        return held, found
    except BaseException:
        held.close()
        raise
