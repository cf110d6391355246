"""The format of prepared text: a folder of token files and a manifest that describes them.

    manifest.json                  describes the files below; checked when a folder is opened
    tokenizer/                     the tokenizer that made the tokens
    train-00000.tokens             token ids, flat, little-endian uint16 or uint32
    train-00000.offsets            the start of each document in that file, in tokens, little-endian uint64
    train-00000.learned            conversations only: one byte per token, 1 if it is learned
    train-00000.examples           conversations only: for each document the columns of `EXAMPLE`, little-endian uint64
    validation-00000.tokens ...

A shard is closed when it holds enough tokens; a document may continue in the next shard.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from gptworks.config import Section
from gptworks.errors import UserError
from gptworks.files import Stamp, map_array, open_regular, read_array, read_regular, sha256_file, stamp, unsealed_json
from gptworks.json_files import mapping_of

FORMAT_VERSION = 4
MANIFEST_FILE = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26
TOKENIZER_FOLDER = "tokenizer"

EXAMPLE = ("record", "text", "question", "answer", "flags")
"""Columns stored for each example: the number of its record, from 0; hashes of its text, of the turns before its last
answer, and of the last answer; the sum of its flags, which are defined below. The hashes ignore case and the amount of
white space. The examples of preference pairs have hashes of 0, and no flag except NO_END."""

NO_END, ALTERED, EMPTY, UNANSWERED, SWAPPED = 1, 2, 4, 8, 16
"""Flags, in this order: an answer has no end token; the template changes an answer; an answer is empty; no answer is
learned; the assistant begins and the user ends."""

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
Dtype = Literal["uint16", "uint32"]
Ids = npt.NDArray[Any]


class ShardFile(Section):
    """A shard: its token file, the file of its document starts, and two more files for conversations."""

    file: str
    offsets_file: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str
    offsets_sha256: str
    more_sha256: dict[str, str] = Field(default_factory=dict)
    """sha256 of the shard's other files, by their ending."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(Path(name).name != name for name in (self.file, self.offsets_file)):
            raise ValueError("a shard's files must be in the folder of the manifest")
        if self.tokens < 1 or self.documents < 0 or self.more_sha256.keys() not in (set(), {"learned", "examples"}):
            raise ValueError("a shard needs tokens, and its further files must be `learned` and `examples`")
        return self

    def numbered(self, split: Split, number: int) -> Self:
        """Return a copy with the file names of shard `number` of a split."""
        name = f"{split}-{number:05d}"
        return self.model_copy(update={"file": f"{name}.tokens", "offsets_file": f"{name}.offsets"})

    def files(self) -> list[str]:
        """Return the names of the shard's files."""
        return [self.file, self.offsets_file, *(_sibling(self, ending) for ending in sorted(self.more_sha256))]


class Origin(Section):
    """A file or dataset of conversations or preference pairs."""

    name: str
    shape: str
    records: int
    unread: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """Maps each key that other programs honour and gptworks does not read to two numbers: the number of records with
    the key, and the number of the first such record. Keys of turns begin with `turn.`, such as `turn.name`."""


class SplitFiles(Section):
    """The shards of a split, in order, and their totals. `text_bytes` is the UTF-8 size of the encoded text."""

    shards: Annotated[tuple[ShardFile, ...], Field(max_length=30_000)]
    tokens: int
    documents: int
    text_bytes: int
    unknown_tokens: int

    @model_validator(mode="after")
    def _check(self) -> Self:
        of_shards = [(shard.tokens, shard.documents) for shard in self.shards]
        if (self.tokens, self.documents) != (sum(n for n, _ in of_shards), sum(n for _, n in of_shards)):
            raise ValueError("the totals are not those of the shards")
        return self

    @classmethod
    def of(cls, shards: Iterable[ShardFile], unknown_tokens: int) -> Self:
        """Return the split that consists of these shards, with their totals."""
        shards = tuple(shards)
        return cls(
            shards=shards,
            tokens=sum(shard.tokens for shard in shards),
            documents=sum(shard.documents for shard in shards),
            text_bytes=sum(shard.text_bytes for shard in shards),
            unknown_tokens=unknown_tokens,
        )


ShardCounts = dict[Split, Annotated[int, Field(ge=0)]]


class Part(Section):
    """One of several datasets in a folder. In every split, each part owns consecutive shards, in the parts' order."""

    name: str
    fingerprint: str
    shards: ShardCounts
    sources: tuple[ShardCounts, ...] = ()
    unknown_tokens: dict[Split, Annotated[int, Field(ge=0)]]
    made_from: dict[str, Any]
    round_trips: bool
    validation_text_sha256: str | None
    cleaning: dict[str, Any] | None = None


@dataclass(frozen=True)
class Stretch:
    """The range of tokens in a split that belongs to one dataset."""

    name: str
    first: int
    n_tokens: int
    text_bytes: int = 0


class Manifest(Section):
    """The contents of a folder of shards, and the origin of its text."""

    format_version: int
    created_by: str
    dtype: Dtype
    vocab_size: int
    tokenizer_sha256: str
    tokenizer_files: dict[str, str] = Field(default_factory=dict)
    """sha256 of each file of `tokenizer/`."""
    made_from: dict[str, Any]
    round_trips: bool
    """Whether decoding restored the text of every validation document. If not, bits per byte is undefined. False for
    conversations, where not every byte is predicted."""
    splits: dict[Split, SplitFiles]
    origins: tuple[Origin, ...] = ()
    validation_text_sha256: str | None = None
    """sha256 of the held-out text before encoding, which is the same for every tokenizer. For a mixture, the sha256 of
    its parts' values; null for conversations."""
    parts: tuple[Part, ...] = ()
    """The datasets of a mixture, in order; empty: the folder is one dataset."""
    cleaning: dict[str, Any] | None = None
    """Counts of the documents that the recipe's filters kept, changed and dropped; null: no filters, or a mixture,
    whose parts have their own counts."""
    sources: tuple[ShardCounts, ...] = ()
    """For each source of text in `made_from`, in order: the number of shards that it owns in each split. Empty for
    conversations, and for mixtures, whose parts have their own counts."""

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        shares = [("parts", [part.shards for part in self.parts]), ("sources", self.sources)]
        for split, files in self.splits.items():
            for name, counts in shares:
                if counts and sum(one.get(split, 0) for one in counts) != len(files.shards):
                    raise ValueError(f"the {name} of its {split} split do not add up to its number of shards")
        return self

    @property
    def holds_examples(self) -> bool:
        """Whether the dataset was built from conversations or preference pairs."""
        return bool(self.origins)

    def where(self, record: int) -> str:
        """Return the place of a record for messages: the name of its file or dataset, and its number there, from 1. The
        argument counts the records of all origins, from 0. Raises IndexError if there is no such record."""
        for origin in self.origins:
            if record < origin.records:
                return f"{origin.name}, record {record + 1}"
            record -= origin.records
        raise IndexError(record)

    @property
    def fingerprint(self) -> str:
        """A sha256 over the sha256 of all shards' tokens, masks and examples. Equal shards have equal fingerprints."""
        shards = [shard for split in sorted(self.splits) for shard in self.splits[split].shards]
        sums = [sha256 for shard in shards for sha256 in (shard.sha256, *shard.more_sha256.values())]
        return hashlib.sha256(" ".join(sums).encode("ascii")).hexdigest()


def shares(split: Split, counts: Sequence[ShardCounts], shards: Sequence[ShardFile]) -> Iterator[Sequence[ShardFile]]:
    """Yield the shards of a split that each part or source owns, given how many each owns."""
    at = 0
    for one in counts:
        own = shards[at : at + one.get(split, 0)]
        at += len(own)
        yield own


def dtype_for(vocab_size: int) -> Dtype:
    """Return the smaller type that holds the ids 0 to vocab_size - 1."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def little_endian(dtype: Dtype) -> np.dtype[Any]:
    """Return the numpy type of the ids in a token file."""
    return np.dtype({"uint16": "<u2", "uint32": "<u4"}[dtype])


# ----------------------------------------------------------------------------------------------- reading shards


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder of shards. Raises UserError if it is missing or broken, or has a format that this
    version does not read."""
    file = folder / MANIFEST_FILE
    try:
        data = read_regular(file, MAX_MANIFEST_BYTES, inside=folder)
        version = mapping_of(data)["format_version"]
        if version == FORMAT_VERSION:
            return Manifest.model_validate(unsealed_json(data))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no prepared text: there is no {MANIFEST_FILE}. {redo(folder)}") from None
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is broken ({type(error).__name__}). {redo(folder)}") from None
    raise UserError(f"{file} has format {version} and this gptworks reads {FORMAT_VERSION}. {redo(folder)}")


class TokenShards:
    """The tokens of one split: its shards, memory-mapped as one sequence.

    With `verify`, the constructor calls the method `verify`. Give False if another process has verified the files, or
    to open the split without reading all of it. Raises UserError if the split or a file is missing, if a file's size is
    not the manifest's, or if a check fails.
    """

    def __init__(self, folder: str | Path, split: Split, verify: bool = True) -> None:
        self.folder, self.split = Path(folder), split
        self.manifest = read_manifest(self.folder)
        assert split in SPLITS
        if split not in self.manifest.splits:
            raise UserError(f"{self.folder} has no {split} split. {redo(self.folder)}")
        self._files = files = self.manifest.splits[split]
        self.n_tokens, self.n_documents = files.tokens, files.documents
        self.text_bytes = files.text_bytes
        """Size of the encoded text in UTF-8 bytes."""
        dtype = little_endian(self.manifest.dtype)
        for shard in self._files.shards:
            self._check_size(shard.file, shard.tokens * dtype.itemsize)
            self._check_size(shard.offsets_file, shard.documents * 8)
            sizes = {"learned": shard.tokens, "examples": shard.documents * 8 * len(EXAMPLE)}
            for ending in shard.more_sha256:
                self._check_size(_sibling(shard, ending), sizes[ending])
        if verify:
            self.verify()
        self._maps = [map_array(self.folder / shard.file, dtype, inside=self.folder) for shard in self._files.shards]
        self._learned = [
            map_array(self.folder / _sibling(shard, "learned"), np.uint8, inside=self.folder)
            for shard in self._files.shards
            if "learned" in shard.more_sha256
        ]
        self._bounds = np.cumsum([0, *(shard.tokens for shard in self._files.shards)])

    @property
    def stretches(self) -> list[Stretch]:
        """The token range of each dataset; one range without a name if the folder is a single dataset."""
        parts, shards = self.manifest.parts, self._files.shards
        owned = shares(self.split, [part.shards for part in parts], shards) if parts else [shards]
        found, first = [], 0
        for name, own in zip([part.name for part in parts] or [""], owned, strict=True):
            n_tokens = sum(shard.tokens for shard in own)
            found.append(Stretch(name, first, n_tokens, sum(shard.text_bytes for shard in own)))
            first += n_tokens
        return found

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Return `length` tokens from position `start` on, as int64. Raises IndexError if the range is not within the
        split."""
        return self._read(self._maps, start, length)

    def read_learned(self, start: int, length: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the learned tokens among `length` tokens from position `start` on; errors as `read`."""
        return self._read(self._learned, start, length).astype(np.bool_)

    def _read(self, maps: Sequence[Ids], start: int, length: int) -> npt.NDArray[np.int64]:
        if not 0 <= start <= start + length <= self.n_tokens:
            raise IndexError(f"tokens {start} to {start + length} of a split of {self.n_tokens}")
        values = np.empty(length, dtype=np.int64)
        shard = int(np.searchsorted(self._bounds, start, side="right")) - 1
        done = 0
        while done < length:
            local = start + done - int(self._bounds[shard])
            part = maps[shard][local : local + length - done]
            values[done : done + len(part)] = part
            done, shard = done + len(part), shard + 1
        return values

    def examples(self) -> dict[str, npt.NDArray[np.uint64]]:
        """Return each column of `EXAMPLE` by name, with one value per example, [n_documents]."""
        names = [_sibling(shard, "examples") for shard in self._files.shards]
        parts = [read_array(self.folder / name, "<u8", inside=self.folder) for name in names]
        values = np.concatenate([*parts, np.empty(0, dtype="<u8")]).astype(np.uint64)
        return dict(zip(EXAMPLE, values.reshape(-1, len(EXAMPLE)).T, strict=True))

    def document_starts(self) -> npt.NDArray[np.int64]:
        """Return the position of each document's first token, [n_documents], ascending; errors as `document_bounds`."""
        return self.document_bounds[:-1]

    @cached_property
    def document_bounds(self) -> npt.NDArray[np.int64]:
        """The position of each document's first token, then the number of tokens, [n_documents + 1], ascending. Raises
        UserError if the stored positions do not begin at 0 or are not ascending."""
        parts = [
            read_array(self.folder / shard.offsets_file, "<u8", inside=self.folder).astype(np.int64) + first
            for shard, first in zip(self._files.shards, self._bounds[:-1].tolist(), strict=True)
        ]
        bounds: npt.NDArray[np.int64] = np.append(np.concatenate([*parts, np.empty(0, np.int64)]), self.n_tokens)
        if bounds[0] != 0 or (np.diff(bounds) < 0).any():
            raise UserError(
                f"{self.folder} is not as it was written: the starts of the documents in its {self.split} split are "
                f"not ascending positions in {self.n_tokens} tokens. {redo(self.folder)}"
            )
        return bounds

    def document(self, number: int) -> tuple[int, int]:
        """Return the positions at which a document begins and ends. Raises UserError if there is no such document."""
        if not 0 <= number < self.n_documents:
            raise UserError(
                f"document {number} is not in the {self.split} split, which has {self.n_documents}, numbered from 0."
            )
        start, end = self.document_bounds[number : number + 2].tolist()
        return start, end

    def document_at(self, position: int) -> int:
        """Return the number of the document that holds the token at a position of the split."""
        return int(np.searchsorted(self.document_bounds, position, side="right")) - 1

    def verify(self) -> None:
        """Compare every file with its sha256 in the manifest, and every id with the vocabulary. Skip files that this
        process has verified since their last change. Raises UserError if a file was changed, or holds an id outside the
        vocabulary."""
        for shard in self._files.shards:
            more = ((_sibling(shard, ending), sha256) for ending, sha256 in shard.more_sha256.items())
            for name, expected in ((shard.file, shard.sha256), (shard.offsets_file, shard.offsets_sha256), *more):
                file = self.folder / name
                if (known := (file.absolute(), stamp(file), expected)) in _verified:
                    continue
                actual = sha256_file(file, inside=self.folder)
                if actual != expected:
                    raise UserError(
                        f"{file} is corrupt: its sha256 is {actual[:12]}… and the manifest states "
                        f"{expected[:12]}…. {redo(self.folder)}"
                    )
                if name == shard.file:
                    self._check_ids(shard)
                _verified.add(known)

    def _check_ids(self, shard: ShardFile) -> None:
        """Raise UserError if an id is outside the vocabulary, which a correct sha256 does not rule out."""
        ids = map_array(self.folder / shard.file, little_endian(self.manifest.dtype), inside=self.folder)
        highest = max(int(ids[at : at + _CHECKED_IDS].max()) for at in range(0, len(ids), _CHECKED_IDS))
        if highest >= self.manifest.vocab_size:
            raise UserError(
                f"{self.folder / shard.file} holds the token {highest} and the vocabulary of its manifest has "
                f"{self.manifest.vocab_size}: ids go from 0 to {self.manifest.vocab_size - 1}. {redo(self.folder)}"
            )

    def _check_size(self, name: str, expected_bytes: int) -> None:
        file = self.folder / name
        try:
            with open_regular(file, inside=self.folder) as opened:
                actual = os.fstat(opened.fileno()).st_size
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{file} is missing. {redo(self.folder)}") from None
        if actual != expected_bytes:
            raise UserError(f"{file} has {actual} bytes and the manifest states {expected_bytes}. {redo(self.folder)}")


_verified: set[tuple[Path, Stamp | None, str]] = set()
"""Files that this process has verified, each with its stamp and sha256."""
_CHECKED_IDS = 1 << 22


def _sibling(shard: ShardFile, ending: str) -> str:
    return Path(shard.file).with_suffix(f".{ending}").name


def redo(folder: Path) -> str:
    """Return advice to delete a damaged dataset and build it again."""
    return f"Delete {folder} and run `gptworks data build` again."
