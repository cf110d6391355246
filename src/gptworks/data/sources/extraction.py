"""Extraction of text from documents, and the sources of HTML, web crawls (WARC and WET) and PDF.

Child processes with limits of time and memory extract the text, since documents may be hostile. The texts, except those
of crawled pages, are kept in the cache, because a document is read several times: by `init`, for the tokenizer, for
shards."""

import base64
import contextlib
import hashlib
import importlib.util
import io
import json
import os
import posixpath
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote
from xml.etree import ElementTree

from gptworks.config.sources import HTMLSource, PDFSource, WARCSource
from gptworks.confined import Confined, Exceeded, Limits, Refused
from gptworks.confined.child import Answer, serve
from gptworks.data.sources.base import PIECES_CHECKED, Piece, Source, Unit, text_document
from gptworks.data.sources.encodings import guessed
from gptworks.data.sources.opening import check_size, compression, open_file, read_bounded
from gptworks.data.sources.records import Skip, refuse, whole_text
from gptworks.errors import RunError, UserError, importing, not_installed, reason_of
from gptworks.files import make_folder, read_regular, sha256_file, write_whole
from gptworks.files.fetch import cache_folder

LIMITS = Limits(seconds=120, n_bytes=2 << 30)
"""Limits of CPU time and memory for one document."""
MOST_BYTES, MOST_PAGE_BYTES = 1 << 28, 1 << 24
"""Maximum bytes of a document, and of an HTML page or a text in a WET file."""
MOST_TEXT_CHARACTERS = 1 << 24
"""Maximum characters of text in a document."""
_WHAT = "such a document"
_MAX_KEPT_BYTES = 1 << 28
_FORM = 1
"""Raise this number when the same document and packages give another text, so that cached texts are not used."""


def extracted(file: Path, kind: str) -> str:
    """Return the text of a document, which may be compressed; `kind` is a key of `PACKAGES`. Raises UserError if the
    document is broken, encrypted or too large, or the package that reads it is missing; OSError if the file cannot be
    read."""
    _check_installed(kind, str(file))
    max_bytes = MOST_PAGE_BYTES if kind == "html" else MOST_BYTES
    check_size(file.stat().st_size, max_bytes, f"{file}: ", _WHAT)
    question = {"kind": kind, "path": str(file.absolute()), "max_bytes": max_bytes}
    return _kept(question, [compression(file.name), max_bytes, sha256_file(file)], str(file))


def extracted_bytes(data: bytes, kind: str, where: str, keep: bool = True) -> str:
    """Return the text of a document, given its bytes, like `extracted`. `where` names the document in errors. `keep`:
    whether to keep the text in the cache."""
    _check_installed(kind, where)
    question = {"kind": kind, "data": base64.b64encode(data).decode("ascii")}
    return _kept(question, [None, None, hashlib.sha256(data).hexdigest()] if keep else None, where)


def _kept(question: dict[str, Any], content: list[Any] | None, where: str) -> str:
    """Return the text from the cache, or ask the child and keep its answer. `content` identifies the document in the
    cache; if it is None, the cache is not used. Raises UserError if there is no text."""
    reply = kept = None
    if content is not None:
        package = PACKAGES[question["kind"]]
        made_from = [_FORM, question["kind"], package, metadata.version(package), *content]
        kept = cache_folder() / "texts" / f"{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()}.json"
        with contextlib.suppress(Exception):  # not in the cache, or damaged there
            tree = json.loads(read_regular(kept, _MAX_KEPT_BYTES))
            reply = str(tree["text"]), str(tree["why"])
    if reply is None:
        reply = _asked(question)
        if kept is not None:
            with contextlib.suppress(OSError, RunError):  # without a cache, the text is taken out again
                make_folder(kept.parent)
                write_whole(kept, json.dumps({"text": reply[0], "why": reply[1]}), private=True)
    if reply[1]:
        raise UserError(f"{where}: {reply[1]}")
    return reply[0]


def missing_packages(kinds: set[str]) -> list[str]:
    """Return the packages that these kinds need and that are not installed, sorted."""
    return sorted({PACKAGES[kind] for kind in kinds if importlib.util.find_spec(PACKAGES[kind]) is None})


def _check_installed(kind: str, where: str) -> None:
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        raise not_installed(PACKAGES[kind], "sources", f"{where}: taking the text out of {kind.upper()}")


@lru_cache(maxsize=1)
def _children() -> Confined:
    setup = Limits(seconds=60, n_bytes=LIMITS.n_bytes)
    return Confined(__name__, None, LIMITS, setup_limits=setup, keep_bytes=1 << 28)


def _asked(question: dict[str, Any]) -> tuple[str, str]:
    """Return the text and "", or "" and the reason why there is no text. Raises UserError if a package is missing."""
    try:
        reply = _children().ask(question)
        if isinstance(reply, dict):
            raise not_installed(PACKAGES[question["kind"]], "sources", f"taking the text out ({reply['missing']})")
        return whole_text(reply).replace("\0", ""), ""
    except Refused as error:
        return "", str(error)
    except Exceeded as error:
        return "", f"taking the text out was stopped: {error} Leave it out, or divide it."


# ------------------------------------------------------------------------------------------------------ sources

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
        if number and getattr(record.raw_stream, "limit", 1):  # `limit` is the number of missing bytes
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


# --------------------------------------------------------------------------------------------- in the child process


def main() -> None:
    """Answer the parent's questions. A question has a document's kind, and its path or bytes; an answer is the text."""
    serve(_prepare)


def _prepare(_: Any) -> Answer:
    os.environ["ALL2MD_DISABLE_NETWORK"] = "1"
    return _answer


def _answer(question: dict[str, Any]) -> str | dict[str, str]:
    kind = question["kind"]
    if "data" in question:
        data = base64.b64decode(question["data"])
    else:
        with open_file(Path(question["path"])) as stream:
            data = read_bounded(stream, question["max_bytes"], "", _WHAT)
    try:
        text = _TAKEN[kind](data)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # libraries raise many types of errors for a broken document
        if isinstance(error, ImportError) or type(error).__name__ == "DependencyError":  # all2md's own error
            return {"missing": reason_of(error)}
        raise UserError(f"a broken {kind.upper()} file ({reason_of(error)}). Get it again.") from None
    if len(text) > MOST_TEXT_CHARACTERS:
        raise UserError(f"more than {MOST_TEXT_CHARACTERS:,} characters of text. Divide it.")
    return text.strip()


def _html(data: bytes) -> str:
    from trafilatura import extract

    page: bytes | str = data
    if b"charset" not in data[:2048].lower() and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            page = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            page = data.decode(guessed(data) or "cp1252", "replace")
    return extract(page) or ""


def _pdf(data: bytes) -> str:
    import logging

    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    pages: list[str] = []
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UserError("it is encrypted. Save it without a password.")
        n_characters = 0
        for page in reader.pages:
            pages.append(page.extract_text().strip())
            n_characters += len(pages[-1])
            if n_characters > MOST_TEXT_CHARACTERS:
                break
    except (UserError, MemoryError):
        raise
    except Exception as error:  # pypdf raises many types of errors for a broken file
        raise UserError(f"page {len(pages) + 1}: a broken PDF ({reason_of(error)}). Get it again.") from None
    return "\n\n".join(page for page in pages if page)


def _plain(data: bytes, kind: str) -> str:
    import all2md
    from all2md.options import PlainTextOptions

    options = PlainTextOptions(max_line_width=None)
    form: Any = kind
    text = all2md.convert(
        data, source_format=form, target_format="plaintext", renderer_options=options, attachment_mode="skip"
    )
    return text.decode("utf-8") if isinstance(text, bytes) else str(text or "")


def _notebook(data: bytes) -> str:
    """Return the cells of a Jupyter notebook as they were written, without their outputs."""
    tree = json.loads(data)
    sheets = [tree, *tree.get("worksheets", ())]  # format 3 has sheets, and `input` in cells of code
    written = (cell.get("source", cell.get("input", "")) for sheet in sheets for cell in sheet.get("cells", ()))
    return "\n\n".join(filter(None, ("".join(one).strip() for one in written)))


def _mail(data: bytes) -> str:
    from email import message_from_bytes

    if not {"from", "date", "subject"} & {name.lower() for name in message_from_bytes(data)}:
        raise UserError("a broken EML file (it has neither sender, date nor subject). Get it again.")
    return _plain(data, "eml")


def _epub(data: bytes) -> str:
    """Return the text of a book's pages, in reading order."""
    with zipfile.ZipFile(io.BytesIO(data)) as book:
        root = ElementTree.fromstring(book.read("META-INF/container.xml")).find(".//{*}rootfile")
        place = "" if root is None else root.get("full-path", "")
        package = ElementTree.fromstring(book.read(place))
        addresses = {one.get("id"): unquote(one.get("href", "")) for one in package.iterfind(".//{*}item")}
        read = [addresses[one.get("idref")] for one in package.iterfind(".//{*}itemref")]
        pages = [book.read(posixpath.join(posixpath.dirname(place), address)) for address in read]
    return "\n\n".join(filter(None, (_plain(page, "html").strip() for page in pages)))


_TAKEN: dict[str, Callable[[bytes], str]] = {
    "html": _html, "pdf": _pdf, "epub": _epub, "eml": _mail, "ipynb": _notebook,
    **{kind: partial(_plain, kind=kind) for kind in ("docx", "odt", "rtf", "pptx", "odp", "xlsx", "ods")},
}  # fmt: skip
PACKAGES = dict.fromkeys(_TAKEN, "all2md") | {"html": "trafilatura", "pdf": "pypdf"}
"""The package that reads each kind of document."""
