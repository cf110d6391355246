"""The recipes that ship with the package. Commands accept their names if no file or folder has that name."""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe's file and its first comments."""

    name: str
    path: Path
    summary: str
    time: str | None
    """Training time and the processor that it was measured on; None: unknown."""


def shipped_paths() -> dict[str, Path]:
    """The file of every shipped recipe by its name, such as `demo` or `miniature/finetune`."""
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in sorted(FOLDER.rglob("*.yaml"))}


def shipped_recipes() -> list[ShippedRecipe]:
    """All shipped recipes. A file's first line is its summary; a comment `Time: …` states the training time."""
    found = []
    for name, path in shipped_paths().items():
        summary, *more = path.read_text(encoding="utf-8").splitlines()
        time = next((line.removeprefix("# Time: ") for line in more if line.startswith("# Time: ")), None)
        found.append(ShippedRecipe(name, path, summary.removeprefix("# "), time and time.rstrip(".")))
    return found
