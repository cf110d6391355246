"""Find a phrase in the tokens of a dataset, with a suffix array over the bytes that the tokens spell.

The index is next to the shards, in files of up to 2**24 tokens. Each file is written completely or not at all:

    a header        JSON, padded to 1,024 bytes: identifies the tokens
    the suffixes    offset of each suffix in the text, in lexicographic order, little-endian uint32
    the places      offset of every 256th token in the text, little-endian uint32
    the text        the bytes that the tokens spell

A phrase may begin and end within a token and may be tokenized in any way: the bytes are searched, not the tokens.
"""

import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gptworks.data.opened import Prepared
from gptworks.data.shards import Ids, Split, TokenShards, redo
from gptworks.data.spelling import BORDER, Spelling
from gptworks.data.workers import Progress
from gptworks.errors import UserError, importing
from gptworks.files import (
    file_lock,
    make_folder,
    naming_disk_errors,
    open_regular,
    replacing,
    sealed_json,
    unsealed_json,
)
from gptworks.machine import usable_cpus

FOLDER = "search"
"""Name of the index's folder in a dataset."""
BLOCK_TOKENS = 1 << 24
MAX_BLOCK_BYTES = (1 << 31) - 1
_VERSION = 1
_HEADER_BYTES = 1024
_EVERY = 256
_READ_TOKENS = 1 << 18
_CONTEXT_TOKENS = 24
_MOST_ORDERED = 1 << 16
_MOST_THREADS = 4


@dataclass(frozen=True)
class Hit:
    """One occurrence of a phrase."""

    document: int
    """Index of the document in the split, from 0."""
    first: int
    """Index in the document of the token in which the phrase begins."""
    n_tokens: int
    """Number of tokens over which the phrase extends."""
    position: int
    """Index in the split of the token in which the phrase begins."""
    before: str
    text: str
    after: str


@dataclass(frozen=True)
class Found:
    """The result of searching for a phrase."""

    n: int
    """Number of occurrences, which may overlap."""
    hits: tuple[Hit, ...]
    """Some of the occurrences, in the order of the text."""


@dataclass(frozen=True)
class _Block:
    """The range of tokens that one file of the index covers."""

    file: Path
    header: dict[str, Any]
    first: int
    n_tokens: int


@dataclass(frozen=True)
class _Opened:
    """The memory-mapped index file of a block."""

    first: int
    memory: mmap.mmap
    suffixes: npt.NDArray[np.uint32]
    places: npt.NDArray[np.uint32]
    begin: int
    """Offset of the text in the file."""
    n_bytes: int

    def range(self, pattern: bytes) -> tuple[int, int]:
        """Return the range of sorted suffixes that begin with `pattern`: the first index, and one after the last."""
        n, begin, memory = len(pattern), self.begin, self.memory

        def key(place: Any) -> bytes:
            at = begin + int(place)
            return memory[at : at + n]

        low = bisect_left(self.suffixes, pattern, key=key)
        return low, bisect_right(self.suffixes, pattern, lo=low, key=key)


class SearchIndex:
    """The search index of a split. Call `build` to complete it before searching. Raises UserError if a file of the
    dataset is missing or has another size, or a token has more than 65,536 bytes."""

    def __init__(self, prepared: Prepared, split: Split = "train") -> None:
        self.folder, self.split, self.tokenizer = prepared.folder / FOLDER, split, prepared.tokenizer
        self.spelling = Spelling(prepared.tokenizer)
        self._shards = TokenShards(prepared.folder, split, verify=False)
        self.n_tokens = self._shards.n_tokens
        self._table: Sequence[bytes] = [*self.spelling.table, BORDER]
        self._blocks = list(self._planned(prepared.manifest.tokenizer_sha256))

    def _planned(self, tokenizer_sha256: str) -> Iterator[_Block]:
        """Yield the blocks of all shards. The blocks are small enough for 32-bit offsets."""
        most = min(BLOCK_TOKENS, MAX_BLOCK_BYTES // (self.spelling.max_token_bytes + 1))
        at = 0
        for shard in self._shards.manifest.splits[self.split].shards:
            for number, start in enumerate(range(0, shard.tokens, most)):
                n = min(most, shard.tokens - start)
                header = {
                    "version": _VERSION, "tokens_sha256": shard.sha256, "documents_sha256": shard.offsets_sha256,
                    "tokenizer_sha256": tokenizer_sha256, "first_token": start, "n_tokens": n,
                }  # fmt: skip
                yield _Block(self.folder / f"{Path(shard.file).stem}-{number:03d}.index", header, at + start, n)
            at += shard.tokens

    # ------------------------------------------------------------------------------------- building the index

    @property
    def missing(self) -> int:
        """Number of tokens that the index does not cover yet."""
        return sum(block.n_tokens for block in self._blocks if _opened(block) is None)

    def build(self, threads: int | None = None, report: Progress = lambda done, total: None) -> None:
        """Write the missing blocks of the index. If the call is interrupted, finished blocks are kept.

        `threads` is the number of blocks to sort in parallel; None: one per core, at most 4. Sorting a block takes
        about 7 bytes of memory per byte of text. Raises UserError if the library is missing, or a file of the dataset
        was changed; RunError if the disk is full or fails.
        """
        with importing("pydivsufsort", "data", "searching a dataset"):
            from pydivsufsort import divsufsort
        self._shards.verify()
        advice = "Finished parts of the index stay. Make room or permission there, and search again."
        needed = 5 * self._shards.text_bytes
        with naming_disk_errors(f"{self.folder}: the index could not be written", self.folder, advice, needed):
            make_folder(self.folder)
            with file_lock(self.folder / ".lock"):
                todo = [block for block in self._blocks if _opened(block) is None]
                done = self.n_tokens - sum(block.n_tokens for block in todo)
                report(done, self.n_tokens)
                with ThreadPoolExecutor(threads or min(_MOST_THREADS, usable_cpus())) as pool:
                    writing = [pool.submit(self._write, block, divsufsort) for block in todo]
                    try:
                        for block, future in zip(todo, writing, strict=True):
                            future.result()
                            done += block.n_tokens
                            report(done, self.n_tokens)
                    finally:
                        pool.shutdown(cancel_futures=True)

    def _write(self, block: _Block, divsufsort: Callable[[bytes], npt.NDArray[np.int32]]) -> None:
        parts: list[bytes] = []
        places: list[npt.NDArray[np.uint32]] = []
        size = 0
        for at in range(block.first, block.first + block.n_tokens, _READ_TOKENS):
            ids, opens = self._read(at, min(_READ_TOKENS, block.first + block.n_tokens - at))
            sizes = self.spelling.sizes[ids] + opens
            places.append((size + np.cumsum(sizes) - sizes)[::_EVERY].astype("<u4"))
            size += int(sizes.sum())
            spelled = np.insert(ids, np.flatnonzero(opens), len(self._table) - 1) if opens.any() else ids
            parts.append(b"".join(map(self._table.__getitem__, spelled.tolist())))
        text = b"".join(parts)
        header = sealed_json({**block.header, "n_bytes": size}).encode("utf-8")
        with replacing(block.file) as file:
            file.write(header.ljust(_HEADER_BYTES))
            divsufsort(text).astype("<u4", copy=False).tofile(file)
            np.concatenate(places).tofile(file)
            file.write(text)

    def _read(self, at: int, n: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Return tokens [n], and a mask [n] of the tokens that begin a document without a special token on either side
        of its start. Raises UserError if a token is not in the vocabulary."""
        before = min(at, 1)
        ids = self._shards.read(at - before, n + before)
        if int(ids.max(initial=0)) >= len(self.spelling.table):
            raise UserError(
                f"{self._shards.folder} holds tokens that are not in its vocabulary. {redo(self._shards.folder)}"
            )
        special = self.spelling.is_border[ids]
        opens = np.zeros(len(ids), dtype=np.bool_)
        starts = self._shards.document_starts()
        low, high = np.searchsorted(starts, [max(at, 1), at + n])
        opens[starts[low:high] - (at - before)] = True
        opens[1:] &= ~special[1:] & ~special[:-1]
        return ids[before:], opens[before:]

    # -------------------------------------------------------------------------------------- searching the index

    @cached_property
    def _open(self) -> list[_Opened]:
        found = [_opened(block) for block in self._blocks]
        if None in found:
            raise UserError(f"{self.folder} is not complete: build the index first.")
        return [one for one in found if one is not None]

    @cached_property
    def _bounds(self) -> list[int]:
        """Offset of each block's text in the text of the split, then the end of the last block."""
        return [0, *accumulate(one.n_bytes for one in self._open)]

    def find(self, phrase: str, most: int = 10) -> Found:
        """Return the number of occurrences of a phrase, and the first `most` of these occurrences. If an index file has
        more than 65,536 occurrences, the returned ones may not be the first. Raises UserError if the phrase cannot be
        searched, or the index is not complete or does not fit the tokens."""
        pattern = self.spelling.of_phrase(phrase)
        ranges = [one.range(pattern) for one in self._open]
        across = list(self._across(pattern))
        n = len(across) + sum(high - low for low, high in ranges)
        places = across[: max(0, most)]
        for one, begin, (low, high) in zip(self._open, self._bounds, ranges, strict=False):
            if len([place for place in places if place < begin]) >= most:
                break
            here = one.suffixes[low : min(high, low + _MOST_ORDERED)]
            if len(here) > most:
                here = np.partition(here, most)[:most]
            places += [begin + place for place in here.tolist()]
        return Found(n, tuple(self._hit(place, pattern) for place in sorted(places)[: max(0, most)]))

    def _across(self, pattern: bytes) -> Iterator[int]:
        """Yield the offsets in the split's text where the pattern begins in one block and ends in a later one."""
        n = len(pattern)
        for before, border in pairwise(self._bounds[:-1]):
            start = max(before, border - n + 1)
            window = self._text(start, min(self._bounds[-1], border + n - 1))
            at = window.find(pattern)
            while at >= 0:
                yield start + at
                at = window.find(pattern, at + 1)

    def _text(self, start: int, end: int) -> bytes:
        first = bisect_right(self._bounds, start) - 1
        last = bisect_left(self._bounds, end)
        parts = ((self._open[i], self._bounds[i]) for i in range(first, last))
        return b"".join(
            one.memory[one.begin + max(0, start - at) : one.begin + min(one.n_bytes, end - at)] for one, at in parts
        )

    def _token_at(self, place: int) -> tuple[int, int]:
        """Return the index of the token that spells the byte at a text offset, and the byte's index in the token.
        Raises UserError if no token spells this byte."""
        number = min(bisect_right(self._bounds, place), len(self._open)) - 1
        one, local = self._open[number], place - self._bounds[number]
        noted = max(0, int(np.searchsorted(one.places, local, side="right")) - 1)
        first, at = one.first + noted * _EVERY, int(one.places[noted])
        for i, spelled in enumerate(self._spelled(first, min(_EVERY, self._shards.n_tokens - first))):
            if at <= local < at + len(spelled):
                return first + i, local - at
            at += len(spelled)
        raise self._damaged()

    def _spelled(self, at: int, n: int) -> list[bytes]:
        ids, opens = self._read(at, n)
        spelled = zip(ids.tolist(), opens.tolist(), strict=True)
        return [BORDER * opened + self._table[token] for token, opened in spelled]

    def _hit(self, place: int, pattern: bytes) -> Hit:
        """Return the occurrence at an offset of the text. Raises UserError if the tokens there do not spell the
        pattern."""
        token, within = self._token_at(place)
        spelled = self._spelled(token, min(len(pattern), self._shards.n_tokens - token))
        ends = list(accumulate(map(len, spelled)))
        n = bisect_left(ends, within + len(pattern)) + 1
        whole = b"".join(spelled[:n])
        if whole[within : within + len(pattern)] != pattern:
            raise self._damaged()
        document = self._shards.document_at(token)
        begin, end = self._shards.document(document)
        before = max(begin, token - _CONTEXT_TOKENS)
        after = min(end, token + n + _CONTEXT_TOKENS)
        if self.spelling.by_text:
            parts = (
                self._shown(before, token) + whole[:within], pattern,
                whole[within + len(pattern) :] + self._shown(token + n, after),
            )  # fmt: skip
            texts = [part.decode("utf-8", "replace") for part in parts]
        else:
            ends_at = ((before, token), (token, token + n), (token + n, after))
            texts = [self.tokenizer.decode(self._shards.read(a, b - a).tolist()) for a, b in ends_at]
        return Hit(document, token - begin, n, token, *texts)

    def _shown(self, start: int, end: int) -> bytes:
        """Return the text of a range of tokens, with the names of special tokens."""
        ids = self._shards.read(start, end - start).tolist()
        border = self.spelling.is_border
        names = ((self.tokenizer.id_to_token(i) or "").encode() if border[i] else self._table[i] for i in ids)
        return b"".join(names)

    def _damaged(self) -> UserError:
        return UserError(
            f"{self.folder} is not the index of {self._shards.folder}, or was changed. Delete it to build it again."
        )


def _opened(block: _Block) -> _Opened | None:
    """Open a block's index file without verifying its contents; None if it is missing, broken or for other tokens."""
    try:
        with open_regular(block.file) as file:
            header = unsealed_json(file.read(_HEADER_BYTES).rstrip(b" "))
            n_bytes = int(header["n_bytes"])
            if not block.header.items() <= header.items() or not 0 < n_bytes <= MAX_BLOCK_BYTES:
                return None
            n_places = -(-block.n_tokens // _EVERY)
            begin = _HEADER_BYTES + 4 * (n_bytes + n_places)
            if os.fstat(file.fileno()).st_size != begin + n_bytes:
                return None
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    suffixes = np.frombuffer(memory, "<u4", n_bytes, _HEADER_BYTES)
    places = np.frombuffer(memory, "<u4", n_places, _HEADER_BYTES + 4 * n_bytes)
    return _Opened(block.first, memory, suffixes, places, begin, n_bytes)
