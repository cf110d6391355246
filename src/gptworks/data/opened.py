"""Open a dataset, or find the dataset of a run by the fingerprint of its tokens."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gptworks.chat_template import ChatTemplate, load_chat_template
from gptworks.config import Recipe
from gptworks.data.shards import MANIFEST_FILE, TOKENIZER_FOLDER, Manifest, TokenShards, read_manifest, redo
from gptworks.errors import UserError
from gptworks.files import sha256_file, url_of
from gptworks.files.mirror import fetched_data
from gptworks.tokenizer import MAX_TOKENIZER_BYTES, StreamDecoder, fingerprint, load_tokenizer

_DECODED_TOKENS = 1 << 16


@dataclass(frozen=True)
class Prepared:
    """A dataset that was opened and checked: a complete folder of shards."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    reused: bool
    chat_template: ChatTemplate | None = None


def find_of_run(recipe: Recipe, run_dir: Path, fingerprint: str) -> Prepared | None:
    """Open the dataset that a run was trained on, even if the dataset's sources are gone; None if it is not found.
    Raises UserError if a file of the dataset's folder is missing or was changed.

    The search covers `data.cache_dir` and the built datasets that the recipe's mixture names. Relative paths are looked
    up in the current folder and in the four folders above the run, because a trial of a sweep is four folders below the
    folder in which its dataset was made.
    """
    near = (Path(), *run_dir.resolve().parents[:4])
    named = [folder / one.dataset.expanduser() for one in recipe.data.mixture if one.dataset for folder in near]
    for folder, manifest in datasets_in([folder / recipe.data.cache_dir for folder in near], named):
        if manifest.fingerprint == fingerprint:
            return open_prepared(folder)
    return None


def datasets_in(caches: Iterable[Path], named: Iterable[Path] = ()) -> Iterator[tuple[Path, Manifest]]:
    """Yield the datasets in the caches and among the named folders, with their manifests. Skip datasets that are broken
    or have another format version."""
    found = chain.from_iterable(sorted(cache.glob(f"[!.]*/{MANIFEST_FILE}")) for cache in caches)
    for folder in chain(named, (file.parent for file in found)):
        with contextlib.suppress(UserError):
            yield folder, read_manifest(folder)


def open_prepared(folder: str | Path) -> Prepared:
    """Open and check a dataset that `prepare` made. If the folder mirrors a remote folder, fetch the files first.
    Raises UserError if the folder is not a dataset, or a file in it is missing or was changed. The tokenizer's files
    are compared with the manifest by content, and the shards only by size."""
    folder = Path(folder)
    if (url := url_of(folder)) is not None:
        fetched_data(url)
    manifest = read_manifest(folder)
    for split in manifest.splits:
        TokenShards(folder, split, verify=False)
    for name, expected in manifest.tokenizer_files.items():
        file = folder / TOKENIZER_FOLDER / name
        if (
            Path(name).name != name
            or not file.is_file()
            or sha256_file(file, inside=folder, max_bytes=MAX_TOKENIZER_BYTES) != expected
        ):
            raise UserError(
                f"{file} is missing or not as it was written: its sha256 is not the manifest's. {redo(folder)}"
            )
    tokenizer = load_tokenizer(folder / TOKENIZER_FOLDER)
    if fingerprint(tokenizer) != manifest.tokenizer_sha256:
        raise UserError(f"{folder / TOKENIZER_FOLDER} is not the tokenizer that made these tokens. {redo(folder)}")
    template = load_chat_template(folder / TOKENIZER_FOLDER, tokenizer)
    if manifest.made_from.get("chat_template") != sha256_text(None if template is None else template.source):
        raise UserError(
            f"{folder / TOKENIZER_FOLDER} does not hold the chat template that made these tokens. {redo(folder)}"
        )
    return Prepared(folder, manifest, tokenizer, reused=True, chat_template=template)


def held_out_text(prepared: Prepared) -> Iterator[bytes]:
    """Yield the validation text in parts, decoded from the shards. Raises UserError if the dataset holds no text,
    decoding the tokens does not restore the text, or a file was changed."""
    if prepared.manifest.holds_examples:
        raise UserError(
            f"{prepared.folder} holds conversations or preference pairs, not text: there is no held-out text to decode."
        )
    if not prepared.manifest.round_trips:
        raise UserError(
            f"{prepared.folder}: this tokenizer does not restore the text that it encoded, so the held-out text cannot "
            f"be decoded. Use tokenizer.type=bpe, which loses nothing."
        )
    shards = TokenShards(prepared.folder, "validation")
    for start, end in pairwise(shards.document_bounds.tolist()):
        stream = StreamDecoder(prepared.tokenizer)
        for at in range(start, end, _DECODED_TOKENS):
            yield stream.push(*shards.read(at, min(_DECODED_TOKENS, end - at)).tolist()).encode("utf-8")
        yield stream.flush().encode("utf-8")


def folder_named(cache_dir: Path, kind: str, made_from: Any) -> Path:
    """Return the path `cache_dir`/KIND-DIGEST, where DIGEST is a hash of the JSON tree `made_from`."""
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode("utf-8")).hexdigest()[:8]
    return cache_dir / f"{kind}-{digest}"


def sha256_text(text: str | None) -> str | None:
    """Return the sha256 of a text in hex; None for None."""
    return None if text is None else hashlib.sha256(text.encode("utf-8")).hexdigest()
