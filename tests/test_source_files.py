"""Compressed files, JSON lists and damaged Parquet: the texts read, and the errors of broken and hostile files."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gptworks.config import CSVSource, JSONLSource, JSONSource, ParquetSource, TextSource
from gptworks.data.sources import json_lists, opening, records
from gptworks.data.sources.choose import check_sources, choose_source, iter_documents, total_bytes
from gptworks.draft.texts import look_at
from gptworks.errors import UserError
from test_sources import documents


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": partial(lzma.compress, preset=0),
    ".bz2": bz2.compress,
    ".zst": zstd,
}


def jsonl(path: Path) -> JSONLSource:
    return JSONLSource(type="jsonl", path=str(path))


def json_list(path: Path, **settings: Any) -> JSONSource:
    return JSONSource(type="json", path=str(path), **settings)


# ---------------------------------------------------------------------------------------------------- compressed


@pytest.mark.parametrize("ending", PACK)
def test_a_compressed_file_is_read_as_the_file_in_it(ending: str, tmp_path: Path) -> None:
    lines = [f"line {i} of 你\n" for i in range(3000)]
    rows = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
    half = len(rows) // 2
    contents = {
        "a.txt": PACK[ending]("".join(lines).encode()),
        "b.jsonl": PACK[ending](rows[:half]) + PACK[ending](rows[half:]),  # of two streams, as parallel packers write
        "c.csv": PACK[ending](b"id,text\n1,one\n"),
        "d.tsv": PACK[ending](b"id\ttext\n1\ttwo, three\n"),
        "e.json": PACK[ending](b'[{"text": "four"}]'),
    }
    for name, content in contents.items():
        (tmp_path / (name + ending)).write_bytes(content)
    given = [
        TextSource(type="text", path=str(tmp_path)),
        jsonl(tmp_path),
        CSVSource(type="csv", path=str(tmp_path)),
        json_list(tmp_path),
    ]
    check_sources(given)
    assert documents(*given) == ["".join(lines), *lines, "one", "two, three", "four"]
    assert total_bytes(given[:1]) is None, "it is known when they are read"
    assert choose_source(given[0]).size_bytes() == 3 * (tmp_path / f"a.txt{ending}").stat().st_size, "about"
    [piece] = iter_documents(given[:1])
    assert piece.document_bytes == len("".join(lines).encode()), "which the tail split needs"


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_damaged_compressed_file_is_named(damage: str, ending: str, tmp_path: Path) -> None:
    whole = PACK[ending](b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(10_000)))
    file = tmp_path / f"a.jsonl{ending}"
    file.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"no such data at all\n" * 9)
    with pytest.raises(UserError, match=rf"a\.jsonl\{ending}: broken \w+ data after [\d,]+ bytes"):
        documents(jsonl(file))


@pytest.mark.parametrize("ending", PACK)
def test_a_bomb_is_refused(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(opening, "MOST_RATIO", 500)
    (tmp_path / f"a.txt{ending}").write_bytes(PACK[ending](b"\n" * (1 << 24)))
    with pytest.raises(UserError, match=rf"a\.txt\{ending}: its first [\d,]+ bytes unpack to [\d,]+.*bomb"):
        check_sources([TextSource(type="text", path=str(tmp_path))])


def test_xz_that_asks_for_more_memory_than_it_may_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_XZ_MEMORY_BYTES", 1 << 20)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b'{"text": "x"}\n', preset=6))
    with pytest.raises(UserError, match=r"a\.jsonl\.xz: broken xz data after 0 bytes .*[Mm]emory"):
        documents(jsonl(tmp_path))


def test_a_line_of_2_gb_is_refused_and_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_LINE_BYTES", 1 << 22)  # a sixteenth, which is what it takes here in time
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.write(b'{"text": "fine"}\n')
        file.truncate(2 << 30)  # sparse
    pieces = iter_documents([jsonl(tmp_path)])
    assert next(pieces).text == "fine"
    tracemalloc.start()
    with pytest.raises(UserError, match=r"a\.jsonl:2: this line has more than 4,194,304 bytes, the most for a line"):
        next(pieces)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_draft_recognizes_compressed_files(tmp_path: Path) -> None:
    text = "".join(f"a line of text, number {i}\n" for i in range(3000))
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(json.dumps({"text": text}).encode()))
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(text.encode()))
    found = look_at(tmp_path)
    assert found.read == {".jsonl.zst": 1, ".txt.xz": 1}
    assert sorted(found.sample) == [text, text]


# ---------------------------------------------------------------------------------------------------------- json


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_a_json_list_is_read_like_json_loads(
    chunk: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lists, "_CHUNK_BYTES", chunk)
    rows = [{"text": f'你 \\ " ] }}, {i}', "n": i, "more": [{"a": [1, -2.5e3, None, True]}]} for i in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=indent, ensure_ascii=False), encoding="utf-8-sig")
    assert documents(json_list(tmp_path / "a.json")) == [row["text"] for row in rows]
    tree = {"version": 12, "skipped": {"rows": [1]}, "rows": rows, "after": 1}
    (tmp_path / "b.json").write_text(json.dumps(tree, indent=indent))
    assert documents(json_list(tmp_path / "b.json", records="rows")) == [row["text"] for row in rows]
    (tmp_path / "c.json").write_text(" [ ] ")
    assert documents(json_list(tmp_path / "c.json")) == []


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b'[{"text": "a"}, {"text": cut}]', {}, r"a\.json, record 2: not JSON: Expecting value, at its character 9"),
        (b'[{"text": "a"}', {}, r"a\.json: a comma or the end of the list is expected instead of ''"),
        (b'[{"text": "a', {}, r"a\.json, record 1: not JSON: Unterminated string"),
        (b'[{"text": "a"}]\n[]', {}, r"a\.json: there is more text after the list.*type=jsonl"),
        (b'{"text": "a"}\n{"text": "b"}', {}, r"holds an object with the keys text, not a list\. .* `records`"),
        (b'{"data": [{"text": "a"}]}', {}, r"holds an object, not a list\. .* if its `records` is `data`"),
        (b'{"data": []}', {"records": "rows"}, r"holds an object with the keys data"),
        (b'["a"]', {}, r"a\.json, record 1: a str, not an object"),
        (b"7", {}, r"a list of objects is expected instead of '7'"),
        (b"", {}, r"a list of objects is expected instead of ''"),
        (b'[{"text": "caf\xe9"}]', {}, r"a\.json is not UTF-8 text"),
        (b"[" + b'{"a": ' * 100_000, {}, r"a\.json, record 1: values are nested too deeply"),
        (b'[{"text": "a", "more": {"a": 1, "a": 2}}]', {}, r"a\.json, record 1: the key 'a' is given twice"),
        (b'[{"body": "a"}]', {}, r"a\.json, record 1: no field `text`; its fields are body"),
    ],
)
def test_a_broken_json_file_is_named(content: bytes, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        check_sources([json_list(tmp_path / "a.json", **settings)])


def test_a_large_json_file_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lists, "MOST_LINE_BYTES", 1 << 18)
    rows = ",".join(json.dumps({"text": "x" * 1000}) for _ in range(8000))
    (tmp_path / "a.json").write_text(f"[{rows}]")
    (tmp_path / "b.json").write_text('[{"text": "' + "x" * (1 << 20) + '"}]')
    tracemalloc.start()
    assert sum(1 for _ in iter_documents([json_list(tmp_path / "a.json")])) == 8000
    with pytest.raises(UserError, match=r"b\.json, record 1: larger than 262,144 characters"):
        documents(json_list(tmp_path / "b.json"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 20


# ------------------------------------------------------------------------------------------------------- parquet


def parquet_file(path: Path, values: pa.Array) -> ParquetSource:
    pq.write_table(pa.table({"text": values}), path, use_dictionary=False, compression="snappy")
    return ParquetSource(type="parquet", path=str(path))


def test_a_lying_parquet_schema_is_named_with_the_rows(tmp_path: Path) -> None:
    good = [f"row {i}" for i in range(100)]
    with pytest.raises(UserError, match=r"a\.parquet, row 100: field `text` is null"):
        documents(parquet_file(tmp_path / "a.parquet", pa.array([*good, None])))
    with pytest.raises(UserError, match=r"b\.parquet, row 0: field `text` holds bytes, not text"):
        documents(parquet_file(tmp_path / "b.parquet", pa.array([one.encode() for one in good])))
    raw = pa.array([*(one.encode() for one in good), b"caf\xe9"])
    says_string = pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:])
    with pytest.raises(UserError, match=r"c\.parquet, in the 64 rows from row 64 on: a text that is not UTF-8"):
        documents(parquet_file(tmp_path / "c.parquet", says_string))


def test_a_corrupt_parquet_page_is_named(tmp_path: Path) -> None:
    source = parquet_file(tmp_path / "a.parquet", pa.array([f"row {i} " * 50 for i in range(1000)]))
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[500:1500] = b"\xff" * 1000
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet, in the 64 rows from row \d+ on: broken data"):
        documents(source)
