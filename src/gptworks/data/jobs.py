"""The work of making shards of text, in jobs: a process takes one from reading to finished files.

A job is a few neighbouring units of the sources, and its folder takes its name when it is whole. What jobs there are,
and what each writes, depends on the sources alone: not on the number of processes, nor on how often it was killed.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Tokenizer

from gptworks.config import Section, SourceConfig, ValidationSplit
from gptworks.data.encode import Advance, PartEncoder, batch_bytes, batches_of, encode_in_order
from gptworks.data.encoders import Encoder, choose_encoder, plain_encoder
from gptworks.data.shard_writer import ShardWriter
from gptworks.data.shards import Dtype, ShardCounts, ShardFile, Split, SplitFiles
from gptworks.data.sources import base
from gptworks.data.sources.base import Piece, Source, Unit
from gptworks.data.sources.choose import choose_source
from gptworks.data.split import split_documents
from gptworks.errors import UserError
from gptworks.files import link_or_copy, new_folder, read_regular, sealed_json, unsealed_json
from gptworks.tokenizer import document_frame, tokenizer_from_json

_JOB_FILE, _HELD_OUT_FILE = "job.json", "held-out.text"
_MAX_JOB_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 20
_WORTH_A_CHOICE_BYTES = 1 << 24  # below it, comparing two encoders takes longer than encoding
_SAMPLED_JOBS, _SAMPLED_PIECES, _SAMPLED_CHARACTERS = 8, 64, 1 << 17
SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True)
class Job:
    """Neighbouring units of one of a recipe's sources."""

    number: int
    source: int
    """The source's number."""
    units: tuple[tuple[Source, Unit], ...]

    def pieces(self) -> Iterator[Piece]:
        """The documents of the units."""
        for source, unit in self.units:
            yield from source.read_unit(unit)

    def opening(self) -> Piece | None:
        """The first piece of the document that the first unit continues; None where it begins one."""
        source, unit = self.units[0]
        return next(source.read(unit.file), None) if source.whole_files and unit.start else None


@dataclass(frozen=True)
class JobSettings:
    """What decides the shards of a job, besides its text."""

    tokenizer_json: str
    validation: ValidationSplit
    shard_tokens: int
    dtype: Dtype


class Done(Section):
    """What a job has written."""

    source: int
    splits: dict[Split, SplitFiles]
    round_trips: bool

    @property
    def text_bytes(self) -> int:
        return sum(files.text_bytes for files in self.splits.values())


def plan_jobs(sources: Iterable[SourceConfig | Source]) -> list[Job]:
    """All units of the sources, in order, in jobs of about the same size. No job has units of two sources."""
    jobs: list[Job] = []
    for number, source in enumerate(map(choose_source, sources)):
        units = source.units()
        total_bytes = sum(unit.size_bytes for unit in units)
        least_bytes = -(-total_bytes // max(1, round(total_bytes / base.UNIT_BYTES)))
        for taken in batches_of(iter(units), lambda one: one.size_bytes, least_bytes):
            jobs.append(Job(len(jobs), number, tuple((source, unit) for unit in taken)))
    return jobs


def run_jobs(
    folder: Path,
    jobs: list[Job],
    settings: JobSettings,
    processes: int,
    report: Advance,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Do the jobs that are not done, in several processes where there is more than one.

    Args:
        report: gets the bytes of text that have been encoded since it was called last.
        say: gets the name of the library that encodes, and the reason.

    Raises:
        UserError: a source is broken, or the tokenizer cannot read the text.
        RunError: a process died, or the disk is full or fails.
    """
    done = finished(folder)
    report(sum(job.text_bytes for job in done.values()))
    left = [job for job in jobs if job.number not in done]
    if not left:
        return
    encoder = _encoder(left, tokenizer_from_json(settings.tokenizer_json))
    if encoder.reason:
        say(f"encoding with {encoder.name}: {encoder.reason}")
    arguments = (folder, settings, encoder.name)
    for _ in encode_in_order(iter([job] for job in left), _job_writer, arguments, processes, least=2, report=report):
        pass


def _encoder(jobs: list[Job], tokenizer: Tokenizer) -> Encoder:
    """How to encode the text of these jobs: what is faster is compared on some of it."""
    if sum(unit.size_bytes for job in jobs for _, unit in job.units) < _WORTH_A_CHOICE_BYTES:
        return plain_encoder(tokenizer)
    chosen = jobs[:: -(-len(jobs) // _SAMPLED_JOBS)]
    sample = (piece.text[:_SAMPLED_CHARACTERS] for job in chosen for piece in islice(job.pieces(), _SAMPLED_PIECES))
    return choose_encoder(tokenizer, sample)


def _job_writer(
    folder: Path, settings: JobSettings, encoder: str, advance: Advance
) -> Callable[[list[Job]], list[None]]:
    tokenizer = tokenizer_from_json(settings.tokenizer_json)
    chosen = plain_encoder(tokenizer) if encoder == "tokenizers" else choose_encoder(tokenizer)
    write = partial(_write_job, folder, tokenizer, PartEncoder(tokenizer, chosen), settings, advance)
    return lambda jobs: [write(job) for job in jobs]


def _write_job(
    folder: Path, tokenizer: Tokenizer, encode: PartEncoder, settings: JobSettings, advance: Advance, job: Job
) -> None:
    """Write the shards of both splits, the held-out text, and what they are."""
    out = _folder(folder, job.number)
    if out.exists():
        shutil.rmtree(out)  # damaged: otherwise it would not be done again
    with new_folder(out) as aside:
        writers = {split: ShardWriter(aside, split, settings.dtype, settings.shard_tokens) for split in SPLITS}
        try:
            with (aside / _HELD_OUT_FILE).open("wb") as held_out:
                round_trips = _write_documents(writers, held_out, tokenizer, encode, settings, advance, job)
            splits = {split: writer.finish() for split, writer in writers.items()}
            done = Done(source=job.source, splits=splits, round_trips=round_trips)
        except BaseException:
            for writer in writers.values():
                writer.abandon()
            raise
        (aside / _JOB_FILE).write_text(sealed_json(done.model_dump(mode="json")), encoding="utf-8", newline="")


def _write_documents(
    writers: dict[Split, ShardWriter],
    held_out: BinaryIO,
    tokenizer: Tokenizer,
    encode: PartEncoder,
    settings: JobSettings,
    advance: Advance,
    job: Job,
) -> bool:
    """Encode and write the text of both splits; returns whether decoding restores what is held out."""
    prefix, suffix = (np.array(ids, dtype=np.uint32) for ids in document_frame(tokenizer))
    round_trips, at_first_tail = True, settings.validation.by == "tail" and job.number == 0
    parts = split_documents(job.pieces(), settings.validation, job.opening())
    for batch in batches_of(parts, lambda part: len(part[1].text), batch_bytes()):
        for (split, piece), encoded in zip(batch, encode(batch), strict=True):
            opens = piece.starts_document
            if split == "validation" and at_first_tail:
                opens = at_first_tail = False  # it continues a training text: nothing separates them
            ids = [prefix[: len(prefix) * opens], encoded.ids, suffix[: len(suffix) * piece.ends_document]]
            writers[split].add(np.concatenate(ids), encoded.text_bytes, piece.starts_document, encoded.unknown_tokens)
            if split == "validation":
                held_out.write(piece.text.encode("utf-8") + b"\0" * piece.ends_document)
            round_trips &= encoded.round_trips
            advance(encoded.text_bytes)
    return round_trips


# ---------------------------------------------------------------------------------------------------- joining


def finished(folder: Path) -> dict[int, Done]:
    """What the jobs that are done have written, by their numbers."""
    found = {}
    for file in sorted(folder.glob(f"jobs/[!.]*/{_JOB_FILE}")):
        with contextlib.suppress(UserError, OSError, ValueError):  # it is done again
            found[int(file.parent.name)] = Done.model_validate(unsealed_json(read_regular(file, _MAX_JOB_BYTES)))
    return found


@dataclass(frozen=True)
class Joined:
    """What all jobs have written."""

    splits: dict[Split, SplitFiles]
    sources: tuple[ShardCounts, ...] = ()
    round_trips: bool = False
    """Whether decoding restores the held-out text."""
    text_sha256: str | None = None
    """Of the held-out text, its documents separated."""


def join_jobs(folder: Path, whole: Path) -> Joined:
    """Give the shards of all jobs their names in the dataset."""
    done = [found for _, found in sorted(finished(folder).items())]
    splits: dict[Split, SplitFiles] = {}
    for split in SPLITS:
        shards: list[ShardFile] = []
        for number, job in enumerate(done):
            for shard in job.splits[split].shards:
                named = {
                    "file": f"{split}-{len(shards):05d}.tokens",
                    "offsets_file": f"{split}-{len(shards):05d}.offsets",
                }
                for attribute, name in named.items():
                    link_or_copy(_folder(folder, number) / getattr(shard, attribute), whole / name)
                shards.append(shard.model_copy(update=named))
        files = [job.splits[split] for job in done]
        splits[split] = SplitFiles(
            shards=tuple(shards),
            tokens=sum(one.tokens for one in files),
            documents=sum(one.documents for one in files),
            text_bytes=sum(one.text_bytes for one in files),
            unknown_tokens=sum(one.unknown_tokens for one in files),
        )
    digest = hashlib.sha256()
    for number in range(len(done)):
        with (_folder(folder, number) / _HELD_OUT_FILE).open("rb") as text:
            for chunk in iter(lambda text=text: text.read(_CHUNK_BYTES), b""):  # type: ignore[misc]
                digest.update(chunk)
    sources = tuple(
        {split: sum(len(job.splits[split].shards) for job in done if job.source == number) for split in SPLITS}
        for number in range(1 + max((job.source for job in done), default=-1))
    )
    return Joined(splits, sources, all(job.round_trips for job in done), digest.hexdigest())


def _folder(folder: Path, number: int) -> Path:
    return folder / "jobs" / f"{number:05d}"
