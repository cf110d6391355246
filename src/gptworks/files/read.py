"""Reading: a regular file, bounded in bytes."""

import os
import stat
from pathlib import Path

from gptworks.errors import UserError


def check_regular(path: Path, max_bytes: int | None = None) -> None:
    """Refuse what is no regular file, before a library opens it: a FIFO would be waited for, a device read for ever.

    Args:
        max_bytes: the largest size; None: any.

    Raises:
        UserError: it is a folder, FIFO, socket or device, or too large.
        OSError: it cannot be looked at; FileNotFoundError where there is none.
    """
    _check_regular(path, path.stat(), max_bytes)


def _check_regular(path: Path, found: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a FIFO, socket or device"
        raise UserError(f"{path} is {kind}: give a regular file.")
    if max_bytes is not None and found.st_size > max_bytes:
        raise UserError(f"{path} has {found.st_size} bytes; such a file may have {max_bytes}.")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file, at most `max_bytes` of them.

    Raises:
        UserError, OSError: as `check_regular`.
    """
    check_regular(path, max_bytes)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # it may have become a FIFO since
    with os.fdopen(descriptor, "rb") as file:
        _check_regular(path, os.fstat(descriptor), max_bytes)
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:  # it grows
        raise UserError(f"{path} has more than {max_bytes} bytes, which is what such a file may have.")
    return data


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a regular UTF-8 file, its line ends as they are.

    Raises:
        UserError, OSError: as `check_regular`; UserError also where it is no UTF-8.
    """
    try:
        return read_regular(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 text: byte {error.start} cannot be read. Save it as UTF-8.") from None
