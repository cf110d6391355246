"""Reading what may come from elsewhere: a regular file, inside its folder, bounded in bytes.

A FIFO would be waited for, a device read for ever, and a link could lead to any file of the reader's. Every name on the
way from the folder to the file is opened by itself, without following a link, in the folder that is held open: so the
file that was looked at is the one that is read. A link that stays inside the folder is followed; so is one of Hugging
Face's cache, from `snapshots/REVISION/` to `blobs/`.
"""

import contextlib
import errno
import os
import select
import stat
import tempfile
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gptworks.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK = (getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK"))
"""Flags; 0 on Windows, which lacks them."""
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | O_DIRECTORY
"""Flags of a folder on the way, which need not be listed."""
_MOST_LINKS = 40
PIPE_SECONDS = 1.0
"""How long a pipe that nobody writes to is waited for. A shell has both of its ends open before it starts a command."""
_CHUNK_BYTES = 1 << 16


def open_regular(path: Path, *, inside: Path | None = None, max_bytes: int | None = None) -> BufferedReader:
    """Open a regular file to read its bytes.

    Args:
        inside: a folder above `path` which no link may lead out of; None: the file is one that the user named.
        max_bytes: the largest size; None: any.

    Raises:
        UserError: it is a folder, FIFO, socket or device, a link that leads outside, or too large.
        OSError: it cannot be opened; FileNotFoundError where there is none.
    """
    descriptor = _open_anywhere(path) if inside is None else _open_inside(path, inside)
    try:
        check_kind(path, os.fstat(descriptor), max_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def check_regular(path: Path, max_bytes: int | None = None, *, inside: Path | None = None) -> None:
    """Refuse what `open_regular` would, before a library opens it by name.

    Raises:
        UserError, OSError: as `open_regular`.
    """
    open_regular(path, inside=inside, max_bytes=max_bytes).close()


def read_regular(path: Path, max_bytes: int, *, inside: Path | None = None) -> bytes:
    """The bytes of a regular file, at most `max_bytes` of them; see `open_regular`.

    Raises:
        UserError, OSError: as `open_regular`.
    """
    with open_regular(path, inside=inside, max_bytes=max_bytes) as file:
        return _bounded(file, path, max_bytes)


def read_text(path: Path, max_bytes: int, *, inside: Path | None = None) -> str:
    """The text of a regular UTF-8 file, its line ends as they are; see `open_regular`.

    Raises:
        UserError, OSError: as `open_regular`; UserError also where it is not UTF-8.
    """
    return _decoded(read_regular(path, max_bytes, inside=inside), path)


def open_given(path: Path, max_bytes: int) -> BinaryIO:
    """Open a file that an option of a command names, to read it, more than once if need be: a regular file, or a pipe,
    such as a shell's `<(command)` or /dev/stdin, which is read to its end into a copy without a name.

    Raises:
        UserError: it is a folder, socket or device, has more than `max_bytes`, or is a pipe that nobody writes to.
        OSError: it cannot be opened; FileNotFoundError where there is none.
    """
    if not stat.S_ISFIFO(path.stat().st_mode):
        return open_regular(path, max_bytes=max_bytes)
    descriptor = os.open(path, os.O_RDONLY | O_NONBLOCK)
    try:
        return _copied(descriptor, path, max_bytes)
    finally:
        os.close(descriptor)


def read_given(path: Path, max_bytes: int) -> str:
    """The UTF-8 text of a file that an option of a command names, or of a pipe; see `open_given`.

    Raises:
        UserError, OSError: as `open_given`; UserError also where it is not UTF-8.
    """
    with open_given(path, max_bytes) as file:
        return _decoded(_bounded(file, path, max_bytes), path)


def _copied(pipe: int, path: Path, max_bytes: int) -> BinaryIO:
    is_ready = bool(select.select([pipe], [], [], PIPE_SECONDS)[0])
    try:
        data = os.read(pipe, _CHUNK_BYTES)
    except BlockingIOError:  # its writer is slow
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
                raise UserError(f"{path} gives more than {max_bytes} bytes, which is what such a file may have.")
            data = os.read(pipe, _CHUNK_BYTES)
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy


def _bounded(file: BinaryIO, path: Path, max_bytes: int) -> bytes:
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:  # it grows
        raise UserError(f"{path} has more than {max_bytes} bytes, which is what such a file may have.")
    return data


def _decoded(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text: byte {error.start} cannot be read. Save it as UTF-8.") from None


def read_array(path: Path, dtype: "npt.DTypeLike", *, inside: Path | None = None) -> "npt.NDArray[Any]":
    """The numbers of a regular file that holds nothing else; errors: see `open_regular`."""
    import numpy as np

    with open_regular(path, inside=inside) as file:
        return np.fromfile(file, dtype)


def map_array(path: Path, dtype: "npt.DTypeLike", *, inside: Path | None = None) -> "npt.NDArray[Any]":
    """The numbers of a regular file that holds nothing else and is not empty, as its pages, which are read when they
    are used; errors: see `open_regular`."""
    import numpy as np

    with open_regular(path, inside=inside) as file:
        return np.memmap(file, dtype, mode="r")


def check_inside(path: Path, inside: Path) -> None:
    """Refuse a file or folder, before a library opens it by name, that a link takes out of the folder `inside`; what
    is not there passes.

    Raises:
        UserError: as said.
    """
    with contextlib.suppress(FileNotFoundError):
        os.close(_open_inside(path, inside))


def check_links(folder: Path) -> None:
    """Refuse a folder that is about to be written to in which a name is a link that leads out of it. Hidden names, to
    which nothing is written, are left alone, save for a lock's.

    Raises:
        UserError: as said.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink() and (path.name == ".lock" or not path.name.startswith(".")):
            check_inside(path, folder)


def check_tree(folder: Path) -> None:
    """Refuse a folder, before a library opens files of it that this package does not name, in which a link leads out of
    it or something is no regular file. Hidden names are left alone.

    Raises:
        UserError: as said. OSError: it cannot be looked at.
    """
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


def open_folder(path: Path, *, inside: Path | None = None) -> int:
    """A descriptor of a folder, by which it is the same one whatever its path becomes.

    Args:
        inside: as of `open_regular`.

    Raises:
        UserError: a link leads out of `inside`.
        OSError: it is no folder, or cannot be opened.
    """
    if inside is not None:
        descriptor = _open_inside(path, inside)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return descriptor
    try:
        return os.open(path, os.O_RDONLY | O_DIRECTORY)
    except PermissionError:  # names can be made in a folder that cannot be listed, where the system has O_PATH
        return os.open(path, _FOLDER)


def check_names(path: Path, found: os.stat_result) -> None:
    """Refuse a file that has other names, before it is changed.

    Raises:
        UserError: as said.
    """
    if found.st_nlink > 1:
        raise UserError(f"{path} has another name elsewhere (a hard link), which would change too: copy it.")


def check_kind(path: Path, found: os.stat_result, max_bytes: int | None = None) -> None:
    """Refuse, by its status, what is no regular file or too large.

    Raises:
        UserError: as said.
    """
    if stat.S_ISLNK(found.st_mode):
        raise UserError(f"{path} is a link, and it is written through none: put a file there, or delete the link.")
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a FIFO, socket or device"
        raise UserError(f"{path} is {kind}: give a regular file.")
    if max_bytes is not None and found.st_size > max_bytes:
        raise UserError(f"{path} has {found.st_size} bytes; such a file may have {max_bytes}.")


def _open_anywhere(path: Path) -> int:
    """A descriptor of a file that the user named: links are followed."""
    _check_name(path)
    found = path.stat()  # opening a device may do something
    if not stat.S_ISREG(found.st_mode):
        check_kind(path, found)
    return os.open(path, os.O_RDONLY | O_NONBLOCK)


def _check_name(path: Path) -> None:
    """Refuse a name that no file can have, as a JSON text may hold: of it the system's calls make other errors."""
    try:
        if b"\0" not in os.fsencode(path):
            return
    except UnicodeEncodeError:
        pass
    raise UserError(f"{str(path)!a} has a NUL or half a surrogate pair in its name, which no file has: correct it.")


def _open_inside(path: Path, inside: Path) -> int:
    """A descriptor of what `path` names, each name on the way from `inside` opened by itself."""
    _check_name(path)
    root, names = Path(os.path.realpath(inside)), Path(os.path.normpath(path.relative_to(inside)))
    try:
        for _ in range(_MOST_LINKS):
            if names.is_absolute() and names.is_relative_to(root):
                names = names.relative_to(root)
            if names.is_absolute() or names.parts[:1] == (os.pardir,):
                if root.parent.name != "snapshots" or names.parts[:-1] != (os.pardir, os.pardir, "blobs"):
                    raise UserError(
                        f"{path} leads out of {inside}, to {names}, and nothing outside is read or written. If you "
                        "trust that, put it there in place of the link."
                    )
                root, names = root.parents[1], Path(*names.parts[2:])
            descriptor, linked = _walk(root, names, path)
            if linked is None:
                return descriptor
            names = Path(os.path.normpath(linked))
    except OSError as error:
        error.filename = str(path)
        raise
    raise UserError(f"{path} is a link in a circle of links: put a file there.")


def _walk(root: Path, names: Path, path: Path) -> tuple[int, Path | None]:
    """A descriptor of what the names from the root on lead to; or at the first link, what it has them stand for."""
    held, parts = os.open(root, _FOLDER), names.parts
    try:
        for n, name in enumerate(parts):
            found = os.stat(name, dir_fd=held, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                return -1, Path(*parts[:n], os.readlink(name, dir_fd=held), *parts[n + 1 :])
            if n + 1 < len(parts):
                flags = _FOLDER
            else:
                if not stat.S_ISDIR(found.st_mode):
                    check_kind(path, found)
                flags = os.O_RDONLY | O_NONBLOCK
            below = os.open(name, flags | O_NOFOLLOW, dir_fd=held)
            os.close(held)
            held = below
        result, held = held, -1
        return result, None
    finally:
        if held >= 0:
            os.close(held)
