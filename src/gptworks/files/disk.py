"""Turn disk errors into messages that name the reason and the place."""

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
"""Finds the errno in a message of a Rust library, or of `shutil` about several files."""
_SHORT_WRITE = re.compile(r"^\d+ requested and \d+ written$")
"""Matches numpy's message about an array that was written only in part."""


@contextlib.contextmanager
def naming_disk_errors(what: str, place: Path, advice: str, needed_bytes: int | None = None) -> Iterator[None]:
    """Within the context, turn disk errors of Python or a library into a RunError with the reason and `advice`. Other
    errors pass. Disk errors are errors of a full, failing or read-only disk, and OSErrors about `place` or a path above
    or below it. `place` need not exist. `needed_bytes`: bytes that will be written; None: unknown."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, RunError) else error  # a RunError may name a file inside `place`
        if not isinstance(cause, Exception) or not (_is_of_the_disk(cause) or _concerns(cause, place.absolute())):
            raise
        raise RunError(f"{what}: {why_not_written(cause, place, needed_bytes)}. {advice}") from cause


def _is_of_the_disk(error: Exception) -> bool:
    """Return whether an error, or a library's message in it, says that the disk is full, fails or is read-only."""
    in_text = _NUMBER.search(str(error))
    number = error.errno if isinstance(error, OSError) and error.errno else int(in_text[1]) if in_text else None
    return number in DISK_FAILS or bool(_SHORT_WRITE.search(str(error)))


def _concerns(error: Exception, place: Path) -> bool:
    if not isinstance(error, OSError) or not isinstance(error.filename, str | os.PathLike):
        return False
    path = Path(error.filename).absolute()
    return path.is_relative_to(place) or place.is_relative_to(path)


def why_not_written(error: Exception, place: Path, needed_bytes: int | None) -> str:
    """Return the reason why files could not be written, with the file's name if known. For a full, failing or read-only
    disk, add the disk's mount point, its free bytes and, if known, the needed bytes."""
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
