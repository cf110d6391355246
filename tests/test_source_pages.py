"""HTML, crawls, PDF and folders of code: the text extracted, and the errors of broken ones."""

import gzip
import io
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gptworks.config import CodeSource, HTMLSource, PDFSource, SourceConfig, WARCSource
from gptworks.data.sources import extraction
from gptworks.data.sources.choose import SOURCES, check_sources
from gptworks.errors import UserError
from test_sources import documents


def html(path: Path) -> HTMLSource:
    return HTMLSource(type="html", path=str(path))


def warc(path: Path) -> WARCSource:
    return WARCSource(type="warc", path=str(path))


def pdf(path: Path, **settings: Any) -> PDFSource:
    return PDFSource(type="pdf", path=str(path), **settings)


def code(path: Path, **settings: Any) -> CodeSource:
    return CodeSource(type="code", path=str(path), **settings)


SENTENCE = "The text of a page is what a reader came for, and it is long enough to be distinct from a menu. "
PAGE = (
    "<html><head><title>Title</title><script>var x = 1;</script></head><body><nav><a href='/'>Home</a></nav><article>"
    f"<h1>Heading</h1><p>{SENTENCE * 3}</p><p>Été 你 {SENTENCE * 3}</p></article><footer>©</footer></body></html>"
).encode()


# ------------------------------------------------------------------------------------------------------------ html


def test_the_main_text_of_a_page_is_taken(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura", exc_type=ImportError)
    (tmp_path / "a.html").write_bytes(PAGE)
    (tmp_path / "b.htm.gz").write_bytes(gzip.compress(PAGE.decode().replace("charset", "").encode("utf-8-sig")))
    (tmp_path / "c.html").write_bytes(b"<html><body></body></html>")
    check_sources([html(tmp_path)])
    for text in documents(html(tmp_path)):
        assert text.count(SENTENCE.strip()) == 6 and "Été 你" in text
        assert "Home" not in text and "var x" not in text and "<" not in text
    assert len(documents(html(tmp_path))) == 2


def test_a_page_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "MOST_PAGE_BYTES", 500)
    (tmp_path / "a.html").write_bytes(PAGE)
    with pytest.raises(UserError, match=r"a\.html: larger than 500 bytes"):
        check_sources([html(tmp_path)])


# ------------------------------------------------------------------------------------------------------------ warc


def crawl(records: list[tuple[str, str, str, bytes]]) -> bytes:
    """Return a WARC file written by warcio, given kind, address, content type and content of each record."""
    writer = pytest.importorskip("warcio.warcwriter")
    from warcio.statusandheaders import StatusAndHeaders

    buffer = io.BytesIO()
    made = writer.WARCWriter(buffer, gzip=True)
    for kind, address, content_type, content in records:
        http = StatusAndHeaders("200 OK", [("Content-Type", content_type)], protocol="HTTP/1.1")
        more = {"http_headers": http} if kind == "response" else {"warc_content_type": content_type}
        made.write_record(made.create_warc_record(address, kind, payload=io.BytesIO(content), **more))
    return buffer.getvalue()


def test_a_crawl_gives_the_texts_of_its_pages(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura", exc_type=ImportError)
    (tmp_path / "a.warc.gz").write_bytes(
        crawl(
            [
                ("warcinfo", "", "application/warc-fields", b"software: x"),
                ("response", "http://a.example/1", "text/html; charset=utf-8", PAGE),
                ("response", "http://a.example/2", "image/png", b"\x89PNG"),
                ("response", "http://a.example/3", "text/html", b"<html></html>"),
            ]
        )
    )
    [text] = documents(warc(tmp_path))
    assert "Été 你" in text and "Home" not in text


def test_wet_files_give_their_texts_and_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"plain text {i} 你\n" * 20 for i in range(200)]
    content = crawl([("conversion", f"http://a.example/{i}", "text/plain", t.encode()) for i, t in enumerate(texts)])
    (tmp_path / "a.warc.wet.gz").write_bytes(content)
    check_sources([warc(tmp_path)])
    assert documents(warc(tmp_path)) == texts
    for name, damaged in (
        ("cut.wet.gz", content[: len(content) // 2]),
        ("cut.wet", gzip.decompress(content)[:5000]),
        ("none.warc", b"nothing of the kind\n" * 9),
        ("empty.warc", b""),
    ):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{name}(:| holds)"):
            documents(warc(tmp_path / name))
    monkeypatch.setattr(extraction, "MOST_PAGE_BYTES", 100)
    with pytest.raises(UserError, match=r"a\.warc\.wet\.gz, record of 'http://a\.example/0': larger than 100 bytes"):
        check_sources([warc(tmp_path / "a.warc.wet.gz")])


# ------------------------------------------------------------------------------------------------------------- pdf


def make_pdf(lines: list[str]) -> bytes:
    """Return a PDF with one page per line, written as in the format's reference."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(lines)))
    bodies = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(lines)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, line in enumerate(lines):
        shown = f"BT /F1 12 Tf 72 720 Td ({line}) Tj ET"
        page = f"/Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * i} 0 R"
        bodies += [f"<< /Type /Page {page} >>", f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream"]
    content, places = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(content))
        content += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    end = f"trailer << /Size {len(bodies) + 1} /Root 1 0 R >>\nstartxref\n{len(content)}\n%%EOF\n"
    return content + f"xref\n0 {len(bodies) + 1}\n0000000000 65535 f \n{table}{end}".encode()


def test_the_text_of_pdf_files_is_taken_and_a_broken_one_is_refused_or_left_out(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(make_pdf(["Hello page one", "", "Page three"]))
    check_sources([pdf(tmp_path)])
    assert documents(pdf(tmp_path)) == ["Hello page one\n\nPage three"]
    (tmp_path / "b.pdf").write_bytes(b"%PDF-1.4 and nothing more")
    with pytest.raises(UserError, match=r"b\.pdf: page 1: a broken PDF .* set the source's `broken` to skip"):
        check_sources([pdf(tmp_path)])
    with pytest.warns(UserWarning, match=r"left out: .*b\.pdf"):
        assert documents(pdf(tmp_path, broken="skip")) == ["Hello page one\n\nPage three"]


@pytest.mark.parametrize("library", ["trafilatura", "warcio", "pypdf", "pathspec"])
def test_a_missing_library_is_named_with_its_extra(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (library, "warcio.archiveiterator"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("a.html", "a.warc", "a.pdf", "a.py", ".gitignore"):
        (tmp_path / name).write_bytes(PAGE)
    source = {
        "trafilatura": html(tmp_path), "warcio": warc(tmp_path), "pypdf": pdf(tmp_path), "pathspec": code(tmp_path)
    }[library]  # fmt: skip
    with pytest.raises(UserError, match=rf"needs {library}.*gptworks\[sources\]"):
        check_sources([source])


# ------------------------------------------------------------------------------------------------------------ code


def test_a_folder_of_code_gives_the_files_that_git_would_track(tmp_path: Path) -> None:
    """Compared with the files that git itself leaves after a repository's `.gitignore` files."""
    pytest.importorskip("pathspec")
    draw = random.Random(0)
    names = ["a.py", "b.py", "keep.py", "x_test.py", "build", "src", "out", "doc", "deep"]
    rules = [
        "*_test.py", "!keep.py", "/build/", "out/", "doc/*.py", "!doc/keep.py", "**/deep/b.py", "a.py", "!a.py", "# no",
        "b.p?", "[ab].py", "src/**/a.py", "\\!x.py", "keep.py/", "deep",
    ]  # fmt: skip
    for number in range(25):
        root = tmp_path / str(number)
        folders = [root]
        for _ in range(6):
            folders.append(draw.choice(folders) / draw.choice(names[4:]))
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            for name in draw.sample(names[:4], 3):
                (folder / name).write_text(f"# {folder.relative_to(root)} {name}")
        for folder in {root, draw.choice(folders)}:
            (folder / ".gitignore").write_text("\n".join(draw.sample(rules, 5)) + "\n")
        git = ["git", "-c", "core.excludesFile=/dev/null", "-C", str(root)]
        subprocess.run([*git, "init", "-q"], check=True)
        listed = subprocess.run(
            [*git, "ls-files", "-z", "--others", "--exclude-standard", "*.py"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        expected = sorted(Path(name) for name in listed.split("\0") if name)
        try:
            found = documents(code(root))
        except UserError as error:
            assert "no file ends in" in str(error)
            found = []
        assert found == [(root / name).read_text() for name in expected], (root / ".gitignore").read_text()


def test_the_reference_lists_each_kind_of_source_with_its_settings() -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "sources.md").read_text(encoding="utf-8")
    kinds = {one.model_fields["type"].annotation.__args__[0]: one for one in SourceConfig.__args__[0].__args__}
    sections = dict(re.findall(r"^## `type: ([\w-]+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sections.keys() == kinds.keys() and {*kinds.values()} == SOURCES.keys()
    for kind, section in sections.items():
        own = kinds[kind].model_fields.keys() - {"type"}
        assert own == set(re.findall(r"^\| `([a-z_0-9]+)` \|", section, re.MULTILINE)), kind


def test_binaries_vendored_folders_links_and_large_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "b.rs", "node_modules/c.js", "sub/third_party/d.py", ".git/e.py", "f.md", "sub/Makefile"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "g.py").write_bytes(b"\x00\x01")
    (tmp_path / "h.py").write_bytes(b"caf\xe9")
    (tmp_path / "i.py").write_bytes(b"x" * 2000)
    (tmp_path / "j.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert documents(code(tmp_path, largest_file_bytes=1000)) == ["a.py", "b.rs"]
    assert documents(code(tmp_path, largest_file_bytes=1000, vendored=True)) == [
        "a.py", "b.rs", "node_modules/c.js", "sub/third_party/d.py"
    ]  # fmt: skip
    assert documents(code(tmp_path, languages=("rust",))) == ["b.rs"]
    assert documents(code(tmp_path, languages=("rust",), extensions=(".md", "Makefile"))) == [
        "b.rs", "f.md", "sub/Makefile"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="unknown language `cobol`"):
        code(tmp_path, languages=("cobol",))
    with pytest.raises(UserError, match=r"no file ends in \.go that is not ignored"):
        check_sources([code(tmp_path, languages=("go",))])
