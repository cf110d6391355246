"""The cleaned documents of each job, which stay in the work folder until the dataset is complete.

    cleaned/00000/documents     the documents in UTF-8, one after the other
    cleaned/00000/sizes         the size of each document in bytes, little-endian uint64
    cleaned/00000/signatures    the signature of each document; empty if documents are not compared
    cleaned/00000/counts.json   the numbers of documents that each filter kept, changed and dropped
    kept/00000                  one byte per document of the job, 0 if it is kept; only if documents are compared
    kept/counts.json            the same numbers for the filters that compare documents

Several processes clean documents. Then one process compares the documents by their signatures.
"""

import io
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from gptworks.config import DataConfig, SourceConfig
from gptworks.config.cleaning import FilterConfig
from gptworks.data.cleaning.choose import PART_BYTES, Cleaner, size_bytes
from gptworks.data.cleaning.counts import FilterCounts, merged
from gptworks.data.cleaning.duplicates import REASONS, Duplicates, Verdicts
from gptworks.data.jobs import Job, plan_jobs
from gptworks.data.sources.base import Piece, Source, Unit, document, text_document
from gptworks.data.sources.choose import choose_source, total_bytes
from gptworks.data.workers import Advance, Report, adding_up, in_order
from gptworks.errors import UserError
from gptworks.files import (
    map_array,
    new_folder,
    open_new,
    open_regular,
    read_array,
    read_regular,
    sealed_json,
    unsealed_json,
    write_whole,
)

CLEANED = "cleaned"
_KEPT, _COUNTS = "kept", "counts.json"
_MAX_COUNTS_BYTES = 1 << 24
Filters = tuple[FilterConfig, ...]


class CleanedDocuments(Source):
    """A source that reads the cleaned documents of one job."""

    def __init__(self, folder: Path, kept: Path | None) -> None:
        super().__init__(None)
        self._folder, self._kept = folder, kept

    def files(self) -> list[Path]:
        return [self._folder / "documents"]

    def sizes(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Return the size of each document in bytes, including those that are not kept."""
        return read_array(self._folder / "sizes", "<u8")

    def verdicts(self) -> Verdicts:
        """Return one byte per document: 0 if it is kept, else a key of `REASONS`."""
        return np.zeros(len(self.sizes()), np.uint8) if self._kept is None else read_array(self._kept, np.uint8)

    def texts(self, wanted: Iterable[bool]) -> Iterator[bytes]:
        """Yield the documents whose flag in `wanted` is true."""
        with open_regular(self._folder / "documents") as stream:
            for size, one in zip(self.sizes().tolist(), wanted, strict=True):
                if one:
                    yield stream.read(size)
                else:
                    stream.seek(size, io.SEEK_CUR)

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        for text in self.texts(self.verdicts() == 0):
            yield from document(io.BytesIO(text))

    def size_bytes(self) -> int:
        return int(self.sizes()[self.verdicts() == 0].sum())


class CleaningSource(Source):
    """A source that reads another source and cleans each document with the filters for single documents."""

    def __init__(self, source: Source, filters: Filters) -> None:
        super().__init__(source.settings)
        self._source, self._filters = source, filters

    def units(self) -> list[Unit]:
        return self._source.units()

    def read_unit(self, unit: Unit) -> Iterator[Piece]:
        cleaner = Cleaner(self._filters)
        for text in _documents(self._source.read_unit(unit)):
            if (cleaned := cleaner.clean(text)) is not None:
                yield from text_document(cleaned)


@dataclass(frozen=True)
class Texts:
    """The sources of a dataset's text (or of its cleaned documents), and the jobs that read these sources."""

    sources: Sequence[SourceConfig | Source]
    jobs: list[Job]
    total_bytes: int | None
    """Size of all texts in bytes; None if it is unknown before reading."""
    counts: tuple[FilterCounts, ...] = ()


def read_texts(data: DataConfig) -> Texts:
    """Return a dataset's sources and jobs. The recipe's filters for single documents clean the text during reading."""
    sources = [CleaningSource(choose_source(one), data.clean) if data.clean else one for one in data.texts]
    return Texts(sources, plan_jobs(sources), total_bytes(data.texts) if data.texts else None)


def cleaned_texts(work: Path, data: DataConfig, report: Report) -> Texts:
    """Return a dataset's sources and jobs, after cleaning the text if the recipe has filters. Jobs that were cleaned
    earlier in `work` are not cleaned again. Raises UserError if a source is broken or no document is left; RunError if
    a process died, or the disk is full or fails."""
    raw = Texts(data.texts, plan_jobs(data.texts), total_bytes(data.texts) if data.texts else None)
    if not data.clean:
        return raw
    advance = adding_up(report, "cleaning", raw.total_bytes)
    left = [job for job in raw.jobs if not (_folder(work, job.number) / _COUNTS).exists()]
    for _ in in_order(left, _job_cleaner, (work, data.clean), data.processes, advance):
        pass
    counts = merged(_read_counts(_folder(work, job.number) / _COUNTS) for job in raw.jobs)
    kept = work / _KEPT if (duplicates := Duplicates(data.clean)) else None
    if kept is not None:
        if not (kept / _COUNTS).exists():
            _compare(work, raw.jobs, duplicates)
        counts += _read_counts(kept / _COUNTS)
    if counts and raw.jobs and not counts[-1].kept.documents:
        raise UserError(_nothing_left(counts))
    sources = [CleanedDocuments(_folder(work, job.number), kept and kept / f"{job.number:05d}") for job in raw.jobs]
    units = [Unit(source.files()[0], source.size_bytes()) for source in sources]
    jobs = [replace(job, units=((source, unit),)) for job, source, unit in zip(raw.jobs, sources, units, strict=True)]
    return Texts(sources, jobs, sum(unit.size_bytes for unit in units), counts)


def _folder(work: Path, number: int) -> Path:
    return work / CLEANED / f"{number:05d}"


def _job_cleaner(work: Path, settings: Filters, advance: Advance) -> Callable[[Job], None]:
    return partial(_clean_job, work, Cleaner(settings), Duplicates(settings), advance)


def _clean_job(work: Path, cleaner: Cleaner, duplicates: Duplicates, advance: Advance, job: Job) -> None:
    cleaner.take_counts()
    sizes = array("Q")
    with new_folder(_folder(work, job.number)) as aside:
        with open_new(aside / "documents") as documents, open_new(aside / "signatures") as signatures:
            for text in _documents(job.pieces()):
                if (cleaned := cleaner.clean(text)) is not None:
                    data = cleaned.encode("utf-8")
                    documents.write(data)
                    sizes.append(len(data))
                    if duplicates:
                        signatures.write(duplicates.signature(cleaned))
                advance(size_bytes(text))
        np.array(sizes, dtype="<u8").tofile(aside / "sizes")
        _write_counts(aside / _COUNTS, cleaner.take_counts())


def _documents(pieces: Iterable[Piece]) -> Iterator[str]:
    """Yield the text of each document. A document larger than PART_BYTES becomes several texts of about this size."""
    parts: list[str] = []
    size = 0
    for piece in pieces:
        n_bytes = size_bytes(piece.text)
        if parts and (piece.starts_document or size + n_bytes > PART_BYTES):
            yield "".join(parts)
            parts, size = [], 0
        parts.append(piece.text)
        size += n_bytes
    if parts:
        yield "".join(parts)


def _compare(work: Path, jobs: list[Job], duplicates: Duplicates) -> None:
    """Find duplicates among all documents. Write each document's verdict, and the counts of the duplicate filters."""
    with new_folder(work / _KEPT) as aside:
        joined = aside / "signatures"
        with open_new(joined) as stream:
            for job in jobs:
                with open_regular(_folder(work, job.number) / "signatures") as signatures:
                    shutil.copyfileobj(signatures, stream)
        n_documents = joined.stat().st_size // (8 * duplicates.columns)
        verdicts = np.zeros(0, dtype=np.uint8)
        if n_documents:
            verdicts = duplicates.verdicts(map_array(joined, "<u8").reshape(n_documents, duplicates.columns))
        joined.unlink()
        counts = {number: FilterCounts(type=name) for number, name in REASONS.items() if name in duplicates.types}
        at = 0
        for job in jobs:
            source = CleanedDocuments(_folder(work, job.number), None)
            sizes = source.sizes()
            own = verdicts[at : at + len(sizes)]
            own.tofile(aside / f"{job.number:05d}")
            at += len(sizes)
            _count(counts, source, sizes.astype(np.int64), own)
        _write_counts(aside / _COUNTS, counts.values())


def _count(counts: dict[int, FilterCounts], source: CleanedDocuments, sizes: np.ndarray, verdicts: Verdicts) -> None:
    """Add a job's documents to the duplicate filters' counts. The second filter sees only the first filter's output."""
    seen = np.ones(len(verdicts), dtype=np.bool_)
    for number, one in counts.items():
        kept = seen & (verdicts != number)
        n_bytes = int(sizes[kept].sum())
        one.keep(int(kept.sum()), n_bytes, n_bytes)
        seen = kept
    dropped = verdicts[verdicts > 0].tolist()
    for number, text in zip(dropped, source.texts(verdicts > 0), strict=True):
        counts[number].drop("like an earlier document", text.decode("utf-8"), len(text))


def _write_counts(file: Path, counts: Iterable[FilterCounts]) -> None:
    tree = {"filters": [one.model_dump(mode="json") for one in counts]}
    write_whole(file, sealed_json(tree), new=True)


def _read_counts(file: Path) -> tuple[FilterCounts, ...]:
    """Return the filters' counts that `_write_counts` wrote. Raises UserError if the file is damaged."""
    try:
        tree = unsealed_json(read_regular(file, _MAX_COUNTS_BYTES))
        return tuple(map(FilterCounts.model_validate, tree["filters"]))
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}): delete {file.parent} to clean again.") from None


def _nothing_left(counts: tuple[FilterCounts, ...]) -> str:
    dropped, why = max(
        (one.documents, f"{each.type}: {reason}") for each in counts for reason, one in each.dropped.items()
    )
    return (
        f"data.clean leaves none of {counts[0].seen.documents:,} documents; most, {dropped:,}, were dropped by {why}. "
        f"Loosen or remove that filter."
    )
