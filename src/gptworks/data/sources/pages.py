"""Sources of text extracted from pages: HTML, web crawls (WARC and WET), PDF."""

import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gptworks.config.sources import HTMLSource, PDFSource, WARCSource
from gptworks.data.sources.base import PIECES_CHECKED, Piece, Source, Unit, text_document
from gptworks.data.sources.opening import open_file
from gptworks.data.sources.records import whole_text
from gptworks.errors import UserError, not_installed

MOST_PAGE_BYTES = 1 << 24
"""Maximum bytes of an HTML page, or of a text in a WET file."""
MOST_PDF_BYTES = 1 << 30
MOST_TEXT_CHARACTERS = 1 << 26
"""Maximum characters of text in a PDF file."""
_HTML = ("text/html", "application/xhtml+xml")


class HTML(Source):
    """A source of HTML files, each one document."""

    settings: HTMLSource
    endings = (".html", ".htm", ".xhtml")
    size_known = False
    files_checked = PIECES_CHECKED  # not all files, because extraction is slow

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        with open_file(unit.file) as stream:
            yield from text_document(whole_text(page_text(_bounded(stream, str(unit.file)), str(unit.file))))


def page_text(html: bytes, where: str) -> str:
    """Return the main text of an HTML page; empty if none is found."""
    try:
        from trafilatura import extract
    except ImportError:
        raise not_installed("trafilatura", "sources", f"{where}: taking the text out of HTML") from None
    return extract(html) or ""


def _bounded(stream: Any, where: str) -> bytes:
    data: bytes = stream.read(MOST_PAGE_BYTES + 1)
    if len(data) > MOST_PAGE_BYTES:
        raise UserError(f"{where}: larger than {MOST_PAGE_BYTES:,} bytes, the limit for a page. Leave it out.")
    return data


# ------------------------------------------------------------------------------------------------------ web crawls


class WARC(Source):
    """A source of web crawls. Each HTML page and each text of a WET file is a document; empty ones are left out."""

    settings: WARCSource
    endings = (".warc", ".wet")
    size_known = False

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        with open_file(unit.file) as stream:
            for record in _warc_records(unit.file, stream):
                address = record.rec_headers.get_header("WARC-Target-URI") or "?"
                where = f"{unit.file}, record of {address[:200]!r}"
                if record.rec_type == "conversion":
                    text = _bounded(record.content_stream(), where).decode("utf-8", errors="replace")
                elif record.rec_type == "response" and _is_page(record):
                    text = page_text(_bounded(record.content_stream(), where), where)
                else:
                    continue
                yield from text_document(whole_text(text))


def _is_page(record: Any) -> bool:
    of_http = record.http_headers and record.http_headers.get_header("Content-Type")
    kind = record.rec_headers.get_header("WARC-Identified-Payload-Type") or of_http or ""
    return kind.partition(";")[0].strip().lower() in _HTML


def _warc_records(file: Path, stream: BinaryIO) -> Iterator[Any]:
    try:
        from warcio.archiveiterator import ArchiveIterator
        from warcio.exceptions import ArchiveLoadFailed
    except ImportError:
        raise not_installed("warcio", "sources", f"{file}: reading a crawl") from None
    number = 0
    try:
        for record in ArchiveIterator(stream):
            yield record
            number += 1
        if number and getattr(record.raw_stream, "limit", 1):  # `limit`: missing bytes; not set if headers are cut off
            raise EOFError("it is cut off")
    except (ArchiveLoadFailed, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file}: broken after {number:,} records ({reason}). Get it again.") from None
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
            text = pdf_text(unit.file)
        except UserError as error:
            if self.settings.broken == "refuse":
                raise UserError(f"{error} To leave out such files, set the source's `broken` to skip.") from None
            warnings.warn(f"left out: {error}", stacklevel=2)
            return
        yield from text_document(whole_text(text))


def pdf_text(file: Path) -> str:
    """Return the text of all pages, separated by empty lines.

    Raises:
        UserError: the PDF is broken, encrypted or too large.
    """
    try:
        import pypdf
    except ImportError:
        raise not_installed("pypdf", "sources", f"{file}: taking the text out of PDF") from None
    with open_file(file) as stream:
        data = stream.read(MOST_PDF_BYTES + 1)
    if len(data) > MOST_PDF_BYTES:
        raise UserError(f"{file}: larger than {MOST_PDF_BYTES:,} bytes, the limit for a PDF file. Divide it.")
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # pypdf's warnings do not name the file
    pages: list[str] = []
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UserError(f"{file} is encrypted. Save it without a password.")
        for page in reader.pages:
            pages.append(page.extract_text().strip())
            if sum(map(len, pages)) > MOST_TEXT_CHARACTERS:
                raise UserError(f"{file}: more than {MOST_TEXT_CHARACTERS:,} characters of text. Divide it.")
    except UserError:
        raise
    except Exception as error:  # pypdf raises many types of errors for a broken file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{file}, page {len(pages) + 1}: a broken PDF ({reason}). Get it again.") from None
    return "\n\n".join(page for page in pages if page)
