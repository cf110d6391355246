"""Sources of UTF-8 text files, in which a document is a whole file or a given number of lines; and the words of
subtitles."""

import re
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
from gptworks.data.sources.encodings import find_encoding, open_text
from gptworks.data.sources.files import local_files, walk
from gptworks.data.sources.opening import compression, has_ending, open_file, read_bounded, unpacked_size
from gptworks.data.sources.records import MOST_LINE_BYTES, line_borders, read_lines
from gptworks.errors import UserError
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
        """Yield byte offsets at which documents begin, about UNIT_BYTES apart; none in a compressed file."""
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


MOST_SUBTITLE_BYTES = 1 << 24
_TIMES = re.compile(r"(\d+:)?\d+:\d+[.,]\d+ +--> ")
_MARKUP = re.compile(r"<[^<>\n]{0,100}>|\{\\[^{}\n]{0,100}\}")


def spoken_text(file: Path) -> str:
    """Return the words of subtitles (SubRip or WebVTT), without numbers, times and markup. Raises UserError if the file
    is too large, is not text, or has no subtitles."""
    with open_text(file, find_encoding(file).name) as stream:
        data = read_bounded(stream, MOST_SUBTITLE_BYTES, f"{file}: ", "subtitles")
    spoken: list[str] = []
    for block in re.split(r"\n[ \t]*\n", data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")):
        lines = block.strip("\n").split("\n")
        at = next((n for n, line in enumerate(lines[:2]) if _TIMES.match(line)), None)
        if at is not None:
            spoken += lines[at + 1 :]
    if not spoken:
        raise UserError(f"{file}: no line has the times of subtitles (00:01:02,345 --> …). Get it again.")
    return "\n".join(filter(None, (_MARKUP.sub("", line).strip() for line in spoken)))
