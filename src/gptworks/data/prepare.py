"""From documents to token shards: split, train or load the tokenizer, encode, write. Done once for the same inputs.

The folder's name carries a fingerprint of everything that decides its contents. Work happens in a hidden folder beside
it, which takes its name when it is complete: what has the name can be trusted, and is never written again.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tokenizers import Tokenizer

from gptworks.chat_template import ChatTemplate, find_chat_template, load_chat_template
from gptworks.config import FileTokenizer, GPT2Tokenizer, Recipe, TokenizerConfig
from gptworks.data.shards import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    Manifest,
    TokenShards,
    read_manifest,
    redo,
)
from gptworks.data.sources.choose import check_sources, source_signature
from gptworks.data.write import Report, write_dataset
from gptworks.errors import UserError
from gptworks.files import make_folder, naming_disk_errors, sha256_file, sync
from gptworks.tokenizer import StreamDecoder, fingerprint, load_tokenizer

_PREFIX = "shards"
_DECODED_TOKENS = 1 << 16


@dataclass(frozen=True)
class Prepared:
    """A folder of shards, complete and checked."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    reused: bool
    chat_template: ChatTemplate | None = None


def prepare(recipe: Recipe, *, report: Report = lambda stage, done_bytes, total_bytes: None) -> Prepared:
    """The recipe's text as token shards: those of an earlier call, or new ones.

    The number of worker processes does not change the shards. Of two simultaneous calls, one works and one waits.

    Raises:
        UserError: something wrong with the sources or the tokenizer, or a split without text.
        RunError: the disk is full or fails, or a worker process died. Nothing half-written is left behind.
    """
    data, made_from = recipe.data, _made_from(recipe)
    folder = _folder(recipe, made_from)
    if folder.exists():
        return open_prepared(folder)
    check_sources(data.texts)
    if data.records and find_chat_template(recipe.tokenizer) is None:
        raise UserError(
            "data.sources are conversations or preferences and no chat template says how they become text: set "
            "tokenizer.chat_template to chatml, alpaca, plain, or a Jinja file."
        )
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
                write_dataset(partial, recipe, made_from, report)
                partial.rename(folder)
                sync(folder.parent)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return replace(open_prepared(folder), reused=False)


def find_prepared(recipe: Recipe) -> Prepared | None:
    """What an earlier `prepare` of this recipe made; None if there is none, or if the sources are missing.

    Raises:
        UserError: a file of that folder is missing or was changed.
    """
    try:
        folder = _folder(recipe, _made_from(recipe))
    except UserError:  # the fingerprint needs the sources
        return None
    return open_prepared(folder) if folder.exists() else None


def find_of_run(recipe: Recipe, run_dir: Path, fingerprint: str) -> Prepared | None:
    """The shards that a run was trained on, by their fingerprint. Their sources may be gone.

    A relative `data.cache_dir` is looked for here and in the folders around the run, in one of which it was made; a
    trial of a sweep lies four below.

    Raises:
        UserError: a file of that folder is missing or was changed.
    """
    caches = [folder / recipe.data.cache_dir for folder in (Path(), *run_dir.resolve().parents[:4])]
    for file in chain.from_iterable(sorted(cache.glob(f"[!.]*/{MANIFEST_FILE}")) for cache in caches):
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
                f"{file} is missing or not what was written: its sha256 is not the manifest's. {redo(folder)}"
            )
    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    if fingerprint(tokenizer) != manifest.tokenizer_sha256:
        raise UserError(f"{folder / TOKENIZER_FOLDER} is not the tokenizer that made these tokens. {redo(folder)}")
    template = load_chat_template(folder / TOKENIZER_FOLDER, tokenizer)
    if manifest.made_from.get("chat_template") != _sha256(None if template is None else template.source):
        raise UserError(
            f"{folder / TOKENIZER_FOLDER} does not hold the chat template that made these tokens. {redo(folder)}"
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
    signature = json.dumps(source_signature([*data.texts, *data.records]))
    return {
        "format_version": FORMAT_VERSION,
        "sources": [source.model_dump(mode="json") for source in data.sources],
        "sources_signature": _sha256(signature),
        "tokenizer": recipe.tokenizer.model_dump(mode="json"),
        "tokenizer_files": _tokenizer_files(recipe.tokenizer),
        "chat_template": _sha256(find_chat_template(recipe.tokenizer)),
        "validation": data.validation.model_dump(mode="json"),
        "shard_tokens": data.shard_tokens,
    }


def _sha256(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode("utf-8")).hexdigest()


def _folder(recipe: Recipe, made_from: dict[str, Any]) -> Path:
    """Where the shards are or will be. Recipes of any name share them; folders of old versions begin with a name."""
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode("utf-8")).hexdigest()[:8]
    others = sorted(folder for folder in recipe.data.cache_dir.glob(f"[!.]*-{digest}") if folder.is_dir())
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
    """Remove the hidden folders of killed processes: those whose lock is free."""
    for partial in cache_dir.glob(".partial-*-????????"):
        with contextlib.suppress(Timeout), _lock(partial.name.removeprefix(".partial-"), cache_dir).acquire(timeout=0):
            shutil.rmtree(partial, ignore_errors=True)
