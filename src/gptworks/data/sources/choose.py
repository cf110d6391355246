"""Choose the source for given settings, and read the text of a recipe's sources in order."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gptworks.config.sources import SourceConfig
from gptworks.data.registry import by_settings
from gptworks.data.sources.base import Piece, Source
from gptworks.data.sources.opening import compression
from gptworks.data.sources.text import PlainText

SOURCES = by_settings("gptworks.data.sources", Source)
"""Maps each settings class to its source class."""
AnySource = SourceConfig | Source


def choose_source(settings: AnySource) -> Source:
    """Return the source that the settings describe. A `Source` is returned as it is."""
    return settings if isinstance(settings, Source) else SOURCES[type(settings)](settings)


def iter_documents(sources: Iterable[AnySource]) -> Iterator[Piece]:
    """Yield all text of the sources in pieces, with local files sorted by path. Empty documents are left out. Raises
    UserError if a file is missing or binary, or a record is broken; RunError if a download failed. The message of a
    UserError names the file and the place."""
    for source in sources:
        yield from choose_source(source).documents()


def check_sources(sources: Iterable[AnySource]) -> None:
    """Find mistakes in the sources before long work; see `Source.check`."""
    for source in sources:
        choose_source(source).check()


def count_documents(sources: Iterable[AnySource], limit: int) -> int:
    """Count the documents of the sources, up to `limit`."""
    count = 0
    for source in map(choose_source, sources):
        if source.whole_files:
            count += len(source.files())
        else:
            count += sum(1 for _ in islice((p for p in source.documents() if p.starts_document), limit))
        if count >= limit:
            return limit
    return count


def total_bytes(sources: Iterable[AnySource]) -> int | None:
    """Return the number of bytes that `iter_documents` reads, for a progress bar; None if a file is compressed, or a
    source does not set `whole_files`."""
    chosen = [choose_source(source) for source in sources]
    if not all(one.whole_files for one in chosen):
        return None
    files = [file for one in chosen for file in one.files()]
    return None if any(compression(file.name) for file in files) else sum(file.stat().st_size for file in files)


def source_signature(sources: Iterable[AnySource]) -> list[list[Any]]:
    """Return the signatures of all sources in one list; see `Source.signature`."""
    return [line for source in sources for line in choose_source(source).signature()]


def unread_files(sources: Iterable[AnySource]) -> Counter[str]:
    """Count the files in folders of text sources that no source reads, by the endings of their names.

    A file without an ending counts by its whole name; hidden files do not count.
    """
    chosen = [choose_source(source) for source in sources]
    unread = {file for source in chosen if isinstance(source, PlainText) for file in source.unread()}
    if unread:
        unread -= {file for source in chosen if getattr(source.settings, "path", None) for file in source.files()}
    return Counter(file.suffix or file.name for file in unread)


def unread_links(sources: Iterable[AnySource]) -> list[Path]:
    """Return the links in folders of text sources that lead to folders elsewhere. Those sources do not follow them."""
    chosen = (source for source in map(choose_source, sources) if isinstance(source, PlainText))
    links: list[Path] = []
    for folder in (Path(source.settings.path).expanduser() for source in chosen if source.settings.path is not None):
        paths = (Path(parent, name) for parent, folders, _ in os.walk(folder) for name in folders)
        links += (path for path in paths if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()))
    return links
