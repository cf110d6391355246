"""Messages for errors of a disk."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from gptworks.errors import RunError, UserError

DISK_FAILS = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EIO, errno.EROFS}
_NUMBER = re.compile(r"(?:\(os error |\[Errno )(\d+)")
"""The number of a system's error in the messages of Rust libraries, and of `shutil` for several files."""
_SHORT_WRITE = re.compile(r"^\d+ requested and \d+ written$")
"""numpy's message if only a part of an array could be written."""


@contextlib.contextmanager
def naming_disk_errors(what: str, place: Path, advice: str, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn errors of the disk into a RunError with the reason and `advice`. Other errors pass.

    These are errors of a full, failing or read-only disk, and errors of the system about `place` or a folder above it.

    Args:
        place: the file or folder that is written; it need not exist.
        needed_bytes: None if unknown.

    Raises:
        RunError: the disk failed, by an error of Python or of a Rust library.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, RunError) else error  # name `place`, not the file in it
        if not isinstance(cause, Exception) or not (_is_of_the_disk(cause) or _concerns(cause, place.absolute())):
            raise
        raise RunError(f"{what}: {why_not_written(cause, place, needed_bytes)}. {advice}") from cause


def _is_of_the_disk(error: Exception) -> bool:
    """Whether the disk is full, fails or is read-only; also recognized in a library's own message."""
    in_text = _NUMBER.search(str(error))
    number = error.errno if isinstance(error, OSError) and error.errno else int(in_text[1]) if in_text else None
    return number in DISK_FAILS or bool(_SHORT_WRITE.search(str(error)))


def _concerns(error: Exception, place: Path) -> bool:
    if not isinstance(error, OSError) or not isinstance(error.filename, str | os.PathLike):
        return False
    path = Path(error.filename).absolute()
    return path.is_relative_to(place) or place.is_relative_to(path)


def why_not_written(error: Exception, place: Path, needed_bytes: int | None) -> str:
    """The reason why files could not be written, and the file, if it is known; for a failing disk also its mount point,
    its free bytes and, if known, the needed ones. A library's own message contains the system's reason.
    """
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    file = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    if not _is_of_the_disk(error):
        return reason + file
    folder = next(folder for folder in (place, *place.absolute().parents) if folder.is_dir())
    disk = folder.absolute()
    while not disk.is_mount():
        disk = disk.parent
    free_bytes = shutil.disk_usage(folder).free
    needs = "" if needed_bytes is None else f"it needs {needed_bytes:,} bytes, and "
    return f"{reason}{file}; {needs}{free_bytes:,}{'' if needs else ' bytes'} are free on the disk mounted at {disk}"
