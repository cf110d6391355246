"""Sources of code: the files in a folder, or Python's standard library."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptworks.config.sources import LANGUAGES, CodeSource, PythonStdlibSource
from gptworks.data.sources.base import Piece, Source, Unit, text_document
from gptworks.data.sources.files import is_made_here, walk
from gptworks.errors import UserError, importing
from gptworks.files import read_regular

VENDORED = {
    "node_modules", "bower_components", "vendor", "third_party", "thirdparty", "site-packages", "dist-packages", "Pods",
    "venv", ".venv", "virtualenv",
}  # fmt: skip
"""Names of folders with code written by others."""
NEVER_READ = {".git", ".hg", ".svn", "__pycache__", ".tox", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_MOST_FILE_BYTES = 1 << 28
_MOST_IGNORE_BYTES = 1 << 20


class _SourceFiles(Source):
    """A source of code files, each one document. Files that are not UTF-8 text are left out."""

    whole_files = True

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        try:
            text = read_regular(unit.file, _MOST_FILE_BYTES).decode("utf-8")
        except UnicodeDecodeError:
            return
        if "\0" not in text:
            yield from text_document(text)

    def check(self) -> None:
        self.files()  # opens no file: files that are not text are left out later


class PythonStdlib(_SourceFiles):
    """A source of the code of Python's standard library, which comes with Python."""

    settings: PythonStdlibSource

    def files(self) -> list[Path]:
        return stdlib_files()


def stdlib_files() -> list[Path]:
    """Return the source files of Python's standard library without its tests, sorted. Raises UserError if the library's
    folder has no .py files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in walk(root, _NOT_LIBRARY) if file.suffix == ".py"]
    if not files:
        raise UserError(f"source python-stdlib: {root} holds no .py files (a zipped Python?). Use type=text.")
    return sorted(files)


class Code(_SourceFiles):
    """A source of the code in a folder. Links are not followed."""

    settings: CodeSource

    def files(self) -> list[Path]:
        folder = Path(self.settings.path).expanduser()
        if not folder.is_dir():
            raise UserError(f"source {folder}: no such folder (looked from {Path.cwd()}). Give a folder of code.")
        try:
            files = sorted(filter(self._wanted, self.walk()))
        except UserError as error:
            raise UserError(f"{error} Or set the source's `gitignore` to false.") from None
        if not files:
            raise UserError(
                f"source {folder}: no file ends in {' '.join(self._endings)} that is not ignored, vendored or larger "
                f"than {self.settings.largest_file_bytes:,} bytes. Set the source's `languages` or `extensions`."
            )
        return files

    def walk(self) -> Iterator[Path]:
        """Yield the files of all endings below the folder. Leave out links, caches, folders made by gptworks, and, if
        the settings say so, ignored files and vendored code. A folder that cannot be opened is yielded itself. Raises
        UserError if a `.gitignore` cannot be read, or pathspec is not installed."""
        return self._walk(Path(self.settings.path).expanduser(), [])

    @property
    def _endings(self) -> tuple[str, ...]:
        named = self.settings.languages or (() if self.settings.extensions else tuple(LANGUAGES))
        return tuple(ending for one in named for ending in LANGUAGES[one]) + self.settings.extensions

    def _wanted(self, file: Path) -> bool:
        return (
            file.name.endswith(self._endings)
            and file.is_file()
            and file.stat().st_size <= self.settings.largest_file_bytes
        )

    def _walk(self, folder: Path, rules: list[tuple[Path, Any]]) -> Iterator[Path]:
        """Yield the files below a folder, with the exceptions of `walk`. `rules` has each folder above this folder that
        has a `.gitignore`, with the file's patterns."""
        ignored = folder / ".gitignore"
        if self.settings.gitignore and ignored.is_file():
            rules = [*rules, (folder, _rules(ignored))]
        skipped = NEVER_READ if self.settings.vendored else NEVER_READ | VENDORED
        try:
            entries = os.scandir(folder)
        except PermissionError:
            yield folder
            return
        with entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in skipped and not _is_ignored(path, rules, "/") and not is_made_here(path):
                        yield from self._walk(path, rules)
                elif entry.is_file(follow_symlinks=False) and not _is_ignored(path, rules, ""):
                    yield path


def _rules(file: Path) -> Any:
    with importing("pathspec", "sources", f"{file}: respecting it"):
        from pathspec import GitIgnoreSpec
    if file.stat().st_size > _MOST_IGNORE_BYTES:
        raise UserError(
            f"{file} is larger than {_MOST_IGNORE_BYTES:,} bytes: it is not a list of patterns. Move it away."
        )
    try:
        return GitIgnoreSpec.from_lines(read_regular(file, _MOST_IGNORE_BYTES).decode("utf-8", "replace").splitlines())
    except ValueError as error:
        raise UserError(f"{file}: {error}. Correct it.") from None


def _is_ignored(path: Path, rules: list[tuple[Path, Any]], end: str) -> bool:
    """Return whether the last matching rule ignores the path; as in git, rules of nearer folders take precedence."""
    for folder, spec in reversed(rules):
        said = spec.check_file(path.relative_to(folder).as_posix() + end).include
        if said is not None:
            return bool(said)
    return False
