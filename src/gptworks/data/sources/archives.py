"""Sources of ZIP and tar archives, whose members are documents or files of records. Members are read in the
archive's order; none is unpacked to the disk."""

import contextlib
import errno
import fnmatch
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from gptworks.config.sources import ArchiveSource
from gptworks.data.sources.base import Piece, Source, Unit, document, grouped, text_document
from gptworks.data.sources.delimited import CSV, read_table
from gptworks.data.sources.encodings import decoded
from gptworks.data.sources.extraction import PACKAGES, extracted_bytes
from gptworks.data.sources.files import listed
from gptworks.data.sources.opening import (
    about_unpacked_size,
    check_ratio,
    compression,
    has_ending,
    open_file,
    plain_name,
    read_bounded,
    unpacked,
)
from gptworks.data.sources.records import JSONL, MOST_LINE_BYTES, Skip, read_jsonl, record_document, refuse
from gptworks.errors import UserError, reason_of
from gptworks.files import open_regular

_ENDINGS = {"text": (".txt", ".md", ".text"), "jsonl": JSONL.endings, "csv": CSV.endings}
_MEMBERS = {form: tuple(f"*{ending}" for ending in endings) for form, endings in _ENDINGS.items()}
"""Default patterns of member names by `format`. They also match names with a compression ending, such as `a.md.gz`."""
MOST_DIRECTORY_BYTES = 1 << 27
_MOST_ENDINGS = 1000
_MOST_HEADER_BYTES = 1 << 20
"""Maximum bytes of a tar member's name and attributes."""

_BROKEN = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, OSError
)  # fmt: skip


class _Member(NamedTuple):
    name: str
    size_bytes: int
    wrong: str
    """Reason why the member cannot be read; empty if it can be read."""
    stream: Callable[[], Any]
    """Opens the member for reading."""


class Archive(Source):
    """A source that reads the members of ZIP and tar archives."""

    settings: ArchiveSource
    endings = (".zip", ".tar")

    def __init__(self, settings: ArchiveSource, kinds: Mapping[str, str] | None = None) -> None:
        """Take the settings of the source.

        Args:
            kinds: maps the ending of a member's name to the member's kind. If given, `format` "text" reads documents
                and texts in any encoding, and `read_unit` reports members of other kinds to `skip`. If None, the
                settings alone state which members are read.
        """
        super().__init__(settings)
        self.kinds = kinds

    def units_of(self, file: Path) -> Iterable[Unit]:
        """Group the members of a ZIP archive into units. A tar archive is one unit, since it is read from the start."""
        if _is_tar(file):
            return [Unit(file, about_unpacked_size(file))]
        with _zip(file) as archive:
            return [*grouped(file, (info.file_size for info in archive.infolist()))] or [Unit(file, 0)]

    def size_bytes(self) -> int | None:
        return sum(unit.size_bytes for unit in self.units()) if self.settings.path else None

    def read_unit(self, unit: Unit, skip: Skip = refuse) -> Iterator[Piece]:
        seen: Counter[str] = Counter()
        others: Counter[str] = Counter()
        n_read = 0
        for member in _members(unit):
            name = Path(f"{unit.file}:{member.name}")
            _check_path(unit.file, member.name)
            _count(seen, _suffix(member.name))
            if not self.wants(member.name):
                _count(others, "hidden" if _is_hidden(member.name) else _suffix(member.name))
                continue
            n_read += 1
            try:
                if member.wrong:
                    raise UserError(f"{name}: {member.wrong} Leave it out with the source's `members`.")
                yield from self._read_member(name, member, skip)
            except UserError as error:
                skip(error)
        if self.kinds is not None:
            if others:
                skip(UserError(f"members of other kinds: {listed(others)}"))
        elif not n_read and unit.end is None:
            if not seen:
                raise UserError(f"{unit.file}: this archive is empty. Get it again, or leave it out.")
            wanted = " or ".join(self._patterns)
            raise UserError(
                f"{unit.file}: no member matches {wanted}; it has {listed(seen)}. Set the source's `members`."
            )

    @property
    def _patterns(self) -> tuple[str, ...]:
        return self.settings.members or _MEMBERS[self.settings.format]

    def names(self, file: Path) -> Iterator[str]:
        """Yield the names of an archive's members. Raises UserError if the archive is broken."""
        return (member.name for member in _members(Unit(file)))

    def wants(self, name: str) -> bool:
        """Return whether a member with this name is read."""
        if self.kinds is not None and self.settings.format == "text":
            return not _is_hidden(name) and self.kinds.get(_ending(name)) in ("text", *PACKAGES)
        names = (name, plain_name(name))
        return any(fnmatch.fnmatchcase(one, pattern) for one in names for pattern in self._patterns)

    def _read_member(self, name: Path, member: _Member, skip: Skip) -> Iterator[Piece]:
        try:
            with member.stream() as opened:
                yield from self._read_opened(name, opened, member.size_bytes, skip)
        except _BROKEN as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # the disk failed
                raise
            raise UserError(f"{name}: broken data ({reason_of(error)}). Get the archive again.") from None

    def _read_opened(self, name: Path, stream: BinaryIO, size_bytes: int, skip: Skip) -> Iterator[Piece]:
        opened = unpacked(stream, name)
        if self.settings.format == "text" and self.kinds is not None and size_bytes <= MOST_LINE_BYTES:
            data, kind = _read_all(opened, name), self.kinds[_ending(name.name)]
            text = extracted_bytes(data, kind, str(name)) if kind in PACKAGES else decoded(data, name)
            yield from text_document(text)
            return
        if self.settings.format == "text":
            if compression(name.name):  # the unpacked size is known only after unpacking
                data = _read_all(opened, name)
                opened, size_bytes = io.BytesIO(data), len(data)
            yield from document(opened, name, n_bytes=size_bytes)
            return
        jsonl = self.settings.format == "jsonl"
        read: Callable[..., Iterator[tuple[object, Mapping[str, Any]]]] = read_jsonl if jsonl else read_table
        for where, record in read(name, opened=opened, skip=skip):
            yield from record_document(where, record, self.settings.field)


def _count(endings: Counter[str], ending: str) -> None:
    if ending in endings or len(endings) < _MOST_ENDINGS:  # a hostile archive may have millions of endings
        endings[ending] += 1


def _is_hidden(name: str) -> bool:
    return PurePosixPath(name).name.startswith(".")


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix or "(none)"


def _ending(name: str) -> str:
    return PurePosixPath(plain_name(name)).suffix.lower()


def _read_all(stream: BinaryIO, name: Path) -> bytes:
    return read_bounded(stream, MOST_LINE_BYTES, f"{name}: ", "a compressed text in an archive, which you may unpack")


def _is_tar(file: Path) -> bool:
    return has_ending(file.name, (".tar",))


def _members(unit: Unit) -> Iterator[_Member]:
    return _tar_members(unit.file) if _is_tar(unit.file) else _zip_members(unit.file, unit.start, unit.end)


def _check_path(file: Path, name: str) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:[\\/]", name):
        shown = name if name.isprintable() else ascii(name)
        raise UserError(
            f"{file}: its member {shown[:200]!r} has a path outside the archive's folder. Nothing is written there, "
            f"but such an archive is damaged or hostile: make it again from the files."
        )


# ------------------------------------------------------------------------------------------------------------- zip


def _check_directory(stream: BinaryIO, file: Path) -> None:
    """Raise a UserError if the archive's list of members is larger than MOST_DIRECTORY_BYTES: it would fill memory."""
    stream.seek(max(0, stream.seek(0, io.SEEK_END) - (1 << 16) - 98))
    tail = stream.read((1 << 16) + 98)
    end, end_of_large = tail.rfind(b"PK\5\6"), tail.rfind(b"PK\6\6")
    size = int.from_bytes(tail[end + 12 : end + 16], "little") if end >= 0 else 0
    if size == 0xFFFFFFFF and end_of_large >= 0:
        size = int.from_bytes(tail[end_of_large + 40 : end_of_large + 48], "little")
    if size > MOST_DIRECTORY_BYTES:
        raise UserError(
            f"{file}: its list of members has {size:,} bytes, and {MOST_DIRECTORY_BYTES:,} is the most. "
            f"Divide it, or pack the files as .tar.gz, which is read as a stream."
        )


@contextlib.contextmanager
def _zip(file: Path) -> Iterator[zipfile.ZipFile]:
    with open_regular(file) as stream:
        _check_directory(stream, file)
        try:
            archive = zipfile.ZipFile(stream)
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
            raise UserError(f"{file} is not a ZIP archive that can be read: {error}. Get it again.") from None
        with archive:
            yield archive


def _zip_members(file: Path, start: int, end: int | None) -> Iterator[_Member]:
    with _zip(file) as archive:
        infos = archive.infolist()
        check_ratio(file, sum(info.file_size for info in infos), file.stat().st_size)
        for info in infos[start:end]:
            if info.is_dir():
                continue
            wrong = ""
            if info.flag_bits & 1:
                wrong = "it is encrypted. Unpack the archive with its password."
            elif (info.external_attr >> 16) & 0o170000 == 0o120000:
                wrong = "it is a symbolic link, and links are not followed."
            yield _Member(info.filename, info.file_size, wrong, partial(archive.open, info))


# ------------------------------------------------------------------------------------------------------------- tar


class _BrokenHeader(Exception):
    """A tar member's header is broken, which tarfile would take for the archive's end, or data follows the end."""


class _Header(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_Header":
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):  # a block of zeros ends the archive
                raise
            raise _BrokenHeader(str(error) if buf else "it is cut off") from None
        if header.size < 0:
            raise _BrokenHeader(f"a member's size is {header.size:,}")
        if header.type in _ATTRIBUTES and header.size > _MOST_HEADER_BYTES:
            raise _BrokenHeader(
                f"a member's attributes are {header.size:,} bytes, and {_MOST_HEADER_BYTES:,} is the most"
            )
        return header


_ATTRIBUTES = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK
)  # fmt: skip


def _tar_members(file: Path) -> Iterator[_Member]:
    last = "its beginning"
    with open_file(file) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 16, tarinfo=_Header) as archive:
                while (info := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined]  # otherwise all members stay in memory
                    if info.isdir():
                        continue
                    wrong = ""
                    if info.issym() or info.islnk():
                        wrong = "it is a link, and links are not followed."
                    elif not info.isreg() or info.issparse():
                        wrong = "it is a device, a FIFO or a sparse file, not a plain one."
                    yield _Member(info.name, info.size, wrong, partial(archive.extractfile, info))
                    last = f"`{info.name}`"
                while rest := archive.fileobj.read(1 << 16):
                    if any(rest):
                        raise _BrokenHeader("more follows the end: are these several archives in one file?")
        except (tarfile.TarError, _BrokenHeader, EOFError) as error:
            raise UserError(f"{file}: broken tar data after {last} ({error}). Get it again.") from None
