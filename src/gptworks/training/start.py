"""Loads another run's weights, with which a new run starts instead of random weights."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gptworks.checkpoint import Report, all_checkpoints, checkpoints, choose_checkpoint, load_run, require_full_weights
from gptworks.config import ModelConfig, Recipe
from gptworks.errors import UserError
from gptworks.model.lab.future import FUTURE_HEADS
from gptworks.recipe import check_same_model, load_recipe
from gptworks.tokenizer import add_tokens, fingerprint, load_tokenizer, vocabulary_size
from gptworks.training.distributed.agreed import agreed_checkpoint
from gptworks.training.distributed.ranks import ALONE, Ranks


def check_start(recipe: Recipe, resume: bool = False) -> None:
    """Check that `initialize_from` can be used, before any work is done. For a resumed run, check the run's newest
    checkpoint instead.

    Raises:
        UserError: `initialize_from` is not a run folder, has another model, lacks heads that an adapter needs, or is
            unset although `adapter` is set; the weights to start from are quantized; or embeddings of added tokens
            would not be trained.
    """
    source = recipe.initialize_from
    if resume and (own := checkpoints(recipe.run_dir)):
        require_full_weights(own[0])
        return
    if source is None:
        if recipe.adapter is not None:
            raise UserError("adapter is set and initialize_from is not: name the run whose weights it adapts.")
        return
    if not (source / "recipe.yaml").exists():
        raise UserError(f"initialize_from={source} is not a run folder: it has no recipe.yaml.")
    for checkpoint in all_checkpoints(source)[:1]:
        require_full_weights(checkpoint)
    _check_new_tokens(recipe, source)
    check_same_model(recipe.model, source)
    ours, theirs = recipe.model.n_future_tokens, load_recipe(source).model.n_future_tokens
    if recipe.adapter is not None and ours > theirs:
        raise UserError(
            f"model.n_future_tokens={ours} with an adapter, which trains no heads, and initialize_from={source} has "
            f"{theirs}: leave model.n_future_tokens out."
        )


def _check_new_tokens(recipe: Recipe, source: Path) -> None:
    """Raise UserError if the recipe adds tokens but trains no embeddings: all new embeddings would stay equal."""
    adapter, freeze = recipe.adapter, recipe.freeze
    if adapter is not None and not adapter.embeddings:
        leaves, change = "an adapter does not train the embeddings", "adapter.embeddings=true"
    elif freeze is not None and freeze.freezes("token_embedding.weight"):
        leaves, change = "freeze does not train the embeddings", "freeze.embeddings=false"
    else:
        return
    if not recipe.tokenizer.added_tokens:
        return
    known = load_tokenizer(source / "tokenizer")
    if new := [token for token in recipe.tokenizer.added_tokens if known.token_to_id(token) is None]:
        raise UserError(
            f"tokenizer.added_tokens has {', '.join(new)}, new to initialize_from={source}, and {leaves}, "
            f"so the model could not distinguish them. Set {change}, or use a chat "
            f"template without new tokens (alpaca, plain)."
        )


def starting_weights(recipe: Recipe, tokenizer: Tokenizer, report: Report, ranks: Ranks = ALONE) -> dict[str, Tensor]:
    """Return the best weights of the run `initialize_from`, the same on every rank, for the recipe's model.

    Raises:
        UserError: the other run's model or tokenizer does not fit, or its checkpoints are quantized or all damaged.
    """
    source = recipe.initialize_from
    assert source is not None
    before = load_tokenizer(source / "tokenizer")
    n_before = vocabulary_size(before)
    if fingerprint(add_tokens(before, recipe.tokenizer.added_tokens)) != fingerprint(tokenizer):
        raise UserError(
            f"tokenizer.type={recipe.tokenizer.type} has {vocabulary_size(tokenizer):,} tokens, and the tokenizer "
            f"differs from that of initialize_from={source} with {n_before:,}: its ids would select the wrong "
            f"embeddings. Leave the tokenizer's type and path out, which means tokenizer.type=file and "
            f"tokenizer.path={source / 'tokenizer'}; tokenizer.added_tokens may add to it."
        )
    best = agreed_checkpoint(ranks, source, lambda: choose_checkpoint(source, report=report))
    assert best is not None
    loaded = load_run(source, str(best.step), full=True)
    weights = with_new_tokens(loaded.model.state_dict(), n_before, vocabulary_size(tokenizer), recipe.model.vocab_size)
    for name, field in (("token_embedding", "vocab_size"), ("position_embedding", "context_length")):
        ours, theirs = getattr(recipe.model, field), getattr(loaded.recipe.model, field)
        if f"{name}.weight" in weights and len(weights[f"{name}.weight"]) != ours:
            raise UserError(
                f"model.{field}={ours} and initialize_from={source} has a {name.replace('_', ' ')} of {theirs}: "
                f"set model.{field}={theirs}."
            )
    report(f"starting from {source}, step {loaded.checkpoint.step:,}")
    return with_future_heads(weights, recipe.model, report)


def with_future_heads(weights: dict[str, Tensor], model: ModelConfig, report: Report) -> dict[str, Tensor]:
    """Return the weights with `model`'s heads for tokens after the next: drop surplus heads, and add missing
    heads as zeros."""
    names = [f"{FUTURE_HEADS}{i}.weight" for i in range(model.n_future_tokens - 1)]
    dropped = [name for name in weights if name.startswith(FUTURE_HEADS) and name not in names]
    new = {name: torch.zeros(model.d_model, model.d_model) for name in names if name not in weights}
    for changed, what in ((dropped, "left out"), (list(new), "new, zero at first")):
        if changed:
            report(f"model.n_future_tokens={model.n_future_tokens}: {', '.join(changed)} ({what})")
    return {name: tensor for name, tensor in weights.items() if name not in dropped} | new


def with_new_tokens(weights: dict[str, Tensor], n_before: int, n_now: int, n_rows: int) -> dict[str, Tensor]:
    """Return the weights with rows for the new tokens n_before … n_now - 1: each is the mean row of the earlier tokens
    (Hewitt, 2021).

    Args:
        n_rows: number of rows of the new embedding, if the old one has fewer; rows from n_now on belong to no token.
    """
    if n_now == n_before:
        return weights
    grown = dict(weights)
    for name in ("token_embedding.weight", "untied_head.weight"):
        if name in weights:
            old = weights[name]
            new = old.new_zeros(max(n_rows, len(old)), old.size(1))
            new[: len(old)] = old
            new[n_before:n_now] = old[:n_before].float().mean(0)
            grown[name] = new
    return grown
