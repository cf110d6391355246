"""Find the local files or downloads of a source, and their sha256. A cache stores the sha256 of large files by path,
size, times and inode, so that an unchanged file is not read again."""

import contextlib
import glob
import json
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gptworks.config.sources import FileSource
from gptworks.data.shards import MANIFEST_FILE, TOKENIZER_FOLDER
from gptworks.data.sources.opening import has_ending
from gptworks.errors import RunError, UserError
from gptworks.files import check_inside, is_url, make_folder, path_like, read_regular, sha256_file, write_whole
from gptworks.files.fetch import cache_folder, fetched
from gptworks.files.mirror import fetched_data

REMEMBERED_BYTES = 1 << 20
"""Minimum size of a file whose sha256 is cached; reading a smaller file again is as fast."""
_SETTLED_NS = 2 * 10**9
"""Minimum age, in nanoseconds, of a file's last change for its sha256 to be cached. Otherwise, a second change in the
same tick of the file system's clock would not be noticed."""
_MOST_KNOWN, _MAX_BYTES = 100_000, 1 << 26
_THREADS = 8


def local_files(source: FileSource, endings: tuple[str, ...]) -> list[Path]:
    """Return the files at a source's path, at least one, sorted. From a folder, return only files with these endings,
    compressed or not. Without a path, fetch and return the source's downloads.

    Raises:
        UserError: no file matches, the source has a `sha256` and its path is not one file, or a link in the folder
            leads out of the folder.
        RunError: a download failed.
    """
    if source.path is None:
        return [fetched(url, sha256, cache_folder()) for url, sha256 in source.downloads]
    path = given_path(source.path)
    if path.is_file():
        return [path]
    if source.sha256:
        raise UserError(f"source {source.path}: `sha256` needs one file, and there is no file here. Check the path.")
    if path.is_dir():
        return _files_of_folder(path, endings)
    matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
    files = [file for file in matches if file.is_file()]
    if not files:
        kind = "no file matches this pattern" if glob.has_magic(source.path) else "no such file or folder"
        raise UserError(f"source {source.path}: {kind} (looked from {Path.cwd()}){path_like(path)}")
    return sorted(files)


def given_path(path: str) -> Path:
    """Return a source's path on this machine. If the path is the URL of an object store, fetch the data first."""
    return fetched_data(path) if is_url(path) else Path(path).expanduser()


def _files_of_folder(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    everything = list(walk(folder))
    files = [file for file in everything if has_ending(file.name, endings) and file.is_file()]
    _check_links(folder, files)
    if not files:
        found = listed(Counter(file.suffix or "(none)" for file in everything)) or "no files at all"
        raise UserError(
            f"source {folder}: no file ends in {' or '.join(endings)}; found {found}. "
            f"Give another folder, or for a source of type text or lines list its `extensions`."
        )
    return sorted(files)


def listed(endings: Counter[str]) -> str:
    """Return the five most frequent endings, such as `.csv (3), .log (1)`."""
    return ", ".join(f"{ending} ({count})" for ending, count in endings.most_common(5))


def _check_links(folder: Path, files: Iterable[Path]) -> None:
    """Raise a UserError if a file is a link out of the folder; the message says that a pattern follows links."""
    for file in files:
        if file.is_symlink():
            try:
                check_inside(file, folder)
            except UserError:
                pattern = Path(glob.escape(str(folder)), "**", f"*{file.suffix}")
                raise UserError(
                    f"{file} leads out of {folder}, to {file.readlink()}, and links out of a folder are not followed. "
                    f"If you trust it, a pattern follows links: give `{pattern}` as the source's path."
                ) from None


def walk(folder: Path, skipped_folders: Collection[str] = ()) -> Iterator[Path]:
    """Yield every file below a folder, without following links to folders. Leave out folders whose names are in
    `skipped_folders`, and folders made by gptworks: a build must not read its own work or a run."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped_folders and not is_made_here(Path(parent, name))]
        yield from (Path(parent, name) for name in names)


def is_made_here(folder: Path) -> bool:
    """Return whether gptworks made a folder: a dataset, an unfinished dataset, or a run."""
    if folder.name.startswith((".partial-", ".writing-")):
        return True
    dataset, run = (MANIFEST_FILE, TOKENIZER_FOLDER), ("recipe.yaml", "checkpoints")
    return any(all((folder / name).exists() for name in names) for names in (dataset, run))


# ------------------------------------------------------------------------------------------------ sha256 of files


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
    """Replace the cache. If several processes do this at the same time, only the sums of the last are kept."""
    with contextlib.suppress(OSError, RunError):  # if the cache cannot be written, files are read again
        folder = cache_folder()
        make_folder(folder)
        write_whole(folder / "sums.json", json.dumps(known), private=True)
