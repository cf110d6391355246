"""Makes the folders of bench/first_hour.py from this machine's documentation and programs."""

import ast
import csv
import gzip
import hashlib
import itertools
import json
import re
import struct
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gptworks.data.sources.code import stdlib_files

MB = 1_000_000
_LEAST_CHARACTERS, _MOST_FILE_BYTES = 400, 2 * MB
_COMMON = {"the", "of", "and", "to", "a", "in", "is", "that", "for", "be", "or", "it", "with", "are", "this"}
_LEAST_COMMON, _LEAST_ASCII = 0.15, 0.97
"""Minimum shares of common words and of ASCII characters in a text that counts as English."""
_LISTS = {"top_level.txt", "entry_points.txt", "SOURCES.txt", "requirements.txt", "namespace_packages.txt"}


# ----------------------------------------------------------------------------------------------------- English


def documentation() -> Iterator[str]:
    """Yield English texts of this machine: documentation of Python and system packages, manual pages, and docstrings
    of installed programs. Each paragraph appears once, because many packages have the same licence."""
    seen: set[bytes] = set()
    for text in itertools.chain(_files(), _docstrings()):
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", text):
            key = hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=8).digest()
            if key not in seen:
                seen.add(key)
                paragraphs.append(paragraph.strip("\n"))
        kept = "\n\n".join(paragraphs) + "\n"
        if is_english(kept):
            yield kept


def is_english(text: str) -> bool:
    """Whether a text reads as English prose: long enough, with many of the commonest words, and almost no characters
    beyond ASCII."""
    words = re.findall(r"[a-z]+", text.lower())
    return (
        len(text) >= _LEAST_CHARACTERS
        and "\0" not in text
        and sum(map(str.isascii, text)) >= _LEAST_ASCII * len(text)
        and sum(word in _COMMON for word in words) >= _LEAST_COMMON * max(1, len(words))
    )


_PREFIXES = ("/usr", "/usr/local", sys.prefix)


def _packages() -> list[Path]:
    return sorted({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


def _files() -> Iterator[str]:
    for folder in _packages():
        yield from _texts(folder, lambda file: file.suffix in (".rst", ".md", ".txt") and file.name not in _LISTS)
    for share in [Path(prefix) / "share" for prefix in dict.fromkeys(_PREFIXES)]:
        yield from _texts(share / "common-licenses", lambda file: not file.is_symlink())
        yield from _texts(share / "doc", lambda file: re.search(r"\.(txt|md|rst)(\.gz)?$|^[A-Za-z]+$", file.name))
        yield from _texts(share / "info", lambda file: ".info" in file.name)
        yield from _texts(share / "perl", lambda file: file.suffix == ".pod")
        for section in sorted((share / "man").glob("man[1-9]")):
            yield from map(plain_manual, _texts(section, lambda file: re.search(r"\.\d\w*(\.gz)?$", file.name)))


def _texts(folder: Path, wanted: Callable[[Path], object]) -> Iterator[str]:
    for file in sorted(folder.rglob("*")):
        try:
            if file.is_file() and wanted(file) and file.stat().st_size <= _MOST_FILE_BYTES:
                data = file.read_bytes()
                yield (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
        except (OSError, EOFError, zlib.error, UnicodeDecodeError):  # unreadable for this user, or not text
            continue


def plain_manual(page: str) -> str:
    """Return the words of a manual page without its layout commands."""
    lines = []
    for line in page.splitlines():
        command = re.match(r"[.']\s*([A-Za-z\\]*)\s*(.*)", line)
        if command is None:
            lines.append(line)
        elif command[1] in ("SH", "SS"):
            lines += ["", command[2].strip('"'), ""]
        elif command[1] in ("PP", "P", "LP", "TP", "IP", "sp"):
            lines.append("")
        elif command[1] in ("B", "I", "BR", "IR", "RB", "RI", "BI", "IB"):
            joined = command[1] in ("B", "I")
            lines.append((" " if joined else "").join(re.findall(r'"[^"]*"|\S+', command[2])).replace('"', ""))
    text = re.sub(r"\\f(\[\w*\]|\(\w\w|\w)|\\s[-+]?\d|\\[&|^%c]", "", "\n".join(lines))
    return (
        re.sub(r"\\\((aq|lq|rq|em|en|bu|co)", lambda one: _SIGNS[one[1]], text).replace("\\-", "-").replace("\\e", "\\")
    )


_SIGNS = {"aq": "'", "lq": '"', "rq": '"', "em": "--", "en": "-", "bu": "*", "co": "(c)"}


def _docstrings() -> Iterator[str]:
    """Yield the docstrings of each module, its functions and its classes as one text."""
    for file in itertools.chain(stdlib_files(), *(sorted(folder.rglob("*.py")) for folder in _packages())):
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        yield "\n\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))


# ----------------------------------------------------------------------------------------------------- folders


def take(texts: Iterable[str], n_bytes: int) -> list[str]:
    """Return the first texts, up to a total number of bytes; the last one is cut to fit."""
    taken: list[str] = []
    for text in texts:
        taken.append(text.encode("utf-8")[:n_bytes].decode("utf-8", "ignore"))
        n_bytes -= len(taken[-1].encode("utf-8"))
        if n_bytes <= 0:
            break
    return taken


def write_texts(folder: Path, texts: Iterable[str], ending: str) -> int:
    """Write each text to a file; return the total bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    n_bytes = 0
    for number, text in enumerate(texts):
        n_bytes += (folder / f"{number:05}{ending}").write_bytes(text.encode("utf-8"))
    return n_bytes


def programs(n_bytes: int) -> list[str]:
    """Return the standard library's sources, up to a total number of bytes."""
    return take((file.read_text(encoding="utf-8", errors="ignore") for file in stdlib_files()), n_bytes)


def write_mixed(folder: Path, english: list[str], code: list[str]) -> int:
    """Write files of many kinds to a folder, and return the bytes of text, without the PDF's.

    gptworks reads text from texts, programs, records and a table with a column of text, not from a table of numbers and
    images. It reads the PDF's line only with the extra `sources`.
    """
    parts = [english[n::4] for n in range(4)]
    n_bytes = write_texts(folder / "texts", parts[0], ".txt") + write_texts(folder / "notes", parts[1], ".md")
    n_bytes += write_texts(folder / "programs", code, ".py")
    with (folder / "records.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"id": n, "text": text}, ensure_ascii=False) + "\n" for n, text in enumerate(parts[2])
        )
    with (folder / "articles.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(
            [["id", "day", "body"], *([n, "2024-01-02", text] for n, text in enumerate(parts[3]))]
        )
    (folder / "prices.csv").write_text("day,price\n" + "".join(f"2024-01-{n:02},{n * 1.5}\n" for n in range(1, 29)))
    (folder / "paper.pdf").write_bytes(pdf("A page of text that is not read."))
    (folder / "dot.png").write_bytes(png())
    (folder / "dot.gif").write_bytes(GIF)
    return n_bytes + sum(len(text.encode("utf-8")) for part in parts[2:] for text in part)


GIF = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"
"""A GIF image of one pixel."""


def png() -> bytes:
    """Return a PNG image of one grey pixel."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\0\x80")),
        (b"IEND", b""),
    ]
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def pdf(line: str) -> bytes:
    """Return a PDF with one page and one line of text."""
    drawn = f"BT /F1 12 Tf 72 720 Td ({line}) Tj ET".encode("ascii")
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(drawn), drawn),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    return out + b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)


def make_folder(name: str, folder: Path, small: Path | None) -> str:
    """Make one of the four folders unless it exists; return a description of its contents.

    Args:
        small: a file of English for the small folder; None: the first megabyte of this machine's documentation.
    """
    said = folder.with_suffix(".about")
    if said.exists():
        return said.read_text(encoding="utf-8")
    if name == "small" and small is not None:
        n_bytes = write_texts(folder, [small.read_text(encoding="utf-8")], ".txt")
        words = f"{n_bytes / MB:.2f} MB of {small.name}"
    elif name == "code":
        words = f"{write_texts(folder, programs(50 * MB), '.py') / MB:.2f} MB of Python's standard library"
    elif name == "mixed":
        n_bytes = write_mixed(folder, take(documentation(), 6 * MB), programs(2 * MB))
        words = f"{n_bytes / MB:.2f} MB in texts, programs, records and a table, beside a PDF and images"
    else:
        wanted = MB if name == "small" else 20 * MB
        n_bytes = write_texts(folder, take(documentation(), wanted), ".txt")
        words = f"{n_bytes / MB:.2f} MB of this machine's documentation, of {wanted / MB:.0f} MB wanted"
    said.write_text(words, encoding="utf-8")
    return words
