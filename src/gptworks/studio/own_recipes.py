"""Find the recipes that a person wrote: YAML files in the working folder and in the given folders.

A requested file is looked up among those found, and never used as a path. Links are not followed.
"""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptworks.errors import UserError
from gptworks.files import read_text
from gptworks.yaml_files import MAX_BYTES

MOST_ENTRIES = 20_000
"""Maximum number of entries of a folder that are looked at."""
MOST_RECIPES = 500
_SECTION = re.compile(r"^(model|tokenizer|data|train|objective|adapter|initialize_from)[ \t]*:", re.MULTILINE)
_LEAST_SECTIONS = 2
"""Minimum number of a recipe's sections in a YAML file for it to count as a recipe, valid or not."""


def own_recipes(roots: Sequence[Path]) -> dict[str, Path]:
    """Return the recipes by name: the path relative to the working folder, or the whole path for files outside of it.

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
    except (UserError, OSError, UnicodeEncodeError):  # it cannot be read, or no request can state its name
        return False
    return len({*_SECTION.findall(text)}) >= _LEAST_SECTIONS
