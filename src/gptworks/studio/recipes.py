"""Read the recipes of the listed runs in a process with limits, since a run folder may come from anyone.

    Recipes.of(path) ──► confined process: `load_recipe(path)` ──► plain values ──► Recipe

The process is reused. If a recipe ends the process (by taking too much time or memory, or by a library's fault), a new
process replaces it and only that recipe is rejected. Recipes and rejections are cached until the recipe's file changes.
"""

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gptworks.config import Recipe
from gptworks.confined import Abandoned, Confined, Exceeded, Limits, Refused, Task
from gptworks.confined.child import serve
from gptworks.errors import UserError
from gptworks.files import Stamp, stamp
from gptworks.recipe import load_recipe

MOST_CHARACTERS = 1 << 19
"""Maximum length of a recipe with all its settings as JSON. A typical recipe has 3,000 characters."""
MOST_KEPT = 4_000
"""Maximum number of cached recipes and rejections."""
_WAIT_SECONDS = 20.0
"""Maximum elapsed seconds for reading a recipe. The limit of CPU time does not count waiting for a disk."""

_SHARED = Confined(
    "gptworks.studio.recipes",
    None,
    Limits(seconds=1.0, n_bytes=256 << 20),
    setup_limits=Limits(seconds=60.0, n_bytes=1 << 30),
)


def main() -> None:
    """Answer the parent's questions. A question has a recipe's `path` relative to `cwd`, the answer its settings."""
    serve(lambda setup: _values)


def _values(question: Any) -> Any:
    os.chdir(question["cwd"])
    recipe = load_recipe(str(question["path"]))
    if (n := len(recipe.model_dump_json())) > MOST_CHARACTERS:
        raise UserError(f"the recipe comes to {n:,} characters with all its settings, and the studio reads "
                        f"{MOST_CHARACTERS:,}.")  # fmt: skip
    return recipe.model_dump(mode="json")


class Recipes:
    """Reads recipes one at a time, and caches each until its file changes. Thread-safe."""

    def __init__(self, process: Confined | None = None) -> None:
        self._process = process or _SHARED
        self._known: OrderedDict[Path, tuple[Stamp, Recipe | str]] = OrderedDict()
        """The stamp of each recipe's file, and the recipe or the reason for rejecting it, by path."""
        self._lock = threading.Lock()

    def of(self, path: Path) -> Recipe:
        """Return the recipe in a run folder or a file.

        Raises:
            UserError: the recipe is missing or invalid, or takes more time or memory than a recipe may.
        """
        found = self._find(path) or self._read(path)
        if isinstance(found, str):
            raise UserError(found)
        return found

    def knows(self, path: Path) -> bool:
        """Return whether the recipe has been read or rejected since its file last changed.

        Raises:
            UserError: the file does not exist.
        """
        return self._find(path) is not None

    def _find(self, path: Path) -> Recipe | str | None:
        known, found = self._known.get(path, (None, None))
        return found if known is not None and known == _stamp(path) else None

    def _read(self, path: Path) -> Recipe | str:
        with self._lock:
            if (found := self._find(path)) is not None:  # another thread has read the recipe
                return found
            known, task, question = _stamp(path), Task(), {"path": str(path), "cwd": str(Path.cwd())}
            timer = threading.Timer(_WAIT_SECONDS, task.abandon)
            timer.daemon = True
            timer.start()
            try:
                found = Recipe.model_validate(self._process.ask(question, task))
            except Refused as error:
                found = str(error)
            except Exceeded as error:
                found = f"the recipe is refused: {error} Reading a recipe takes far less: give it fewer settings."
            except ValidationError as error:  # the process's answer is not a valid recipe
                found = f"the recipe is refused: {error.errors()[0]['msg']}"
            except Abandoned:  # by the timer; not cached, since the disk may be faster next time
                raise UserError(f"the recipe was not read within {_WAIT_SECONDS:g} seconds.") from None
            finally:
                timer.cancel()
            self._known[path] = known, found
            while len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
            return found


def _stamp(path: Path) -> Stamp:
    found = stamp(path if path.is_file() else path / "recipe.yaml")
    if found is None:
        raise UserError(f"{path} has no recipe to read.")
    return found
