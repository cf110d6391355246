"""Files of 30 kinds with given paragraphs, written by the standard library (Parquet by pyarrow): each is good, in
another encoding, broken, empty, huge, or cannot be opened."""

import csv
import gzip
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from email.message import EmailMessage
from html import escape
from pathlib import Path
from typing import Any

PARAGRAPHS = [
    "The keeper of the lighthouse counted the ships & wrote them down, <one> by one, in a book of her own.",
    "Die Größe der Häuser überraschte die Gäste, die spät am Abend über die Brücke kamen; süß war der Wein.",
    "When the fog came she rang the bell until the last boat had found the harbour and its people were safe.",
]
_XML = '<?xml version="1.0" encoding="{}" standalone="yes"?>\n'
_OFFICE = "http://schemas.openxmlformats.org"
_LINKS = f"{_OFFICE}/officeDocument/2006/relationships"
_OPEN = "urn:oasis:names:tc:opendocument:xmlns"


def _zip(files: dict[str, str], encoding: str, mimetype: str = "") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        if mimetype:
            archive.writestr("mimetype", mimetype, compress_type=zipfile.ZIP_STORED)
        for name, text in files.items():
            archive.writestr(name, (_XML.format(encoding) + text).encode(encoding))
    return buffer.getvalue()


def _links(**targets: str) -> str:
    links = "".join(
        f'<Relationship Id="{name}" Type="{_LINKS}/{target.split()[0]}" Target="{target.split()[1]}"/>'
        for name, target in targets.items()
    )
    return f'<Relationships xmlns="{_OFFICE}/package/2006/relationships">{links}</Relationships>'


def _office(main: str, parts: dict[str, tuple[str, str]], encoding: str) -> bytes:
    """Return an Office Open XML file, given the content type and the XML of each part; links have no content type."""
    kind = "application/vnd.openxmlformats"
    types = "".join(
        f'<Override PartName="/{name}" ContentType="{kind}-officedocument.{what}+xml"/>'
        for name, (what, _) in parts.items() if what
    )  # fmt: skip
    default = f'<Default Extension="rels" ContentType="{kind}-package.relationships+xml"/>'
    content = f'<Types xmlns="{_OFFICE}/package/2006/content-types">{default}{types}</Types>'
    files = {"[Content_Types].xml": content, "_rels/.rels": _links(r1=f"officeDocument {main}")}
    return _zip(files | {name: text for name, (_, text) in parts.items()}, encoding)


def docx(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    body = "".join(f"<w:p><w:r><w:t>{escape(one)}</w:t></w:r></w:p>" for one in paragraphs)
    text = f'<w:document xmlns:w="{_OFFICE}/wordprocessingml/2006/main"><w:body>{body}</w:body></w:document>'
    return _office("word/document.xml", {"word/document.xml": ("wordprocessingml.document.main", text)}, encoding)


def pptx(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    names = f'xmlns:a="{_OFFICE}/drawingml/2006/main" xmlns:r="{_LINKS}" xmlns:p="{_OFFICE}/presentationml/2006/main"'
    numbers = range(1, len(paragraphs) + 1)
    ids = "".join(f'<p:sldId id="{256 + n}" r:id="r{n}"/>' for n in numbers)
    sizes = '<p:sldSz cx="9144000" cy="6858000"/><p:notesSz cx="6858000" cy="9144000"/>'
    show = f"<p:presentation {names}><p:sldIdLst>{ids}</p:sldIdLst>{sizes}</p:presentation>"
    parts = {"ppt/presentation.xml": ("presentationml.presentation.main", show)}
    links = _links(**{f"r{n}": f"slide slides/slide{n}.xml" for n in numbers})
    parts["ppt/_rels/presentation.xml.rels"] = ("", links)
    head = '<p:nvGrpSpPr><p:cNvPr id="1" name=""/><p:cNvGrpSpPr/><p:nvPr/></p:nvGrpSpPr><p:grpSpPr/>'
    box = '<p:nvSpPr><p:cNvPr id="2" name="Text"/><p:cNvSpPr/><p:nvPr/></p:nvSpPr><p:spPr/>'
    for n, one in zip(numbers, paragraphs, strict=True):
        said = f"<p:txBody><a:bodyPr/><a:p><a:r><a:t>{escape(one)}</a:t></a:r></a:p></p:txBody>"
        tree = f"<p:cSld><p:spTree>{head}<p:sp>{box}{said}</p:sp></p:spTree></p:cSld>"
        parts[f"ppt/slides/slide{n}.xml"] = ("presentationml.slide", f"<p:sld {names}>{tree}</p:sld>")
    return _office("ppt/presentation.xml", parts, encoding)


def xlsx(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    rows = "".join(
        f'<row r="{n}"><c r="A{n}"><v>{n}</v></c><c r="B{n}" t="inlineStr"><is><t>{escape(one)}</t></is></c></row>'
        for n, one in enumerate(paragraphs, 1)
    )
    main = f'xmlns="{_OFFICE}/spreadsheetml/2006/main"'
    sheets = '<sheets><sheet name="Sheet" sheetId="1" r:id="r1"/></sheets>'
    book = f'<workbook {main} xmlns:r="{_LINKS}">{sheets}</workbook>'
    sheet = f"<worksheet {main}><sheetData>{rows}</sheetData></worksheet>"
    parts = {
        "xl/workbook.xml": ("spreadsheetml.sheet.main", book),
        "xl/_rels/workbook.xml.rels": ("", _links(r1="worksheet worksheets/sheet1.xml")),
        "xl/worksheets/sheet1.xml": ("spreadsheetml.worksheet", sheet),
    }
    return _office("xl/workbook.xml", parts, encoding)


def _open_document(kind: str, body: str, encoding: str) -> bytes:
    names = " ".join(f'xmlns:{one}="{_OPEN}:{one}:1.0"' for one in ("office", "text", "table", "drawing"))
    names += f' xmlns:draw="{_OPEN}:drawing:1.0"'
    document = f'<office:document-content {names} office:version="1.2"><office:body>{body}</office:body>'
    mimetype = f"application/vnd.oasis.opendocument.{kind}"
    entries = "".join(
        f'<manifest:file-entry manifest:full-path="{path}" manifest:media-type="{what}"/>'
        for path, what in (("/", mimetype), ("content.xml", "text/xml"))
    )
    manifest = f'<manifest:manifest xmlns:manifest="{_OPEN}:manifest:1.0">{entries}</manifest:manifest>'
    files = {"content.xml": f"{document}</office:document-content>", "META-INF/manifest.xml": manifest}
    return _zip(files, encoding, mimetype)


def odt(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    body = "".join(f"<text:p>{escape(one)}</text:p>" for one in paragraphs)
    return _open_document("text", f"<office:text>{body}</office:text>", encoding)


def ods(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    cell = '<table:table-cell office:value-type="string"><text:p>{}</text:p></table:table-cell>'
    rows = "".join(f"<table:table-row>{cell.format(escape(one))}</table:table-row>" for one in paragraphs)
    table = f'<table:table table:name="Sheet">{rows}</table:table>'
    return _open_document("spreadsheet", f"<office:spreadsheet>{table}</office:spreadsheet>", encoding)


def odp(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    box = "<draw:frame><draw:text-box><text:p>{}</text:p></draw:text-box></draw:frame>"
    pages = "".join(f"<draw:page>{box.format(escape(one))}</draw:page>" for one in paragraphs)
    return _open_document("presentation", f"<office:presentation>{pages}</office:presentation>", encoding)


def epub(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    """Return a book with a page for each paragraph; the order in which they are read is not that of their names."""
    numbers = [*range(len(paragraphs), 0, -1)]
    listed = "".join(f'<item id="c{n}" href="c%20{n}.xhtml" media-type="application/xhtml+xml"/>' for n in range(1, 4))
    order = "".join(f'<itemref idref="c{n}"/>' for n in numbers)
    package = f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{listed}</manifest><spine>{order}</spine>'
    root = '<rootfile full-path="text/content.opf" media-type="application/oebps-package+xml"/>'
    names = 'xmlns="urn:oasis:names:tc:opendocument:xmlns:container"'
    files = {
        "META-INF/container.xml": f'<container version="1.0" {names}><rootfiles>{root}</rootfiles></container>',
        "text/content.opf": f"{package}</package>",
    }
    for n, one in zip(numbers, paragraphs, strict=True):
        page = f"<head><title>{n}</title></head><body><p>{escape(one)}</p></body>"
        files[f"text/c {n}.xhtml"] = f'<html xmlns="http://www.w3.org/1999/xhtml">{page}</html>'
    return _zip(files, encoding, "application/epub+zip")


def rtf(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    def spelled(character: str) -> str:
        if character.isascii():
            return f"\\{character}" if character in "\\{}" else character
        return f"\\u{ord(character)}?" if encoding == "utf-8" else f"\\'{character.encode(encoding)[0]:02x}"

    body = "\\par\n".join("".join(map(spelled, one)) for one in paragraphs)
    return f"{{\\rtf1\\ansi\\ansicpg1252\\deff0{{\\fonttbl{{\\f0 Times;}}}}\n{body}\\par}}".encode("ascii")


def eml(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    mail = EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = "ada@example.org", "bob@example.org", "A letter"
    mail["Date"] = "Mon, 02 Mar 2026 10:00:00 +0000"
    mail.set_content("\n\n".join(paragraphs), charset=encoding, cte="quoted-printable")
    return mail.as_bytes()


def ipynb(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    cells: list[Any] = [{"cell_type": "markdown", "metadata": {}, "source": [one]} for one in paragraphs]
    picture = {"output_type": "display_data", "data": {"image/png": "aGVsbG8="}, "metadata": {}}
    code = {"cell_type": "code", "metadata": {}, "execution_count": 1, "outputs": [picture], "source": ["x = 2"]}
    tree = {"cells": [*cells, code], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(tree, ensure_ascii=False).encode(encoding)


def html(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    body = "".join(f"<p>{escape(one)}</p>" for one in paragraphs)
    return f"<html><head><script>var x;</script></head><body><article>{body}</article></body></html>".encode(encoding)


def srt(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    blocks = []
    for n, one in enumerate(_unmarked(paragraphs), 1):
        first, _, rest = one.partition(" ")
        blocks.append(f"{n}\r\n00:00:01,000 --> 00:00:02,500\r\n<i>{first}</i>\r\n{rest}\r\n\r\n")
    return "".join(blocks).encode(encoding)


def vtt(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    cues = "".join(f"00:{n:02d}.000 --> 00:{n + 1:02d}.000\n{one}\n\n" for n, one in enumerate(_unmarked(paragraphs)))
    return f"WEBVTT\n\nNOTE made by hand\n\n{cues}".encode(encoding)


def _unmarked(paragraphs: list[str]) -> list[str]:
    return [one.replace("<one>", "one") for one in paragraphs]


def pdf(paragraphs: list[str], encoding: str = "cp1252") -> bytes:
    """Return a PDF with one page per paragraph, written as in the format's reference."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(paragraphs)))
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    pages = f"<< /Type /Pages /Kids [{kids}] /Count {len(paragraphs)} >>"
    bodies = [b"<< /Type /Catalog /Pages 2 0 R >>", pages.encode(), font.encode()]
    for i, line in enumerate(paragraphs):
        shown = f"BT /F1 8 Tf 36 720 Td ({line}) Tj ET".encode("cp1252")
        page = f"/Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * i} 0 R"
        stream = b"<< /Length %d >>\nstream\n%s\nendstream" % (len(shown), shown)
        bodies += [f"<< /Type /Page {page} >>".encode(), stream]
    content, places = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"trailer << /Size {len(bodies) + 1} /Root 1 0 R >>\nstartxref\n{len(content)}\n%%EOF\n"
    return content + f"xref\n0 {len(bodies) + 1}\n0000000000 65535 f \n{table}{end}".encode()


def plain(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    return "".join(f"{one}\n" for one in paragraphs).encode(encoding)


def packed(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    return gzip.compress(plain(paragraphs, encoding), mtime=0)


def table(delimiter: str) -> "Writer":
    def write(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
        text = io.StringIO(newline="")
        rows = [("id", "day", "remark"), *((n, "2026-03-02", one) for n, one in enumerate(paragraphs))]
        csv.writer(text, delimiter=delimiter).writerows(rows)
        return text.getvalue().encode(encoding)

    return write


def jsonl(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    lines = (json.dumps({"id": n, "text": one}, ensure_ascii=False) for n, one in enumerate(paragraphs))
    return "\n".join(lines).encode(encoding)


def json_list(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    return json.dumps([{"text": one} for one in paragraphs], ensure_ascii=False).encode(encoding)


def parquet(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": [*range(len(paragraphs))], "body": paragraphs}), buffer)
    return buffer.getvalue()


def zipped(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("deep/a.txt", plain(paragraphs, encoding))
        archive.writestr("picture.png", b"\x89PNG")
    return buffer.getvalue()


def tarred(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        data = plain(paragraphs, encoding)
        info = tarfile.TarInfo("deep/a.md")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def wet(paragraphs: list[str], encoding: str = "utf-8") -> bytes:
    text = plain(paragraphs)
    uri = "WARC-Target-URI: http://a.example/\r\nWARC-Date: 2026-03-02T10:00:00Z\r\n"
    head = f"WARC/1.0\r\nWARC-Type: conversion\r\n{uri}Content-Type: text/plain\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text + b"\r\n\r\n"


Writer = Callable[..., bytes]


@dataclass(frozen=True)
class KindOfFile:
    """How files of a kind are written, and what is made of those that are not as they should be."""

    write: Writer
    encodings: tuple[str, ...] = ("cp1252", "utf-16")
    """Encodings other than the usual one; empty: the kind has only one."""
    is_broken: str = r"broken|binary"
    """Pattern of the reason why the first half of a file, or bytes that are no text, are skipped."""
    broken_bytes: bytes | None = None
    """What a broken file holds; None: the first half of a good one."""
    foreign_is_read: bool = True
    limited: bool = False
    """Whether a file of 256 MiB is too large."""


_GARBAGE = b"\x00\x01\x02\xff" * 100
_TEXT = KindOfFile(plain, broken_bytes=_GARBAGE)
KINDS = {
    **dict.fromkeys((".txt", ".md", ".rst", ".tex", ".py", ".log", ""), _TEXT),
    ".txt.gz": KindOfFile(packed),
    ".csv": KindOfFile(table(";"), broken_bytes=_GARBAGE), ".tsv": KindOfFile(table("\t"), broken_bytes=_GARBAGE),
    ".jsonl": KindOfFile(jsonl, is_broken="not JSON", broken_bytes=b"{oh no}\n[1]\n"),
    ".json": KindOfFile(json_list, is_broken="not JSON", broken_bytes=b'[{"text": oh no}]'),
    ".parquet": KindOfFile(parquet, (), "is not a parquet file"),
    ".zip": KindOfFile(zipped, is_broken="not a ZIP"), ".tar.gz": KindOfFile(tarred),
    ".wet": KindOfFile(wet, (), "broken after 0", b"no crawl\n"),
    ".html": KindOfFile(html, ("cp1252",), "no text", _GARBAGE, limited=True),
    ".pdf": KindOfFile(pdf, (), broken_bytes=b"%PDF-1.4 and no more", limited=True),
    **{
        f".{write.__name__}": KindOfFile(write, ("iso-8859-1",), limited=True)
        for write in (docx, pptx, xlsx, epub)
    },
    ".odt": KindOfFile(odt, ("iso-8859-1",), foreign_is_read=False, limited=True),
    ".odp": KindOfFile(odp, ("iso-8859-1",), foreign_is_read=False, limited=True),
    ".ods": KindOfFile(ods, ("iso-8859-1",), foreign_is_read=False, limited=True),
    ".rtf": KindOfFile(rtf, ("cp1252",), broken_bytes=b"no rtf", limited=True),
    ".eml": KindOfFile(eml, ("iso-8859-1",), broken_bytes=b"no mail\n", limited=True),
    ".ipynb": KindOfFile(ipynb, ("utf-16",), limited=True),
    ".srt": KindOfFile(srt, ("cp1252",), "times of subtitles", b"1\nno time\nwords\n"),
    ".vtt": KindOfFile(vtt, ("utf-16",), "times of subtitles", b"WEBVTT\n\nno time\nwords\n"),
}  # fmt: skip


def write_folder(folder: Path) -> dict[str, str]:
    """Write six or more files of each kind to a folder. Return, for each, what becomes of it: "" if it is read, else a
    pattern of the reason."""
    expected: dict[str, str] = {}

    def put(name: str, content: bytes, why: str = "") -> None:
        (folder / name).write_bytes(content)
        expected[name] = why

    for number, (ending, kind) in enumerate(KINDS.items()):
        good = kind.write(PARAGRAPHS)
        put(f"good{ending}", good)
        for encoding in kind.encodings:
            why = "" if kind.foreign_is_read else "broken"
            put(f"foreign-{encoding}{ending}", kind.write(PARAGRAPHS, encoding), why)
        put(
            f"broken{ending}",
            good[: len(good) // 2] if kind.broken_bytes is None else kind.broken_bytes,
            kind.is_broken,
        )
        put(f"empty{ending}", b"", "it is empty")
        if kind.limited:
            with (folder / f"huge{ending}").open("wb") as file:
                file.truncate((1 << 28) + 1)
            expected[f"huge{ending}"] = "larger than"
        else:
            put(f"huge{ending}", kind.write(PARAGRAPHS * 4000 if ending != ".xlsx" else PARAGRAPHS))
        unreadable = folder / f"unreadable{ending}"
        if number % 2:
            os.mkfifo(unreadable)
        else:
            unreadable.symlink_to("nowhere")
        expected[unreadable.name] = "a link that leads nowhere|a FIFO"
    return expected
