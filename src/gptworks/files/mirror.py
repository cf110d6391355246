"""The local mirrors of remote folders. `fetched_path` makes a mirror current, except for large files. `fetch_missing`
adds a large file when it is first read.

    .sessions/00000001  (in the store) a process that trains or trained there; each process takes the next number
    .session.json       (in the mirror) the session of this machine's last training
    .remote.json        (in the mirror) the version of each object that the mirror holds

A folder below `checkpoints` counts only if it has its manifest.json, because writers upload this file last.
"""

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

from filelock import FileLock

from gptworks.errors import RunError, UserError
from gptworks.files.lock import file_lock, is_locked
from gptworks.files.read import check_links, read_regular
from gptworks.files.remote import Entry, Remote, cache_root, mirror_around, mirror_of, url_of
from gptworks.files.schemes import is_url
from gptworks.files.sums import sha256_file
from gptworks.files.write import make_folder, remove_tree, replacing, write_whole

SESSIONS, OWN_SESSION, VERSIONS = ".sessions", ".session.json", ".remote.json"
SEAL, CHECKPOINTS, LARGE = "manifest.json", "checkpoints", ".safetensors"
_MOST_JSON_BYTES = 1 << 24
_MOST_SMALL_BYTES = 1 << 32
"""Maximum total bytes of a run's small files; see `_is_small`."""
_FRESH_SECONDS = 10.0
"""Time after which a process asks the store again for the state of a folder."""
_TRIES = 3
_fetched_at: dict[Path, float] = {}
"""Time (`time.monotonic`) at which this process last asked the store for the state of each mirror's folder. A missing
time counts as -inf, not 0, because this clock may begin at 0 when the machine starts."""


def local_path(path: str | PathLike[str]) -> Path:
    """Return the path of a URL's local mirror, which need not exist, or a local path unchanged."""
    return mirror_of(path) if is_url(path) else Path(path)


def fetched_path(path: str | PathLike[str]) -> Path:
    """Return the `local_path` of a path. If the path is in a mirror, first make the mirror current, at most once per
    `_FRESH_SECONDS`. Tensors of checkpoints are left to `fetch_missing`. Raises UserError if the URL cannot be used, or
    the store refuses access or holds names that are not read; RunError if the store or the disk fails."""
    local = local_path(path)
    mirror = mirror_around(local)
    if mirror is not None and time.monotonic() > _fetched_at.get(mirror, -inf) + _FRESH_SECONDS:
        refresh(mirror)
    return local


def fetched_data(url: str) -> Path:
    """Return the local copy of a file or a folder of data in an object store. First fetch all files except hidden ones,
    and except files that have not changed since the last fetch. Raises UserError if nothing is there, the URL cannot be
    used, or the store refuses access; RunError if the store or disk fails."""
    path = mirror_of(url)
    remote = Remote(url)
    make_folder(path.parent)
    with _locked(path):
        entries = remote.entries()
        if not entries:
            raise UserError(f"{url}: no such file or folder in the store. Check the path.")
        if "" not in entries:
            _fetch(remote, entries, path, lambda name: not _is_hidden(name))
            return path
        versions, version = path.with_name(f".{path.name}.json"), [entries[""].n_bytes, entries[""].version]
        if not path.is_file() or _json(versions) != {"": version}:
            _download(remote, "", entries[""].n_bytes, path, path.parent)
            write_whole(versions, json.dumps({"": version}))
        return path


def _locked(path: Path) -> FileLock:
    return file_lock(path.with_name(f".{path.name}.lock"), mode=0o600)


def keep(mirror: Path) -> None:
    """Never fetch the mirror again in this process, because this process trains there."""
    _fetched_at[mirror] = inf


def refresh(mirror: Path, session: dict[str, Any] | None = None) -> bool:
    """Make a mirror current, except for tensors of checkpoints, and return True.

    Return False, and change nothing, if a process trains there or if this machine was the last to train there, because
    the mirror may have files that the store lacks. If another machine has trained there since, a mirror with such files
    is renamed, with a warning. `session` is the remote folder's last session before this process's own session; None:
    read it from the store. Errors: see `fetched_path`.
    """
    url = url_of(mirror)
    assert url is not None
    make_folder(mirror.parent)
    with _locked(mirror):
        _fetched_at[mirror] = max(_fetched_at.get(mirror, -inf), time.monotonic())
        if is_locked(mirror / ".lock"):
            return False
        remote = Remote(url)
        entries = remote.entries()
        if session is None:
            session = last_session(remote, entries)
        if session is not None and is_last_here(mirror, session):
            return False
        own = _json(mirror / OWN_SESSION)
        if own is not None and own.get("uploaded") is not True and any((mirror / CHECKPOINTS).glob("step-*")):
            aside = mirror.with_name(f".{mirror.name}.{own.get('token')}")
            warnings.warn(
                f"{url} was trained elsewhere since this machine wrote files that it lacks: they are kept in {aside}.",
                stacklevel=2,
            )
            remove_tree(aside)
            mirror.rename(aside)
        if "" in entries:
            raise UserError(f"{url} is a file: give the folder of a run.")
        small = {name: entry for name, entry in entries.items() if _is_small(name, entries)}
        if (n_bytes := sum(entry.n_bytes for entry in small.values())) > _MOST_SMALL_BYTES:
            largest = max(small, key=lambda name: small[name].n_bytes)
            raise UserError(
                f"{url} has {n_bytes:,} bytes of files other than a checkpoint's tensors; a run may have "
                f"{_MOST_SMALL_BYTES:,}. Move other files out of its folder, such as {largest} with "
                f"{small[largest].n_bytes:,} bytes."
            )
        _fetch(remote, entries, mirror, small.__contains__)
        return True


def is_last_here(mirror: Path, session: dict[str, Any]) -> bool:
    """Return whether this machine ran `session`, a remote folder's newest session, or the last session that wrote to
    the folder."""
    own = _json(mirror / OWN_SESSION) or {}
    tokens = {own.get("token"), own.get("claims"), written_by(own)} - {None}
    return not tokens.isdisjoint((session.get("token"), written_by(session)))


def written_by(session: dict[str, Any]) -> Any:
    """Return the token of the last session that wrote to a remote folder, as stated by its newest session."""
    return session.get("after") if session.get("wrote") is False else session.get("token")


def last_session(remote: Remote, entries: dict[str, Entry]) -> dict[str, Any] | None:
    """Return the newest session of a remote folder, with its `number`; None if the folder has no session."""
    numbers = [name.rpartition("/")[2] for name in entries if name.startswith(f"{SESSIONS}/")]
    newest = max((int(one) for one in numbers if one.isascii() and one.isdigit() and len(one) < 16), default=None)
    if newest is None:
        return None
    try:
        found = json.loads(remote.read(f"{SESSIONS}/{newest:08d}", _MOST_JSON_BYTES))
    except (ValueError, RecursionError, FileNotFoundError):
        found = None
    known = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in known if isinstance(value, str | int)} | {"number": newest}


def _fetch(remote: Remote, entries: dict[str, Entry], mirror: Path, is_wanted: Callable[[str], bool]) -> None:
    """Fetch the wanted files that the mirror lacks or has in another version. Delete the mirror's files that the store
    lacks, except hidden files."""
    wanted = {name: entry for name, entry in entries.items() if is_wanted(name)}
    make_folder(mirror)
    check_links(mirror)
    mirror.chmod(0o700)
    have = _json(mirror / VERSIONS) or {}
    for path in sorted(mirror.rglob("*"), reverse=True):  # files before their folders
        name = path.relative_to(mirror).as_posix()
        gone = name not in entries if not path.is_dir() else not any(one.startswith(f"{name}/") for one in entries)
        if gone and not _is_hidden(name):
            remove_tree(path)
    versions = {name: [entry.n_bytes, entry.version] for name, entry in wanted.items()}
    missing = {name for name in wanted if have.get(name) != versions[name] or not (mirror / name).exists()}
    _check_room(remote.url, sum(wanted[name].n_bytes for name in missing), mirror)
    now = {}
    for name, entry in sorted(wanted.items()):
        if name in missing:
            path = mirror / name
            if name.endswith(f"/{SEAL}") and name.startswith(f"{CHECKPOINTS}/"):  # a new checkpoint of this name
                for large in path.parent.glob(f"*{LARGE}"):
                    large.unlink()
            make_folder(path.parent)
            try:
                _download(remote, name, entry.n_bytes, path, mirror)
            except FileNotFoundError:  # deleted meanwhile, with its checkpoint
                continue
        now[name] = versions[name]
    write_whole(mirror / VERSIONS, json.dumps(now), inside=mirror)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _is_small(name: str, entries: dict[str, Entry]) -> bool:
    """Return whether `refresh` fetches a run's file. Hidden files, tensors of checkpoints, and incomplete checkpoints
    are not fetched."""
    if _is_hidden(name):
        return False
    if not name.startswith(f"{CHECKPOINTS}/"):
        return True
    return f"{name.rpartition('/')[0]}/{SEAL}" in entries and not name.endswith(LARGE)


def _check_room(url: str, n_bytes: int, folder: Path) -> None:
    if n_bytes > (free_bytes := shutil.disk_usage(folder).free):
        raise RunError(
            f"{url}: {n_bytes:,} bytes are to be fetched, and {free_bytes:,} are free at {folder}: make room."
        )


def _download(remote: Remote, name: str, n_bytes: int, path: Path, mirror: Path) -> None:
    _check_room(f"{remote.url}/{name}", n_bytes, mirror)
    with replacing(path, inside=mirror, private=True) as file:
        remote.download(name, n_bytes, file)


def fetch_missing(path: Path, n_bytes: int, sha256: str) -> None:
    """Fetch a mirror's missing file of this size and checksum; no effect if the path is in no mirror, the file exists,
    or the store has no such file.
    Raises UserError if the store sends other bytes several times; RunError if the store fails, or the disk is full."""
    mirror = None if path.exists() else mirror_around(path)
    if mirror is None:
        return
    url = url_of(mirror)
    assert url is not None
    remote, name = Remote(url), path.relative_to(mirror).as_posix()
    with _locked(mirror):
        for _ in range(_TRIES):
            if path.exists():  # another process has fetched it
                return
            if (entry := remote.entries().get(name)) is None or entry.n_bytes != n_bytes:
                return  # the reader reports a damaged checkpoint
            try:
                _download(remote, name, n_bytes, path, mirror)
            except FileNotFoundError:
                return
            if sha256_file(path) == sha256:
                return
            path.unlink()
    raise UserError(f"{url}/{name} is damaged: {_TRIES} times its bytes had another sha256 than its manifest has.")


def send(paths: Iterable[Path]) -> None:
    """Upload files that a command has written to a mirror. Ignore other paths, and mirrors in which a process trains,
    because the training process uploads them. Raises UserError if the store refuses access; RunError if it fails."""
    for path in paths:
        mirror = mirror_around(path)
        if mirror is not None and not is_locked(mirror / ".lock"):
            Remote(url_of(mirror) or "").put(path.relative_to(mirror).as_posix(), path.read_bytes())


@dataclass(frozen=True)
class LocalCopy:
    """This machine's copy of a folder or file in a store."""

    url: str
    path: Path
    n_bytes: int
    kept_because: str
    """Reason to keep the copy; empty: the copy may be removed, because the store has everything."""


def local_copies() -> list[LocalCopy]:
    """Return the local copies of folders and files in stores, including the mirrors that `refresh` renamed."""
    found = []
    for path in sorted(cache_root().glob("*/*")):
        url, why = url_of(path), ""
        if path.name.startswith("."):
            if not path.is_dir():  # a lock, or a file's version
                continue
            url, why = url_of(path.with_name(path.name[1:].rpartition(".")[0])), "kept aside, not in the store"
        elif is_locked(path / ".lock"):
            why = "in use"
        elif (own := _json(path / OWN_SESSION)) is not None and own.get("uploaded") is not True:
            why = "not all in the store"
        files = [path] if path.is_file() else path.rglob("*")
        n_bytes = sum(each.lstat().st_size for each in files if not each.is_dir())
        if url is not None:
            found.append(LocalCopy(url, path, n_bytes, why))
    return found


def remove_copy(url: str) -> LocalCopy:
    """Delete the local copy of a folder or file in a store, and return its description. Raises UserError if there is no
    copy, a process trains there, or the store may lack files of the copy."""
    path = mirror_of(url)
    with _locked(path):
        copy = next((each for each in local_copies() if each.path == path), None)
        if copy is None:
            raise UserError(f"{url}: this machine has no copy of it.")
        if copy.kept_because:
            raise UserError(
                f"{url}: its copy is {copy.kept_because}. --resume uploads what the store lacks; if it is not needed, "
                f"delete {path}."
            )
        remove_tree(path)
        path.with_name(f".{path.name}.json").unlink(missing_ok=True)
        _fetched_at.pop(path, None)
    return copy


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(read_regular(path, _MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError, UserError):
        return None
    return found if isinstance(found, dict) else None
