"""Plans a run from its recipe and the size of its data, which is estimated from files if it is not prepared."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gptworks.config import Recipe
from gptworks.data.batches import windows_per_epoch
from gptworks.data.opened import Prepared
from gptworks.data.prepare import find_prepared
from gptworks.data.samples import AnswerPairs, open_samples
from gptworks.data.shards import TokenShards
from gptworks.data.sources.choose import choose_source
from gptworks.errors import UserError
from gptworks.planning.devices import UTILIZATION, Device
from gptworks.planning.flops import training_work
from gptworks.planning.run import Plan, plan
from gptworks.planning.steps import DataSize
from gptworks.recipe import with_vocab_size


def estimate(
    recipe: Recipe,
    read: Callable[[Sequence[str]], Recipe],
    device: Device,
    n_ranks: int = 1,
    utilization: float = UTILIZATION,
) -> Plan:
    """Return the plan of a recipe's run. If its data is missing, figures that depend on the tokens are unknown.

    Args:
        read: loads the recipe again with additional overrides; the plan uses it to test its advice.

    Raises:
        UserError: as in `gptworks.planning.run.plan`; or the data is missing and the vocabulary's size is unknown.
    """
    planned, data, pairs = _with_data(recipe)

    def apply(overrides: Sequence[str], n_ranks: int) -> Recipe:
        changed = read(overrides)
        model = changed.model.model_copy(update={"vocab_size": planned.model.vocab_size})
        return changed.model_copy(update={"model": model})

    found = plan(planned, data, device=device, n_ranks=n_ranks, utilization=utilization, apply=apply)
    return found if pairs is None or found.steps is None else _with_lengths(found, pairs, found.steps)


MOST_SAMPLES = 1_000_000
"""Maximum number of samples whose lengths are read to estimate the mean length."""


def _with_lengths(found: Plan, pairs: AnswerPairs, steps: int) -> Plan:
    """Return the plan with its tokens per sample and its FLOPs computed from the real lengths of the pairs."""
    n_samples = min(found.train.samples_before(steps), MOST_SAMPLES)
    per_sample = pairs.tokens_read(n_samples, found.setting.micro_batch_size) / n_samples
    width = max(1, round(per_sample / found.recipe.objective.rows_per_sample))
    shorter = found.recipe.model_copy(update={"train": found.train.model_copy(update={"row_tokens": width})})
    return replace(found, tokens_per_sample=per_sample, work=training_work(shorter))


def with_what_is_prepared(recipe: Recipe) -> tuple[Recipe, Prepared | None]:
    """Return the recipe with the vocabulary's size from its prepared data, and this data; `recipe` and None if the data
    is not prepared."""
    prepared = find_prepared(recipe)
    if prepared is None:
        return recipe, None
    return with_vocab_size(recipe, prepared.manifest.vocab_size), prepared


def _with_data(recipe: Recipe) -> tuple[Recipe, DataSize, AnswerPairs | None]:
    """Return the recipe with its vocabulary's size, if known; the size of its data, exact if prepared; and its prepared
    pairs of answers, or None."""
    recipe, prepared = with_what_is_prepared(recipe)
    if prepared is None:
        size = data_size(recipe)
        if size.missing is not None and not recipe.model.vocab_size:
            raise UserError(size.missing)
        return (recipe if size.vocab_size is None else with_vocab_size(recipe, size.vocab_size)), size, None
    if recipe.data.mixture:
        stretches = TokenShards(prepared.folder, "train", verify=False).stretches
        sizes = {one.name: part.n_tokens for one, part in zip(recipe.data.mixture, stretches, strict=True)}
        return recipe, of_datasets(recipe, sizes, estimated=False), None
    samples = open_samples(recipe, prepared.folder) if recipe.data.records else None
    per_epoch = None if samples is None else samples.per_epoch
    size = DataSize(prepared.manifest.splits["train"].tokens, per_epoch)
    return recipe, size, samples if isinstance(samples, AnswerPairs) else None


BYTES_PER_TOKEN = 4.0
"""Bytes per token of English text in byte-level BPE with tens of thousands of tokens; fewer in a smaller vocabulary."""


def data_size(recipe: Recipe) -> DataSize:
    """Estimate the size of the training split: bytes of the sources, without the held-out share, divided by the bytes
    per token (1 for a character tokenizer, else `BYTES_PER_TOKEN`). The share `data.snippets` is added as if all
    text were Python. Sizes of built datasets of a mixture are exact."""
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
