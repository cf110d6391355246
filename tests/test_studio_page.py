"""The studio's static files: vendored ones, their sizes, and forbidden contents."""

import gzip
import hashlib
import re
import tomllib
from pathlib import Path

import gptworks

STATIC = Path(gptworks.__file__).parent / "studio" / "static"
OWN = [path for path in STATIC.rglob("*") if path.suffix in {".js", ".css", ".html"} and path.parent.name != "vendor"]


def test_vendored_files_have_the_sums_and_licences_that_the_list_names() -> None:
    listed = (STATIC / "vendor" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|.*\(`(LICENSE[^`]+)`\).*\| `([0-9a-f]{64})` \|$", listed, re.MULTILINE)
    there = {path.name for path in (STATIC / "vendor").iterdir() if path.suffix in {".js", ".css"}}
    assert {name for name, _, _ in rows} == there
    for name, _, digest in rows:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest, name
    for licence in re.findall(r"`(LICENSE[^`]+)`", listed):
        assert (STATIC / "vendor" / licence).stat().st_size > 1000, licence


def test_the_static_files_are_small() -> None:
    sizes = {path: len(gzip.compress(path.read_bytes(), 9)) for path in STATIC.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 400 * 1024


def test_the_extra_is_the_servers() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert extras["studio"] == ["gptworks[serve]"] and not set(extras["serve"]) & set(project["dependencies"])


def test_own_files_are_short_and_make_no_markup_from_texts() -> None:
    for path in OWN:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 450, path
        banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://(?!www\.w3)"
        assert not re.search(banned, text.replace('"http://www.w3.org/2000/svg"', "")), path


def test_the_page_has_no_inline_script_or_style_and_names_files_that_exist() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)
    names = re.findall(r'(?:href|src)="static/([^"]+)"', page)
    assert names and all((STATIC / name).is_file() for name in names)


def test_the_first_paint_waits_for_what_the_first_screen_needs() -> None:
    """The parts' stylesheets match no medium until the page needs them, so that nothing waits for them."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    first = re.findall(r'rel="stylesheet" href="static/([^"]+)"', page)
    assert first == ["style.css", "shared.css", "home.css"]
    assert re.findall(r'<script src="static/([^"]+)"', page) == ["js/theme.js"]
    later = set(re.findall(r'rel="stylesheet" media="not all" href="static/([^"]+)"', page))
    assert later == {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.css")} - {*first}


def test_a_part_styles_no_class_that_another_part_has() -> None:
    """All stylesheets apply to all parts: `.line` of one part drew boxes around another's line ends. Shared styles are
    in style.css and shared.css."""
    sheets = {path.name: path.read_text(encoding="utf-8") for path in OWN if path.suffix == ".css"}
    common = sheets.pop("style.css") + sheets.pop("shared.css")
    shared = set(re.findall(r"^\.([\w-]+)", common, re.MULTILINE))
    assert len(sheets) > 2
    for name, sheet in sheets.items():
        alone = set(re.findall(r"^\.([\w-]+)(?=[ ,{:])", sheet, re.MULTILINE)) - shared
        for other in sheets.keys() - {name}:
            assert not alone & set(re.findall(r"\.([a-zA-Z][\w-]*)", sheets[other])), (name, other)


def test_each_colour_stands_once_for_light_and_once_for_dark() -> None:
    """theme.js, for which the page waits, chooses between them."""
    sheet = (STATIC / "style.css").read_text(encoding="utf-8")
    light, dark = (
        set(re.findall(r"(--[\w-]+):", part)) for part in re.findall(r":root[^{]*\{(.*?)\}", sheet, re.DOTALL)
    )
    light = {name for name in light if not re.match(r"--(mono|type|space|radius)", name)}
    assert dark == light and "prefers-color-scheme" not in sheet
    head = (STATIC / "index.html").read_text(encoding="utf-8").partition("</head>")[0]
    assert head.index('<script src="static/js/theme.js">') < head.index('<link rel="stylesheet')


def test_modules_import_each_other_by_relative_addresses() -> None:
    for path in (path for path in OWN if path.suffix == ".js"):
        found = re.findall(r'(?:\bfrom|\bimport)\s*\(?\s*"([^"]+)"', path.read_text(encoding="utf-8"))
        for name in found:
            assert name.startswith("."), f"{path}: {name}"
            assert (path.parent / name).resolve().is_file(), f"{path}: {name}"
