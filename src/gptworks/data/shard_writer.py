"""Write a folder of shards in the format that `gptworks.data.shards` describes."""

import contextlib
import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gptworks.data.shards import (
    MANIFEST_FILE,
    SPLITS,
    Dtype,
    Ids,
    Manifest,
    ShardFile,
    Split,
    SplitFiles,
    little_endian,
)
from gptworks.files import open_new, sealed_json, sync, write_whole


class ShardWriter:
    """Writes the shards of one split as tokens arrive. Memory holds the document starts and masks of one shard."""

    def __init__(self, folder: Path, split: Split, dtype: Dtype, shard_tokens: int) -> None:
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._dtype = little_endian(dtype)
        self._shards: list[ShardFile] = []
        self._unknown_tokens = 0
        self._open: BinaryIO | None = None

    def add(
        self,
        ids: Ids,
        text_bytes: int,
        starts_document: bool,
        unknown_tokens: int = 0,
        learned: npt.NDArray[np.bool_] | None = None,
        example: tuple[int, ...] = (),
    ) -> None:
        """Append tokens [n] that encode `text_bytes` bytes of text.

        Add a conversation in one call, with the mask of its learned tokens [n] and values for the columns of `EXAMPLE`.
        """
        if self._open is None:
            self._name = f"{self._split}-{len(self._shards):05d}"
            self._open = open_new(self._folder / f"{self._name}.tokens")
            self._digest, self._starts, self._tokens, self._text_bytes = hashlib.sha256(), array("Q"), 0, 0
            self._learned: list[bytes] = []
            self._examples = array("Q")
        if starts_document:
            self._starts.append(self._tokens)
        data = ids.astype(self._dtype).tobytes()
        self._open.write(data)
        self._digest.update(data)
        if learned is not None:
            self._learned.append(learned.astype(np.uint8).tobytes())
            self._examples.extend(example)
        self._tokens += len(ids)
        self._text_bytes += text_bytes
        self._unknown_tokens += unknown_tokens
        if self._tokens >= self._shard_tokens:
            self._close_shard()

    def finish(self) -> SplitFiles:
        """Close the last shard and return a description of the split's files, which are on the disk now."""
        self._close_shard()
        return SplitFiles.of(self._shards, self._unknown_tokens)

    def close(self) -> None:
        """Close the open file, if any; leave the other files as they are."""
        if self._open is not None:
            with contextlib.suppress(OSError):  # closing may fail for the same reason as the work, such as a full disk
                self._open.close()

    def _close_shard(self) -> None:
        if self._open is None:
            return
        self._open.close()
        self._open = None
        sync(self._folder / f"{self._name}.tokens")
        files = {"offsets": np.asarray(self._starts, dtype="<u8").tobytes()}
        if self._learned:
            examples = np.asarray(self._examples, dtype="<u8").tobytes()
            files |= {"learned": b"".join(self._learned), "examples": examples}
        for ending, content in files.items():
            write_whole(self._folder / f"{self._name}.{ending}", content, new=True)
        sums = {ending: hashlib.sha256(content).hexdigest() for ending, content in files.items()}
        self._shards.append(
            ShardFile(
                file=f"{self._name}.tokens",
                offsets_file=f"{self._name}.offsets",
                tokens=self._tokens,
                documents=len(self._starts),
                text_bytes=self._text_bytes,
                sha256=self._digest.hexdigest(),
                offsets_sha256=sums.pop("offsets"),
                more_sha256=sums,
            )
        )


@contextlib.contextmanager
def split_writers(folder: Path, dtype: Dtype, shard_tokens: int) -> Iterator[dict[Split, ShardWriter]]:
    """Yield a writer for each split; the caller must `finish` each."""
    writers = {split: ShardWriter(folder, split, dtype, shard_tokens) for split in SPLITS}
    try:
        yield writers
    finally:
        for writer in writers.values():
            writer.close()


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write manifest.json durably; call this after all other files of the folder are written."""
    write_whole(folder / MANIFEST_FILE, sealed_json(manifest.model_dump(mode="json")), new=True)
