"""Look at the texts in a file or a folder: the text in each file, the reason for each skipped file, and a sample."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gptworks.config import FilesSource
from gptworks.data.sources.anything import KINDS, Files
from gptworks.data.sources.opening import COMPRESSIONS
from gptworks.data.sources.report import Item, Kind, count_files, lines, reasons, table
from gptworks.errors import UserError
from gptworks.files import path_like
from gptworks.terminal import one_line
from gptworks.units import readable

LEAST_BYTES = 1 << 15
"""Minimum bytes of text; less cannot train a language model."""

SAMPLE_BYTES, SAMPLE_PARTS = 1 << 21, 64
"""Bytes of text to read for the sample, and the number of evenly spaced parts in which to read them."""

MOST_BYTES = 1 << 26
"""Bytes of text to read in a file that is not plain text, such as records or an archive. Reading stops at the end of a
unit (see `gptworks.data.sources.base.Unit`). The size of the rest is estimated."""

PASSAGE_BYTES = 600
_LISTED = 5


@dataclass(frozen=True)
class Passage:
    """A part of a text, as training reads it."""

    file: str
    text: str


@dataclass(frozen=True)
class Texts:
    """The texts in a file or a folder that a recipe can train on."""

    path: Path
    """The file or folder that holds the texts."""
    items: tuple[Item, ...]
    """All files, read or skipped, and all inner folders that are not entered."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Sources for a recipe's `data.sources`."""

    @property
    def n_bytes(self) -> int:
        """Bytes of text; an estimate for large archives and files of records."""
        return sum(item.n_bytes for item in self.items)

    @property
    def read(self) -> Counter[str]:
        """Number of files that are read, by ending."""
        return Counter(item.kind for item in self.items if not item.why)

    @property
    def skipped(self) -> Counter[str]:
        """Number of files that are skipped, by ending, and of hidden files and folders that are not entered."""
        return Counter(item.kind for item in self.items if item.why)

    @property
    def n_files(self) -> int:
        """Number of files, read or skipped, without the folders that are not entered."""
        return count_files(self.items)

    @property
    def largest_document_bytes(self) -> int:
        """Bytes of text in the largest file that is a single document; 0 if there is no such file."""
        return max((item.n_bytes for item in self.items if item.n_documents == 1), default=0)

    @property
    def n_documents(self) -> int | None:
        """Number of documents; None if it is not known."""
        numbers = [item.n_documents for item in self.items]
        return None if None in numbers else sum(filter(None, numbers))

    @cached_property
    def sample(self) -> list[str]:
        """All text if it is short; else evenly spaced parts that start at the beginning of a line."""
        if self.n_bytes <= SAMPLE_BYTES:
            return [piece.text for piece in self._source.documents()]
        step = self.n_bytes / SAMPLE_PARTS
        texts, before, position = list[str](), 0, 0.0
        for item in self.items:
            offsets = []
            while position < before + item.n_bytes:
                offsets.append(int(position) - before)
                position += step
            if offsets:
                for part in self._source.excerpts(item, offsets, SAMPLE_BYTES // SAMPLE_PARTS):
                    texts += part
            before += item.n_bytes
        return texts

    def passages(self, n: int = 10, seed: int = 0) -> list[Passage]:
        """Return at most `n` random passages of the texts, as training reads them. Every byte of text is equally
        likely."""
        draw = random.Random(seed)
        read = [item for item in self.items if item.n_bytes]
        found = []
        for item in draw.choices(read, [item.n_bytes for item in read], k=n):
            parts = next(self._source.excerpts(item, [draw.randrange(item.n_bytes)], PASSAGE_BYTES), [])
            found.append(Passage(one_line(item.file), parts[0] if parts else ""))
        return [passage for passage in found if passage.text]

    def table(self) -> list[Kind]:
        """Return the files by kind; see `gptworks.data.sources.report.table`."""
        return table(self.items)

    def lines(self) -> list[str]:
        """Return lines of text: the number of files that are read and their size, and the table of files by kind."""
        size = readable(self.n_bytes, "B")
        of = f"{self.read.total():,} of {self.n_files:,} files"
        return [f"reads       {of}: {size} of text", "", *lines(self.table())]

    @property
    def _source(self) -> Files:
        return Files(FilesSource.model_validate(self.sources[0]))


def look_at(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Texts:
    """Return the texts found in a file, or in a folder and all folders inside it. A bad file does not stop the search.
    Raise a UserError if the path does not exist, or has no text or too little text. `progress` is called with the
    number of files done and the number of all files."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder{path_like(path)} Give a folder of texts, or one file.")
    source = {"type": "files", "path": str(path)}
    files = Files(FilesSource.model_validate(source))
    found = Texts(path, tuple(files.look(MOST_BYTES, progress)), [source])
    why = "".join(f" {line}." for line in reasons(found.items)[:_LISTED])
    if not found.read:
        raise UserError(f"{path} holds no text that can be read: it has {listed(found.skipped)}.{why} {_KINDS}")
    if found.n_bytes < LEAST_BYTES:
        raise UserError(
            f"{path} holds {found.n_bytes:,} bytes of text ({listed(found.read)}), and a model needs {LEAST_BYTES:,} "
            f"or more: give more text, or fine-tune a model that is there with `gptworks tune`.{why}"
        )
    return found


_KINDS = (
    f"Read are {' '.join(ending for ending, kind in KINDS.items() if kind != 'text')} .txt .md and other files of text "
    f"and code, also compressed ({' '.join(COMPRESSIONS)})."
)


def listed(endings: Counter[str]) -> str:
    """Return the numbers of files by ending as text, such as `214 .txt, 3 .md`."""
    words = [f"{n:,} {ending or 'without an ending'}" for ending, n in endings.most_common(_LISTED)]
    more = len(endings) - _LISTED
    return one_line(", ".join(words)) + (f" and {more} kinds more" if more > 0 else "") or "no files"
