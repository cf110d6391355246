"""Embeddings of token pairs (`bigram_vocab_size`), against the definition in float64."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from gptworks.model.gpt import GPT
from gptworks.planning.inference import kv_cache_bytes
from gptworks.planning.params import count_parameters
from test_equivalence import random_model
from tiny import plain_model

ROWS, VOCABULARY, CONTEXT = 37, 29, 24


def settings(**more: Any) -> dict[str, Any]:
    shape = {"vocab_size": VOCABULARY, "context_length": CONTEXT, "n_layers": 2, "d_model": 16, "n_heads": 2}
    return shape | {"bigram_vocab_size": ROWS} | more


def row_by_definition(token: int, previous: int | None) -> int:
    """Return a pair's row by modded-nanogpt's hash (two factors, exclusive or, modulo); a token without a previous one
    has its own row."""
    return ROWS - 1 if previous is None else ((36_313 * token) ^ (27_191 * previous)) % (ROWS - 1)


def first_block_input(model: GPT, tokens: Tensor, **given: Any) -> Tensor:
    """Return the input of the first block, [B, T, C]."""
    seen: list[Tensor] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model.features(tokens, **given)
    hook.remove()
    return seen[0]


def twin(model: GPT, texts: list[list[int]]) -> Tensor:
    """Return the embedding of concatenated texts, [1, T, C], computed token by token."""
    weights = {name: tensor.detach().double() for name, tensor in model.named_parameters()}
    table, scale = weights["bigram_embedding.table.weight"], weights["bigram_embedding.scale"]
    return torch.stack([
        weights["token_embedding.weight"][token] + scale * table[row_by_definition(token, before)]
        for text in texts
        for token, before in zip(text, [None, *text[:-1]], strict=True)
    ])[None]  # fmt: skip


def test_the_embedding_is_the_tokens_and_its_pairs() -> None:
    model = random_model(plain_model(**settings())).double()
    text = torch.randint(VOCABULARY, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
    torch.testing.assert_close(first_block_input(model, torch.tensor([text])), twin(model, [text]), rtol=0, atol=1e-12)


def test_no_pair_reaches_over_the_border_of_two_texts_in_a_row() -> None:
    model = random_model(plain_model(**settings())).double()
    texts = [[3, 5, 5, 2], [7], [5, 2, 11]]
    row = torch.tensor([[token for text in texts for token in text]])
    positions = torch.tensor([[i for text in texts for i in range(len(text))]])
    embedded = first_block_input(model, row, text_positions=positions)
    torch.testing.assert_close(embedded, twin(model, texts), rtol=0, atol=1e-12)
    apart = torch.cat([model(torch.tensor([text])) for text in texts], dim=1)
    together = model.logits(model.features(row, text_positions=positions))
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-9)


def test_a_model_begins_as_without_the_table_and_the_table_learns() -> None:
    model = GPT(plain_model(**settings(zero_init_projections=True)))
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(first_block_input(model, tokens), model.token_embedding(tokens))
    model(tokens).logsumexp(-1).sum().backward()
    gradient = dict(model.named_parameters())["bigram_embedding.table.weight"].grad
    used = {row_by_definition(token, before) for token, before in zip([1, 2, 3, 4], [None, 1, 2, 3], strict=True)}
    assert gradient is not None and set(gradient.abs().sum(1).nonzero().flatten().tolist()) == used


def test_the_counts_of_table_scale_and_kept_ids() -> None:
    plain, paired = (plain_model(**settings(bigram_vocab_size=rows)) for rows in (0, ROWS))
    assert count_parameters(paired).total - count_parameters(plain).total == 16 * ROWS + 1
    assert count_parameters(paired).non_embedding == count_parameters(plain).non_embedding
    assert kv_cache_bytes(paired) - kv_cache_bytes(plain) == 4 * CONTEXT


def test_a_table_of_one_row_is_refused() -> None:
    with pytest.raises(ValidationError, match="bigram_vocab_size=1"):
        plain_model(**settings(bigram_vocab_size=1))
