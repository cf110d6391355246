"""A cache of large files' sha256 by path, size, times and inode, so that an unchanged file is not read again."""

import contextlib
import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gptworks.errors import RunError
from gptworks.files import make_folder, read_regular, sha256_file, write_whole
from gptworks.files.fetch import cache_folder

REMEMBERED_BYTES = 1 << 20
"""The sha256 of smaller files is not cached, since reading such a file is as fast."""
_SETTLED_NS = 2 * 10**9
"""Minimum age, in ns, of a file's last change for caching: a second change within a clock tick would go unnoticed."""
_MOST_KNOWN, _MAX_BYTES = 100_000, 1 << 26
_THREADS = 8


def contents(files: Iterable[Path]) -> list[list[Any]]:
    """Return a pair for each file: the endings of its name, and its sha256. The pair does not depend on the path."""
    files, known = list(files), _read()
    keys = [_key(file) for file in files]
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = list(threads.map(lambda file, key: known.get(str(key)) or sha256_file(file), files, keys))
    settled = time.time_ns() - _SETTLED_NS
    new = {
        str(key): one
        for key, one in zip(keys, sums, strict=True)
        if key[1] >= REMEMBERED_BYTES and max(key[2:4]) < settled and str(key) not in known
    }
    if new:
        _write(dict(list((known | new).items())[-_MOST_KNOWN:]))
    return [["".join(file.suffixes), one] for file, one in zip(files, sums, strict=True)]


def _key(file: Path) -> tuple[str, int, int, int, int]:
    status = file.stat()
    return str(file.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _read() -> dict[str, str]:
    try:
        tree = json.loads(read_regular(cache_folder() / "sums.json", _MAX_BYTES))
    except Exception:  # no cache, or a damaged one: files are read again
        return {}
    return tree if isinstance(tree, dict) and all(isinstance(one, str) for one in tree.values()) else {}


def _write(known: dict[str, str]) -> None:
    """Replace the cache. If several processes do this together, one wins, and the sums of the others are lost."""
    with contextlib.suppress(OSError, RunError):  # if the cache cannot be written, files are read again
        folder = cache_folder()
        make_folder(folder)
        write_whole(folder / "sums.json", json.dumps(known), private=True)
