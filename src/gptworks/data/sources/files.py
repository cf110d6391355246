"""Find the files of a source: local files, or its downloads."""

import glob
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from gptworks.config.sources import FileSource
from gptworks.data.shards import MANIFEST_FILE, TOKENIZER_FOLDER
from gptworks.data.sources.opening import has_ending
from gptworks.errors import UserError
from gptworks.files import check_inside, is_url, path_like
from gptworks.files.fetch import cache_folder, fetched
from gptworks.files.mirror import fetched_data


def local_files(source: FileSource, endings: tuple[str, ...]) -> list[Path]:
    """Return the files at a source's path, at least one, sorted; in a folder, only those with these endings, also
    compressed. Without a path, fetch and return the source's downloads.

    Raises:
        UserError: no file matches, the source has a `sha256` and its path is not one file, or a link in the folder
            leads out of it.
        RunError: a download failed.
    """
    if source.path is None:
        return [fetched(url, sha256, cache_folder()) for url, sha256 in source.downloads]
    path = fetched_data(source.path) if is_url(source.path) else Path(source.path).expanduser()
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


def _files_of_folder(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    everything = list(walk(folder))
    files = [file for file in everything if has_ending(file.name, endings) and file.is_file()]
    check_links_of(folder, files)
    if not files:
        found = Counter(file.suffix or "(none)" for file in everything).most_common(5)
        listed = ", ".join(f"{suffix} ({count})" for suffix, count in found) or "no files at all"
        raise UserError(
            f"source {folder}: no file ends in {' or '.join(endings)}; found {listed}. "
            f"Give another folder, or for a source of type text or lines list its `extensions`."
        )
    return sorted(files)


def check_links_of(folder: Path, files: Iterable[Path]) -> None:
    """Stop with an error if a file is a link out of the folder.

    Raises:
        UserError: there is such a link; the message says that a pattern follows links.
    """
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
    """Return whether a folder is a dataset, the work on one, or a run."""
    if folder.name.startswith((".partial-", ".writing-")):
        return True
    dataset, run = (MANIFEST_FILE, TOKENIZER_FOLDER), ("recipe.yaml", "checkpoints")
    return any(all((folder / name).exists() for name in names) for names in (dataset, run))


def linked_folders(folder: Path) -> list[Path]:
    """Return the links below a folder that lead to folders outside it. `walk` does not follow them."""
    paths = (Path(parent, name) for parent, folders, _ in os.walk(folder) for name in folders)
    return [path for path in paths if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())]
