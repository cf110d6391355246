"""A folder of any files: each is read, or skipped with its reason while the others are read."""

import json
import os
import re
import stat
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kinds_of_files as kinds
from gptworks.cli import app
from gptworks.config import FilesSource
from gptworks.confined import Limits
from gptworks.data.prepare import prepare
from gptworks.data.sources import anything, archives, base, code, extraction
from gptworks.data.sources.anything import Files
from gptworks.data.sources.choose import check_sources, source_signature
from gptworks.data.sources.encodings import find_encoding, open_text
from gptworks.data.sources.records import text_field
from gptworks.data.sources.report import Kind
from gptworks.draft import pretraining
from gptworks.draft.texts import look_at
from gptworks.errors import UserError
from gptworks.recipe import load_recipe
from test_draft import machine, prose

pytest.importorskip("all2md")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPTWORKS_CACHE", str(tmp_path_factory.mktemp("cache")))


def files(path: Path, **settings: Any) -> Files:
    return Files(FilesSource(type="files", path=str(path), **settings))


def words(text: str) -> str:
    return " ".join(text.split())


def whole(path: Path, **settings: Any) -> list[str]:
    """Return the documents of a file or folder."""
    found: list[str] = []
    ended = True
    for piece in files(path, **settings).documents():
        assert piece.starts_document == ended
        found += [""] * piece.starts_document
        found[-1] += piece.text
        ended = piece.ends_document
    assert ended
    return found


def test_of_30_kinds_everything_that_can_be_is_read_and_every_skip_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("warcio")
    pytest.importorskip("trafilatura", exc_type=ImportError)
    assert len(kinds.KINDS) == 30
    expected = kinds.write_folder(tmp_path)
    found = look_at(tmp_path)
    by_name = {item.file: item for item in found.items}
    assert by_name.keys() == expected.keys()
    for name, why in expected.items():
        item = by_name[name]
        assert bool(item.why) == bool(why) and re.search(why, item.why), (name, item)
        if not why and not name.startswith("huge"):
            text = words(" ".join(whole(tmp_path / name)))
            for paragraph in kinds.PARAGRAPHS:
                assert paragraph in text or paragraph.replace("<one>", "one") in text, (name, text)
            assert not re.search(r"-->|var x|<p>|WEBVTT|NOTE|RELS|PNG", text), (name, text)
        elif not why:
            assert item.n_bytes > base.PIECE_BYTES, item
    assert sum(kind.n_read + kind.n_skipped for kind in found.table()) == len(expected)
    read = [item for item in found.items if not item.why]
    assert found.n_bytes == sum(len(piece.text.encode()) for piece in files(tmp_path).documents())
    assert found.n_documents == len(whole(tmp_path)) >= len(read)
    in_part = [item.file for item in read if item.lacks]
    assert [name for name in in_part if not name.endswith(".zip")] == [], "which hold a picture"
    n_left_out = len(expected) - len(read) + len(in_part)
    with pytest.warns(UserWarning, match=f"{n_left_out} of {len(expected)} files are left out"):
        check_sources([FilesSource(type="files", path=str(tmp_path))])


def test_a_dataset_is_built_from_the_folder_and_the_recipe_lists_what_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's name may hold a line break: it must not add a setting to the recipe."""
    folder = tmp_path / "my texts"
    folder.mkdir()
    (folder / "a.txt").write_text(prose(30_000))
    (folder / "b.docx").write_bytes(kinds.docx(prose(30_000, 2).splitlines()))
    (folder / "c\nname: evil\n#.docx").write_bytes(b"no docx")
    (folder / "d.txt").write_bytes(kinds.plain(kinds.PARAGRAPHS * 40, "cp1252"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretraining, "measure_speed", machine(1e9))
    result = CliRunner().invoke(app, ["init", "my texts", "--minutes", "0.1"])
    assert result.exit_code == 0, result.output
    recipe = load_recipe("mine.yaml")
    assert recipe.name == "mine"
    assert recipe.data.sources == (FilesSource(type="files", path="my texts"),)
    comments = [line for line in Path("mine.yaml").read_text().splitlines() if line.startswith("#")]
    n_bytes = len((folder / "a.txt").read_bytes()) + len(kinds.plain(kinds.PARAGRAPHS * 40))
    assert look_at(folder).table()[0] == Kind(".txt", 2, 0, n_bytes, ["1 read as cp1252 (guessed)"], [])
    for line in (r"\.docx +1 +1 ", r"\.txt +2 +0 ", "1 read as cp1252", "c\ufffdname: evil\ufffd#.docx: a broken DOCX"):
        assert any(re.search(line, comment) for comment in comments), (line, comments)
        assert re.search(line, result.stdout)
    data = recipe.data.model_copy(update={"cache_dir": tmp_path / "data", "processes": 2})
    with pytest.warns(UserWarning, match="1 of 4 files are left out"):
        prepared = prepare(recipe.model_copy(update={"data": data}))
    read = sum(files.text_bytes for files in prepared.manifest.splits.values())
    assert read == sum(len(one.encode()) for one in whole(folder)) == look_at(folder).n_bytes


def test_look_shows_random_passages_as_training_reads_them(tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(kinds.docx(kinds.PARAGRAPHS * 100))
    (tmp_path / "b.txt").write_bytes("".join(f"Zeile {n} der Größe\n" for n in range(9000)).encode("utf-16"))
    (tmp_path / "c.jsonl").write_bytes(kinds.jsonl(kinds.PARAGRAPHS * 100))
    texts = {name: "\n".join(whole(tmp_path / name)) for name in ("a.docx", "b.txt", "c.jsonl")}
    found = look_at(tmp_path)
    passages = found.passages(40, seed=1)
    assert {passage.file for passage in passages} == texts.keys()
    assert all(passage.text in texts[passage.file] for passage in passages)
    assert len({passage.text for passage in passages if passage.file == "b.txt"}) > 5
    assert found.passages(40, seed=1) == passages != found.passages(40, seed=2)
    result = CliRunner().invoke(app, ["init", str(tmp_path), "--look"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n--- ") == 10 and "read as utf-16" in result.stdout
    as_json = CliRunner().invoke(app, ["init", str(tmp_path), "--look", "--json"])
    assert len(json.loads(as_json.stdout)["passages"]) == 10
    assert "--minutes does nothing with --look" in str(
        CliRunner().invoke(app, ["init", str(tmp_path), "--look", "--minutes", "1"]).exception
    )


def test_only_the_broken_record_or_member_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\nnot json\n{"text": null}\n[]\n{"text": "two"}\n')
    (tmp_path / "b.csv").write_text('id|text\n1|one\n2|"tw"o"\n3|a|b\n4|four\n')
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        for name, content in (("a.txt", b"one\n"), ("b.txt", b"\0\1"), ("c.txt", b"three\n")):
            archive.writestr(name, content)
    with zipfile.ZipFile(tmp_path / "c2.zip", "w") as archive:
        archive.writestr("Übung/letter.docx", kinds.docx(["dear reader"]))
        archive.writestr("broken.docx", b"no docx")
        archive.writestr("PAGE.HTM", kinds.html(["a page " * 20]))
        archive.writestr("old.txt", "Größe".encode("utf-16"))
        archive.writestr("__MACOSX/._old.txt", b"a fork of resources")
    (tmp_path / "d.json").write_text('[{"text": "one"}, {"text": "two"}, 3')
    assert whole(tmp_path) == [
        "one",
        "two",
        "one",
        "four",
        "one\n",
        "three\n",
        "dear reader",
        words("a page " * 20),
        "Größe",
        "one",
        "two",
    ]
    lacks = {item.file: item.lacks for item in files(tmp_path).look()}
    for name, pattern in (
        ("a.jsonl", "^3 parts .*line 2: not JSON"), ("b.csv", "^2 parts .*line 3: "), ("c.zip", "^1 part .*b.txt is"),
        ("c2.zip", "^2 parts .*broken.docx: a broken DOCX"),
        ("d.json", "^1 part .*record 3"),
    ):  # fmt: skip
        assert re.search(pattern, lacks[name]), lacks


def test_a_document_cut_off_by_an_error_ends_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(archives, "MOST_LINE_BYTES", 1 << 10)
    data = b"".join(b"line %d\n" % n for n in range(2000))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", data)
        archive.writestr("b.txt", b"next\n")
    broken = bytearray((tmp_path / "a.zip").read_bytes())
    broken[broken.index(b"line 1900")] = ord("L")  # the checksum at the member's end does not fit
    (tmp_path / "a.zip").write_bytes(broken)
    first, second = whole(tmp_path / "a.zip")
    assert second == "next\n" and data.decode().startswith(first[:8000]) and len(first) > 8000


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Limits], None]]:
    def set_limits(limits: Limits) -> None:
        monkeypatch.setattr(extraction, "LIMITS", limits)
        extraction._children.cache_clear()

    yield set_limits
    extraction._children.cache_clear()


def test_a_hostile_document_is_stopped_by_its_limits(tmp_path: Path, limit: Callable[[Limits], None]) -> None:
    (tmp_path / "good.docx").write_bytes(kinds.docx(kinds.PARAGRAPHS))
    laughs = "".join(f'<!ENTITY a{n + 1} "{f"&a{n};" * 10}">' for n in range(9))
    with zipfile.ZipFile(tmp_path / "laughs.epub", "w") as archive:
        archive.writestr("META-INF/container.xml", f'<!DOCTYPE a [<!ENTITY a0 "ha">{laughs}]><a>&a9;</a>')
    assert len(whole(tmp_path)) == 1, "the limits of the program"
    (tmp_path / "bomb.epub").write_bytes(kinds.epub(["a word " * 12_000_000, "", ""]))
    limit(Limits(seconds=60, n_bytes=1 << 26))
    why = {item.file: item.why for item in files(tmp_path).look()}
    assert "it takes more than 64 MiB of memory" in why["bomb.epub"]
    assert "broken EPUB" in why["laughs.epub"] and why["good.docx"] == ""
    limit(Limits(seconds=0.02, n_bytes=1 << 30))
    (tmp_path / "slow.docx").write_bytes(kinds.docx(["another"]))
    why = {item.file: item.why for item in files(tmp_path).look()}
    assert "more than 0.02 seconds of processor time" in why["slow.docx"] and why["good.docx"] == "", (
        "kept in the cache"
    )
    extraction._children.cache_clear()


def test_hidden_linked_unknown_and_excluded_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "texts"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    for name in (
        "a.txt",
        "drafts/b.txt",
        "locked.txt",
        ".hidden/c.txt",
        ".d.txt",
        "e.xyz",
        "~$f.docx",
        "run/recipe.yaml",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "run" / "checkpoints").mkdir()
    (folder / "g.txt").symlink_to(outside / "secret.txt")
    (folder / "h").symlink_to(outside)
    (folder / "i.bin.txt").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n")
    opened = anything.open_regular

    def refusing(path: Path, **options: Any) -> Any:
        if path.name == "locked.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, **options)

    monkeypatch.setattr(anything, "open_regular", refusing)
    assert whole(folder, exclude=("drafts/*",)) == ["a.txt"]
    why = {item.file: item.why for item in files(folder, exclude=("drafts/*",)).look()}
    assert why.pop("a.txt") == ""
    for name, pattern in {
        "drafts/b.txt": "exclude", "locked.txt": "Permission denied", ".hidden": "hidden", ".d.txt": "hidden",
        "e.xyz": "not a kind", "~$f.docx": "lock file", "run": "made by gptworks", "g.txt": "a link out of the folder",
        "h": "a link to a folder elsewhere", "i.bin.txt": "git lfs pull",
    }.items():  # fmt: skip
        assert re.search(pattern, why.pop(name)), name
    assert not why
    with pytest.warns(UserWarning, match=r"^6 of 8 files and 2 folders are left out, wholly or in part:"):
        check_sources([FilesSource(type="files", path=str(folder), exclude=("drafts/*",))])
    assert whole(folder / "e.xyz") == ["e.xyz"], "a file that is named is read as text"
    assert whole(folder, exclude=("drafts/*",), extensions=(".xyz",)) == ["a.txt", "e.xyz"]
    (folder / "long.txt").write_text(prose(40_000))
    looked = look_at(folder)
    assert looked.n_files == 9 and looked.lines()[0].startswith("reads       3 of 9 files: ")


def test_errors_of_libraries_and_of_one_named_file_are_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n' + "oh no\n" * 5000)
    (tmp_path / "c.wet").write_bytes(kinds.wet(kinds.PARAGRAPHS))

    def failing(*_: object) -> Any:
        raise ZeroDivisionError("of a library")

    monkeypatch.setattr(anything.WARC, "read_unit", failing)
    items = {item.file: item for item in files(tmp_path).look()}
    assert items["c.wet"].why == "broken data (ZeroDivisionError: of a library)"
    assert items["b.jsonl"].lacks.startswith("5,000 parts of it left out: line 2: not JSON")
    assert whole(tmp_path) == ["text", "one"]
    with pytest.raises(UserError, match=r"no file can be read\. .*c\.wet: broken data"):
        check_sources([FilesSource(type="files", path=str(tmp_path / "c.wet"))])
    with pytest.raises(UserError, match=r"its sha256 is .* and the recipe states"):
        check_sources([FilesSource(type="files", path=str(tmp_path / "a.txt"), sha256="0" * 64)])


def test_of_a_repository_what_git_ignores_is_not_read(tmp_path: Path) -> None:
    pytest.importorskip("pathspec")
    for name in ("src/a.py", "ignored/b.py", "ignored/c.md", "node_modules/d.md", "README.md", ".git/objects/ab.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("ignored/\n")
    assert whole(tmp_path) == ["README.md", "src/a.py"]


@pytest.mark.parametrize("broken", ["not installed", "too large"])
def test_rules_of_git_that_cannot_be_read_are_named_once(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.md", "inner/secret.md", "node_modules/b.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".git").mkdir()
    (tmp_path / "inner" / ".gitignore").write_text("secret.md\n")
    if broken == "not installed":
        monkeypatch.setitem(sys.modules, "pathspec", None)
    else:
        monkeypatch.setattr(code, "_MOST_IGNORE_BYTES", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_sources([FilesSource(type="files", path=str(tmp_path))])
        assert whole(tmp_path) == ["a.md", "inner/secret.md"]
    [message] = (str(one.message) for one in caught)
    assert message.startswith(f"source {tmp_path}: the files that `.gitignore` names are read too. ")
    why = "gptworks[sources]" if broken == "not installed" else "is larger than 1 bytes"
    assert f"{tmp_path / 'inner' / '.gitignore'}" in message and why in message and "`gitignore`" not in message


@pytest.mark.parametrize(
    ("language", "encodings", "text"),
    [
        ("German", "cp1252 utf-16 utf-16-le utf-16-be utf-32 utf-8-sig", "Die Größe der Häuser überraschte die Gäste."),
        ("English", "cp1252", "It’s “fine”, she said… and gave him £5."),
        ("Italian", "cp1252", "La città è più bella perché c'è il sole; lunedì andrò là."),
        (
            "French",
            "cp1252 iso8859-1",
            "Le garçon a été très étonné de voir la forêt enneigée où l'hiver règne à jamais.",
        ),
        (
            "Polish",
            "cp1250 iso8859-2",
            "Stary żeglarz szedł wieczorem przez most i patrzył na łodzie stojące przy brzegu.",
        ),
        ("Russian", "cp1251 koi8-r cp866", "Старый моряк шёл по мосту вечером и смотрел на лодки у берега реки."),
        ("Greek", "cp1253", "Ο γέρος ναύτης περπατούσε το βράδυ στη γέφυρα και κοιτούσε τις βάρκες."),
        ("Turkish", "cp1254", "Yaşlı denizci akşam köprüden geçti ve nehir kıyısındaki teknelere baktı."),
        ("Hebrew", "cp1255", "המלח הזקן הלך בערב על הגשר והביט בסירות"),
        ("Arabic", "cp1256", "سار البحار العجوز مساء على الجسر ونظر إلى القوارب"),
        ("Japanese", "shift_jis euc_jp", "年老いた船乗りは夕方に橋を渡り、川岸にある船を眺めた。"),
        ("Chinese", "gb18030 utf-8", "老水手傍晚走过桥，看着停在河岸的船。他听到了海鸥的叫声。"),
        ("Taiwanese", "big5", "老水手傍晚走過橋，看著停在河岸的船。他聽到了海鷗的叫聲。"),
        ("Korean", "euc_kr", "늙은 선원은 저녁에 다리를 건너 강가에 있는 배들을 바라보았다."),
    ],
)
def test_text_in_any_encoding_is_read(language: str, encodings: str, text: str, tmp_path: Path) -> None:
    for encoding in encodings.split():
        for n in (1, 4000):  # the second is divided into chunks and pieces
            (tmp_path / "a.txt").write_bytes((text * n).encode(encoding))
            assert whole(tmp_path / "a.txt") == [text * n], (language, encoding, find_encoding(tmp_path / "a.txt"))


def test_a_read_of_a_text_in_another_encoding_ends_early_only_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(("a" * 100_000 + "é😀\r\n\r" * 10_000).encode("utf-16"))
    whole = b"a" * 100_000 + "é😀\r\n\r".encode() * 10_000
    for size in range(65_530, 65_540):  # around the size of the buffer, of which a few bytes stay free
        with open_text(file, "utf-16") as stream:
            parts = [*iter(lambda: stream.read(size), b"")]  # noqa: B023 (called in this round only)
        assert b"".join(parts) == whole and all(len(part) == size for part in parts[:-1])


def test_a_word_in_another_encoding_far_into_a_file_is_found(tmp_path: Path) -> None:
    text = "a line of plain letters\n" * 100_000 + "Größe, süß und schön\n"
    (tmp_path / "a.txt").write_bytes(text.encode("cp1252"))
    assert "".join(whole(tmp_path / "a.txt")) == text
    assert find_encoding(tmp_path / "a.txt").n_bytes == len(text.encode())
    (tmp_path / "b.txt").write_bytes(text.encode("cp1252") + b"\0")
    with pytest.raises(UserError, match="binary, not text: 0x00"):
        find_encoding(tmp_path / "b.txt")


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        ([{"id": 1, "Body": "words here"}], "Body"),
        ([{"day": "2026-01-02", "remark": "some words"}], "remark"),
        ([{"title": "short", "review": "a much longer text " * 9}], "review"),
        ([{"first": "Ada", "last": "Lovelace"}], ""),
    ],
)
def test_the_field_of_records_that_is_the_text(rows: list[dict[str, Any]], taken: str, tmp_path: Path) -> None:
    assert text_field(rows) == taken
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    every = "\n".join(f"{name}: {value}" for name, value in rows[0].items())
    assert whole(tmp_path / "a.jsonl") == [rows[0][taken] if taken else every]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("id;text\n1;hello, you\n2;and, me\n", "hello, you"),
        ("sep=;\r\nid;text\r\n1;hello, you\r\n", "hello, you"),
        ('id,text\n1,"a; b; c"\n2,"d; e; f"\n', "a; b; c"),
        ("id|text\n1|a, b\nbroken\n2|c, d\n", "a, b"),
        ("text\nonly, one, column\n", None),
        ("id\ttext\n1\ta, b\n", "a, b"),
    ],
)
def test_the_delimiter_of_a_table_is_found(content: str, text: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content, encoding="utf-8-sig", newline="")
    assert whole(tmp_path / "a.csv")[:1] == ([text] if text else [])


@pytest.mark.parametrize("rows", [[], [{"day": "2026-01-02", "price": "17.5"}], [{"messages": []}]])
def test_records_without_words_are_not_text(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"no record|no field holds words"):
        text_field(rows)


def test_a_document_is_converted_once_and_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.docx").write_bytes(kinds.docx(kinds.PARAGRAPHS))
    (tmp_path / "a.txt").write_text("text")
    asked: list[Any] = []
    ask = extraction._asked
    monkeypatch.setattr(extraction, "_asked", lambda question: asked.append(question) or ask(question))
    assert whole(tmp_path) == whole(tmp_path)
    assert len(asked) == 1
    kept = next(Path(os.environ["GPTWORKS_CACHE"]).glob("texts/*.json"))
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    kept.write_text("damaged")
    before = source_signature([FilesSource(type="files", path=str(tmp_path))])
    assert "lighthouse" in whole(tmp_path)[0] and len(asked) == 2
    monkeypatch.setitem(sys.modules, "all2md", None)
    assert whole(tmp_path) == ["text"]
    assert "gptworks[sources]" in files(tmp_path).look()[0].why
    assert source_signature([FilesSource(type="files", path=str(tmp_path))]) != before, "a dataset would lack its text"


def test_only_datasets_of_archives_are_built_again_since_more_of_their_members_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    source = FilesSource(type="files", path=str(tmp_path))
    assert source_signature([source])[0] == ["files", 1]
    (tmp_path / "b.zip").touch()
    assert source_signature([source])[0] == ["files", 1], "it is empty, and not read"
    (tmp_path / "b.zip").write_bytes(b"PK")
    assert source_signature([source])[0] == ["files", 1, ["archive", 2]]


def test_text_of_a_document_is_valid_unicode_without_nul(tmp_path: Path) -> None:
    cells = [{"cell_type": "markdown", "source": ["a\ud800b", "\0c"]}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    assert whole(tmp_path) == ["a\ufffdbc"]


def test_a_folder_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file can be read\. There is none"):
        check_sources([FilesSource(type="files", path=str(tmp_path))])
    (tmp_path / "a.docx").write_bytes(b"no docx")
    with pytest.raises(UserError, match=r"no file can be read\. a\.docx: a broken DOCX"):
        check_sources([FilesSource(type="files", path=str(tmp_path))])
