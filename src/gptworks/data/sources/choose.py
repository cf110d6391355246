"""The text of a recipe's sources, in the order given."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gptworks.config import SourceConfig
from gptworks.data.sources.archives import Archive
from gptworks.data.sources.base import Piece, Source, total_size
from gptworks.data.sources.code import Code
from gptworks.data.sources.delimited import CSV
from gptworks.data.sources.files import linked_folders
from gptworks.data.sources.json_lists import JSON
from gptworks.data.sources.opening import compression
from gptworks.data.sources.pages import HTML, PDF, WARC
from gptworks.data.sources.records import JSONL, HuggingFace, Parquet, Records
from gptworks.data.sources.text import PythonStdlib, Text

SOURCES: dict[str, type[Source]] = {
    "python-stdlib": PythonStdlib,
    "text": Text,
    "jsonl": JSONL,
    "json": JSON,
    "csv": CSV,
    "parquet": Parquet,
    "archive": Archive,
    "html": HTML,
    "warc": WARC,
    "pdf": PDF,
    "code": Code,
    "huggingface": HuggingFace,
    "conversations": Records,
    "preferences": Records,
}
"""By `type`."""


def choose_source(settings: SourceConfig | Source) -> Source:
    """The source that the settings describe; a source itself."""
    return settings if isinstance(settings, Source) else SOURCES[settings.type](settings)


def iter_documents(sources: Iterable[SourceConfig | Source]) -> Iterator[Piece]:
    """All the text of the sources, in the order given and files sorted by path. Empty documents are left out.

    Raises:
        UserError: a missing or binary file, a broken record. The message names the file and the place.
        RunError: a download failed.
    """
    for source in sources:
        yield from choose_source(source).documents()


def check_sources(sources: Iterable[SourceConfig]) -> None:
    """Find mistakes before long work: see `Source.check`."""
    for source in sources:
        choose_source(source).check()


def count_documents(sources: Iterable[SourceConfig | Source], limit: int) -> int:
    """The number of documents, counted no further than `limit`."""
    count = 0
    for source in map(choose_source, sources):
        if source.whole_files:
            count += len(source.files())
        else:
            count += sum(1 for _ in islice((p for p in source.documents() if p.starts_document), limit))
        if count >= limit:
            return limit
    return count


def total_bytes(sources: Iterable[SourceConfig | Source]) -> int | None:
    """Bytes of text that `iter_documents` reads, for a progress bar; None where they are known only after reading."""
    chosen = [choose_source(source) for source in sources]
    if not all(one.whole_files for one in chosen):
        return None
    files = [file for one in chosen for file in one.files()]
    return None if any(compression(file.name) for file in files) else total_size(files)


def source_signature(sources: Iterable[SourceConfig]) -> list[list[Any]]:
    """What decides the text of the sources: see `Source.signature`."""
    return [line for source in sources for line in choose_source(source).signature()]


def unread_files(sources: Iterable[SourceConfig]) -> Counter[str]:
    """How many files of each ending are in the folders of texts and are read by no source."""
    chosen = [choose_source(source) for source in sources]
    unread = {file for source in chosen if isinstance(source, Text) for file in source.unread()}
    if unread:
        unread -= {file for source in chosen if getattr(source.settings, "path", None) for file in source.files()}
    return Counter(file.suffix or file.name for file in unread)


def unread_links(sources: Iterable[SourceConfig]) -> list[Path]:
    """The links to folders elsewhere in the folders of texts, which no source reads."""
    chosen = [choose_source(source) for source in sources]
    paths = [source.settings.path for source in chosen if isinstance(source, Text)]
    folders = [Path(path).expanduser() for path in paths if path is not None]
    return [link for folder in folders if folder.is_dir() for link in linked_folders(folder)]
