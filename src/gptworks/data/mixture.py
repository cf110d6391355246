"""A mixture on disk: one folder with the shards of several datasets, one dataset after the other.

The folder is a complete dataset: its shards are links to the datasets' shards, or copies if the file system differs.
The datasets' weights are in the recipe, not in the folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gptworks.config import AnyRecipe, DatasetTokenizer, FileTokenizer, MixtureMember, TrainedTokenizer
from gptworks.config.data import check_mixture
from gptworks.data.opened import Prepared, folder_named, open_prepared, sha256_text
from gptworks.data.shard_writer import write_manifest
from gptworks.data.shards import FORMAT_VERSION, SPLITS, TOKENIZER_FOLDER, Manifest, Part, Split, SplitFiles, shares
from gptworks.errors import UserError
from gptworks.files import (
    check_free,
    check_regular,
    copy_folder,
    file_lock,
    link_or_copy,
    make_folder,
    naming_disk_errors,
    new_folder,
)
from gptworks.tokenizer import fingerprint, train_tokenizer

Made = Callable[[AnyRecipe], Prepared | None]


@dataclass(frozen=True)
class Member:
    """One dataset of a mixture: a whole folder, or a part of a folder that is itself a mixture."""

    prepared: Prepared
    part: Part
    splits: dict[Split, SplitFiles]

    @classmethod
    def of(cls, name: str, prepared: Prepared) -> "Member":
        """Return the dataset in a folder, or the part with this name if the folder is a mixture. Raises UserError if
        the mixture has no such part, or the folder holds conversations."""
        manifest, folder = prepared.manifest, prepared.folder
        if manifest.holds_examples:
            raise UserError(f"{folder} ({name}) holds conversations, and mixtures are of text: train on it separately.")
        only_part = Part(
            name=name,
            fingerprint=manifest.fingerprint,
            shards={split: len(files.shards) for split, files in manifest.splits.items()},
            unknown_tokens={split: files.unknown_tokens for split, files in manifest.splits.items()},
            made_from=manifest.made_from,
            round_trips=manifest.round_trips,
            validation_text_sha256=manifest.validation_text_sha256,
            cleaning=manifest.cleaning,
            sources=manifest.sources,
        )
        parts = manifest.parts or (only_part,)
        names = [part.name for part in parts]
        if name not in names:
            raise UserError(
                f"{folder} is a mixture itself, of {', '.join(names)}, and none of them is {name}. Use one of these "
                f"names for that part of the mixture."
            )
        number = names.index(name)
        splits = {}
        for split, files in manifest.splits.items():
            shards = list(shares(split, [part.shards for part in parts], files.shards))[number]
            splits[split] = SplitFiles.of(shards, parts[number].unknown_tokens.get(split, 0))
        return cls(prepared, parts[number], splits)


def members_of(recipe: AnyRecipe, made: Made, trained: Callable[[AnyRecipe], Path | None]) -> list[Member] | None:
    """Return the datasets of a recipe's mixture, in order; None if a dataset is not built, or the tokenizer is not
    trained.

    Args:
        made: returns the dataset of a recipe without a mixture; None if it is not built.
        trained: returns the folder of the tokenizer trained on the text of all datasets; None if it is not trained.

    Raises:
        UserError: a folder is not a dataset of text or lacks the part that a member names, or the datasets'
            tokenizers differ from each other or from the recipe's tokenizer.
    """
    data = recipe.data
    folders = {member.name: member.dataset for member in data.mixture if member.dataset is not None}
    built = {name: Member.of(name, open_prepared(folder.expanduser())) for name, folder in folders.items()}
    first = next(iter(built.values()), None)
    tokenizer = recipe.tokenizer
    if first is not None:
        _check_same_tokenizer(list(built.values()))
        folder, made_by = first.prepared.folder, first.prepared.manifest.tokenizer_sha256
        if not isinstance(tokenizer, DatasetTokenizer) and fingerprint(train_tokenizer(tokenizer, ())) != made_by:
            raise UserError(
                f"tokenizer.type={tokenizer.type} is not the tokenizer of {first.part.name} ({folder}), which is "
                f"already tokenized: set tokenizer.type=dataset."
            )
        tokenizer = FileTokenizer(type="file", path=folder / TOKENIZER_FOLDER)
    elif isinstance(tokenizer, TrainedTokenizer):
        if (trained_in := trained(recipe)) is None:
            return None
        tokenizer = FileTokenizer(type="file", path=trained_in)
    members = []
    for member in data.mixture:
        if (found := built.get(member.name)) is None:
            prepared = made(recipe.model_copy(update={"tokenizer": tokenizer, "data": data.of_member(member)}))
            if prepared is None:
                return None
            found = Member.of(member.name, prepared)
        members.append(found)
    return members


def find_mixed(members: Sequence[Member], cache_dir: Path) -> Prepared | None:
    """Open the dataset of exactly these members, which is a folder that they share or that `mixed` made; None if there
    is no such folder. Raises UserError if the members have different tokenizers, or a file of the folder was changed.
    """
    _check_same_tokenizer(members)
    first = members[0].prepared
    whole = [*first.manifest.parts] or [members[0].part]
    if {member.prepared.folder for member in members} == {first.folder} and [one.part for one in members] == whole:
        return first
    folder = folder_named(cache_dir, "mixture", _manifest(members).model_dump(mode="json"))
    return open_prepared(folder) if folder.exists() else None


def mixed(members: Sequence[Member], cache_dir: Path) -> Prepared:
    """Return the dataset of exactly these members. If `find_mixed` finds none, make one in `cache_dir`. Raises
    UserError if the members have different tokenizers; RunError if the disk is full, fails or refuses to write."""
    if (found := find_mixed(members, cache_dir)) is not None:
        return found
    manifest = _manifest(members)
    folder = folder_named(cache_dir, "mixture", manifest.model_dump(mode="json"))
    advice = "Free space, or set data.cache_dir to another disk, and run it again."
    with naming_disk_errors(f"{cache_dir}: the mixture could not be made", folder, advice):
        make_folder(cache_dir)
        with file_lock(cache_dir / f".{folder.name}.lock"):
            if folder.exists():
                return open_prepared(folder)
            _write(members, manifest, folder)
    return replace(open_prepared(folder), reused=False)


def mix_folders(out: Path, datasets: Sequence[str]) -> list[dict[str, Any]]:
    """Combine datasets, each `NAME=FOLDER` or `NAME=FOLDER:WEIGHT`, in the folder `out`. Return the name, weight and
    number of training tokens of each.

    Raises:
        UserError: an argument has another form, `out` is not empty, a folder is not a dataset of text, or the
            tokenizers differ.
        RunError: the disk is full, fails or refuses to write.
    """
    given = [_given(text) for text in datasets]
    try:
        check_mixture(tuple(given), None)
    except ValueError as error:
        raise UserError(f"{error}.") from None
    check_free(out)
    members = [Member.of(one.name, open_prepared(Path(one.dataset or "").expanduser())) for one in given]
    _check_same_tokenizer(members)
    _write(members, _manifest(members), out)
    pairs = zip(given, members, strict=True)
    return [{"name": g.name, "weight": g.weight, "train_tokens": m.splits["train"].tokens} for g, m in pairs]


def _given(text: str) -> MixtureMember:
    name, _, folder = text.partition("=")
    before, colon, weight = folder.rpartition(":")
    if colon and not Path(folder).exists():
        folder = before
    else:
        weight = "1"
    try:
        return MixtureMember.model_validate({"name": name, "dataset": folder or None, "weight": weight})
    except ValidationError as error:
        problem = error.errors()[0]
        raise UserError(
            f"{text}: {'.'.join(map(str, problem['loc']))} {problem['msg']}. Give NAME=FOLDER, or NAME=FOLDER:WEIGHT "
            f"with a weight of 0 or more, such as web=data/shards-0123abcd:0.7."
        ) from None


def _check_same_tokenizer(members: Sequence[Member]) -> None:
    first, *others = members
    for other in others:
        ours, theirs = first.prepared.manifest, other.prepared.manifest
        tokens = [(one.tokenizer_sha256, one.vocab_size, one.dtype) for one in (ours, theirs)]
        if tokens[0] != tokens[1] or ours.made_from.get("chat_template") != theirs.made_from.get("chat_template"):
            raise UserError(
                f"{first.part.name} ({first.prepared.folder}, {ours.vocab_size:,} tokens) and {other.part.name} "
                f"({other.prepared.folder}, {theirs.vocab_size:,}) have different tokenizers, so one model cannot read "
                f"both. Build one of them again with tokenizer.type=file and "
                f"tokenizer.path={first.prepared.folder / TOKENIZER_FOLDER}."
            )


def _manifest(members: Sequence[Member]) -> Manifest:
    first = members[0].prepared
    splits: dict[Split, SplitFiles] = {}
    for split in SPLITS:
        shards = chain.from_iterable(member.splits[split].shards for member in members)
        numbered = (shard.numbered(split, number) for number, shard in enumerate(shards))
        splits[split] = SplitFiles.of(numbered, sum(member.splits[split].unknown_tokens for member in members))
    parts = tuple(member.part for member in members)
    texts = [part.validation_text_sha256 for part in parts]
    return first.manifest.model_copy(
        update={
            "format_version": FORMAT_VERSION,
            "made_from": {"chat_template": first.manifest.made_from.get("chat_template")},
            "round_trips": all(part.round_trips for part in parts),
            "splits": splits,
            "validation_text_sha256": None if None in texts else sha256_text(" ".join(map(str, texts))),
            "parts": parts,
            "cleaning": None,
            "sources": (),
        }
    )


def _write(members: Sequence[Member], manifest: Manifest, folder: Path) -> None:
    with new_folder(folder) as aside:
        prepared = members[0].prepared.folder
        copy_folder(prepared / TOKENIZER_FOLDER, aside / TOKENIZER_FOLDER, inside=prepared)
        for split in SPLITS:
            taken = ((member.prepared.folder, one) for member in members for one in member.splits[split].shards)
            for (source, old), new in zip(taken, manifest.splits[split].shards, strict=True):
                for name, to in zip(old.files(), new.files(), strict=True):
                    check_regular(source / name, inside=source)
                    link_or_copy((source / name).resolve(), aside / to)
        write_manifest(manifest, aside)
