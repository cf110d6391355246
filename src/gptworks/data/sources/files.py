"""The files of a source: those that its path names, or its download."""

import glob
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from filelock import FileLock

from gptworks.config.sources import FileSource
from gptworks.data.sources.opening import plain_name
from gptworks.errors import RunError, UserError
from gptworks.files import check_inside, make_folder, sha256_file, sync

_CHUNK_BYTES = 1 << 20


def local_files(source: FileSource, endings: tuple[str, ...]) -> list[Path]:
    """The files that a source's path names, at least one, sorted; those of a folder by their endings, compressed ones
    too. Or its download, which is fetched first.

    Raises:
        UserError: there are none.
        RunError: the download failed.
    """
    if source.path is None:
        return [_download(url, sha256) for url, sha256 in source.downloads]
    path = Path(source.path).expanduser()
    if path.is_file():
        return [path]
    if source.sha256:
        raise UserError(f"source {source.path}: sha256 is that of one file, and there is no file here. Check the path.")
    if path.is_dir():
        return _files_of_folder(path, endings)
    matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
    files = [file for file in matches if file.is_file()]
    if not files:
        kind = "no file matches this pattern" if glob.has_magic(source.path) else "no such file or folder"
        raise UserError(f"source {source.path}: {kind} (looked from {Path.cwd()}). Check the path.")
    return sorted(files)


def _files_of_folder(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    everything = list(walk(folder))
    files = [file for file in everything if plain_name(file.name).endswith(endings) and file.is_file()]
    for file in files:
        if file.is_symlink():
            check_inside(file, folder)
    if not files:
        found = Counter(file.suffix or "(none)" for file in everything).most_common(5)
        listed = ", ".join(f"{suffix} ({count})" for suffix, count in found) or "no files at all"
        raise UserError(
            f"source {folder}: no file ends in {' or '.join(endings)}; found {listed}. "
            f"Give another folder, or for a source of type text list its `extensions`."
        )
    return sorted(files)


def walk(folder: Path, skipped_folders: Collection[str] = ()) -> Iterator[Path]:
    """Every file below a folder."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped_folders]
        yield from (Path(parent, name) for name in names)


def cache_folder() -> Path:
    """Where downloads are kept: $GPTWORKS_CACHE, else $XDG_CACHE_HOME/gptworks, else ~/.cache/gptworks."""
    if chosen := os.environ.get("GPTWORKS_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gptworks"


def _download(url: str, sha256: str) -> Path:
    """The file at `url`, fetched once. It gets its name only when its bytes are the right ones; what a download that
    broke off has fetched is kept, and the next one goes on from there."""
    file = cache_folder() / f"{sha256[:16]}-{Path(urlsplit(url).path).name or 'download'}"
    if file.exists():
        return file
    make_folder(file.parent)
    partial = file.with_name(f".{file.name}.partial")
    with FileLock(file.with_name(f".{file.name}.lock")):
        if file.exists():  # another process was faster
            return file
        try:
            _fetch(url, partial)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            kept = partial.stat().st_size if partial.exists() else 0
            fix = "Try again" + (f", which goes on after the {kept:,} bytes that came" if kept else "")
            raise RunError(
                f"{url} could not be downloaded: {error}. {fix}, or fetch it yourself and set `path` to it."
            ) from error
        if (actual := sha256_file(partial)) != sha256:
            partial.unlink()
            raise UserError(
                f"{url}: the sha256 of what came is {actual} and the recipe states {sha256}. "
                f"Nothing was kept. It changed or the download was altered; correct the recipe if you trust it."
            )
        sync(partial)
        partial.replace(file)
    return file


def _fetch(url: str, partial: Path) -> None:
    """Download what a file lacks; all of it where the server gives no parts."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:  # it is whole, or of another file
            return
        raise
    goes_on = have and response.status == http.HTTPStatus.PARTIAL_CONTENT
    with response, partial.open("ab" if goes_on else "wb") as file:
        shutil.copyfileobj(response, file, _CHUNK_BYTES)
        if getattr(response, "length", None):
            raise ConnectionError(f"the connection closed {response.length:,} bytes before the end")
