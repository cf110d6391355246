"""The recipes that come with the package. A command takes one by its name if no file or folder has that name."""

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe's file, and what its first comments say."""

    name: str
    path: Path
    summary: str
    time: str | None
    """How long training takes, and where that was measured; None: not known."""


def shipped_paths() -> dict[str, Path]:
    """The file of every shipped recipe by its name, such as `demo` or `miniature/finetune`."""
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in sorted(FOLDER.rglob("*.yaml"))}


def shipped_recipes() -> list[ShippedRecipe]:
    """All of them. A file's first line is its summary; a comment `Time: …` says how long it trains."""
    found = []
    for name, path in shipped_paths().items():
        summary, *more = path.read_text(encoding="utf-8").splitlines()
        time = next((line.removeprefix("# Time: ") for line in more if line.startswith("# Time: ")), None)
        found.append(ShippedRecipe(name, path, summary.removeprefix("# "), time and time.rstrip(".")))
    return found
