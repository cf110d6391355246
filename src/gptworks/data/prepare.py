"""Turn documents into token shards: split, train or load the tokenizer, encode, write. Reuse earlier results.

The name of a dataset's folder contains a fingerprint of everything that decides the dataset's contents. The work
happens in a hidden folder next to the dataset's folder. A dataset gets its name when it is complete, and never changes
after that. If the work is killed, finished jobs stay in the hidden folder, and the next call continues from them.
"""

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, Timeout
from tokenizers import Tokenizer

from gptworks.chat_template import find_chat_template, load_chat_template
from gptworks.config import AnyRecipe, ValidationSplit
from gptworks.data.cleaned import CLEANED, Texts, cleaned_texts, read_texts
from gptworks.data.cleaning.choose import choose_filters
from gptworks.data.cleaning.duplicates import Duplicates
from gptworks.data.conversations.examples import write_examples
from gptworks.data.identity import folder_for, folder_of_settings, made_from
from gptworks.data.jobs import JobSettings, finished, join_jobs, plan_jobs, run_jobs
from gptworks.data.learn import LearnedText, empty, held_out_of, iter_records, keep_tokenizer, split_by
from gptworks.data.mixture import find_mixed, members_of, mixed
from gptworks.data.opened import Prepared, folder_named, open_prepared
from gptworks.data.shard_writer import split_writers, write_manifest
from gptworks.data.shards import FORMAT_VERSION, TOKENIZER_FOLDER, Manifest, dtype_for
from gptworks.data.sources.choose import check_sources
from gptworks.data.workers import Report, adding_up
from gptworks.errors import UserError
from gptworks.files import (
    file_lock,
    link_or_copy,
    make_folder,
    naming_disk_errors,
    new_folder,
    remove_leftovers,
    sha256_file,
)
from gptworks.tokenizer import fingerprint, load_tokenizer, pack_tokenizer, vocabulary_size


def prepare(recipe: AnyRecipe, *, report: Report = lambda stage, done_bytes, total_bytes: None) -> Prepared:
    """Build the recipe's dataset of token shards, or open it if an earlier call has built it.

    The number of worker processes does not change the shards. If two calls run at the same time, one builds and the
    other waits. If the sources are gone, the dataset built earlier with the same settings is used, with a warning.

    Raises:
        UserError: the sources or the tokenizer have a mistake, or a split has no text.
        RunError: the disk is full or fails, or a worker process died. The next call continues from the finished jobs.
    """
    data = recipe.data
    if data.mixture:
        members = members_of(recipe, lambda one: prepare(one, report=report), lambda one: _trained(one, report))
        assert members is not None
        return mixed(members, data.cache_dir)
    try:
        made = made_from(recipe)
    except UserError as missing:
        if (folder_of_gone := folder_of_settings(recipe)) is None:
            raise
        warnings.warn(f"{missing} {folder_of_gone}, made by these settings, is used.", stacklevel=2)
        return open_prepared(folder_of_gone)
    folder = folder_for(recipe, made)
    if folder.exists():
        return open_prepared(folder)
    _check(recipe)
    with _naming_disk_errors(folder), _locked(folder, report):
        if folder.exists():  # another process made the dataset while this one waited
            return open_prepared(folder)
        _remove_stale(folder.parent)
        try:
            _work(folder).mkdir(exist_ok=True)
            work_on(_work(folder), recipe, report)
            write_dataset(folder, recipe, made, report)
        except UserError:  # the text or tokenizer has a mistake, so finished work is useless
            shutil.rmtree(_work(folder), ignore_errors=True)
            raise
        finally:  # the next call may continue from finished jobs
            _remove_unless_useful(folder)
    return replace(open_prepared(folder), reused=False)


def build_part(
    recipe: AnyRecipe, k: int, n: int, *, report: Report = lambda stage, done_bytes, total_bytes: None
) -> Path:
    """Do the Kth of N parts of the work on a dataset of text. Return the work folder.

    Each part may be done on another machine. Then `merge_parts` makes the dataset from the jobs of all machines, which
    must be in the folder `jobs` of the work folder: share the work folder, or copy the jobs there.

    Raises:
        UserError, RunError: see `prepare`; UserError also if K is not from 1 to N, or the recipe has a mixture,
            conversations or preferences.
    """
    if not 1 <= k <= n:
        raise UserError(f"part {k}/{n}: K goes from 1 to N, such as 1/{max(n, 1)}.")
    if recipe.data.mixture:
        raise UserError("data.mixture: build each of its datasets by itself, with a recipe that has its `sources`.")
    if recipe.data.records:
        raise UserError("data.sources are conversations or preferences, which are built in one part: leave --part out.")
    folder = folder_for(recipe, made_from(recipe))
    _check(recipe)
    with _naming_disk_errors(folder), _locked(folder.with_name(f"{folder.name}.part-{k}-of-{n}"), report):
        make_folder(_work(folder) / _SHARED)
        with _locked(folder, report):
            _begin(_work(folder), recipe, report)
        work_on(_work(folder), recipe, report, (k, n))
    return _work(folder)


def merge_parts(recipe: AnyRecipe, *, report: Report = lambda stage, done_bytes, total_bytes: None) -> Prepared:
    """Make the dataset from its finished parts. Raises UserError if a part is not finished, or the sources are missing
    or were changed; RunError if the disk is full or fails."""
    made = made_from(recipe)
    folder = folder_for(recipe, made)
    if folder.exists():
        return open_prepared(folder)
    with _naming_disk_errors(folder), _locked(folder, report):
        work = _work(folder)
        if missing := sorted({job.number for job in plan_jobs(recipe.data.texts)} - finished(work).keys()):
            raise UserError(
                f"{work / 'jobs'} lacks {len(missing):,} jobs, the first of them {missing[0]:05d}. Do each part with "
                f"--part K/N, and copy what other machines have there. On one machine, leave --merge out."
            )
        write_dataset(folder, recipe, made, report)
        shutil.rmtree(work)
    return replace(open_prepared(folder), reused=False)


def find_prepared(recipe: AnyRecipe) -> Prepared | None:
    """Open the dataset that `prepare` built from this recipe, even if its sources are gone; None if it was not built.
    Raises UserError if a file of the dataset's folder is missing or was changed."""
    if recipe.data.mixture:
        members = members_of(recipe, find_prepared, _find_trained)
        return None if members is None else find_mixed(members, recipe.data.cache_dir)
    try:
        folder = folder_for(recipe, made_from(recipe)) if recipe.data.cache_dir.exists() else None
    except UserError:  # the sources are gone
        folder = folder_of_settings(recipe)
    return open_prepared(folder) if folder is not None and folder.exists() else None


# ----------------------------------------------------------------------------------- tokenizer of a mixture


def _trained(recipe: AnyRecipe, report: Report) -> Path:
    """Return the folder of the tokenizer trained on the text of all datasets of a mixture; train it if necessary."""
    folder = _tokenizer_folder(recipe)
    if folder.exists():
        return folder
    check_sources(source for member in recipe.data.mixture for source in member.sources)
    make_folder(folder.parent)
    with _locked(folder, report):
        learned = []
        for member in recipe.data.mixture:
            data = recipe.data.of_member(member)
            texts = read_texts(data)
            learned.append(LearnedText(data, texts, split_by(data, texts.sources), member.weight))
        keep_tokenizer(folder, recipe, learned, report)
    return folder


def _find_trained(recipe: AnyRecipe) -> Path | None:
    with contextlib.suppress(UserError):  # the sources are gone
        if (folder := _tokenizer_folder(recipe)).exists():
            return folder
    return None


def _tokenizer_folder(recipe: AnyRecipe) -> Path:
    """Return the folder for the tokenizer of a mixture's text."""
    data = recipe.data
    parts = (recipe.model_copy(update={"data": data.of_member(member)}) for member in data.mixture)
    names = [folder_for(part, made_from(part)).name for part in parts]
    return folder_named(data.cache_dir, "tokenizer", [names, [member.weight for member in data.mixture]])


def work_on(work: Path, recipe: AnyRecipe, report: Report, part: tuple[int, int] = (1, 1)) -> None:
    """Do the unfinished work on a dataset in the folder `work`: make the tokenizer, and the jobs' shards of text. With
    part = (K, N), do only every Nth job, from the Kth on."""
    data, (k, n) = recipe.data, part
    texts, validation, tokenizer = _begin(work, recipe, report)
    dtype = dtype_for(vocabulary_size(tokenizer))
    settings = JobSettings(pack_tokenizer(tokenizer), validation, data.snippets, data.shard_tokens, dtype)
    known = texts.total_bytes if part == (1, 1) else None
    advance = adding_up(report, "shards", known and round(known * (1 + data.snippets)))
    run_jobs(work, texts.jobs[k - 1 :: n], settings, data.processes, advance, lambda line: report(line, 0, None))


def _begin(work: Path, recipe: AnyRecipe, report: Report) -> tuple[Texts, ValidationSplit, Tokenizer]:
    """Do what precedes the jobs: clean the text, decide how to split it, and make the tokenizer."""
    data = recipe.data
    texts = cleaned_texts(work, data, report)
    validation = split_by(data, texts.sources)
    if data.snippets and validation.by == "tail":
        raise UserError(
            "data.snippets needs whole training documents, and these are so few that the end of each is held out: "
            "give more documents, set data.validation.by=document, or remove data.snippets."
        )
    learned = [LearnedText(data, texts, validation)]
    return texts, validation, keep_tokenizer(work / TOKENIZER_FOLDER, recipe, learned, report)


def write_dataset(folder: Path, recipe: AnyRecipe, made: dict[str, Any], report: Report) -> None:
    """Write the dataset's folder, completely or not at all: encode conversations, or join the finished jobs of text.
    Raises UserError if the sources or the tokenizer's files changed since the folder's name was computed."""
    if folder_for(recipe, made_from(recipe)) != folder:
        raise UserError("the sources or the tokenizer's files changed while they were read. Run it again.")
    data, work = recipe.data, _work(folder)
    texts = cleaned_texts(work, data, report)
    validation = split_by(data, texts.sources)
    tokenizer = load_tokenizer(work / TOKENIZER_FOLDER)
    template = load_chat_template(work / TOKENIZER_FOLDER, tokenizer)
    dtype = dtype_for(vocabulary_size(tokenizer))
    with new_folder(folder) as whole:
        if template is None or not data.records:
            written = join_jobs(work, whole)
        else:
            with split_writers(whole, dtype, data.shard_tokens) as writers:
                held_out = held_out_of(data, validation)
                origins = write_examples(writers, template, iter_records(data), held_out, data.processes, report)
                splits = {split: writer.finish() for split, writer in writers.items()}
            written = {"splits": splits, "origins": origins, "round_trips": False}
        for split, files in written["splits"].items():
            if not files.tokens:
                raise UserError(empty(split, validation, data))
        (whole / TOKENIZER_FOLDER).mkdir()
        for file in (work / TOKENIZER_FOLDER).iterdir():
            link_or_copy(file, whole / TOKENIZER_FOLDER / file.name)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            created_by=f"gptworks {_version()}",
            dtype=dtype,
            vocab_size=vocabulary_size(tokenizer),
            tokenizer_sha256=fingerprint(tokenizer),
            tokenizer_files={file.name: sha256_file(file) for file in sorted((whole / TOKENIZER_FOLDER).iterdir())},
            made_from=made | ({"split_by": validation.by} if data.validation.by == "auto" else {}),
            cleaning={"filters": [one.model_dump(mode="json") for one in texts.counts]} if data.clean else None,
            **written,
        )
        write_manifest(manifest, whole)


def _version() -> str:
    try:
        return metadata.version("gptworks")
    except metadata.PackageNotFoundError:  # gptworks runs from a source tree
        return "unknown"


# -------------------------------------------------------------------------------------------- work folders


_SHARED = "parts"
"""Name of a folder that marks a work folder as shared by machines: the work is kept until the parts are merged."""


def _check(recipe: AnyRecipe) -> None:
    check_sources(recipe.data.texts)
    choose_filters(recipe.data.clean)
    Duplicates(recipe.data.clean)
    if recipe.data.records and find_chat_template(recipe.tokenizer) is None:
        raise UserError(
            "data.sources are conversations or preferences and no chat template says how they become text: set "
            "tokenizer.chat_template to chatml, alpaca, plain, or a Jinja file."
        )


def _work(folder: Path) -> Path:
    return folder.with_name(f".partial-{folder.name}")


@contextlib.contextmanager
def _naming_disk_errors(folder: Path) -> Iterator[None]:
    advice = "Free space, or set data.cache_dir to another disk, and run it again: it continues from finished parts."
    with naming_disk_errors(f"{folder.parent}: the data could not be prepared", _work(folder), advice):
        make_folder(folder.parent)
        yield


def _lock(folder: Path) -> BaseFileLock:
    return file_lock(folder.with_name(f".{folder.name}.lock"))


@contextlib.contextmanager
def _locked(folder: Path, report: Report) -> Iterator[None]:
    """Hold the folder's lock, which the operating system releases even if this process is killed."""
    lock = _lock(folder)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        report("waiting", 0, None)
        held = lock.acquire()
    with held:
        yield


def _remove_stale(cache_dir: Path) -> None:
    """Remove the work folders of killed processes, whose locks are free, unless the work is useful."""
    for partial in cache_dir.glob(".partial-*-????????"):
        folder = cache_dir / partial.name.removeprefix(".partial-")
        with contextlib.suppress(Timeout), _lock(folder).acquire(timeout=0):
            _remove_unless_useful(folder)


def _remove_unless_useful(folder: Path) -> None:
    """Remove the work on a dataset if the dataset exists, or if nothing is finished and no machines share the work."""
    remove_leftovers(folder)
    useful = finished(_work(folder)) or [*_work(folder).glob(f"{CLEANED}/[!.]*")] or (_work(folder) / _SHARED).exists()
    if folder.exists() or not useful:
        shutil.rmtree(_work(folder), ignore_errors=True)
