"""Sources whose files are documents: text, and the standard library's own sources."""

import io
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptworks.config import TextSource
from gptworks.data.sources.base import Piece, Source, document, stamps, total_size
from gptworks.data.sources.files import local_files, walk
from gptworks.errors import UserError

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Text(Source):
    """UTF-8 text."""

    settings: TextSource
    whole_files = True

    def files(self) -> list[Path]:
        return local_files(self.settings, self.settings.extensions)

    def read(self, file: Path) -> Iterator[Piece]:
        with file.open("rb") as stream:
            yield from document(stream, file)

    def unread(self) -> list[Path]:
        """The files in the folder that are not read, by their names."""
        if self.settings.path is None:
            return []
        folder, endings = Path(self.settings.path).expanduser(), self.settings.extensions  # of a file: nothing to walk
        return [file for file in walk(folder) if not file.name.startswith(".") and not file.name.endswith(endings)]


class PythonStdlib(Source):
    """The standard library's own sources, there on every machine."""

    whole_files = True

    def files(self) -> list[Path]:
        return stdlib_files()

    def read(self, file: Path) -> Iterator[Piece]:
        content = file.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            return
        yield from document(io.BytesIO(content))

    def check(self) -> None:
        self.files()  # right by construction

    def signature(self) -> list[list[Any]]:
        return stamps(self.files())

    def size_bytes(self) -> int:
        return total_size(self.files())


def stdlib_files() -> list[Path]:
    """The standard library's own sources, tests left out, sorted.

    Raises:
        UserError: there are none.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in walk(root, _NOT_LIBRARY) if file.suffix == ".py"]
    if not files:
        raise UserError(f"source python-stdlib: {root} holds no .py files (a zipped Python?). Use type=text.")
    return sorted(files)
