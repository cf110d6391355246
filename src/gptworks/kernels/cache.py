"""The folders that keep compiled libraries.

Loading a library runs its code. So a library is loaded only if its checksum matches, and only from a folder that
belongs to this user and that nobody else may write to. The first usable folder of this list keeps the library:

- the user's cache folder,
- this user's folder in $XDG_RUNTIME_DIR or in the folder for temporary files, until the machine restarts,
- a temporary folder of this process.

One process compiles under a lock while others wait. That process also removes libraries that have long been unused.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_LOG = logging.getLogger(__name__)


def keep(folder: Path, key: str, make: Callable[[], bytes]) -> Path:
    """Return the path of the library for `key` in the folder; `make` builds the library if it is missing.

    Raises:
        OSError: the folder is not private (see `make_private`), or cannot be written to.
    """
    folder = make_private(folder)
    content = _kept(folder, key)
    if content is None:
        with _alone(folder):  # while this process waited, another may have built the library
            content = _kept(folder, key) or make()
            _keep(folder, key, content)
            _prune(folder)
    return _keep(folder, key, content)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock in this context; raises an OSError if the folder cannot be written to."""
    import filelock  # imported here, because filelock is not installed when a wheel is built

    lock = filelock.FileLock(folder / "lock", mode=0o600)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _LOG.info("another process compiles the kernels: waiting for it")
        lock.acquire()
    except NotImplementedError:  # the file system has no locks: several processes may compile
        yield
        return
    try:
        yield
    finally:
        lock.release()


def cache_folder() -> Path | None:
    """Return the cache folder for compiled kernels: gptworks/ in $XDG_CACHE_HOME or ~/.cache; None without a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():  # the XDG specification requires absolute paths
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(base) / "gptworks"


def folders() -> Iterator[Path]:
    """Yield the folders to try, in the order of this module's docstring. On a system without user ids, these are only
    the cache folder and the temporary folder of this process."""
    if (folder := cache_folder()) is not None:
        yield folder
    if hasattr(os, "geteuid"):
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        if Path(base).is_absolute():
            yield Path(base) / "gptworks"
        yield Path(tempfile.gettempdir(), f"gptworks-{os.geteuid()}")
    temporary = Path(tempfile.mkdtemp(prefix="gptworks-kernels-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    yield temporary


def make_private(folder: Path) -> Path:
    """Make a folder private, so that only this user can write to it or replace it; return its resolved path.

    Raises:
        OSError: the folder cannot be made, is a link or belongs to another user; or a parent folder belongs to another
            user, or lets others replace the folder.
    """
    if not hasattr(os, "geteuid"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    trusted = {os.geteuid(), 0, Path("/").stat().st_uid}  # in a container, root may have another user id
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there.stat().st_uid not in trusted:  # root must leave no files in another user's HOME
        raise OSError(None, f"another user owns {there}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_link, folder = folder.is_symlink(), folder.resolve()
    status = folder.stat(follow_symlinks=False)
    if is_link or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(None, "it is no folder of this user's")
    if status.st_mode & 0o022:
        folder.chmod(0o700)
    for parent in folder.parents:
        status = parent.stat()
        if status.st_uid not in trusted:
            raise OSError(None, f"another user owns {parent}")
        by_group = status.st_mode & 0o020 and not _is_own_group(status.st_gid)
        if (by_group or status.st_mode & 0o002) and not status.st_mode & stat.S_ISVTX:
            raise OSError(None, f"other users may write to {parent}")
    return folder


def _is_own_group(number: int) -> bool:
    """Whether a group has this user's name and no other member. Many systems give each user such a group."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _kept(folder: Path, key: str) -> bytes | None:
    """Return the bytes of the library built earlier for this key; None if its file is missing or was changed."""
    for file in folder.glob(f"kernels-{key}-*.so"):
        if (content := _trusted_bytes(file, digest_in(file))) is not None:
            return content
    return None


def digest_in(file: Path) -> str:
    """Return the checksum at the end of a library's file name."""
    return file.stem.rpartition("-")[2]


def _trusted_bytes(file: Path, digest: str) -> bytes | None:
    """Return the file's bytes if only this user may write the file and its SHA-256 is `digest`, else None."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            mine = not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)
            if not stat.S_ISREG(status.st_mode) or file.is_symlink() or not mine:
                return None
            content = opened.read()
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == digest else None


def _keep(folder: Path, key: str, content: bytes) -> Path:
    """Write a library's file if missing or damaged, mark it as used now, and return its path."""
    digest = hashlib.sha256(content).hexdigest()
    file = folder / f"kernels-{key}-{digest}.so"
    if _trusted_bytes(file, digest) is None:
        _write(file, content)
    with contextlib.suppress(OSError):  # the file system may be read-only
        os.utime(file)
    return file


MOST_KEPT, UNUSED_DAYS = 12, 60
"""Maximum number of libraries kept in a folder, and days after which an unused library is removed."""


def _prune(folder: Path) -> None:
    """Remove libraries unused for UNUSED_DAYS or beyond the MOST_KEPT last used, and killed processes' temporary files.

    Keep files used in the last hour, because another process may be about to use them.
    """
    now = time.time()

    def age(file: Path) -> float:
        with contextlib.suppress(OSError):
            return now - file.stat(follow_symlinks=False).st_mtime
        return 0.0

    by_age = sorted((age(file), file) for file in folder.glob("kernels-*.so"))
    old = [(seconds, file) for seconds, file in by_age if seconds > UNUSED_DAYS * 86_400]
    torn = [(age(file), file) for file in folder.glob(".writing-*")]
    for seconds, file in (*old, *by_age[MOST_KEPT:], *torn):
        if seconds > 3_600:
            with contextlib.suppress(OSError):
                file.unlink()


def _write(file: Path, content: bytes) -> None:
    """Write or replace a file atomically: it appears whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".writing-", delete=False) as aside:
        try:
            aside.write(content)
            aside.flush()
            Path(aside.name).chmod(0o700)
            Path(aside.name).replace(file)
        except BaseException:
            Path(aside.name).unlink(missing_ok=True)
            raise
