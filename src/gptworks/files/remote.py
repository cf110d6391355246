"""Folders in object stores, such as s3://bucket/runs/demo, through fsspec. Each has a mirror on this machine: a folder
below the cache with the same files, so that other code reads and writes it like any folder.

What a store sends is untrusted: names, sizes and bytes are checked before they reach the disk.
"""

import contextlib
import os
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, unquote

from gptworks.errors import RunError, UserError, not_installed, reason_of
from gptworks.files.fetch import cache_folder
from gptworks.files.schemes import PACKAGES, STORE_URL, is_url
from gptworks.files.write import write_at

T = TypeVar("T")

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+@-]{0,199}")
_MOST_PARTS, _MOST_OBJECTS = 16, 100_000
_MOST_FOLDER_BYTES = 255
BLOCK_BYTES = 1 << 25
_THREADS = 4
"""Number of blocks of a file that are downloaded at the same time."""
_TRIES, _FIRST_WAIT_SECONDS = 6, 0.5
_FINAL = (PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
"""Errors that another try does not change."""


@dataclass(frozen=True)
class Entry:
    """An object below a remote folder."""

    n_bytes: int
    version: str
    """Changes when the object is replaced: its ETag, generation or time; empty if the store states none."""


def cache_root() -> Path:
    """Return the folder of all mirrors."""
    return cache_folder().absolute() / "remote"


def mirror_of(url: str | os.PathLike[str]) -> Path:
    """Return the local folder that mirrors a URL: `<cache>/remote/<the URL up to the last slash, quoted>/<last name>`.
    Raises UserError if the URL has no name below the bucket, has a name with other characters than allowed, or is too
    long."""
    found = STORE_URL.fullmatch(str(url))
    parts = found[2].rstrip("/").split("/") if found else []
    if found is None or len(parts) < 2 or len(parts) > _MOST_PARTS or not all(map(_PART.fullmatch, parts)):
        raise UserError(
            f"{url}: give {' or '.join(f'{scheme}://BUCKET/NAME' for scheme in list(PACKAGES)[:3])}, with names of "
            f"letters, digits and ._=+@- that begin with a letter or digit."
        )
    *above, name = parts
    folder = quote(f"{found[1]}://{'/'.join(above)}", safe="")
    if len(folder) > _MOST_FOLDER_BYTES:
        raise UserError(f"{url} is too long: its names, up to the last slash, may have about 240 characters.")
    return cache_root() / folder / name


def url_of(path: Path) -> str | None:
    """Return the URL of a mirror, or of a path inside one; None for other paths."""
    try:
        parts = path.relative_to(cache_root()).parts
    except (ValueError, RuntimeError):  # outside, or this user has no home folder
        return None
    url = "/".join([unquote(parts[0]), *parts[1:]]) if len(parts) > 1 else ""
    return url if is_url(url) else None


def mirror_around(path: Path) -> Path | None:
    """Return the mirror that contains a path; None if there is none."""
    return None if url_of(path) is None else cache_root().joinpath(*path.relative_to(cache_root()).parts[:2])


def shown(path: Path) -> str:
    """Return a path as messages show it: a mirror as its URL, other paths unchanged."""
    return url_of(path) or str(path)


def _is_name(part: str) -> bool:
    """Return whether a part of an object's name may become a file's name: printable, not only dots and spaces, without
    backslash, at most 200 bytes."""
    return part.isprintable() and part.strip(". ") != "" and "\\" not in part and len(part.encode()) <= 200


class Remote:
    """A folder in an object store. All calls except `upload` are repeated if they fail, after growing random waits."""

    def __init__(self, url: str) -> None:
        """Open the store of a URL. Raises UserError if the package for the scheme is not installed."""
        scheme = url.partition(":")[0]
        self.url, (self._package, extra) = url.rstrip("/"), PACKAGES[scheme]
        if find_spec(self._package) is None:
            raise not_installed(self._package, extra, url)
        import fsspec

        self._store: Any = fsspec.filesystem(scheme, use_listings_cache=False)
        self._base: str = self._store._strip_protocol(self.url)

    def _call(self, what: str, work: Callable[[], T], tries: int = _TRIES) -> T:
        """Return the result of `work`, tried again after errors that may pass. `what` names the object in messages.

        Raises:
            FileNotFoundError: the object does not exist.
            FileExistsError: the object must not exist, but exists.
            UserError: the store refuses the access, or the object's bytes do not have the checksum that it stores.
            RunError: the store fails at every try.
        """
        for n in range(tries):
            try:
                return work()
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:  # each store's library has its own types
                name = f"{self.url}{what and '/'}{what}"
                reason = reason_of(error)
                if isinstance(error, _FINAL) or "Credential" in type(error).__name__:
                    raise UserError(
                        f"{name}: the store refuses the access ({reason}). Check the bucket's name, and the "
                        f"credentials of {self._package} in the environment."
                    ) from error
                if n + 1 == tries and "Checksum" in type(error).__name__:
                    raise UserError(f"{name} is damaged in the store: {reason} Restore it, or delete it.") from error
                if n + 1 == tries:
                    raise RunError(f"{name}: the store failed {tries} times, at last with: {reason}.") from error
            time.sleep(_FIRST_WAIT_SECONDS * 2**n * random.uniform(0.5, 1.5))
        raise AssertionError

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}" if name else self._base

    def entries(self) -> dict[str, Entry]:
        """Return the objects below the folder by relative name. An object at the URL itself has the name "".

        Raises:
            UserError: the store refuses the access, or there are too many objects. Also if an object has no size, other
                objects below it, too many levels in its name, or a name that no file can have, such as `..`.
            RunError: the store fails.
        """
        found = self._call("", lambda: self._store.find(self._base, detail=True))
        if len(found) > _MOST_OBJECTS:
            raise UserError(f"{self.url} has {len(found):,} objects; a folder may have {_MOST_OBJECTS:,}.")
        entries = {}
        for path, info in found.items():
            if path.endswith("/"):  # a placeholder that consoles make for a folder
                continue
            name = path[len(self._base) :].removeprefix("/")
            parts = name.split("/")
            if name and (
                not path.startswith(f"{self._base}/") or len(parts) > _MOST_PARTS or not all(map(_is_name, parts))
            ):
                raise UserError(
                    f"{self.url} has an object named {name[:200]!a}, which is not read: rename or delete it."
                )
            size = info.get("size")
            if type(size) is not int or size < 0:
                raise UserError(f"{self.url}/{name}: the store states no size.")
            keys = ("ETag", "etag", "generation", "LastModified", "last_modified", "mtime", "created")
            entries[name] = Entry(size, next((str(info[key]) for key in keys if info.get(key)), ""))
        for name in entries:
            above = name.split("/")[:-1]
            if any("/".join(above[:n]) in entries for n in range(1, len(above) + 1)):
                raise UserError(f"{self.url}: {name} lies below another object, as if that were a folder: delete one.")
        return entries

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return the bytes of a small object; errors: see `_call`, and UserError if it has more than `max_bytes`."""

        def work() -> bytes:
            try:
                return bytes(self._store.cat_file(self._at(name), start=0, end=max_bytes + 1))
            except Exception:  # each store's library has its own error for a range of an empty object
                if self._store.size(self._at(name)) == 0:
                    return b""
                raise

        data = self._call(name, work)
        if len(data) > max_bytes:
            raise UserError(f"{self.url}/{name} has more than {max_bytes:,} bytes, which is the limit for such a file.")
        return data

    def download(self, name: str, n_bytes: int, file: BinaryIO) -> None:
        """Write the bytes of an object, which must have `n_bytes`, to a file: several blocks at once, each tried again
        if it fails or is too short. Errors: see `_call`, and OSError if the disk fails."""
        descriptor = file.fileno()

        def block(at: int) -> None:
            end = min(at + BLOCK_BYTES, n_bytes)

            def work() -> bytes:
                data: bytes = self._store.cat_file(self._at(name), start=at, end=end)
                if len(data) != end - at:
                    raise ConnectionError(f"{len(data):,} bytes came instead of {end - at:,}")
                return data

            write_at(descriptor, self._call(name, work), at)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(block, range(0, n_bytes, BLOCK_BYTES)))

    def put(self, name: str, data: bytes, *, new: bool = False) -> None:
        """Write an object; errors: see `_call`. With `new`, raise a FileExistsError if the object exists
        (`If-None-Match: *` on S3 and Azure, `ifGenerationMatch=0` on Google)."""
        mode = {"mode": "create"} if new else {}
        self._call(name, lambda: self._store.pipe_file(self._at(name), data, **mode))

    def upload(self, name: str, file: Path) -> None:
        """Write a file's bytes to an object, which appears only when all of them have arrived; errors: see `_call`, and
        FileNotFoundError if the file does not exist."""

        def work() -> None:
            n_bytes = file.stat().st_size
            self._store.put_file(str(file), self._at(name))
            if (arrived := self._store.size(self._at(name))) != n_bytes:
                raise ConnectionError(f"{arrived} bytes have arrived of {n_bytes:,}")

        self._call(name, work, tries=1)

    def remove(self, name: str) -> None:
        """Delete an object; no effect if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            self._call(name, lambda: self._store.rm_file(self._at(name)))

    def age_seconds(self, name: str, probe: str) -> float:
        """Return the age of an object by the store's clock; errors: see `_call`. To read the clock, write and delete
        the object `probe`; this also shows whether this process may write."""
        self.put(probe, b"")
        try:
            times = [self._call(each, lambda each=each: self._store.modified(self._at(each))) for each in (probe, name)]  # type: ignore[misc]
        finally:
            self.remove(probe)
        return float((times[0] - times[1]).total_seconds())
