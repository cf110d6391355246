"""How many tokens a recipe's data will have, from the size of its files alone."""

from dataclasses import dataclass

from gptworks.config import Recipe
from gptworks.data.sources.choose import choose_source
from gptworks.errors import UserError

BYTES_PER_TOKEN = 4.0
"""Of English text in byte-level BPE with tens of thousands of tokens; a smaller vocabulary has fewer."""


@dataclass(frozen=True)
class DataSize:
    """How large a training split is."""

    train_tokens: int | None
    """None where the size of a source is not known before it is fetched, or it is missing."""
    samples_per_epoch: int | None
    """Rows of examples or pairs of answers; None: windows of the text, or unknown."""
    estimated: bool
    missing: str | None = None
    """Which source is not there, and what to do."""


def data_size(recipe: Recipe) -> DataSize:
    """Tokens of the training split: bytes of the files, compressed ones as they are, less what is held out, over
    bytes a token: 1 for a tokenizer of characters, else 4."""
    try:
        sizes = [choose_source(source).size_bytes() for source in recipe.data.sources]
    except UserError as error:
        return DataSize(None, None, estimated=True, missing=str(error))
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return DataSize(None, None, estimated=True)
    rate = 1.0 if recipe.tokenizer.type == "char" else BYTES_PER_TOKEN
    tokens = int(sum(known) * (1 - recipe.data.validation.fraction) / rate)
    packed = bool(recipe.data.conversations) and recipe.objective.several_texts
    return DataSize(tokens, max(1, tokens // recipe.model.context_length) if packed else None, estimated=True)
