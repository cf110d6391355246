"""ZIP and tar archives: the texts read from them, and the errors of broken and hostile ones."""

import bz2
import gzip
import io
import json
import lzma
import stat
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gptworks.config import ArchiveSource, FilesSource
from gptworks.data.sources import archives, base, opening
from gptworks.data.sources.base import Source
from gptworks.data.sources.choose import check_sources, choose_source, iter_documents
from gptworks.data.sources.delimited import CSV
from gptworks.data.sources.records import JSONL
from gptworks.errors import UserError
from test_sources import documents


def archive(path: Path, **settings: Any) -> ArchiveSource:
    return ArchiveSource(type="archive", path=str(path), **settings)


def make_zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as made:
        for name, content in members.items():
            made.writestr(zipfile.ZipInfo(name), content, method)
    return path


def tar_bytes(members: dict[str, bytes], **changes: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in changes.items():
                setattr(info, key, value)
            made.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".tar": bytes,
    ".tar.gz": gzip.compress,
    ".tgz": gzip.compress,
    ".tar.xz": partial(lzma.compress, preset=0),
    ".tar.bz2": bz2.compress,
    ".tar.zst": lambda content: bytes(pa.compress(content, codec="zstd", asbytes=True)),
}
LONG = "".join(f"line {i} of a long text 你\n" for i in range(45_000))
MEMBERS = {
    "docs/": b"",
    "docs/a.txt": b"\xef\xbb\xbfone",
    "docs/long.md": LONG.encode(),
    "docs/empty.txt": b"",
    "more.txt.gz": gzip.compress(b"packed"),
    "image.png": b"\x89PNG\0",
    "data/rows.jsonl": b'{"text": "first"}\n{"text": "second"}\n',
    "data/rows.jsonl.xz": lzma.compress(b'{"text": "third"}\n'),
    "table.tsv": b"id\ttext\n1\tcell\n",
}


@pytest.mark.parametrize("ending", [".zip", *PACK])
def test_members_are_documents_or_files_of_records(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"a{ending}"
    if ending == ".zip":
        make_zip(file, MEMBERS)
    else:
        file.write_bytes(PACK[ending](tar_bytes({name: content for name, content in MEMBERS.items() if content})))
    for source, expected in (
        (archive(tmp_path), ["one", LONG, "packed"]),
        (archive(file, members=("docs/*",)), ["one", LONG]),
        (archive(file, format="jsonl"), ["first", "second", "third"]),
        (archive(file, format="jsonl", members=("*.xz",)), ["third"]),
        (archive(file, format="csv"), ["cell"]),
    ):
        check_sources([source])
        assert documents(source) == expected
    with pytest.raises(UserError, match=rf"a{ending}:data/rows\.jsonl:1: no field `body`; its fields are text"):
        documents(archive(file, format="jsonl", field="body"))


@pytest.mark.parametrize("name", ["A.ZIP", "A.TAR", "A.TGZ", "A.Tar.GZ"])
def test_the_name_of_an_archive_may_be_in_any_case(name: str, tmp_path: Path) -> None:
    members = {"a.txt": b"one"}
    if name == "A.ZIP":
        make_zip(tmp_path / name, members)
    else:
        (tmp_path / name).write_bytes((bytes if name == "A.TAR" else gzip.compress)(tar_bytes(members)))
    for source in (archive(tmp_path), archive(tmp_path / name), FilesSource(type="files", path=str(tmp_path))):
        check_sources([source])
        assert documents(source) == ["one"]


@pytest.mark.parametrize(("form", "source"), [("jsonl", JSONL), ("csv", CSV)])
def test_members_of_all_endings_of_their_format_are_read(form: Any, source: type[Source], tmp_path: Path) -> None:
    content = {"jsonl": b'{"text": "cell"}\n', "csv": b"text\ncell\n"}[form]
    make_zip(tmp_path / "a.zip", {f"a{ending}": content for ending in source.endings})
    assert documents(archive(tmp_path, format=form)) == ["cell"] * 2


def test_the_units_of_a_zip_archive_are_its_documents_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "UNIT_BYTES", 1000)
    make_zip(tmp_path / "a.zip", {f"{i}.txt": str(i).encode() * 100 for i in range(50)})
    source = choose_source(archive(tmp_path))
    units = source.units()
    assert len(units) > 5 and units == source.units()
    assert source.size_bytes() == sum(unit.size_bytes for unit in units) == 100 * (10 + 2 * 40)
    assert [piece.text for unit in units for piece in source.read_unit(unit)] == [str(i) * 100 for i in range(50)]


# ----------------------------------------------------------------------------------------------- broken and hostile


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("name", ["/etc/a.txt", "../a.txt", "docs/../../a.txt", "C:\\a.txt"])
def test_a_member_that_leaves_its_folder_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    if kind == "zip":
        make_zip(tmp_path / "a.zip", {name: b"text"})
    else:
        (tmp_path / "a.tar").write_bytes(tar_bytes({name: b"text"}))
    with pytest.raises(UserError, match=r"a\.\w+: its member .* has a path outside the archive's folder"):
        check_sources([archive(tmp_path)])


def test_links_devices_and_encrypted_members_are_refused_where_they_would_be_read(tmp_path: Path) -> None:
    for name, changes, what in (
        ("a.tar", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "size": 0}, "link"),
        ("b.tar", {"type": tarfile.LNKTYPE, "linkname": "a.txt", "size": 0}, "link"),
        ("c.tar", {"type": tarfile.FIFOTYPE, "size": 0}, "device"),
    ):
        (tmp_path / name).write_bytes(tar_bytes({"a.txt": b""}, **changes))
        with pytest.raises(UserError, match=rf"{name}:a\.txt: it is a {what}.*with the source's `members`"):
            check_sources([archive(tmp_path / name)])
    link = zipfile.ZipInfo("a.txt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "d.zip", "w") as made:
        made.writestr(link, "/etc/passwd")
        made.writestr("b.md", "text")
    with pytest.raises(UserError, match=r"d\.zip:a\.txt: it is a symbolic link"):
        check_sources([archive(tmp_path / "d.zip")])
    assert documents(archive(tmp_path / "d.zip", members=("*.md",))) == ["text"]
    content = bytearray(make_zip(tmp_path / "e.zip", {"a.txt": b"secret"}).read_bytes())
    content[6] |= 1  # the flag in the member's header, and in the directory
    content[content.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "e.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"e\.zip:a\.txt: it is encrypted"):
        check_sources([archive(tmp_path / "e.zip")])


def test_an_empty_archive_and_one_without_a_matching_member_are_refused(tmp_path: Path) -> None:
    make_zip(tmp_path / "a.zip", {})
    (tmp_path / "b.tar").write_bytes(tar_bytes({}))
    for name in ("a.zip", "b.tar"):
        with pytest.raises(UserError, match=rf"{name}: this archive is empty"):
            documents(archive(tmp_path / name))
    for name in ("c.zip", "d.tar.gz"):
        (tmp_path / name).touch()
        with pytest.raises(UserError, match=name):
            documents(archive(tmp_path / name))
    make_zip(tmp_path / "e.zip", {"a.py": b"x", "b.py": b"y", "c.png": b"z"})
    with pytest.raises(UserError, match=r"no member matches \*\.txt or .*; it has \.py \(2\), \.png \(1\)\. Set the"):
        check_sources([archive(tmp_path / "e.zip")])


@pytest.mark.parametrize("stated", [100, 1000])
def test_a_size_that_is_not_the_members_is_refused(stated: int, tmp_path: Path) -> None:
    """The member has 500 bytes; its directory entry claims fewer or more."""
    content = bytearray(make_zip(tmp_path / "a.zip", {"a.txt": b"x" * 500}).read_bytes())
    at = content.index(b"PK\x01\x02") + 24
    assert struct.unpack_from("<I", content, at) == (500,)
    struct.pack_into("<I", content, at, stated)
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.zip:a\.txt: (broken data \(Bad CRC|its stated size is 1,000 bytes, and)"):
        check_sources([archive(tmp_path)])


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(opening, "MOST_RATIO", 300)
    zeros = {f"{i}.txt": b"\n" * (1 << 20) for i in range(8)}
    make_zip(tmp_path / "a.zip", zeros)
    (tmp_path / "b.tar.xz").write_bytes(lzma.compress(tar_bytes(zeros), preset=0))
    for name in ("a.zip", "b.tar.xz"):
        with pytest.raises(UserError, match=rf"{name}: its first [\d,]+ bytes unpack to [\d,]+.*bomb"):
            check_sources([archive(tmp_path / name)])


def test_a_damaged_archive_is_named_with_the_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tar_bytes({f"{i}.txt": f"text {i}".encode() * 100 for i in range(20)})
    for name, content in (
        ("cut.tar", whole[:5000]),
        ("between.tar", whole[: 512 * 6]),
        ("header.tar", whole[: 512 * 6] + b"\xff" * 512 + whole[512 * 7 :]),
        ("size.tar", whole[: 512 * 3 + 124] + b"77777777777" + whole[512 * 3 + 135 :]),
        ("two.tar", whole + whole),
        ("none.tar", b"no archive " * 100),
        ("attributes.tar", tar_bytes({"a.txt": b"x" * (2 << 20)}, type=tarfile.XHDTYPE)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}(:\d+\.txt)?: (broken|its size)"):
            documents(archive(tmp_path / name))
    content = bytearray(make_zip(tmp_path / "a.zip", {"a.txt": bytes(range(32, 127)) * 99}).read_bytes())
    content[60:90] = b"\xff" * 30
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.zip:a\.txt: broken data"):
        documents(archive(tmp_path / "a.zip"))
    monkeypatch.setattr(archives, "MOST_DIRECTORY_BYTES", 40)
    with pytest.raises(UserError, match=r"a\.zip: its list of members has 51 bytes, and 40 is the most"):
        documents(archive(tmp_path / "a.zip"))
    (tmp_path / "b.zip").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"b\.zip is not a ZIP archive that can be read"):
        documents(archive(tmp_path / "b.zip"))


def test_a_large_tar_archive_is_not_held(tmp_path: Path) -> None:
    member = tar_bytes({"a.jsonl": json.dumps({"text": "x" * 100_000}).encode()})[: 512 + 100_352]
    with gzip.open(tmp_path / "a.tar.gz", "wb", 1) as made:
        for _ in range(400):
            made.write(member)
        made.write(bytes(1024))
    tracemalloc.start()
    assert sum(1 for _ in iter_documents([archive(tmp_path, format="jsonl")])) == 400
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20
