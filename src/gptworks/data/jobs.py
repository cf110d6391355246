"""Write shards of text in jobs. One process does a whole job, from reading text to finished files.

A job consists of neighbouring units of one source. A job's folder gets its final name when the job is complete. The
jobs and their files depend only on the sources and settings, not on the number of processes or on interruptions.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gptworks.config import Section, SourceConfig, ValidationSplit
from gptworks.data.encoders import Encoder, choose_encoder, compared, plain_encoder
from gptworks.data.shard_writer import ShardWriter, split_writers
from gptworks.data.shards import SPLITS, Dtype, ShardFile, Split, SplitFiles
from gptworks.data.snippets import with_snippets
from gptworks.data.sources import base
from gptworks.data.sources.base import Piece, Source, Unit
from gptworks.data.sources.choose import choose_source
from gptworks.data.split import split_documents
from gptworks.data.workers import Advance, batches_of, in_order
from gptworks.errors import UserError
from gptworks.files import (
    link_or_copy,
    new_folder,
    open_new,
    open_regular,
    read_regular,
    remove_tree,
    sealed_json,
    unsealed_json,
    write_whole,
)
from gptworks.machine import usable_cpus
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import document_frame, encode_text, token_texts, unpack_tokenizer

_JOB_FILE, _HELD_OUT_FILE = "job.json", "held-out.text"
_MAX_JOB_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 20
_BATCH_BYTES, _MOST_THREADS = 1 << 20, 8
_WORTH_A_CHOICE_BYTES = 1 << 24  # for less text, comparing two encoders takes longer than encoding
MOST_JOBS = 4096
"""Maximum number of jobs per source. Each job has its own shards, and a dataset of many small files opens slowly."""
_SAMPLED_PIECES, _SAMPLED_CHARACTERS = 16, 1 << 12
"""Size of the sample of each job by which two encoders are compared: number of pieces, and characters per piece."""


@dataclass(frozen=True)
class Job:
    """A part of the work on a dataset: neighbouring units of one source."""

    number: int
    source: int
    units: tuple[tuple[Source, Unit], ...]

    def pieces(self) -> Iterator[Piece]:
        """Yield the documents of the units, in pieces."""
        for source, unit in self.units:
            yield from source.read_unit(unit)

    def split(self, validation: ValidationSplit) -> Iterator[tuple[Split, Piece]]:
        """Yield the documents of the units, in pieces, each piece with its split. If `validation.by` is "document", all
        pieces of a document have the same split, even if several jobs read the document."""
        source, unit = self.units[0]
        return split_documents(self.pieces(), validation, lambda: source.opening(unit))


@dataclass(frozen=True)
class JobSettings:
    """Settings that, together with the text, decide a job's shards."""

    tokenizer: str
    """The tokenizer, serialized by `pack_tokenizer`."""
    validation: ValidationSplit
    snippets: float
    shard_tokens: int
    dtype: Dtype


class Done(Section):
    """A description of the files that a finished job has written."""

    source: int
    splits: dict[Split, SplitFiles]
    round_trips: bool


def plan_jobs(sources: Iterable[SourceConfig | Source]) -> list[Job]:
    """Group all units of the sources, in order, into jobs of about equal size; each job has units of one source."""
    jobs: list[Job] = []
    for number, source in enumerate(map(choose_source, sources)):
        units = source.units()
        total_bytes = sum(unit.size_bytes for unit in units)
        least_bytes = -(-total_bytes // min(MOST_JOBS, max(1, round(total_bytes / base.UNIT_BYTES))))
        for taken in batches_of(iter(units), lambda one: one.size_bytes, least_bytes):
            jobs.append(Job(len(jobs), number, tuple((source, unit) for unit in taken)))
    return jobs


def run_jobs(
    folder: Path, jobs: list[Job], settings: JobSettings, processes: int, report: Advance, say: Callable[[str], None]
) -> None:
    """Do the unfinished jobs, in `processes` processes if there are several jobs.

    Args:
        processes: see `in_order`.
        report: called with the bytes of text encoded since the last call. The first call counts the finished jobs.
        say: called with each new line that names an encoding library and the reason for choosing the library.

    Raises:
        UserError: a source is broken, or the tokenizer cannot read the text.
        RunError: a process died, or the disk is full or fails.
    """
    done = finished(folder)
    report(sum(files.text_bytes for job in done.values() for files in job.splits.values()))
    left = [job for job in jobs if job.number not in done]
    if not left:
        return
    fast = sum(unit.size_bytes for job in left for _, unit in job.units) >= _WORTH_A_CHOICE_BYTES
    said = {""}
    for _, line in in_order(left, _JobWriter, (folder, settings, fast), processes, report):
        if line not in said:
            said.add(line)
            say(line)


class _JobWriter:
    """Writes the shards of jobs, in a worker process or in the main one."""

    def __init__(self, folder: Path, settings: JobSettings, fast: bool, advance: Advance) -> None:
        self._folder, self._settings, self._advance = folder, settings, advance
        self._tokenizer = unpack_tokenizer(settings.tokenizer)
        self._encoder = choose_encoder(self._tokenizer) if fast else plain_encoder(self._tokenizer)
        self._unknown, self._texts = special_tokens(self._tokenizer).unk, token_texts(self._tokenizer)

    def __call__(self, job: Job) -> str:
        """Write the shards of both splits, the held-out text, and their description. Return a line that names the
        encoding library and the reason for choosing it; empty if there was no choice."""
        out = _folder(self._folder, job.number)
        if out.exists():
            remove_tree(out)  # a folder that exists for an unfinished job is damaged
        with new_folder(out) as aside:
            with (
                split_writers(aside, self._settings.dtype, self._settings.shard_tokens) as writers,
                open_new(aside / _HELD_OUT_FILE) as held_out,
            ):
                encoder, round_trips = self._write_documents(writers, held_out, job)
                splits = {split: writer.finish() for split, writer in writers.items()}
            done = Done(source=job.source, splits=splits, round_trips=round_trips)
            write_whole(aside / _JOB_FILE, sealed_json(done.model_dump(mode="json")), new=True)
        return f"encoding with {encoder.name}: {encoder.reason}" if encoder.reason else ""

    def _write_documents(self, writers: dict[Split, ShardWriter], held_out: BinaryIO, job: Job) -> tuple[Encoder, bool]:
        """Encode and write the text of both splits. Return the encoder, and whether decoding restores the held-out
        text."""
        validation, encoder = self._settings.validation, self._encoder
        prefix, suffix = (np.array(ids, dtype=np.uint32) for ids in document_frame(self._tokenizer))
        round_trips, at_first_tail = True, validation.by == "tail" and job.number == 0
        parts = with_snippets(job.split(validation), self._settings.snippets)
        for number, batch in enumerate(batches_of(parts, lambda part: len(part[1].text), batch_bytes())):
            if number == 0:
                sample = (piece.text[:_SAMPLED_CHARACTERS] for _, piece in batch[:_SAMPLED_PIECES])
                encoder = compared(encoder, self._tokenizer, sample)
            for (split, piece), ids in zip(batch, encoder.encode([piece.text for _, piece in batch]), strict=True):
                text, opens = piece.text.encode("utf-8"), piece.starts_document
                if split == "validation":
                    if at_first_tail:
                        opens = at_first_tail = False  # no separator: this text continues a training text
                    held_out.write(text + b"\0" * piece.ends_document)
                    round_trips = round_trips and self._round_trips(piece, text, ids.tolist())
                framed = [prefix[: len(prefix) * opens], ids, suffix[: len(suffix) * piece.ends_document]]
                unknown_tokens = 0 if self._unknown is None else int(np.count_nonzero(ids == self._unknown))
                writers[split].add(np.concatenate(framed), len(text), piece.starts_document, unknown_tokens)
                self._advance(len(text))
        return encoder, round_trips

    def _round_trips(self, piece: Piece, text: bytes, ids: list[int]) -> bool:
        """Return whether the tokens decode to the text, even if other text precedes the tokens."""
        if self._texts is not None:  # decoding only joins the texts of tokens
            return b"".join(map(self._texts.__getitem__, ids)) == text
        if piece.starts_document:
            return bool(self._tokenizer.decode(ids) == piece.text)
        before = piece.text[:1]
        return bool(self._tokenizer.decode(encode_text(self._tokenizer, before) + ids) == before + piece.text)


def batch_bytes() -> int:
    """Return the approximate size of the text to encode in one call, in bytes: `_BATCH_BYTES` for each thread of this
    process, counting at most `_MOST_THREADS` threads."""
    threads = int(os.environ.get("RAYON_NUM_THREADS") or usable_cpus())
    return _BATCH_BYTES * min(threads, _MOST_THREADS)


# ----------------------------------------------------------------------------------- joining the jobs' shards


def finished(folder: Path) -> dict[int, Done]:
    """Return the outputs of the finished jobs, by job number."""
    found = {}
    for file in sorted(folder.glob(f"jobs/[!.]*/{_JOB_FILE}")):
        with contextlib.suppress(UserError, OSError, ValueError):  # a job with a broken file is repeated
            found[int(file.parent.name)] = Done.model_validate(unsealed_json(read_regular(file, _MAX_JOB_BYTES)))
    return found


def join_jobs(folder: Path, whole: Path) -> dict[str, Any]:
    """Link or copy the shards of all jobs into the dataset's folder. Return the manifest fields that describe them."""
    done = [found for _, found in sorted(finished(folder).items())]
    splits: dict[Split, SplitFiles] = {}
    for split in SPLITS:
        shards: list[ShardFile] = []
        for number, job in enumerate(done):
            for shard in job.splits[split].shards:
                named = shard.numbered(split, len(shards))
                for name, new_name in zip(shard.files(), named.files(), strict=True):
                    link_or_copy(_folder(folder, number) / name, whole / new_name)
                shards.append(named)
        splits[split] = SplitFiles.of(shards, sum(job.splits[split].unknown_tokens for job in done))
    digest = hashlib.sha256()
    for number in range(len(done)):
        with open_regular(_folder(folder, number) / _HELD_OUT_FILE) as text:
            while chunk := text.read(_CHUNK_BYTES):
                digest.update(chunk)
    sources = tuple(
        {split: sum(len(job.splits[split].shards) for job in done if job.source == number) for split in SPLITS}
        for number in range(1 + max((job.source for job in done), default=-1))
    )
    return {
        "splits": splits,
        "sources": sources,
        "round_trips": all(job.round_trips for job in done),
        "validation_text_sha256": digest.hexdigest(),
    }


def _folder(folder: Path, number: int) -> Path:
    return folder / "jobs" / f"{number:05d}"
