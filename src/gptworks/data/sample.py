"""A random sample of the text, from which a tokenizer learns its merges if there is more text than it needs.

A hash of a document's text, or of each piece of a long document, decides whether it is in the sample. So the sample is
the same in every build and does not depend on the order of the sources.
"""

import hashlib
import heapq
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from gptworks.config import ValidationSplit
from gptworks.data.encode import Advance, encode_in_order
from gptworks.data.jobs import Job
from gptworks.data.split import split_documents
from gptworks.files import make_folder, open_regular, replacing

_ALL = 1 << 64
_LEAST_KEPT_BYTES = 1 << 23
"""Each job may keep at least this many bytes of text."""


def sample_texts(
    folder: Path, jobs: list[Job], validation: ValidationSplit, limit_bytes: int, processes: int, report: Advance
) -> Iterator[str]:
    """Random pieces of the training text, in order, at most `limit_bytes` in all, which is less than the text has."""
    make_folder(folder)
    sizes = [sum(unit.size_bytes for _, unit in job.units) for job in jobs]
    rate = min(
        1.0, 2 * limit_bytes / max(1, sum(sizes))
    )  # twice the size needed, because these are sizes of files, not of text
    limits = [min(limit_bytes, max(_LEAST_KEPT_BYTES, int(4 * rate * size))) for size in sizes]
    files = [folder / f"{job.number:05d}.jsonl" for job in jobs]
    left = [[work] for work in zip(jobs, files, limits, strict=True) if not work[1].exists()]
    for _ in encode_in_order(iter(left), _sampler, (validation, int(rate * _ALL)), processes, least=2, report=report):
        pass
    most, taken_bytes = _ALL, 0
    for key, size in heapq.merge(*(sorted((line[0], line[1]) for line in _lines(file)) for file in files)):
        taken_bytes += size
        if size == 0 or taken_bytes > limit_bytes:
            most = key
            break
    return (text for file in files for key, _, text in _lines(file) if key < most)


def _lines(file: Path) -> Iterator[tuple[int, int, str]]:
    """The key, the size and the text of each piece. Size 0: pieces with this key or a larger one were left out."""
    with open_regular(file) as lines:
        for line in lines:
            key, size, text = json.loads(line)
            yield key, size, text


Work = tuple[Job, Path, int]


def _sampler(validation: ValidationSplit, below: int, advance: Advance) -> Callable[[list[Work]], list[None]]:
    sample = partial(_sample_job, validation, below, advance)
    return lambda works: [sample(*work) for work in works]


def _sample_job(
    validation: ValidationSplit, below: int, advance: Advance, job: Job, file: Path, limit_bytes: int
) -> None:
    """Write the training pieces with keys below `below`; if these exceed `limit_bytes`, only the smallest keys."""
    kept: list[tuple[int, int, str]] = []  # a heap, the largest key first
    kept_bytes, most = 0, below
    for number, (split, piece) in enumerate(split_documents(job.pieces(), validation, job.opening())):
        text = piece.text.encode("utf-8")
        advance(len(text))
        key = int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"sample").digest(), "big")
        if split == "validation" or key >= most:
            continue
        heapq.heappush(kept, (-key, number, piece.text))
        kept_bytes += len(text)
        while kept_bytes > limit_bytes:
            largest, _, dropped = heapq.heappop(kept)
            kept_bytes -= len(dropped.encode("utf-8"))
            most = -largest
    in_order = sorted((number, -key, text) for key, number, text in kept)
    lines = [(key, len(text.encode("utf-8")), text) for _, key, text in in_order if key < most]
    with replacing(file) as out:
        for line in [*lines, (most, 0, "")] if most < below else lines:
            out.write(f"{json.dumps(line)}\n".encode())
