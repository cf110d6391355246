"""From documents to token shards: split, train or load the tokenizer, encode, write. Done once for the same inputs.

The folder's name carries a fingerprint of everything that decides its contents. Work happens in a hidden folder beside
it, which takes its name when it is complete: what has the name can be trusted, and is never written again.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from gptworks.chat_template import ChatTemplate, find_chat_template, load_chat_template, save_chat_template
from gptworks.config import (
    BPETokenizer,
    DataConfig,
    FileTokenizer,
    GPT2Tokenizer,
    Recipe,
    TokenizerConfig,
    ValidationSplit,
)
from gptworks.data.conversations.examples import write_examples
from gptworks.data.conversations.preferences import iter_pairs, write_pairs
from gptworks.data.conversations.reading import conversations_signature, is_held_out, iter_conversations
from gptworks.data.conversations.reading import origins as origins_of
from gptworks.data.encode import encode_all
from gptworks.data.shards import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Manifest,
    Origin,
    ShardWriter,
    Split,
    TokenShards,
    dtype_for,
    read_manifest,
    write_manifest,
)
from gptworks.data.sources import Piece, check_sources, count_documents, iter_documents, source_signature, total_bytes
from gptworks.errors import UserError
from gptworks.files import make_folder, naming_disk_errors, sha256_file, sync
from gptworks.recipe import with_vocab_size
from gptworks.tokenizer import (
    StreamDecoder,
    document_frame,
    fingerprint,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    vocabulary_size,
)

TOKENIZER_FOLDER = "tokenizer"
_PREFIX = "shards"
_BPE_TRAINING_BYTES = 200_000_000
_DOCUMENTS_WORTH_A_SPLIT = 20
_DECODED_TOKENS = 1 << 16

Report = Callable[[str, int, int | None], None]
"""Told what is being done ("waiting", "tokenizer", "shards"), bytes of text done, and bytes in all where known."""


@dataclass(frozen=True)
class Prepared:
    """A folder of shards, complete and checked."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    reused: bool
    chat_template: ChatTemplate | None = None


def prepare(recipe: Recipe, *, report: Report = lambda stage, done_bytes, total_bytes: None) -> Prepared:
    """The recipe's text as token shards, made now or found from before.

    The shards are the same whatever the number of worker processes. Two calls at once are safe: one works, one waits.

    Raises:
        UserError: something wrong with the sources or the tokenizer, or a split without text.
        RunError: the disk is full or fails, or a worker process died. Nothing half-written is left behind.
    """
    data, made_from = recipe.data, _made_from(recipe)
    folder = _folder(recipe, made_from)
    if folder.exists():
        return open_prepared(folder)
    check_sources(data.texts)
    _check_template(recipe)
    advice = "What was written in part is removed. Free space, or set data.cache_dir to another disk, and run it again."
    with naming_disk_errors(f"{data.cache_dir}: the data could not be prepared", _partial(folder), advice):
        make_folder(data.cache_dir)
        with _alone(folder, report):
            if folder.exists():  # made by another process while this one waited
                return open_prepared(folder)
            _remove_stale(data.cache_dir)
            partial = _partial(folder)
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir()
                _fill(partial, recipe, made_from, report)
                partial.rename(folder)
                sync(folder.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return replace(open_prepared(folder), reused=False)


def find_prepared(recipe: Recipe) -> Prepared | None:
    """What `prepare` has made of this recipe before; None where it has not, or where the sources are not there.

    Raises:
        UserError: it has, and something in the folder is missing or was changed.
    """
    try:
        folder = _folder(recipe, _made_from(recipe))
    except UserError:  # without its sources nothing tells what they were
        return None
    return open_prepared(folder) if folder.exists() else None


def find_by_fingerprint(cache_dir: Path, fingerprint: str) -> Prepared | None:
    """The folder of the shards with a fingerprint, such as those that a run was trained on; their sources may be gone.

    Raises:
        UserError: it is there, and something in it is missing or was changed.
    """
    for file in sorted(cache_dir.glob(f"[!.]*/{MANIFEST_FILE}")):
        with contextlib.suppress(UserError):  # of another version, or broken: `prepare` says so where it is needed
            if read_manifest(file.parent).fingerprint == fingerprint:
                break
    else:
        return None
    return open_prepared(file.parent)


def open_prepared(folder: str | Path) -> Prepared:
    """Open a folder that `prepare` made.

    Raises:
        UserError: it is not one, or something in it is missing or was changed.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for split in manifest.splits:
        TokenShards(folder, split, verify=False)
    for name, expected in manifest.tokenizer_files.items():
        file = folder / TOKENIZER_FOLDER / name
        if not file.is_file() or sha256_file(file) != expected:
            raise UserError(
                f"{file} is missing or not what was written: its sha256 is not the manifest's. "
                f"Delete {folder} and run `gptworks prepare` again."
            )
    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    if fingerprint(tokenizer) != manifest.tokenizer_sha256:
        raise UserError(
            f"{folder / TOKENIZER_FOLDER} is not the tokenizer that made these tokens. "
            f"Delete {folder} and run `gptworks prepare` again."
        )
    template = load_chat_template(folder / TOKENIZER_FOLDER, tokenizer)
    if manifest.made_from.get("chat_template") != _sha256(None if template is None else template.source):
        raise UserError(
            f"{folder / TOKENIZER_FOLDER} does not hold the chat template that made these tokens. "
            f"Delete {folder} and run `gptworks prepare` again."
        )
    return Prepared(folder, manifest, tokenizer, reused=True, chat_template=template)


def held_out_text(prepared: Prepared) -> Iterator[bytes]:
    """The validation text itself, in parts, decoded from the shards.

    Raises:
        UserError: the tokenizer loses something, so that its tokens do not give the text back.
    """
    if not prepared.manifest.round_trips:
        raise UserError(
            f"{prepared.folder}: this tokenizer does not give back the text it encoded, so the held-out text cannot be "
            f"read from the tokens. Use tokenizer.type=bpe, which loses nothing."
        )
    shards = TokenShards(prepared.folder, "validation")
    bounds = [*shards.document_starts().tolist(), shards.n_tokens]
    for start, end in pairwise(bounds):
        stream = StreamDecoder(prepared.tokenizer)
        for at in range(start, end, _DECODED_TOKENS):
            yield stream.push(*shards.read(at, min(_DECODED_TOKENS, end - at)).tolist()).encode("utf-8")
        yield stream.flush().encode("utf-8")


# ------------------------------------------------------------------------------------------------- identity


def _made_from(recipe: Recipe) -> dict[str, Any]:
    """Everything that decides what the shards hold, as JSON."""
    data = recipe.data
    conversations = [entry for source in data.records for entry in conversations_signature(source)]
    signature = json.dumps([*source_signature(data.texts), *conversations])
    return {
        "format_version": FORMAT_VERSION,
        "sources": [source.model_dump(mode="json") for source in recipe.data.sources],
        "sources_signature": hashlib.sha256(signature.encode("utf-8")).hexdigest(),
        "tokenizer": recipe.tokenizer.model_dump(mode="json"),
        "tokenizer_files": _tokenizer_files(recipe.tokenizer),
        "chat_template": _sha256(find_chat_template(recipe.tokenizer)),
        "validation": recipe.data.validation.model_dump(mode="json"),
        "shard_tokens": recipe.data.shard_tokens,
    }


def _sha256(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode("utf-8")).hexdigest()


def _check_template(recipe: Recipe) -> None:
    """Refuse conversations without a template."""
    if recipe.data.records and find_chat_template(recipe.tokenizer) is None:
        raise UserError(
            "data.sources are conversations or preferences and no chat template says how they become text: set "
            "tokenizer.chat_template to chatml, alpaca, plain, or a Jinja file."
        )


def _folder(recipe: Recipe, made_from: dict[str, Any]) -> Path:
    """Where the shards are or will be. Recipes of any name share them; folders of old versions begin with a name."""
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode("utf-8")).hexdigest()[:8]
    named = recipe.data.cache_dir.glob(f"*-{digest}") if recipe.data.cache_dir.is_dir() else ()
    others = sorted(folder for folder in named if not folder.name.startswith(".") and folder.is_dir())
    return next(iter(others), recipe.data.cache_dir / f"{_PREFIX}-{digest}")


def _tokenizer_files(config: TokenizerConfig) -> list[str]:
    """sha256 of each file a tokenizer is loaded from."""
    if not isinstance(config, FileTokenizer | GPT2Tokenizer) or config.path is None:
        return []
    path = config.path.expanduser()
    candidates = [path, *(path / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))]
    return [sha256_file(file) for file in candidates if file.is_file()]


def _partial(folder: Path) -> Path:
    return folder.with_name(f".partial-{folder.name}")


def _lock(folder_name: str, cache_dir: Path) -> FileLock:
    return FileLock(cache_dir / f".{folder_name}.lock")


@contextlib.contextmanager
def _alone(folder: Path, report: Report) -> Iterator[None]:
    """Hold the folder's lock, which the system releases even when a process is killed."""
    lock = _lock(folder.name, folder.parent)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_stale(cache_dir: Path) -> None:
    """Remove what killed processes left: hidden folders whose lock nobody holds."""
    for partial in cache_dir.glob(".partial-*-????????"):
        with contextlib.suppress(Timeout), _lock(partial.name.removeprefix(".partial-"), cache_dir).acquire(timeout=0):
            shutil.rmtree(partial, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------- split


def split_documents(pieces: Iterable[Piece], validation: ValidationSplit) -> Iterator[tuple[Split, Piece]]:
    """Assign text to training or validation. It depends on the text alone, not on its order or its neighbours.

    `validation.by` is "document" or "tail". A document's tail is given as a document of its own, which the training
    part then does not end.
    """
    if validation.by == "tail":
        yield from _split_tails(pieces, validation.fraction)
        return
    split: Split = "train"
    for piece in pieces:
        if piece.starts_document:
            hashed = hashlib.blake2b(piece.text.encode("utf-8"), digest_size=8).digest()
            split = "validation" if int.from_bytes(hashed, "big") < validation.fraction * 2**64 else "train"
        yield split, piece


def _split_tails(pieces: Iterable[Piece], fraction: float) -> Iterator[tuple[Split, Piece]]:
    start_bytes = cut_bytes = 0
    in_tail = False
    for piece in pieces:
        if piece.starts_document:
            start_bytes, cut_bytes, in_tail = 0, int(piece.document_bytes * (1 - fraction)), False
        text = piece.text.encode("utf-8")
        cut = max(cut_bytes - start_bytes, 0)
        while cut < len(text) and text[cut] & 0xC0 == 0x80:  # inside a character: forward to the next one
            cut += 1
        head, tail = text[:cut].decode("utf-8"), text[cut:].decode("utf-8")
        if head:
            yield "train", replace(piece, text=head, ends_document=piece.ends_document and not tail)
        if tail:
            yield "validation", replace(piece, text=tail, starts_document=not in_tail)
            in_tail = True
        start_bytes += len(text)


# ---------------------------------------------------------------------------------------------------- write


def _fill(folder: Path, recipe: Recipe, made_from: dict[str, Any], report: Report) -> None:
    """Write the tokenizer, the shards of both splits, and the manifest."""
    data, validation = recipe.data, _split_by(recipe.data)
    total = total_bytes(data.texts) if data.texts else None
    tokenizer = _tokenizer(recipe, _training_texts(data, validation), total, report)
    save_tokenizer(tokenizer, folder / TOKENIZER_FOLDER)
    source = find_chat_template(recipe.tokenizer)
    template = None if source is None else ChatTemplate(source, tokenizer)
    if template is not None:
        save_chat_template(template, folder / TOKENIZER_FOLDER)
    for path in (*(folder / TOKENIZER_FOLDER).iterdir(), folder / TOKENIZER_FOLDER):
        sync(path)

    dtype = dtype_for(vocabulary_size(tokenizer))
    splits: tuple[Split, ...] = ("train", "validation")
    writers = {split: ShardWriter(folder, split, dtype, data.shard_tokens) for split in splits}
    origins: tuple[Origin, ...] = ()
    round_trips, text_sha256 = False, None
    try:
        if template is not None and data.conversations:
            conversations = iter_conversations(data.conversations)
            origins = write_examples(writers, template, conversations, validation.fraction, data.processes, report)
        elif template is not None and data.preferences:
            pairs = iter_pairs(data.preferences)
            origins = write_pairs(writers, template, pairs, validation.fraction, data.processes, report)
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
        tokenizer_files={
            path.name: sha256_file(path) for path in sorted((folder / TOKENIZER_FOLDER).iterdir()) if path.is_file()
        },
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
    enough = data.records or count_documents(data.texts, _DOCUMENTS_WORTH_A_SPLIT) == _DOCUMENTS_WORTH_A_SPLIT
    return data.validation.model_copy(update={"by": "document" if enough else "tail"})


def _training_texts(data: DataConfig, validation: ValidationSplit) -> Iterator[str]:
    """What a tokenizer may learn from."""
    for conversation in iter_conversations(data.conversations):
        if not is_held_out(conversation.prompt, validation.fraction):
            yield from (message["content"] for message in conversation.messages)
    for pair in iter_pairs(data.preferences):
        if not is_held_out(pair.prompt, validation.fraction):
            yield from (message["content"] for message in [*pair.prompt, pair.chosen, pair.rejected])
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
    """Encode and write the text of both splits; returns whether its tokens give it back, and the sha256 of the
    validation text, its documents apart."""
    prefix, suffix = (np.array(ids, dtype=np.uint32) for ids in document_frame(tokenizer))
    round_trips, done_bytes, at_first_tail = True, 0, validation.by == "tail"
    held_out = hashlib.sha256()
    parts = split_documents(iter_documents(data.texts), validation)
    for (split, piece), encoded in encode_all(tokenizer, parts, data.processes):
        opens = piece.starts_document
        if split == "validation" and at_first_tail:
            opens = at_first_tail = False  # it goes on where a training text stopped: nothing separates them
        ids = [prefix[: len(prefix) * opens], encoded.ids, suffix[: len(suffix) * piece.ends_document]]
        writers[split].add(np.concatenate(ids), encoded.text_bytes, piece.starts_document, encoded.unknown_tokens)
        if split == "validation":
            held_out.update(piece.text.encode("utf-8") + b"\0" * piece.ends_document)
        round_trips &= encoded.round_trips
        done_bytes += encoded.text_bytes
        report("shards", done_bytes, total)
    return round_trips, held_out.hexdigest()


def _counted(texts: Iterable[str], limit_bytes: int | None, total: int | None, report: Report) -> Iterator[str]:
    """The texts, as many as fit in the limit, counted for the report."""
    done_bytes = 0
    for text in texts:
        yield text
        done_bytes += len(text.encode("utf-8"))
        report("tokenizer", done_bytes, total if limit_bytes is None or total is None else min(total, limit_bytes))
        if limit_bytes is not None and done_bytes >= limit_bytes:
            return


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
