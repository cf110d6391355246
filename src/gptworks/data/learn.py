"""Decide how a dataset's text is split, and make its tokenizer, before the text is encoded."""

import heapq
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path

from tokenizers import Tokenizer

from gptworks.chat_template import (
    ChatTemplate,
    find_chat_template,
    find_other_templates,
    save_chat_template,
    save_other_templates,
)
from gptworks.config import AnyRecipe, BPETokenizer, DataConfig, Recipe, SourceConfig, ValidationSplit
from gptworks.data.cleaned import Texts
from gptworks.data.conversations.preferences import Pair, iter_pairs
from gptworks.data.conversations.reading import Conversation, fraction_held_out, is_held_out, iter_conversations
from gptworks.data.conversations.reading import origins as origins_of
from gptworks.data.jobs import Job
from gptworks.data.permutation import hashed
from gptworks.data.shards import Split
from gptworks.data.sources.base import Source
from gptworks.data.sources.choose import count_documents, iter_documents
from gptworks.data.split import split_documents
from gptworks.data.workers import Advance, Report, adding_up, in_order
from gptworks.errors import UserError
from gptworks.files import make_folder, new_folder, open_regular, replacing
from gptworks.recipe import with_vocab_size
from gptworks.special_tokens import SEPARATOR
from gptworks.tokenizer import document_frame, load_tokenizer, save_tokenizer, train_tokenizer, vocabulary_size

_BPE_TRAINING_BYTES = 200_000_000
_SAMPLE_BYTES = 100_000_000
"""Size of the sample that trains BPE if the text exceeds _BPE_TRAINING_BYTES; training is 10 × slower than encoding."""
_DOCUMENTS_WORTH_A_SPLIT = 20


def split_by(data: DataConfig, sources: Sequence[SourceConfig | Source]) -> ValidationSplit:
    """Return the settings of the validation split, with `by: auto` replaced. `auto` becomes `document` for
    conversations and pairs, and for text with at least 20 documents if one of them is held out; otherwise `tail`."""
    if data.validation.by != "auto":
        return data.validation
    by_document, by_tail = (data.validation.model_copy(update={"by": by}) for by in ("document", "tail"))
    if data.records:
        return by_document
    enough = count_documents(sources, _DOCUMENTS_WORTH_A_SPLIT) == _DOCUMENTS_WORTH_A_SPLIT
    splits = (split for split, _ in split_documents(iter_documents(sources), by_document))
    return by_document if enough and "validation" in splits else by_tail


def iter_records(data: DataConfig) -> Iterator[Conversation | Pair]:
    return chain(iter_conversations(data.conversations), iter_pairs(data.preferences))


def held_out_of(data: DataConfig, validation: ValidationSplit) -> float:
    """Return the fraction of the data's prompts to hold out; see `fraction_held_out`."""
    return fraction_held_out((record.prompt for record in iter_records(data)), validation.fraction)


@dataclass(frozen=True)
class LearnedText:
    """The text of a dataset, and its weight in a tokenizer's training text."""

    data: DataConfig
    texts: Texts
    validation: ValidationSplit
    weight: float = 1.0

    def training(self) -> Iterator[str]:
        """Yield the training text, from which a tokenizer may learn."""
        held_out = held_out_of(self.data, self.validation)
        for record in iter_records(self.data):
            if not is_held_out(record.prompt, held_out):
                yield from (message["content"] for message in record.messages)
        for split, piece in chain.from_iterable(job.split(self.validation) for job in self.texts.jobs):
            if split == "train":
                yield piece.text


def keep_tokenizer(folder: Path, recipe: AnyRecipe, texts: Sequence[LearnedText], report: Report) -> Tokenizer:
    """Load the tokenizer in `folder`; if there is no such folder, train or load the recipe's tokenizer and save it.
    Raises UserError if the text is empty or too short, or the recipe states another vocabulary size."""
    if not folder.exists():
        sample = folder.with_name(f".{folder.name}.sample")
        trained = _train(recipe, texts, sample, report)
        if not any(document_frame(trained)) and any(text.data.texts for text in texts):
            report(_NO_SEPARATOR, 0, None)
        source = find_chat_template(recipe.tokenizer)
        with new_folder(folder) as aside:
            save_tokenizer(trained, aside)
            if source is not None:
                save_chat_template(ChatTemplate(source, trained), aside)
            save_other_templates(find_other_templates(recipe.tokenizer), aside)
        shutil.rmtree(sample, ignore_errors=True)
    tokenizer = load_tokenizer(folder)
    if isinstance(recipe, Recipe):
        with_vocab_size(recipe, vocabulary_size(tokenizer))  # raises if the recipe states another size
    return tokenizer


_NO_SEPARATOR = (
    f"the tokenizer has no token that begins or ends a document, so documents follow one another without a sign. "
    f"tokenizer.added_tokens=['{SEPARATOR}'] gives it one"
)


def _train(recipe: AnyRecipe, texts: Sequence[LearnedText], sample: Path, report: Report) -> Tokenizer:
    sizes = [text.texts.total_bytes for text in texts]
    total = None if None in sizes else sum(filter(None, sizes))
    most = _BPE_TRAINING_BYTES if isinstance(recipe.tokenizer, BPETokenizer) else None
    learned = chain.from_iterable(text.training() for text in texts)
    if most is not None and (total is None or total > most) and _more_than(most, learned):
        learned = chain.from_iterable(_sampled(texts, min(most, _SAMPLE_BYTES), sample, total, report))
    else:
        learned = chain.from_iterable(text.training() for text in texts)
    first_text = next(learned, None)
    if first_text is None:
        for text in texts:
            if next(chain(iter_documents(text.texts.sources), *map(origins_of, text.data.records)), None) is not None:
                raise UserError(empty("train", text.validation, text.data))
        raise UserError("data.sources hold no text: every document is empty. Give sources with text.")
    counted = _counted(chain([first_text], learned), most, total, report)
    return train_tokenizer(recipe.tokenizer, counted, lambda line: report(line, 0, None))


def _sampled(
    texts: Sequence[LearnedText], limit_bytes: int, folder: Path, total: int | None, report: Report
) -> Iterator[Iterator[str]]:
    """Yield a sample of each dataset's training text, with a size in proportion to the dataset's weight."""
    advance = adding_up(report, "sample", total)
    weights = sum(text.weight for text in texts)
    for number, text in enumerate(texts):
        limit = int(limit_bytes * text.weight / weights)
        place, processes = folder / str(number), text.data.processes
        yield sample_texts(place, text.texts.jobs, text.validation, limit, processes, advance)


def _more_than(most_bytes: int, texts: Iterator[str]) -> bool:
    return any(size > most_bytes for size in accumulate(len(text.encode("utf-8")) for text in texts))


def _counted(texts: Iterable[str], limit_bytes: int | None, total: int | None, report: Report) -> Iterator[str]:
    """Yield texts up to the limit and report the bytes read. Then report the stage "merging", which is slow too."""
    advance = adding_up(report, "tokenizer", total if limit_bytes is None or total is None else min(total, limit_bytes))
    done_bytes = 0
    for text in texts:
        yield text
        n_bytes = len(text.encode("utf-8"))
        advance(n_bytes)
        done_bytes += n_bytes
        if limit_bytes is not None and done_bytes >= limit_bytes:
            break
    report("merging", 0, None)


def empty(split: Split, validation: ValidationSplit, data: DataConfig) -> str:
    """Return the error message for a split without text."""
    if (n_prompts := len({json.dumps(record.prompt) for record in iter_records(data)})) < 2 and data.records:
        found = "no record" if n_prompts == 0 else "records of one prompt"
        return f"data.sources hold {found}, and one prompt is held out for validation: give two prompts or more."
    name, change = ("training", "Lower") if split == "train" else ("validation", "Raise")
    other = "" if validation.by == "tail" or data.records else ", set data.validation.by=tail"
    return (
        f"data.validation.fraction={validation.fraction} by {validation.by} leaves the {name} split without text. "
        f"{change} the fraction{other}, or give more text."
    )


# ------------------------------------------------------------------------------------ sample for the tokenizer

# If there is more text than a tokenizer needs, it learns its merges from a random sample. A hash of each document's
# text, or of each piece of a long document, decides whether it is sampled. So the sample is the same in every build and
# does not depend on the order of the sources.
_ALL = 1 << 64
_LEAST_KEPT_BYTES = 1 << 23
"""Minimum of one job's limit on sampled bytes, unless the limit for all jobs together is lower."""


def sample_texts(
    folder: Path, jobs: list[Job], validation: ValidationSplit, limit_bytes: int, processes: int, report: Advance
) -> Iterator[str]:
    """Return random pieces of the training text in order, at most `limit_bytes` in total. The text must be larger.

    Each job's pieces are stored in `folder`. Jobs sampled there earlier are not sampled again.
    """
    make_folder(folder)
    sizes = [sum(unit.size_bytes for _, unit in job.units) for job in jobs]
    rate = min(
        1.0, 2 * limit_bytes / max(1, sum(sizes))
    )  # twice the rate needed: `sizes` are sizes of files, not of text
    limits = [min(limit_bytes, max(_LEAST_KEPT_BYTES, int(4 * rate * size))) for size in sizes]
    files = [folder / f"{job.number:05d}.jsonl" for job in jobs]
    left = [work for work in zip(jobs, files, limits, strict=True) if not work[1].exists()]
    for _ in in_order(left, partial, (_sample_job, validation, int(rate * _ALL)), processes, report):
        pass
    most, taken_bytes = _ALL, 0
    for key, size in heapq.merge(*(sorted((line[0], line[1]) for line in _lines(file)) for file in files)):
        taken_bytes += size
        if size == 0 or taken_bytes > limit_bytes:
            most = key
            break
    return (text for file in files for key, _, text in _lines(file) if key < most)


def _lines(file: Path) -> Iterator[tuple[int, int, str]]:
    """Yield the key, size and text of each sampled piece. An entry of size 0 means that pieces with its key or a larger
    key were left out."""
    with open_regular(file) as lines:
        yield from map(json.loads, lines)


def _sample_job(validation: ValidationSplit, below: int, advance: Advance, work: tuple[Job, Path, int]) -> None:
    """Write a job's training pieces with keys less than `below` to a file. If these pieces exceed the limit of bytes,
    drop the pieces with the largest keys."""
    job, file, limit_bytes = work
    kept: list[tuple[int, int, str]] = []  # a heap with the largest key on top
    kept_bytes, most = 0, below
    for number, (split, piece) in enumerate(job.split(validation)):
        text = piece.text.encode("utf-8")
        advance(len(text))
        key = hashed(text, b"sample")
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
