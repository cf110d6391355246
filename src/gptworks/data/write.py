"""The files of a dataset: its tokenizer, the shards of both splits, the manifest."""

from importlib import metadata
from pathlib import Path
from typing import Any

from gptworks.chat_template import ChatTemplate, load_chat_template
from gptworks.config import AnyRecipe, DataConfig, ValidationSplit
from gptworks.data.cleaned import cleaned_texts
from gptworks.data.conversations.examples import write_examples
from gptworks.data.jobs import JobSettings, join_jobs, run_jobs
from gptworks.data.learn import empty, iter_records, keep_tokenizer, split_by
from gptworks.data.report import Report, adding_up
from gptworks.data.shard_writer import split_writers, write_manifest
from gptworks.data.shards import FORMAT_VERSION, TOKENIZER_FOLDER, Dtype, Manifest, dtype_for
from gptworks.errors import UserError
from gptworks.files import link_or_copy, new_folder, sha256_file
from gptworks.tokenizer import fingerprint, load_tokenizer, pack_tokenizer, vocabulary_size


def work_on(work: Path, recipe: AnyRecipe, report: Report, part: tuple[int, int] = (1, 1)) -> None:
    """Do the unfinished work on a dataset in a folder: the tokenizer, and the shards of text.

    Args:
        part: (K, N): do every Nth job from the Kth on; other machines do the others.
    """
    data, (k, n) = recipe.data, part
    texts = cleaned_texts(work, data, report)
    validation = split_by(data, texts.sources)
    tokenizer = keep_tokenizer(work / TOKENIZER_FOLDER, recipe, [(data, 1.0, texts)], report)
    dtype = dtype_for(vocabulary_size(tokenizer))
    settings = JobSettings(pack_tokenizer(tokenizer), validation, data.shard_tokens, dtype)
    advance = adding_up(report, "shards", texts.total_bytes if part == (1, 1) else None)
    run_jobs(work, texts.jobs[k - 1 :: n], settings, data.processes, advance, lambda line: report(line, 0, None))


def write_dataset(folder: Path, work: Path, recipe: AnyRecipe, made_from: dict[str, Any], report: Report) -> None:
    """Write the finished dataset, completely or not at all. Conversations are encoded here."""
    data = recipe.data
    texts = cleaned_texts(work, data, report)
    validation = split_by(data, texts.sources)
    tokenizer = load_tokenizer(work / TOKENIZER_FOLDER)
    template = load_chat_template(work / TOKENIZER_FOLDER, tokenizer)
    dtype = dtype_for(vocabulary_size(tokenizer))
    with new_folder(folder) as whole:
        if template is not None and data.records:
            written = _write_records(whole, dtype, template, data, validation, report)
        else:
            written = join_jobs(work, whole)
        for split, files in written["splits"].items():
            if not files.tokens:
                raise UserError(empty(split, validation, bool(data.conversations)))
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
            made_from=made_from,
            cleaning={"filters": [one.model_dump(mode="json") for one in texts.counts]} if data.clean else None,
            **written,
        )
        write_manifest(manifest, whole)


def _write_records(
    whole: Path, dtype: Dtype, template: ChatTemplate, data: DataConfig, validation: ValidationSplit, report: Report
) -> dict[str, Any]:
    """Write the shards of conversations or pairs of answers. Returns the manifest's fields about them."""
    with split_writers(whole, dtype, data.shard_tokens) as writers:
        origins = write_examples(writers, template, iter_records(data), validation.fraction, data.processes, report)
        splits = {split: writer.finish() for split, writer in writers.items()}
    return {"splits": splits, "origins": origins, "round_trips": False}


def _version() -> str:
    try:
        return metadata.version("gptworks")
    except metadata.PackageNotFoundError:  # run from a source tree, not installed
        return "unknown"
