"""Files that a crash cannot spoil: summed, flushed to the disk, replaced at once."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptworks.errors import RunError, UserError

_DISK_FAILS = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EIO, errno.EROFS}
_NUMBER = re.compile(r"(?:\(os error |\[Errno )(\d+)")
"""How libraries in Rust, and `shutil` of several files, give the number of a system's error in a text."""
_SHORT_WRITE = re.compile(r"^\d+ requested and \d+ written$")
"""All that numpy says when a disk does not take an array whole."""


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


def sha256_file(path: Path) -> str:
    """The sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed_json(tree: dict[str, Any]) -> str:
    """A mapping as JSON text that carries the sha256 of its own contents."""
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode("ascii")).hexdigest()
    return json.dumps({**tree, "sha256": digest}, indent=2, ensure_ascii=False) + "\n"


def unsealed_json(data: bytes) -> dict[str, Any]:
    """The mapping of a `sealed_json` text.

    Raises:
        ValueError: it is no such text, or a byte of it has changed.
    """
    tree = json.loads(data)
    if not isinstance(tree, dict) or "sha256" not in tree:
        raise ValueError("it carries no sha256 of its own")
    contents = {key: value for key, value in tree.items() if key != "sha256"}
    if sealed_json(contents).encode("utf-8") != data:
        raise ValueError("its sha256 is not that of its contents")
    return contents


SUMS_FILE = "sums.json"


def write_sums(folder: Path) -> None:
    """Write the sha256 of each file of a folder into its `sums.json`, for `check_sums`."""
    sums = {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.name != SUMS_FILE}
    write_whole(folder / SUMS_FILE, sealed_json({"files": sums}))


def check_sums(folder: Path, max_bytes: int) -> None:
    """Compare a folder's files with its `sums.json`; without one, nothing is checked. Files it does not name may be
    there.

    Args:
        max_bytes: the largest size of a file.

    Raises:
        UserError: a file is missing, was changed or is no regular file, or `sums.json` is damaged.
    """
    path = folder / SUMS_FILE
    try:
        sums = unsealed_json(read_regular(path, 1 << 20)).get("files")
        if not isinstance(sums, dict) or any(Path(name).name != name for name in sums):
            raise ValueError("it does not list the files beside it")
    except (FileNotFoundError, NotADirectoryError):  # the folder was written by an earlier version
        return
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): restore it from a copy, or delete it. {_ACCEPT}") from None
    for name, expected in sums.items():
        file = folder / name
        try:
            check_regular(file, max_bytes)
            state = None if sha256_file(file) == expected else "is not the file that was written"
        except FileNotFoundError:
            state = "is missing"
        if state is not None:
            raise UserError(
                f"{file} {state}: {path} has the sha256 of each file beside it. Restore the file from a copy. If you "
                f"changed it on purpose, delete {path}. {_ACCEPT}"
            )


_ACCEPT = "Without it, the files beside it are taken as they are."


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder, where the system lets a folder be opened."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, whose names a crash does not lose."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def link_or_copy(file: Path, to: Path) -> None:
    """Give a file a second name, or copy it to where the file system takes none."""
    try:
        to.hardlink_to(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _DISK_FAILS:
            raise
        shutil.copyfile(file, to)
        sync(to)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to. At the end it replaces `path`: a reader sees the old file or the new, never a part.
    If the writing fails, the old file stays.

    Raises:
        RunError: the disk is full, fails or refuses.
    """
    aside = path.with_name(f".{path.name}.writing")
    advice = "Nothing of it is left behind; make room or permission there and try again."
    with naming_disk_errors(f"{path} could not be written", aside, advice):
        try:
            yield aside
            sync(aside)
            aside.replace(path)
            sync(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a small file at once; see `replacing`.

    Raises:
        RunError: the disk is full, fails or refuses.
    """
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_folder(out: Path, needed_bytes: int | None = None) -> Iterator[Path]:
    """A folder beside `out` to fill, which becomes `out` at the end, flushed: it is there whole or not at all.

    Args:
        out: nothing, or an empty folder; see `check_free`.
        needed_bytes: what will be written, for the message; None: not known.

    Raises:
        RunError: the disk is full, fails or refuses.
    """
    aside = out.with_name(f".{out.name}.writing")
    advice = "Nothing half-written is kept. Make room or permission there, or give another place, and do it again."
    with naming_disk_errors(f"{out} could not be written", aside, advice, needed_bytes):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            make_folder(out.absolute().parent)
            aside.mkdir()
            yield aside
            for path in (*aside.rglob("*"), aside):
                sync(path)
            if out.exists():
                out.rmdir()
            aside.rename(out)
            try:
                sync(out.absolute().parent)
            except OSError:  # a crash may still lose its name: then it is not done, and can be done again
                out.rename(aside)
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def naming_disk_errors(what: str, place: Path, advice: str, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn errors of the disk into a RunError that says why, and what to do: `advice`. Other errors pass.

    Named are a full, failing or read-only disk, and whatever the system refuses of `place` and the folders above it.

    Args:
        place: what is written: a file or a folder, there or not.
        needed_bytes: None where it is not known beforehand.

    Raises:
        RunError: the disk failed, by an error of Python or of a library in Rust.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, RunError) else error  # the whole is named, not the file in it
        if not isinstance(cause, Exception) or not (_is_of_the_disk(cause) or _concerns(cause, place.absolute())):
            raise
        raise RunError(f"{what}: {why_not_written(cause, place, needed_bytes)}. {advice}") from cause


def _is_of_the_disk(error: Exception) -> bool:
    """Whether the disk is full, fails or is read-only, also where a library has made a text of its own of it."""
    in_text = _NUMBER.search(str(error))
    number = error.errno if isinstance(error, OSError) and error.errno else int(in_text[1]) if in_text else None
    return number in _DISK_FAILS or bool(_SHORT_WRITE.search(str(error)))


def _concerns(error: Exception, place: Path) -> bool:
    if not isinstance(error, OSError) or not isinstance(error.filename, str | os.PathLike):
        return False
    path = Path(error.filename).absolute()
    return path.is_relative_to(place) or place.is_relative_to(path)


def why_not_written(error: Exception, place: Path, needed_bytes: int | None) -> str:
    """Why files could not be written: the system's reason, and the file where it is known. Of a disk that fails, also
    which it is, its free bytes and, where known, those needed.

    Of an error that a library has made into text of its own, the system's reason stands in that text.
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


def check_free(out: Path) -> None:
    """Refuse a place that holds something.

    Raises:
        UserError: it is a file, or a folder that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: give another place, or delete it.")
