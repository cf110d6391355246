"""The format of prepared text: a folder of token files and one manifest that says what they are.

    manifest.json                  everything below, checked when a folder is opened
    tokenizer/                     the tokenizer that made the tokens
    train-00000.tokens             token ids, flat, little-endian uint16 or uint32
    train-00000.offsets            where documents start in that file, in tokens, little-endian uint64
    validation-00000.tokens ...

A shard is closed when it holds enough tokens; documents may go on in the next one.
"""

import contextlib
import hashlib
import json
import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from gptworks.config import Section
from gptworks.errors import UserError
from gptworks.files import sealed_json, sha256_file, unsealed_json

FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"

Split = Literal["train", "validation"]
Dtype = Literal["uint16", "uint32"]
Ids = npt.NDArray[Any]


class ShardFile(Section):
    """One token file and its document starts."""

    file: str
    offsets_file: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str
    offsets_sha256: str


class SplitFiles(Section):
    """The shards of a split, in order, and their totals. `text_bytes` is the UTF-8 size of the text itself."""

    shards: tuple[ShardFile, ...]
    tokens: int
    documents: int
    text_bytes: int
    unknown_tokens: int


class Manifest(Section):
    """What a folder of shards holds and what it was made from."""

    format_version: int
    created_by: str
    dtype: Dtype
    vocab_size: int
    tokenizer_sha256: str
    made_from: dict[str, Any]
    round_trips: bool
    """Whether decoding gave back the text of every validation document: bits per byte is defined only then."""
    splits: dict[Split, SplitFiles]

    @property
    def fingerprint(self) -> str:
        """One sha256 over those of all token files: equal for equal tokens."""
        sums = [shard.sha256 for split in sorted(self.splits) for shard in self.splits[split].shards]
        return hashlib.sha256(" ".join(sums).encode("ascii")).hexdigest()


def dtype_for(vocab_size: int) -> Dtype:
    """The narrowest of the two types that holds the ids 0 to vocab_size - 1."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


# ---------------------------------------------------------------------------------------------------- write


class ShardWriter:
    """Writes the shards of one split as tokens come. Memory holds no more than one shard's document starts."""

    def __init__(self, folder: Path, split: Split, dtype: Dtype, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._dtype = _little_endian(dtype)
        self._shards: list[ShardFile] = []
        self._unknown_tokens = 0
        self._open: BinaryIO | None = None

    def add(self, ids: Ids, text_bytes: int, starts_document: bool, unknown_tokens: int = 0) -> None:
        """Append tokens [n] that stand for `text_bytes` bytes of text."""
        if self._open is None:
            self._name = f"{self._split}-{len(self._shards):05d}"
            self._open = (self._folder / f"{self._name}.tokens").open("wb")
            self._digest, self._starts, self._tokens, self._text_bytes = hashlib.sha256(), array("Q"), 0, 0
        if starts_document:
            self._starts.append(self._tokens)
        data = ids.astype(self._dtype).tobytes()
        self._open.write(data)
        self._digest.update(data)
        self._tokens += len(ids)
        self._text_bytes += text_bytes
        self._unknown_tokens += unknown_tokens
        if self._tokens >= self._shard_tokens:
            self._close_shard()

    def finish(self) -> SplitFiles:
        """Close the last shard. Every file is on the disk when this returns."""
        self._close_shard()
        return SplitFiles(
            shards=tuple(self._shards),
            tokens=sum(shard.tokens for shard in self._shards),
            documents=sum(shard.documents for shard in self._shards),
            text_bytes=sum(shard.text_bytes for shard in self._shards),
            unknown_tokens=self._unknown_tokens,
        )

    def abandon(self) -> None:
        """Close the open file and leave the rest as it is."""
        if self._open is not None:
            with contextlib.suppress(OSError):  # it may fail for the reason that ended the work: a full disk
                self._open.close()

    def _close_shard(self) -> None:
        if self._open is None:
            return
        sync_and_close(self._open)
        self._open = None
        offsets = np.asarray(self._starts, dtype="<u8").tobytes()
        offsets_file = (self._folder / f"{self._name}.offsets").open("wb")
        offsets_file.write(offsets)
        sync_and_close(offsets_file)
        self._shards.append(
            ShardFile(
                file=f"{self._name}.tokens",
                offsets_file=f"{self._name}.offsets",
                tokens=self._tokens,
                documents=len(self._starts),
                text_bytes=self._text_bytes,
                sha256=self._digest.hexdigest(),
                offsets_sha256=hashlib.sha256(offsets).hexdigest(),
            )
        )


def sync_and_close(file: BinaryIO) -> None:
    """Close a file whose bytes have reached the disk."""
    with file:
        file.flush()
        os.fsync(file.fileno())


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write manifest.json, durably. It is the last file of a folder."""
    file = (folder / MANIFEST_FILE).open("wb")
    file.write(sealed_json(manifest.model_dump(mode="json")).encode("utf-8"))
    sync_and_close(file)


def _little_endian(dtype: Dtype) -> np.dtype[Any]:
    return np.dtype({"uint16": "<u2", "uint32": "<u4"}[dtype])


# ----------------------------------------------------------------------------------------------------- read


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder of shards.

    Raises:
        UserError: it is missing or broken, or of a format this version does not read.
    """
    file = folder / MANIFEST_FILE
    try:
        data = file.read_bytes()
        version = json.loads(data)["format_version"]
        if version == FORMAT_VERSION:
            return Manifest.model_validate(unsealed_json(data))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no prepared text: there is no {MANIFEST_FILE}. {_fix(folder)}") from None
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise UserError(f"{file} is broken ({type(error).__name__}). {_fix(folder)}") from None
    raise UserError(f"{file} has format {version} and this gptworks reads {FORMAT_VERSION}. {_fix(folder)}")


class TokenShards:
    """The tokens of one split, read where they lie: the shards are memory-mapped as one sequence.

    Raises:
        UserError: a file is missing or its size is not what the manifest says; with `verify`, also changed bytes.
    """

    def __init__(self, folder: str | Path, split: Split, verify: bool = False) -> None:
        self.folder, self.split = Path(folder), split
        self.manifest = read_manifest(self.folder)
        assert split in get_args(Split)
        self._files = self.manifest.splits[split]
        dtype = _little_endian(self.manifest.dtype)
        for shard in self._files.shards:
            self._check_size(shard.file, shard.tokens * dtype.itemsize)
            self._check_size(shard.offsets_file, shard.documents * 8)
        if verify:
            self.verify()
        self._maps = [np.memmap(self.folder / shard.file, dtype, mode="r") for shard in self._files.shards]
        self._bounds = np.cumsum([0, *(shard.tokens for shard in self._files.shards)])

    @property
    def n_tokens(self) -> int:
        return self._files.tokens

    @property
    def n_documents(self) -> int:
        return self._files.documents

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text the tokens stand for."""
        return self._files.text_bytes

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [length] from position `start`, as int64.

        Raises:
            IndexError: the range is not within the split.
        """
        if not 0 <= start <= start + length <= self.n_tokens:
            raise IndexError(f"tokens {start} to {start + length} of a split of {self.n_tokens}")
        tokens = np.empty(length, dtype=np.int64)
        shard = int(np.searchsorted(self._bounds, start, side="right")) - 1
        done = 0
        while done < length:
            local = start + done - int(self._bounds[shard])
            part = self._maps[shard][local : local + length - done]
            tokens[done : done + len(part)] = part
            done, shard = done + len(part), shard + 1
        return tokens

    def document_starts(self) -> npt.NDArray[np.int64]:
        """Positions [n_documents] of the first token of each document, ascending."""
        starts = [
            np.fromfile(self.folder / shard.offsets_file, dtype="<u8").astype(np.int64) + int(self._bounds[index])
            for index, shard in enumerate(self._files.shards)
        ]
        return np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)

    def verify(self) -> None:
        """Compare every byte with the sha256 in the manifest.

        Raises:
            UserError: a file is not what was written.
        """
        for shard in self._files.shards:
            for name, expected in ((shard.file, shard.sha256), (shard.offsets_file, shard.offsets_sha256)):
                actual = sha256_file(self.folder / name)
                if actual != expected:
                    raise UserError(
                        f"{self.folder / name} is corrupt: its sha256 is {actual[:12]}… and the manifest states "
                        f"{expected[:12]}…. {_fix(self.folder)}"
                    )

    def _check_size(self, name: str, expected_bytes: int) -> None:
        file = self.folder / name
        if not file.is_file():
            raise UserError(f"{file} is missing. {_fix(self.folder)}")
        if (actual := file.stat().st_size) != expected_bytes:
            raise UserError(f"{file} has {actual} bytes and the manifest states {expected_bytes}. {_fix(self.folder)}")


def _fix(folder: Path) -> str:
    return f"Delete {folder} and run `gptworks prepare` again."
