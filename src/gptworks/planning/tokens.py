"""Estimates the number of tokens in a recipe's data from the sizes of its files."""

from gptworks.config import Recipe
from gptworks.data.batches import windows_per_epoch
from gptworks.data.shards import TokenShards
from gptworks.data.sources.choose import choose_source
from gptworks.errors import UserError
from gptworks.planning.steps import DataSize

BYTES_PER_TOKEN = 4.0
"""Bytes per token of English text in byte-level BPE with tens of thousands of tokens; fewer in a smaller vocabulary."""


def data_size(recipe: Recipe) -> DataSize:
    """Estimate the size of the training split: bytes of the sources, without the held-out share, divided by the bytes
    per token (1 for a character tokenizer, else `BYTES_PER_TOKEN`). If there are snippets, all text counts as Python.
    Sizes of built datasets of a mixture are exact."""
    if recipe.data.mixture:
        return _mixture_size(recipe)
    try:
        sizes = [choose_source(source).size_bytes() for source in recipe.data.sources]
    except UserError as error:
        return DataSize(estimated=True, missing=str(error))
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return DataSize(estimated=True)
    rate = 1.0 if recipe.tokenizer.type == "char" else BYTES_PER_TOKEN
    share = (1 - recipe.data.validation.fraction) * (1 + recipe.data.snippets)
    tokens = int(sum(known) * share / rate)
    rows = max(1, tokens // recipe.row_length) if recipe.several_texts else None
    return DataSize(tokens, rows, estimated=True)


def _mixture_size(recipe: Recipe) -> DataSize:
    """Return the size of a mixture: exact for built datasets, estimated for sources."""
    data, sizes, vocab_size = recipe.data, {}, None
    for member in data.mixture:
        if member.dataset is None:
            found = data_size(recipe.model_copy(update={"data": data.of_member(member)}))
            if found.train_tokens is None:
                return found
            sizes[member.name] = found.train_tokens
            continue
        try:
            shards = TokenShards(member.dataset.expanduser(), "train", verify=False)
        except UserError as error:
            return DataSize(estimated=True, missing=str(error))
        vocab_size = shards.manifest.vocab_size
        parts = shards.stretches
        sizes[member.name] = sum(part.n_tokens for part in parts if len(parts) == 1 or part.name == member.name)
    estimated = any(member.dataset is None for member in data.mixture)
    return of_datasets(recipe, sizes, estimated, vocab_size)


def of_datasets(recipe: Recipe, sizes: dict[str, int], estimated: bool, vocab_size: int | None = None) -> DataSize:
    """Return the size of a mixture from the number of training tokens of each dataset."""
    samples = sum(windows_per_epoch(n, recipe.model.context_length) for n in sizes.values())
    return DataSize(sum(sizes.values()), samples, estimated, datasets=sizes, vocab_size=vocab_size)
