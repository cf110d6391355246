"""The sources of plain text: UTF-8 files that hold one document each, or documents of a given number of lines."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from gptworks.config.sources import LinesSource, TextSource
from gptworks.data.sources.base import (
    UNIT_BYTES,
    Piece,
    Source,
    Unit,
    borders,
    decoded,
    document,
    text_document,
    units_between,
)
from gptworks.data.sources.files import local_files, walk
from gptworks.data.sources.opening import compression, has_ending, open_file, unpacked_size
from gptworks.data.sources.records import MOST_LINE_BYTES, line_borders, read_lines
from gptworks.files import open_regular


class PlainText(Source):
    """A source of UTF-8 text files."""

    def files(self) -> list[Path]:
        return local_files(self.settings, self.settings.extensions)

    def unread(self) -> list[Path]:
        """Return the files in the folder that are not read because of their names, without hidden ones; an empty list
        if the path is not a folder."""
        if self.settings.path is None:
            return []
        endings = self.settings.extensions
        files = walk(Path(self.settings.path).expanduser())  # yields nothing if the path is a file
        return [file for file in files if not file.name.startswith(".") and not has_ending(file.name, endings)]


class Text(PlainText):
    """A source of UTF-8 text files, each one document."""

    settings: TextSource
    whole_files = True

    def units_of(self, file: Path) -> Iterable[Unit]:
        with open_regular(file) as stream:
            yield from units_between(file, () if compression(file.name) else borders(stream))

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        n_bytes = unpacked_size(unit.file) if compression(unit.file.name) else None
        with open_file(unit.file) as stream:
            yield from document(stream, unit.file, unit.start, unit.end, n_bytes)


class Lines(PlainText):
    """A source of UTF-8 text files with `settings.lines` lines per document; a file's last document may have fewer."""

    settings: LinesSource

    def units_of(self, file: Path) -> Iterable[Unit]:
        return units_between(file, line_borders(file) if self.settings.lines == 1 else self._borders(file))

    def _borders(self, file: Path) -> Iterator[int]:
        """Yield offsets at which documents begin, about UNIT_BYTES apart; none in a compressed file."""
        if compression(file.name):
            return
        sizes = (len(line) for _, line in read_lines(file, MOST_LINE_BYTES))
        last = at = 0
        while size := sum(islice(sizes, self.settings.lines)):
            if at - last >= UNIT_BYTES:
                yield (last := at)
            at += size

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        offset_bytes = unit.start
        lines = (line for _, line in read_lines(unit.file, MOST_LINE_BYTES, unit.start, unit.end))
        while data := b"".join(islice(lines, self.settings.lines)):
            yield from text_document(decoded(data, offset_bytes, unit.file))
            offset_bytes += len(data)
