"""Blocks that run several times (`layer_repeats`), against a model with one block for each of these uses and equal
weights."""

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.interpret.record import record
from gptworks.model.gpt import GPT
from gptworks.planning.arrange import refusal
from gptworks.planning.flops import forward_flops
from gptworks.planning.inference import kv_cache_bytes
from gptworks.planning.params import count_parameters
from gptworks.quantize.convert import quantize_model
from gptworks.recipe import parse_recipe
from test_equivalence import random_model
from tiny import plain_model

ORDERS: dict[str, tuple[Any, list[int]]] = {
    "the stack": (2, [0, 1, 2, 0, 1, 2]), "each block": ((1, 3, 2), [0, 1, 1, 1, 2, 2]),
}  # fmt: skip


def settings(**more: Any) -> dict[str, Any]:
    shape = {"vocab_size": 29, "context_length": 24, "n_layers": 3, "d_model": 16, "n_heads": 2, "norm": "rmsnorm"}
    return shape | {"window": 5, "window_pattern": ("full", "window", "full")} | more


def unrolled(model: GPT, order: list[int]) -> GPT:
    """Return a model with a block for each use in `order`, with the weights of the block used."""
    pattern = tuple("window" if layer == 1 else "full" for layer in order)
    other = GPT(plain_model(**settings(n_layers=len(order), window_pattern=pattern))).double()
    weights = model.state_dict()
    for step, layer in enumerate(order):
        own = f"blocks.{layer}."
        of_block = {name.removeprefix(own): x for name, x in weights.items() if name.startswith(own)}
        other.blocks[step].load_state_dict(of_block)
    outside = {name: x for name, x in weights.items() if not name.startswith("blocks.")}
    other.load_state_dict(other.state_dict() | outside)
    return other


@pytest.mark.parametrize("name", ORDERS)
def test_repeated_blocks_are_as_many_blocks_with_equal_weights(name: str) -> None:
    repeats, order = ORDERS[name]
    model = random_model(plain_model(**settings(layer_repeats=repeats))).double()
    twin, tokens = unrolled(model, order), torch.randint(29, (2, 24), generator=torch.Generator().manual_seed(3))
    logits, theirs = model(tokens), twin(tokens)
    torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-10)
    for each in (logits, theirs):
        each.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for layer in range(3):
        sums = sum(twin.blocks[step].mlp.down.weight.grad for step, block in enumerate(order) if block == layer)
        torch.testing.assert_close(gradients[f"blocks.{layer}.mlp.down.weight"], sums, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ORDERS)
def test_work_and_cache_are_those_of_every_run_and_parameters_those_of_one(name: str) -> None:
    repeats, order = ORDERS[name]
    once, again = (plain_model(**settings(layer_repeats=times)) for times in (1, repeats))
    pattern = tuple("window" if layer == 1 else "full" for layer in order)
    unrolled = plain_model(**settings(n_layers=len(order), window_pattern=pattern))
    assert count_parameters(again) == count_parameters(once)
    assert forward_flops(again) == forward_flops(unrolled)
    assert kv_cache_bytes(again) == kv_cache_bytes(unrolled) == 2 * kv_cache_bytes(once)


def test_gpt2s_initialization_counts_the_runs() -> None:
    torch.manual_seed(0)
    model = GPT(plain_model(**settings(d_model=256, init="gpt2", layer_repeats=6)))
    assert model.blocks[1].mlp.down.weight.std().item() == pytest.approx(0.02 / 6, rel=0.02)  # sqrt(2 · 18)


def test_a_number_for_each_block_is_asked_for() -> None:
    with pytest.raises(ValidationError, match="layer_repeats has 2 numbers and n_layers=3"):
        plain_model(**settings(layer_repeats=(1, 2)))


def test_what_takes_blocks_for_one_run_refuses_them_by_name() -> None:
    model = random_model(plain_model(**settings(layer_repeats=2)))
    with pytest.raises(UserError, match=r"model\.layer_repeats"):
        record(model, np.arange(5), [0])
    with pytest.raises(UserError, match=r"model\.layer_repeats"):
        quantize_model(model, "int4", [torch.zeros(1, 8, dtype=torch.long)])
    recipe = parse_recipe({
        "model": settings(layer_repeats=2), "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 1, "optimizer": "adamw", "parallel": {"strategy": "fsdp"}},
    })  # fmt: skip
    found = refusal(recipe, 2)
    assert found is not None and "model.layer_repeats" in found
    assert ModelConfig(**settings(layer_repeats=1)).laboratory == ()


def test_settings_that_belong_to_one_place_of_a_block_are_refused_beside_it() -> None:
    with pytest.raises(ValidationError, match=r"layer_repeats .* unet_skips"):
        plain_model(**settings(layer_repeats=2, unet_skips=True))
