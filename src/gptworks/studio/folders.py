"""List the folders and files that the Home tab may read, and the user's own recipes for the Start tab.

The user's own recipes are YAML files in the working folder and in the given folders. Links are not followed.
"""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gptworks.errors import UserError
from gptworks.files import read_text
from gptworks.studio.checking import check_within
from gptworks.units import counted
from gptworks.yaml_files import MAX_BYTES

MOST_ENTRIES = 50_000
"""Maximum number of entries of a folder that are looked at."""
MOST_SHOWN = 300
"""Maximum number of folders, and of files, in an answer."""
MOST_RECIPES = 500
_SECTION = re.compile(r"^(model|tokenizer|data|train|objective|adapter|initialize_from)[ \t]*:", re.MULTILINE)
_LEAST_SECTIONS = 2
"""Minimum number of recipe sections in a YAML file that counts as a recipe, valid or not."""

Tree = dict[str, Any]


def outermost(folders: Sequence[str]) -> list[str]:
    """Return the given folders, except those inside another given folder."""
    return [one for one in folders if not any(other != one and Path(one).is_relative_to(other) for other in folders)]


def entries(folder: str | None, words: str, allowed: Sequence[str]) -> Tree:
    """Return the subfolders and files of a folder, sorted by name.

    Args:
        folder: the folder's path; None for the list of allowed folders or, if there is only one, for its entries.
        words: text that the names of the returned entries contain, in upper or lower case.

    Returns:
        `path` (None for the list of allowed folders); `above`, the folder and the allowed folders around it,
        outermost first; `folders` and `files`, at most `MOST_SHOWN` of each, with their `name`, their `path` (None if
        it is not UTF-8, since JSON cannot represent it) and, for files, `n_bytes`; `n_folders` and `n_files`, the
        numbers of all folders and files found; and `notes` on entries that are left out.

    Raises:
        UserError: the folder is not allowed, or cannot be read.
    """
    places = outermost(allowed)
    if folder is None and len(places) > 1:
        found = [{"name": one, "path": one} for one in places]
        return {"path": None, "above": [], "folders": found, "files": [], "n_folders": len(found), "n_files": 0,
                "notes": []}  # fmt: skip
    given = places[0] if folder is None else folder
    path = Path(os.path.expanduser(given))  # noqa: PTH111 (Path.expanduser raises an error for an unknown user)
    check_within("folder", given, [path], allowed, "use gptworks init")
    path = path.absolute()
    return {"path": _stated(path), "above": _above(path, places), **_sorted(path, words.casefold())}


def _above(path: Path, places: Sequence[str]) -> list[Tree]:
    inside = [one for one in (path, *path.parents) if any(one.is_relative_to(place) for place in places)]
    return [{"name": one.name or str(one), "path": _stated(one)} for one in reversed(inside)]


def _sorted(path: Path, words: str) -> Tree:
    folders, files = dict[str, Tree](), dict[str, Tree]()
    n_seen = n_hidden = n_links = 0
    try:
        with os.scandir(path) as found:
            for entry in found:
                n_seen += 1
                if n_seen > MOST_ENTRIES:
                    break
                n_hidden += (is_hidden := entry.name.startswith("."))
                n_links += (is_link := not is_hidden and entry.is_symlink())
                if is_hidden or is_link or words not in entry.name.casefold():
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders[entry.name] = {"name": entry.name, "path": _stated(entry.path)}
                elif entry.is_file(follow_symlinks=False):
                    files[entry.name] = {"name": entry.name, "path": _stated(entry.path), "n_bytes": _size(entry)}
    except OSError as error:
        raise UserError(f"folder={path} cannot be read: {error.strerror}. Choose another.") from None
    left_out = [counted(n, word) for n, word in ((n_hidden, "hidden name"), (n_links, "link")) if n]
    notes = [f"Not listed: {' and '.join(left_out)}."] if left_out else []
    if n_seen > MOST_ENTRIES:
        notes.append(f"Only {MOST_ENTRIES:,} entries of this folder were looked at.")
    return {
        "folders": _first(folders), "files": _first(files), "n_folders": len(folders), "n_files": len(files),
        "notes": notes,
    }  # fmt: skip


def _first(entries: dict[str, Tree]) -> list[Tree]:
    names = sorted(entries, key=lambda name: (name.casefold(), name))
    return [entries[name] for name in names[:MOST_SHOWN]]


def _size(entry: "os.DirEntry[str]") -> int | None:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:  # the file was deleted
        return None


def _stated(path: str | Path) -> str | None:
    """Return the path as text; None if the path is not UTF-8, which JSON cannot represent."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return None
    return str(path)


# -------------------------------------------------------------------------------------------- a person's recipes


def own_recipes(roots: Sequence[Path]) -> dict[str, Path]:
    """Return the user's own recipes by name. A name is the path relative to the working folder, or the whole path of a
    file outside of it. A requested file is looked up among these names, and never used as a path.

    A recipe next to a run folder of the same name is left out: the run's own recipe can be used instead.
    """
    here = Path.cwd()
    folders = dict.fromkeys(Path(os.path.realpath(one)) for one in (here, *roots))
    found = dict[str, Path]()
    for file in itertools.chain.from_iterable(map(_recipes, folders)):
        if len(found) == MOST_RECIPES:
            break
        found[(file.relative_to(here) if file.is_relative_to(here) else file).as_posix()] = file
    return found


def _recipes(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(
                entry.name
                for entry in itertools.islice(entries, MOST_ENTRIES)
                if entry.name.endswith((".yaml", ".yml")) and entry.is_file(follow_symlinks=False)
            )
    except OSError:  # the folder does not exist, or cannot be read
        return
    for name in names:
        file = folder / name
        if name != "recipe.yaml" and not (file.with_suffix("") / "recipe.yaml").is_file() and _is_recipe(file):
            yield file


def _is_recipe(file: Path) -> bool:
    try:
        file.name.encode()
        text = read_text(file, MAX_BYTES)
    except (UserError, OSError, UnicodeEncodeError):  # the file cannot be read, or no request can state its name
        return False
    return len({*_SECTION.findall(text)}) >= _LEAST_SECTIONS
