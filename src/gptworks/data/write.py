"""The files of a dataset: its tokenizer, the shards of both splits, the manifest."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from gptworks.chat_template import ChatTemplate, find_chat_template, save_chat_template
from gptworks.config import BPETokenizer, DataConfig, Recipe, ValidationSplit
from gptworks.data.conversations.examples import write_examples
from gptworks.data.conversations.preferences import Pair, iter_pairs
from gptworks.data.conversations.reading import Conversation, is_held_out, iter_conversations
from gptworks.data.conversations.reading import origins as origins_of
from gptworks.data.encode import encode_all
from gptworks.data.shards import (
    FORMAT_VERSION,
    TOKENIZER_FOLDER,
    Manifest,
    Origin,
    ShardWriter,
    Split,
    dtype_for,
    write_manifest,
)
from gptworks.data.sources.choose import count_documents, iter_documents, total_bytes
from gptworks.data.split import split_documents
from gptworks.errors import UserError
from gptworks.files import sha256_file, sync
from gptworks.recipe import with_vocab_size
from gptworks.tokenizer import document_frame, fingerprint, save_tokenizer, train_tokenizer, vocabulary_size

_BPE_TRAINING_BYTES = 200_000_000
_DOCUMENTS_WORTH_A_SPLIT = 20

Report = Callable[[str, int, int | None], None]
"""Called with the stage ("waiting", "tokenizer", "merging", "shards"), the bytes of text done, and all of them where
known."""


def write_dataset(folder: Path, recipe: Recipe, made_from: dict[str, Any], report: Report) -> None:
    """Write the tokenizer, the shards of both splits, and the manifest."""
    data, validation = recipe.data, _split_by(recipe.data)
    total = total_bytes(data.texts) if data.texts else None
    tokenizer = _tokenizer(recipe, _training_texts(data, validation), total, report)
    save_tokenizer(tokenizer, folder / TOKENIZER_FOLDER)
    source = find_chat_template(recipe.tokenizer)
    template = None if source is None else ChatTemplate(source, tokenizer)
    if template is not None:
        save_chat_template(template, folder / TOKENIZER_FOLDER)
    tokenizer_files = sorted((folder / TOKENIZER_FOLDER).iterdir())
    for path in (*tokenizer_files, folder / TOKENIZER_FOLDER):
        sync(path)

    dtype = dtype_for(vocabulary_size(tokenizer))
    splits: tuple[Split, ...] = ("train", "validation")
    writers = {split: ShardWriter(folder, split, dtype, data.shard_tokens) for split in splits}
    origins: tuple[Origin, ...] = ()
    round_trips, text_sha256 = False, None
    try:
        if template is not None and data.records:
            records = _records(data)
            origins = write_examples(writers, template, records, validation.fraction, data.processes, report)
        else:
            round_trips, text_sha256 = _write_documents(writers, tokenizer, data, validation, total, report)
        written = {split: writer.finish() for split, writer in writers.items()}
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise
    for split, files in written.items():
        if not files.tokens:
            raise UserError(_empty(split, validation, bool(data.conversations)))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        created_by=f"gptworks {_version()}",
        dtype=dtype,
        vocab_size=vocabulary_size(tokenizer),
        tokenizer_sha256=fingerprint(tokenizer),
        tokenizer_files={path.name: sha256_file(path) for path in tokenizer_files},
        made_from=made_from,
        round_trips=round_trips,
        splits=written,
        origins=origins,
        validation_text_sha256=text_sha256,
    )
    write_manifest(manifest, folder)
    sync(folder)


def _split_by(data: DataConfig) -> ValidationSplit:
    """How the text is split, decided where that is left to us."""
    if data.validation.by != "auto":
        return data.validation
    by_document, by_tail = (data.validation.model_copy(update={"by": by}) for by in ("document", "tail"))
    if data.records:
        return by_document
    enough = count_documents(data.texts, _DOCUMENTS_WORTH_A_SPLIT) == _DOCUMENTS_WORTH_A_SPLIT
    splits = (split for split, _ in split_documents(iter_documents(data.texts), by_document))
    return by_document if enough and "validation" in splits else by_tail


def _records(data: DataConfig) -> Iterator[Conversation | Pair]:
    return chain(iter_conversations(data.conversations), iter_pairs(data.preferences))


def _training_texts(data: DataConfig, validation: ValidationSplit) -> Iterator[str]:
    """What a tokenizer may learn from."""
    for record in _records(data):
        if not is_held_out(record.prompt, validation.fraction):
            yield from (message["content"] for message in record.messages)
    for split, piece in split_documents(iter_documents(data.texts), validation):
        if split == "train":
            yield piece.text


def _tokenizer(recipe: Recipe, texts: Iterator[str], total: int | None, report: Report) -> Tokenizer:
    first_text = next(texts, None)
    if first_text is None:
        data = recipe.data
        if next(chain(iter_documents(data.texts), *map(origins_of, data.records)), None) is not None:
            raise UserError(_empty("train", _split_by(data), bool(data.records)))
        raise UserError("data.sources hold no text: every document is empty. Give sources with text.")
    limit = _BPE_TRAINING_BYTES if isinstance(recipe.tokenizer, BPETokenizer) else None
    tokenizer = train_tokenizer(recipe.tokenizer, _counted(chain([first_text], texts), limit, total, report))
    with_vocab_size(recipe, vocabulary_size(tokenizer))  # another vocabulary is refused before the long work
    return tokenizer


def _write_documents(
    writers: dict[Split, ShardWriter],
    tokenizer: Tokenizer,
    data: DataConfig,
    validation: ValidationSplit,
    total: int | None,
    report: Report,
) -> tuple[bool, str]:
    """Encode and write the text of both splits; returns whether decoding restores it, and the sha256 of the validation
    text with its documents separated."""
    prefix, suffix = (np.array(ids, dtype=np.uint32) for ids in document_frame(tokenizer))
    round_trips, done_bytes, at_first_tail = True, 0, validation.by == "tail"
    held_out = hashlib.sha256()
    parts = split_documents(iter_documents(data.texts), validation)
    for (split, piece), encoded in encode_all(tokenizer, parts, data.processes):
        opens = piece.starts_document
        if split == "validation" and at_first_tail:
            opens = at_first_tail = False  # it continues a training text: nothing separates them
        ids = [prefix[: len(prefix) * opens], encoded.ids, suffix[: len(suffix) * piece.ends_document]]
        writers[split].add(np.concatenate(ids), encoded.text_bytes, piece.starts_document, encoded.unknown_tokens)
        if split == "validation":
            held_out.update(piece.text.encode("utf-8") + b"\0" * piece.ends_document)
        round_trips &= encoded.round_trips
        done_bytes += encoded.text_bytes
        report("shards", done_bytes, total)
    return round_trips, held_out.hexdigest()


def _counted(texts: Iterable[str], limit_bytes: int | None, total: int | None, report: Report) -> Iterator[str]:
    """The texts up to the limit, reported as they are read; then that the tokenizer is made, which takes long too."""
    done_bytes = 0
    for text in texts:
        yield text
        done_bytes += len(text.encode("utf-8"))
        report("tokenizer", done_bytes, total if limit_bytes is None or total is None else min(total, limit_bytes))
        if limit_bytes is not None and done_bytes >= limit_bytes:
            break
    report("merging", 0, None)


def _empty(split: Split, validation: ValidationSplit, conversations: bool = False) -> str:
    name, change = ("training", "Lower") if split == "train" else ("validation", "Raise")
    other = "" if validation.by == "tail" or conversations else ", set data.validation.by=tail"
    return (
        f"data.validation.fraction={validation.fraction} by {validation.by} leaves the {name} split without text. "
        f"{change} the fraction{other}, or give more text."
    )


def _version() -> str:
    try:
        return metadata.version("gptworks")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return "unknown"
