"""Sources whose files are documents: text, and the standard library's own sources."""

import io
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptworks.config import TextSource
from gptworks.data.sources.base import Piece, Source, Unit, borders, document, total_size, units_between
from gptworks.data.sources.files import local_files, walk
from gptworks.data.sources.opening import MOST_SOURCE_BYTES, compression, open_file, plain_name, unpacked_size
from gptworks.data.sources.sums import contents
from gptworks.errors import UserError
from gptworks.files import open_regular, read_regular

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Text(Source):
    """UTF-8 text."""

    settings: TextSource
    whole_files = True

    def files(self) -> list[Path]:
        return local_files(self.settings, self.settings.extensions)

    def read(self, file: Path) -> Iterator[Piece]:
        return self.read_unit(Unit(file, 0))

    def units(self) -> list[Unit]:
        found: list[Unit] = []
        for file in self.files():
            with open_regular(file) as stream:
                found += units_between(file, () if compression(file.name) else borders(stream))
        return found

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        n_bytes = unpacked_size(unit.file) if compression(unit.file.name) else None
        with open_file(unit.file) as stream:
            yield from document(stream, unit.file, unit.start, unit.end, n_bytes)

    def unread(self) -> list[Path]:
        """The files in the folder that are not read, by their names."""
        if self.settings.path is None:
            return []
        folder, endings = Path(self.settings.path).expanduser(), self.settings.extensions  # of a file: nothing to walk
        return [
            file
            for file in walk(folder)
            if not file.name.startswith(".") and not plain_name(file.name).endswith(endings)
        ]


class PythonStdlib(Source):
    """The standard library's own sources, there on every machine."""

    whole_files = True

    def files(self) -> list[Path]:
        return stdlib_files()

    def read(self, file: Path) -> Iterator[Piece]:
        content = read_regular(file, MOST_SOURCE_BYTES)
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            return
        yield from document(io.BytesIO(content))

    def check(self) -> None:
        self.files()  # right by construction

    def signature(self) -> list[list[Any]]:
        return contents(self.files())

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
