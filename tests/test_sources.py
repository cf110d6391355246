import csv
import gzip
import hashlib
import json
import random
import re
import sys
import tracemalloc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import tiny
from gptworks.cli.printing import prepare_with_progress
from gptworks.config import (
    ConversationsSource,
    CSVSource,
    DataConfig,
    HuggingFaceSource,
    JSONLSource,
    LinesSource,
    ParquetSource,
    PythonStdlibSource,
    Recipe,
    SourceConfig,
    TextSource,
)
from gptworks.config.sources import FileSource
from gptworks.data.conversations.reading import iter_conversations, origins
from gptworks.data.opened import held_out_text
from gptworks.data.prepare import find_prepared, prepare
from gptworks.data.registry import by_settings
from gptworks.data.shards import TokenShards
from gptworks.data.sources import base, delimited, records
from gptworks.data.sources import text as text_sources
from gptworks.data.sources.base import Piece, Source, Unit
from gptworks.data.sources.choose import (
    SOURCES,
    check_sources,
    choose_source,
    count_documents,
    iter_documents,
    source_signature,
    total_bytes,
    unread_files,
)
from gptworks.data.sources.code import stdlib_files
from gptworks.draft.texts import look_at
from gptworks.errors import RunError, UserError
from gptworks.recipe import parse_recipe
from gptworks.training.rehearsal.estimate import data_size
from web import website


def text(path: Path | str, **settings: Any) -> TextSource:
    return TextSource(type="text", path=str(path), **settings)


def jsonl(path: Path | str, **settings: Any) -> JSONLSource:
    return JSONLSource(type="jsonl", path=str(path), **settings)


def parquet(path: Path | str, **settings: Any) -> ParquetSource:
    return ParquetSource(type="parquet", path=str(path), **settings)


def lines(path: Path | str, n: int = 1, **settings: Any) -> LinesSource:
    return LinesSource(type="lines", path=str(path), lines=n, **settings)


def table(path: Path | str, **settings: Any) -> CSVSource:
    return CSVSource(type="csv", path=str(path), **settings)


def documents(*given: SourceConfig) -> list[str]:
    whole: list[str] = []
    for piece in iter_documents(given):
        if piece.starts_document:
            whole.append("")
        whole[-1] += piece.text
    return whole


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GPTWORKS_CACHE", str(folder))
    return folder


# --------------------------------------------------------------------------------------------------------- text


def test_a_folder_gives_its_files_in_order_of_path(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.MD", "a/b.txt", "c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(text(tmp_path)) == ["a/b.txt", "a/z.MD", "b.txt"]
    assert documents(text(tmp_path, extensions=(".PY",))) == ["c.py"]
    assert documents(text(tmp_path / "**" / "*.txt")) == ["a/b.txt", "b.txt"]
    assert documents(text(tmp_path / "c.py"), text(tmp_path / "b.txt")) == ["c.py", "b.txt"]


def test_bytes_are_kept_but_for_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree \xef\xbb\xbf")
    (piece,) = iter_documents([text(tmp_path / "a.txt")])
    assert piece == Piece("one\r\ntwo\rthree \ufeff", True, True, 18)


def test_empty_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf")
    assert documents(text(tmp_path)) == []


@pytest.mark.parametrize("content", ["line äöü\n" * 50, "你好" * 99 + "🙂", "x", "\n" * 64, "ä" * 16, "a" * 16])
def test_a_long_file_comes_in_pieces_that_join_to_it(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "PIECE_BYTES", 16)
    (tmp_path / "a.txt").write_text(content, encoding="utf-8", newline="")
    pieces = list(iter_documents([text(tmp_path / "a.txt")]))
    assert "".join(piece.text for piece in pieces) == content
    assert all(0 < len(piece.text.encode()) <= 32 for piece in pieces)
    assert [piece.starts_document for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece.document_bytes for piece in pieces} == {len(content.encode())}


def test_pieces_end_at_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PIECE_BYTES", 16)
    (tmp_path / "a.txt").write_text("a line\n" * 20)
    assert all(piece.text.endswith("\n") for piece in iter_documents([text(tmp_path / "a.txt")]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text\n" * 10 + b"abc\0def", r"a\.txt is binary, not text: a NUL byte at byte 53"),
        (b"text\n" * 10 + b"caf\xe9 au lait", r"a\.txt is not UTF-8 text: byte 0xe9 at byte 53"),
        (b"text \xe2\x82", r"byte 0xe2 at byte 5"),
        (b"\xef\xbb\xbfab\xff", r"byte 0xff at byte 5"),
    ],
)
def test_a_binary_file_is_named_with_the_offset(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "PIECE_BYTES", 16)
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        check_sources([text(tmp_path / "a.txt")])


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_every_so_many_lines_are_a_document(ending: str, tmp_path: Path) -> None:
    opened = gzip.open if ending else open
    for name, content in (("a", "\ufeffone\ntwo\r\n\nfour"), ("b", "five\n")):
        with opened(tmp_path / f"{name}.txt{ending}", "wb") as file:
            file.write(content.encode("utf-8"))
    assert documents(lines(tmp_path)) == ["one\n", "two\r\n", "\n", "four", "five\n"]
    assert documents(lines(tmp_path, 3)) == ["one\ntwo\r\n\n", "four", "five\n"]
    assert documents(lines(tmp_path, 9)) == ["one\ntwo\r\n\nfour", "five\n"]
    assert count_documents([lines(tmp_path, 3)], 100) == 3


def test_documents_of_lines_are_read_in_parts_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = [f"{i} {'äöü' * (i % 7)}\n" for i in range(400)]
    (tmp_path / "a.txt").write_text("".join(content), encoding="utf-8")
    monkeypatch.setattr(text_sources, "UNIT_BYTES", 1000)
    monkeypatch.setattr(base, "PIECE_BYTES", 30)
    source = lines(tmp_path, 4)
    assert len(choose_source(source).units()) > 5
    found = documents(source)
    assert "".join(found) == "".join(content) and max(one.count("\n") for one in found) == 4
    (tmp_path / "a.txt").write_bytes("".join(content).encode() + b"caf\xe9\n")
    place = len("".join(content).encode()) + 3
    with pytest.raises(UserError, match=rf"a\.txt is not UTF-8 text: byte 0xe9 at byte {place}\."):
        documents(source)


def test_each_document_of_a_large_file_has_all_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [f"question {i} {'?' * (i % 7)}\nanswer {i}\n" for i in range(400)]
    (tmp_path / "a.txt").write_text("".join(pairs) + "a question", encoding="utf-8")
    monkeypatch.setattr(text_sources, "UNIT_BYTES", 1000)
    assert len(choose_source(lines(tmp_path, 2)).units()) > 5
    assert documents(lines(tmp_path, 2)) == [*pairs, "a question"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.txt: no such file or folder"):
        check_sources([text(tmp_path / "none.txt")])
    with pytest.raises(UserError, match="no file matches this pattern"):
        check_sources([text(tmp_path / "*.txt")])
    with pytest.raises(UserError, match="no files at all"):
        check_sources([text(tmp_path)])
    (tmp_path / "a.csv").touch()
    with pytest.raises(UserError, match=r"no file ends in \.txt or \.md or \.text; found \.csv \(1\)"):
        check_sources([text(tmp_path)])


# -------------------------------------------------------------------------------------------------------- stdlib


def test_the_standard_library_comes_without_tests() -> None:
    found = documents(PythonStdlibSource(type="python-stdlib"))
    assert Path(json.__file__).read_text(encoding="utf-8") in found
    names = [file.as_posix() for file in stdlib_files()]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("/test/" in name or "/site-packages/" in name or "/idle_test/" in name for name in names)
    assert sum(len(document.encode()) for document in found) > 5_000_000


# --------------------------------------------------------------------------------------------------------- jsonl


def test_jsonl_plain_and_gzipped(tmp_path: Path) -> None:
    lines = '{"text": "one\\n你"}\n\n{"text": ""}\n{"id": 1, "text": "two"}\n'
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    assert documents(jsonl(tmp_path)) == ["one\n你", "two"] * 2


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b \\ud83d\\ude42"}')
    assert documents(jsonl(tmp_path)) == ["a\ufffd b 🙂"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"a\.jsonl:2: not JSON"),
        ('["text"]', r"a\.jsonl:2: a list, not an object"),
        ('{"id": 1, "body": "x"}', r"a\.jsonl:2: no field `text`; its fields are id, body"),
        ('{"text": "a", "text": "b"}', r"a\.jsonl:2: not JSON \(the key 'text' is given twice"),
        ('{"text": null}', r"a\.jsonl:2: field `text` is null"),
    ],
)
def test_a_broken_record_is_named(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        check_sources([jsonl(tmp_path / "a.jsonl")])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_beyond_the_bound_is_named_and_never_held(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MOST_LINE_BYTES", 1 << 20)
    line = b'{"text": "' + b"x" * (1 << 23) + b'"}\n'
    content = b'{"text": "fine"}\n' + line + b'{"text": "after"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content, 1) if name.endswith("gz") else content)
    pieces = iter_documents([jsonl(tmp_path / name)])
    assert next(pieces).text == "fine"
    tracemalloc.start()
    with pytest.raises(UserError, match=r":2: this line has more than 1,048,576 bytes, the most for a line\."):
        next(pieces)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20
    monkeypatch.setattr(records, "MOST_LINE_BYTES", 1 << 16)
    with pytest.raises(UserError, match=r":2: this line has more than 65,536 bytes, the most for a line\."):
        documents(jsonl(tmp_path / name))
    source = ConversationsSource(type="conversations", path=str(tmp_path / name))
    with pytest.raises(UserError, match=r":2: this line has more than"):
        [*origins(source).__next__()[1]]


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_gzip_file_is_named(damage: str, tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(10_000)))
    damaged = whole[: len(whole) // 2] if damage == "cut" else whole[:10] + b"\xff" * 100 + whole[110:]
    (tmp_path / "a.jsonl.gz").write_bytes(damaged)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: broken gzip data after [\d,]+ bytes"):
        documents(jsonl(tmp_path / "a.jsonl.gz"))


# --------------------------------------------------------------------------------------------------------- tables


def test_tables_are_read_as_written_and_as_by_pyarrow(tmp_path: Path) -> None:
    from pyarrow import csv as arrow

    draw = random.Random(0)
    signs = ["a", "你", "🙂", '"', '""', ",", ";", "\t", "\n", "\r\n", " ", "'", "=1+1"]
    texts = ["".join(draw.choices(signs, k=draw.randrange(1, 12))) for _ in range(200)]
    for name, delimiter in (("a.csv", ","), ("b.tsv", "\t"), ("c.csv", ";")):
        with (tmp_path / name).open("w", encoding="utf-8-sig" if name == "a.csv" else "utf-8", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([["id", "body"], *enumerate(texts)])
        theirs = arrow.read_csv(
            tmp_path / name, parse_options=arrow.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        )
        source = table(tmp_path / name, field="body", delimiter=delimiter if name == "c.csv" else None)
        assert documents(source) == texts == theirs["body"].to_pylist()


def test_tables_plain_and_gzipped_with_empty_lines_and_texts(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbfid,text\r\n1,"one, ""two""\r\nthree"\r\n\r\n2,\r\n3,last'
    (tmp_path / "a.csv").write_bytes(content)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(content))
    (tmp_path / "c.txt").touch()
    assert documents(table(tmp_path)) == ['one, "two"\r\nthree', "last"] * 2
    (tmp_path / "d.tsv").write_text('text\tid\n"Yes," he said\t1\n')
    assert documents(table(tmp_path / "d.tsv", quotes=False)) == ['"Yes," he said']


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b'id,text\n1,fine\n2,"never\nclosed\n', {}, r"a\.csv:3: unexpected end of data\. A field with"),
        (b'id,text\n1,"a"b\n', {}, r"a\.csv:2: ',' expected after '\"'.*`quotes` to false"),
        (b"id,text\n\n1,one,two\n", {}, r"a\.csv:3: 3 fields, and the first row names 2 columns\."),
        (b"id,text\n1\tone\n", {"quotes": False}, r"a\.csv:2: 1 field, .*With `quotes` false, no field"),
        (b"id,body\n1,one\n", {}, r"a\.csv:1: no columns are named `text`.* are `id`, `body`\. Set"),
        (b"text,text\n1,one\n", {}, r"a\.csv:1: 2 columns are named `text`"),
        (b"\x1b[2J" + b"x" * 99 + b",id\n", {}, r"The columns are '\\x1b\[2Jx{36}', `id`"),
        (b"id,text\n1,ok\n2,caf\xe9\n", {}, r"a\.csv:3 is not UTF-8 text: byte 0xe9 at byte 5 of the line\. Convert"),
        ("id,text\n".encode("utf-16"), {}, r"a\.csv:1.*(NUL|UTF-8)"),
        (b"id,text\n1,a\0b\n", {}, r"a\.csv:2: a NUL byte"),
        (b"sep=;\nid;text\n1;ok\n2;caf\xe9\n", {}, r"a\.csv:4 is not UTF-8 text: byte 0xe9 at byte 5 of the line"),
        (b"sep=;\nid;body\n1;one\n", {}, r"a\.csv:2: no columns are named `text`.*in the first row\."),
        (b"sep=;\nid;text\n1;ok\n\n2;a;b\n", {}, r"a\.csv:5: 3 fields, and the first row names 2 columns"),
        (b"sep=;\nid;text\n2;" + b"long" * 99 + b"\n", {}, r"a\.csv:3: this line has more than 128 bytes"),
        (b"id,text\r1,one\r", {}, r"a\.csv:1: new-line character seen in unquoted field\. A field"),
        (b'id,text\n1,ok\n2,"' + b"line\n" * 99, {}, r"a\.csv:3: a row is larger than 128 bytes.*never closed"),
        (
            b"id,text\n1," + b"x" * 999,
            {"quotes": False},
            r"a\.csv:2: this line has more than 128 bytes, the most",
        ),
    ],
)
def test_a_broken_table_is_named_with_the_line_the_rule_and_the_fix(
    content: bytes, settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "MOST_ROW_BYTES", 128)
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        check_sources([table(tmp_path / "a.csv", **settings)])
    assert len(str(refused.value)) < 500 and str(refused.value).isprintable()


def test_a_table_is_read_as_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\n" + b"a line\n" * 50_000 + b"\xff")
    pieces = iter_documents([table(tmp_path / "a.csv")])
    assert [next(pieces).text for _ in range(1000)] == ["a line"] * 1000
    assert count_documents([table(tmp_path / "a.csv")], 20) == 20
    with pytest.raises(UserError, match=r"a\.csv:50002 is not UTF-8"):
        documents(table(tmp_path / "a.csv"))


@pytest.mark.parametrize("delimiter", ["", "ab", '"', "\n"])
def test_a_delimiter_is_one_character_that_is_not_a_quotation_mark_or_a_line_break(delimiter: str) -> None:
    with pytest.raises(ValueError, match="delimiter"):
        table("a.csv", delimiter=delimiter)


# ------------------------------------------------------------------------------------------- parquet and the hub


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"body": [f"document {i}" for i in range(150)], "id": list(range(150))}), tmp_path / "a.parquet"
    )
    assert documents(parquet(tmp_path, field="body")) == [f"document {i}" for i in range(150)]
    with pytest.raises(UserError, match=r"no column `text`; it has body, id"):
        check_sources([parquet(tmp_path)])
    with pytest.raises(UserError, match="field `id` holds int"):
        check_sources([parquet(tmp_path, field="id")])
    (tmp_path / "a.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="is not a parquet file"):
        check_sources([parquet(tmp_path)])


@pytest.mark.parametrize("library", ["pyarrow", "datasets"])
def test_a_missing_library_is_named_with_its_extra(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "a.parquet").touch()
    source = parquet(tmp_path) if library == "pyarrow" else HuggingFaceSource(type="huggingface", dataset="a/b")
    with pytest.raises(UserError, match=rf"needs {library}.*gptworks\[data\]"):
        check_sources([source])


def test_a_dataset_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset_builder(dataset: str, **settings: Any) -> types.SimpleNamespace:
        def as_streaming_dataset(split: str) -> Iterator[dict[str, str]]:
            asked.append((dataset, settings | {"split": split}))
            return iter([{"body": "one"}, {"body": "two"}])

        config = types.SimpleNamespace(data_files={"validation": files})
        return types.SimpleNamespace(config=config, as_streaming_dataset=as_streaming_dataset)

    files = ["hf://datasets/A/b@0123/data.jsonl"]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset_builder=load_dataset_builder))
    source = HuggingFaceSource(type="huggingface", dataset="a/b", name="c", split="validation", field="body")
    assert documents(source) == ["one", "two"]
    assert asked[0] == ("a/b", {"name": "c", "split": "validation", "revision": None})
    with pytest.raises(UserError, match=r"dataset a/b, row 0: no field `text`; its fields are body"):
        check_sources([source.model_copy(update={"field": "text"})])
    for foreign in ("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/a", "hf://datasets/a/other@1/a.jsonl"):
        files[:] = ["hf://datasets/a/b@0123/data.jsonl", foreign]
        with pytest.raises(UserError, match=re.escape(f"dataset a/b: its README.md names {foreign} as its data")):
            documents(source)


def test_a_slice_of_a_dataset_is_refused_by_its_name() -> None:
    source = HuggingFaceSource(type="huggingface", dataset="a/b", split="train[:10%]")
    with pytest.raises(UserError, match=r"split=train\[:10%\] is a slice, .* such as train\."):
        documents(source)


@pytest.mark.parametrize("kind", [HuggingFaceSource, ConversationsSource])
def test_a_dataset_whose_files_have_different_columns_is_named(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one", "instruction": "one", "output": "two", "more": null}\n')
    (folder / "b.jsonl").write_text('{"text": "two", "instruction": "one", "output": "two", "other": {"n": 1}}\n')
    name = "huggingface" if kind is HuggingFaceSource else "conversations"
    source = kind(type=name, dataset=str(folder))
    read = documents if kind is HuggingFaceSource else lambda one: list(iter_conversations([one]))
    with pytest.raises(UserError, match=r"dataset .*after its row .*differ in their columns"):
        read(source)


@pytest.mark.parametrize("how", ["link", "up", "absolute", "address"])
def test_a_local_dataset_folder_reads_nothing_outside(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder, secret = tmp_path / "corpus", tmp_path / "secret.jsonl"
    folder.mkdir()
    secret.write_text('{"text": "secret"}\n')
    (folder / "train.jsonl").write_text('{"text": "inside"}\n')
    source = HuggingFaceSource(type="huggingface", dataset=str(folder))
    named = {"up": "../secret.jsonl", "absolute": str(secret), "address": f"file://{secret}"}
    if how == "link":
        (folder / "more.jsonl").symlink_to(secret)
    else:
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: '{named[how]}'\n---\n")
    with pytest.raises(
        UserError, match="leads out of" if how == "link" else "README.md names .*secret.jsonl as its data"
    ):
        documents(source)


# ------------------------------------------------------------------------------------------------------ download


def kept(cache: Path) -> list[str]:
    return [file.name for file in cache.iterdir() if file.suffix != ".lock"]


def test_an_interrupted_download_continues_where_it_ended(cache: Path) -> None:
    content = "".join(f"line {i}\n" for i in range(50_000)).encode()
    asked: list[str | None] = []

    def send(request: Any) -> None:
        asked.append(request.headers["Range"])
        start = int((request.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        request.send_response(206 if request.headers["Range"] else 200)
        request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        request.wfile.write(content[start : 100_000 * len(asked) if len(asked) < 3 else None])

    with website({"/a.txt": send}) as url:
        source = TextSource(type="text", url=f"{url}/a.txt", sha256=hashlib.sha256(content).hexdigest())
        for n_bytes in (100_000, 200_000):
            with pytest.raises(
                RunError, match=rf"before the end\. Try again, which continues after the first {n_bytes:,} bytes"
            ):
                documents(source)
        assert documents(source) == [content.decode()]
    assert asked == [None, "bytes=100000-", "bytes=200000-"]
    assert kept(cache) == [f"{source.sums[0][:16]}-a.txt"]


def test_several_downloads_are_one_source() -> None:
    names = ("b.txt", "a.txt")
    sums = tuple(hashlib.sha256(name.encode()).hexdigest() for name in names)
    with website({f"/{name}": name.encode() for name in names}) as url:
        source = TextSource(type="text", url=tuple(f"{url}/{name}" for name in names), sha256=sums)
        check_sources([source])
        assert documents(source) == ["b.txt", "a.txt"]
        assert source_signature([source]) == [["sha256", one] for one in sums]
        with pytest.raises(ValueError, match="url lists 2 and sha256 lists 1"):
            TextSource(type="text", url=source.url, sha256=sums[:1])
        with pytest.raises(ValueError, match="give path or url, not both"):
            text("a.txt", url=source.url, sha256=sums)


def test_a_download_is_verified_and_kept(cache: Path) -> None:
    with website({"/a.txt": b"from afar"}) as url:
        source = TextSource(type="text", url=f"{url}/a.txt", sha256=hashlib.sha256(b"from afar").hexdigest())
        assert documents(source) == ["from afar"]
    with website({}):  # it is asked no more
        assert documents(source) == ["from afar"]
    assert kept(cache) == [f"{source.sums[0][:16]}-a.txt"]


def test_a_download_of_other_bytes_is_refused_and_not_kept(cache: Path) -> None:
    actual = hashlib.sha256(b"something else").hexdigest()
    with website({"/a.txt": b"something else"}) as url:
        source = TextSource(type="text", url=f"{url}/a.txt", sha256="0" * 64)
        with pytest.raises(UserError, match=f"{actual} and the recipe states {'0' * 64}"):
            documents(source)
    assert kept(cache) == []


def test_a_failed_download_is_a_failed_run(cache: Path) -> None:
    with website({}) as url:
        source = TextSource(type="text", url=f"{url}/none.txt", sha256="0" * 64)
        with pytest.raises(RunError, match="could not be downloaded: the server answers 404"):
            documents(source)
    assert kept(cache) == []


def test_a_local_copy_is_used_instead_and_verified(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("here")
    right = hashlib.sha256(b"here").hexdigest()
    source = text(tmp_path / "a.txt", url="https://nowhere.invalid/a.txt", sha256=right)
    check_sources([source])
    assert documents(source) == ["here"]
    with pytest.raises(UserError, match=f"its sha256 is {right} and the recipe states {'0' * 64}"):
        check_sources([source.model_copy(update={"sha256": "0" * 64})])


# ----------------------------------------------------------------------------------------------- counts, signature


def test_counts_and_sizes(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("12345")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 7)
    assert count_documents([text(tmp_path), jsonl(tmp_path)], 100) == 12
    assert count_documents([text(tmp_path), jsonl(tmp_path)], 8) == 8
    assert total_bytes([text(tmp_path)]) == 25
    assert total_bytes([text(tmp_path), jsonl(tmp_path)]) is None


def test_the_signature_changes_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = source_signature([text(tmp_path)])
    assert source_signature([text(tmp_path)]) == before
    (tmp_path / "a.txt").write_text("three")
    changed = source_signature([text(tmp_path)])
    (tmp_path / "b.txt").write_text("")
    assert before != changed != source_signature([text(tmp_path)])


def test_a_local_dataset_folder_is_read_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"text": f"document {i}", "id": i}) for i in range(5)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = HuggingFaceSource(type="huggingface", dataset=str(folder))
    assert [piece.text for piece in iter_documents([source])] == [f"document {i}" for i in range(5)]


def test_files_that_are_not_read_are_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a.txt", "b.pdf", "c.pdf", "d.docx", ".hidden", "LICENSE"):
        (texts / name).write_text(tiny.TEXT + "More.\n")
    assert unread_files([text(texts)]) == {".pdf": 2, ".docx": 1, "LICENSE": 1}
    tree = tiny.recipe_tree(tmp_path)
    prepare_with_progress(parse_recipe(tree))
    assert "not read" not in capsys.readouterr().err
    tree["data"]["sources"][0]["path"] = str(texts)
    for _ in range(2):
        prepare_with_progress(parse_recipe(tree))
    printed = capsys.readouterr().err
    assert printed.count("not read, since they do not end in a source's `extensions`: 2 × .pdf, 1 × ") == 1
    (texts / "e.csv").write_text("text\n")
    (texts / "f.md").write_text("x")
    others = [table(texts), text(texts, extensions=(".md",))]
    assert unread_files([text(texts, extensions=(".txt",)), *others]) == {".pdf": 2, ".docx": 1, "LICENSE": 1}


def test_a_build_reads_neither_its_own_work_nor_what_gptworks_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of texts may be the folder for datasets, by default `data`."""
    monkeypatch.chdir(tmp_path)
    Path("data/runs/old/checkpoints").mkdir(parents=True)
    for i in range(8):
        Path(f"data/{i}.txt").write_text(tiny.TEXT[1000 * i : 1000 * (i + 1)])
    Path("data/runs/old/recipe.yaml").write_text("name: old\n")
    Path("data/runs/old/samples.md").write_text("what a model wrote\n" * 100)
    tree = tiny.recipe_tree(tmp_path)
    tree["data"] |= {
        "sources": [{"type": "text", "path": "data"}, {"type": "code", "path": ".", "extensions": [".json", ".txt"]}]
    }
    tree["data"]["cache_dir"] = "data"
    tree["data"]["validation"] = {"fraction": 0.3, "by": "document"}
    made = prepare(parse_recipe(tree))
    assert prepare(parse_recipe(tree)).reused
    assert sum(split.documents for split in made.manifest.splits.values()) == 17, "each twice, and text.txt"


def test_links_out_of_a_folder_of_texts_are_named_and_a_pattern_follows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere, texts = tmp_path / "elsewhere", tmp_path / "my texts"
    for folder in (elsewhere, texts):
        folder.mkdir()
        (folder / f"{folder.name}.txt").write_text(tiny.TEXT)
    (texts / "books").symlink_to(elsewhere)
    tree = tiny.recipe_tree(tmp_path)
    tree["data"]["sources"][0]["path"] = str(texts)
    prepare_with_progress(parse_recipe(tree))
    assert f"link to a folder elsewhere: {texts / 'books'}; name that folder" in capsys.readouterr().err
    assert "name that folder" not in str(look_at(texts).skipped)
    assert "source of its own" in "".join(look_at(texts).lines())
    (texts / "linked.txt").symlink_to(elsewhere / "elsewhere.txt")
    tree["data"]["cache_dir"] = str(tmp_path / "other")
    advised = f"give `{texts}/**/*.txt` as the source's path"
    with pytest.raises(UserError, match=re.escape(advised)):
        prepare(parse_recipe(tree))
    assert look_at(texts).skipped == {"folder": 1, ".txt": 1}
    assert len(documents(text(f"{texts}/**/*.txt"))) == 3


# -------------------------------------------------------------------------------------------------- from outside


class ReversedSource(FileSource):
    type: Literal["reversed"] = "reversed"


class Reversed(Source):
    """A source of text files in which each line is read from right to left."""

    endings = (".rtl",)

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        for line in unit.file.read_text().splitlines():
            yield Piece(line[::-1], True, True, len(line))


class OwnData(DataConfig):
    sources: tuple[ReversedSource, ...]  # type: ignore[assignment]


class OwnRecipe(Recipe):
    data: OwnData


def test_a_kind_of_source_from_outside_is_checked_counted_and_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, ReversedSource, Reversed)
    (tmp_path / "a.rtl").write_text("".join(f"{i} abc\n" for i in range(10, 70)))
    tree = tiny.recipe_tree(tmp_path) | {"tokenizer": {"type": "char"}}
    tree["data"] |= {"sources": [{"type": "reversed", "path": str(tmp_path)}], "validation": {"fraction": 0.2}}
    recipe = OwnRecipe.model_validate(tree)
    assert data_size(recipe).train_tokens == int(60 * 7 * 0.8)
    prepared = prepare(recipe)
    train = TokenShards(prepared.folder, "train")
    learned = prepared.tokenizer.decode(train.read(0, train.n_tokens).tolist())
    texts = learned.encode() + b"".join(held_out_text(prepared))
    assert texts.count(b"cba") == 60 and b"abc" not in texts
    assert find_prepared(recipe) is not None
    (tmp_path / "a.rtl").write_text("changed\n")
    assert find_prepared(recipe) is None


def test_a_class_in_a_new_file_is_found_by_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kinds_here"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "verses.py").write_text(
        "from gptworks.config.sources import FileSource\nfrom gptworks.data.sources.base import Source\n\n\n"
        "class VersesSource(FileSource):\n    pass\n\n\nclass Verses(Source):\n    settings: VersesSource\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = {settings.__name__: source.__name__ for settings, source in by_settings("kinds_here", Source).items()}
    assert found["VersesSource"] == "Verses"
    assert {settings.__name__ for settings in SOURCES} <= found.keys()
