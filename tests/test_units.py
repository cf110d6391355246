"""Sources read in separate parts give the same as the whole, wherever the parts begin."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptworks.config import FilesSource, ValidationSplit
from gptworks.data.jobs import plan_jobs
from gptworks.data.sources import base, records
from gptworks.data.sources.base import Piece, Source
from gptworks.data.sources.choose import choose_source
from gptworks.data.split import split_documents
from gptworks.errors import UserError
from test_sources import jsonl, parquet, text

LINES = [f"line {i}: " + "naïve 世界 🙂 " * (i % 7) + "\n" for i in range(400)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base, records):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)
        monkeypatch.setattr(module, "UNIT_BYTES", 512)


def whole(source: Source) -> list[Piece]:
    """Read the files without units."""
    return [piece for file in source.files() for piece in source.read(file)]


def apart(source: Source) -> list[list[Piece]]:
    return [list(source.read_unit(unit)) for unit in source.units()]


TEXTS: dict[str, bytes] = {
    "lines": "".join(LINES).encode(),
    "a byte order mark": b"\xef\xbb\xbf" + "".join(LINES).encode(),
    "one long line": ("word " * 900).encode(),
    "long lines among short ones": "".join(LINES[i] * 3 + "é" * (i % 5 * 60) + "\n" for i in range(60)).encode(),
    "windows": "".join(LINES).replace("\n", "\r\n").encode(),
    "nothing": b"",
    "exactly a unit": b"x" * 511 + b"\n",
    "exactly two": (b"x" * 63 + b"\n") * 16,
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_pieces_of_a_text_do_not_depend_on_its_units(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXTS[name])
    source = choose_source(text(tmp_path / "a.txt"))
    units, pieces = apart(source), whole(source)
    assert [piece for unit in units for piece in unit] == pieces == list(source.documents())
    assert "".join(piece.text for piece in pieces).encode() == TEXTS[name].removeprefix(b"\xef\xbb\xbf")
    assert len(units) == 1 or all(units)
    assert sum(unit.size_bytes for unit in source.units()) == len(TEXTS[name])
    if name in ("lines", "windows"):
        assert len(units) > 30


@pytest.mark.parametrize("kind", ["text", "files"])
@pytest.mark.parametrize("by", ["document", "tail"])
@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5, 0.9])
def test_a_document_s_split_does_not_depend_on_its_units(by: Any, fraction: float, kind: str, tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text("".join(LINES[i : i + 60]), encoding="utf-8", newline="")
    settings = text(tmp_path) if kind == "text" else FilesSource(type="files", path=str(tmp_path))
    source, validation = choose_source(settings), ValidationSplit(by=by, fraction=fraction)
    jobs = plan_jobs([source])
    parts = [part for job in jobs for part in job.split(validation)]
    assert parts == list(split_documents(whole(source), validation))
    assert sum(not next(job.pieces()).starts_document for job in jobs) > 5


def test_lines_of_json_are_divided_at_their_ends(tmp_path: Path) -> None:
    texts = [line * (40 if i == 77 else 1) for i, line in enumerate(LINES)]
    lines = [json.dumps({"text": t}, ensure_ascii=bool(i % 2)) + "\n" for i, t in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(lines) + "\n\n", encoding="utf-8")
    source = choose_source(jsonl(tmp_path))
    units = apart(source)
    assert [piece for unit in units for piece in unit] == whole(source)
    assert len(units) > 20
    (tmp_path / "a.jsonl").write_text("".join(lines) + "broken", encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.jsonl:401: not JSON"):
        list(source.read_unit(source.units()[-1]))


def test_row_groups_of_a_table_are_its_units(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": LINES, "n": range(400)}), tmp_path / "a.parquet", row_group_size=7)
    source = choose_source(parquet(tmp_path))
    units = apart(source)
    assert [piece for unit in units for piece in unit] == whole(source)
    assert len(units) > 10
    where = [place for place, _ in records.read_parquet(tmp_path / "a.parquet", "text", 3, 5)]
    assert where == [f"{tmp_path / 'a.parquet'}, row {row}" for row in range(21, 35)]
