"""Sources of text extracted from pages: HTML, web crawls (WARC and WET), PDF."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gptworks.config.sources import HTMLSource, PDFSource, WARCSource
from gptworks.data.sources.base import PIECES_CHECKED, Piece, Source, Unit, text_document
from gptworks.data.sources.extraction import MOST_PAGE_BYTES, extracted, extracted_bytes
from gptworks.data.sources.opening import open_file, read_bounded
from gptworks.data.sources.records import Skip, refuse
from gptworks.errors import UserError, importing, reason_of

_HTML = ("text/html", "application/xhtml+xml")


class HTML(Source):
    """A source of HTML files, each one document."""

    settings: HTMLSource
    endings = (".html", ".htm", ".xhtml")
    size_known = False
    files_checked = PIECES_CHECKED  # not all files, because extraction is slow

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        yield from text_document(extracted(unit.file, "html"))


# ------------------------------------------------------------------------------------------------------ web crawls


class WARC(Source):
    """A source of web crawls. Each HTML page and each text of a WET file is a document; empty ones are left out."""

    settings: WARCSource
    endings = (".warc", ".wet")
    size_known = False

    def read_unit(self, unit: Unit, skip: Skip = refuse) -> Iterator[Piece]:
        with open_file(unit.file) as stream:
            for record in _warc_records(unit.file, stream):
                address = record.rec_headers.get_header("WARC-Target-URI") or "?"
                where = f"{unit.file}, record of {address[:200]!r}"
                is_text = record.rec_type == "conversion"
                if not is_text and not (record.rec_type == "response" and _is_page(record)):
                    continue
                try:
                    data = read_bounded(record.content_stream(), MOST_PAGE_BYTES, f"{where}: ", "a page")
                    text = data.decode("utf-8", "replace") if is_text else extracted_bytes(data, "html", where, False)
                except UserError as error:
                    skip(error)
                    continue
                yield from text_document(text)


def _is_page(record: Any) -> bool:
    of_http = record.http_headers and record.http_headers.get_header("Content-Type")
    kind = record.rec_headers.get_header("WARC-Identified-Payload-Type") or of_http or ""
    return kind.partition(";")[0].strip().lower() in _HTML


def _warc_records(file: Path, stream: BinaryIO) -> Iterator[Any]:
    with importing("warcio", "sources", f"{file}: reading a crawl"):
        from warcio.archiveiterator import ArchiveIterator
        from warcio.exceptions import ArchiveLoadFailed
    number = 0
    try:
        for record in ArchiveIterator(stream):
            yield record
            number += 1
        if number and getattr(record.raw_stream, "limit", 1):  # `limit`: bytes missing; unset if headers are cut off
            raise EOFError("it is cut off")
    except (ArchiveLoadFailed, EOFError) as error:
        raise UserError(f"{file}: broken after {number:,} records ({reason_of(error)}). Get it again.") from None
    if not number:
        raise UserError(f"{file} holds no record: it is empty or not a WARC file. Get it again, or leave it out.")


# ------------------------------------------------------------------------------------------------------------- pdf


class PDF(Source):
    """A source of PDF files, each one document."""

    settings: PDFSource
    endings = (".pdf",)
    size_known = False
    files_checked = PIECES_CHECKED  # not all files, because extraction is slow

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        try:
            text = extracted(unit.file, "pdf")
        except UserError as error:
            if self.settings.broken == "refuse":
                raise UserError(f"{error} To leave out such files, set the source's `broken` to skip.") from None
            warnings.warn(f"left out: {error}", stacklevel=2)
            return
        yield from text_document(text)
