"""The files of a source: those that its path names, or its download."""

import glob
import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from gptworks.config.data import FileSource
from gptworks.errors import RunError, UserError

_CHUNK_BYTES = 1 << 20


def local_files(source: FileSource, endings: tuple[str, ...]) -> list[Path]:
    """The files that a source's path names, at least one, sorted; those of a folder by their endings. Or its download,
    which is fetched first.

    Raises:
        UserError: there are none.
        RunError: the download failed.
    """
    if source.path is None:
        assert source.url and source.sha256
        return [_download(source.url, source.sha256)]
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
    files = [file for file in everything if file.name.endswith(endings) and file.is_file()]
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
    """The file at `url`, fetched once. It gets its name only when its bytes are the right ones."""
    file = cache_folder() / f"{sha256[:16]}-{Path(urlsplit(url).path).name or 'download'}"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".partial-", delete=False) as aside:
        partial = Path(aside.name)
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                while chunk := response.read(_CHUNK_BYTES):
                    aside.write(chunk)
                    digest.update(chunk)
            aside.flush()
            os.fsync(aside.fileno())
            if digest.hexdigest() != sha256:
                raise UserError(
                    f"{url}: the sha256 of what came is {digest.hexdigest()} and the recipe states {sha256}. "
                    f"Nothing was kept. It changed or the download was altered; correct the recipe if you trust it."
                )
            partial.replace(file)
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            fix = "Try again, or fetch it yourself and set `path` to it."
            raise RunError(f"{url} could not be downloaded: {error}. {fix}") from error
        finally:
            partial.unlink(missing_ok=True)
    return file
