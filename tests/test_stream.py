"""Settings of the laboratory: each against its definition in float64, and what every model owes whatever is on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from gptworks.config import LABORATORY, ModelConfig
from gptworks.errors import UserError
from gptworks.interop.gguf.architectures import choose_architecture
from gptworks.interop.huggingface.architectures import FAMILIES
from gptworks.model import GPT
from gptworks.model.gpt import Block
from gptworks.model.layers import MLP
from gptworks.native.backend import refusal
from gptworks.plan.arrange import refusal as arrangement_refusal
from gptworks.recipe import parse_recipe
from gptworks.train.optim.optimizer import parameter_groups
from halves import assert_resumes_exactly
from test_equivalence import CONTEXT, Cached, assert_same, random_model, random_tokens
from tiny import plain_model, plain_training

SHAPE: dict[str, Any] = {
    "vocab_size": 29, "context_length": CONTEXT, "n_layers": 4, "d_model": 16, "n_heads": 4, "n_kv_heads": 2,
    "norm": "rmsnorm", "mlp": "swiglu", "d_ff": 24, "qk_norm": True,
}  # fmt: skip
ON: dict[str, dict[str, Any]] = {
    "residual_scalars": {"residual_scalars": True},
}
"""Each setting of the laboratory in the forms that it has; a key begins with its name."""
WHOLE: dict[str, Any] = {name: value for settings in ON.values() for name, value in settings.items()}
"""All of them at once."""


def double(settings: dict[str, Any], **more: Any) -> GPT:
    """A model in float64 in which every parameter is random."""
    return random_model(plain_model(**SHAPE | settings | more)).double()


def test_each_setting_is_tried_here() -> None:
    assert {name.partition(",")[0] for name in ON} == set(LABORATORY) == set(WHOLE)


# ------------------------------------------------------------------------------------------- by their definitions


def branches(block: Block, x: Tensor) -> Tensor:
    """A block of pre-norm, without what the laboratory adds to it."""
    assert isinstance(block.mlp, MLP)
    rotary = None
    x = x + block.attention(block.norm1(x), rotary, None)
    return x + block.mlp(block.norm2(x))


@torch.no_grad()
def test_scalars_of_the_stream_and_of_the_embedding_by_their_definition() -> None:
    model = double({"residual_scalars": True, "position": "none"})
    tokens = random_tokens(2, CONTEXT)
    embedding = x = model.token_embedding.weight[tokens]
    for block in model.blocks:
        assert isinstance(block, Block) and block.scalars is not None
        of_stream, of_embedding = block.scalars.weight.tolist()
        x = branches(block, of_stream * x + of_embedding * embedding)
    torch.testing.assert_close(model(tokens), model.norm(x) @ model.head_weight.T, rtol=0, atol=1e-12)


# --------------------------------------------------------------------------------------------- whatever is on


@pytest.mark.parametrize("name", [*ON, "all"])
def test_a_new_model_with_it_computes_what_one_without_it_does(name: str) -> None:
    """Where a setting starts from nothing, which the settings here do; gates and tables aside."""
    changes = WHOLE if name == "all" else ON[name]
    if set(changes) & STARTS_OTHERWISE:
        return
    torch.manual_seed(0)
    with_it = GPT(plain_model(**SHAPE | changes))
    without = GPT(plain_model(**SHAPE))
    without.load_state_dict({key: with_it.state_dict()[key] for key in without.state_dict()})
    tokens = random_tokens(2, CONTEXT)
    torch.testing.assert_close(with_it(tokens), without(tokens), rtol=0, atol=0)


STARTS_OTHERWISE: set[str] = set()


@torch.no_grad()
@pytest.mark.parametrize("chunks", [(CONTEXT,), (7, 1, 1, 6, 1, 8), (1,) * CONTEXT], ids=str)
@pytest.mark.parametrize("name", [*ON, "all"])
def test_cached_equals_uncached(name: str, chunks: tuple[int, ...]) -> None:
    model, tokens = double(WHOLE if name == "all" else ON[name], window=5), random_tokens(3, CONTEXT)
    cached = Cached(model, 3)
    cached.cache = type(cached.cache)(model.config, 3, CONTEXT, dtype=torch.float64)
    assert_same(torch.cat([cached(part) for part in tokens.split(chunks, dim=1)], dim=1), model(tokens))


@torch.no_grad()
@pytest.mark.parametrize("name", [*ON, "all"])
def test_rows_of_several_texts_are_the_texts_alone(name: str) -> None:
    model = double(WHOLE if name == "all" else ON[name])
    lengths = [9, 1, 14]
    row = random_tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model.logits(model.features(row, text_positions=positions))
    for part, text in zip(packed.split(lengths, dim=1), row.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(part, model(text), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["before", "after", "both"])
@pytest.mark.parametrize("again", ["block", "selective"])
def test_blocks_computed_again_give_the_same_gradients(again: str, kind: str) -> None:
    gradients = []
    for setting in ("none", again):
        model = random_model(plain_model(**SHAPE | WHOLE | {"norm_placement": kind})).train()
        model.activation_checkpointing = setting
        model(random_tokens(2, CONTEXT)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None and other is not None and one.abs().sum() > 0
        assert torch.equal(one, other)


def test_vectors_have_no_decay_and_muon_has_the_blocks_matrices_alone() -> None:
    model = GPT(plain_model(**SHAPE | WHOLE))
    groups = parameter_groups(dict(model.named_parameters()), plain_training(max_steps=1, optimizer="muon"))
    kind_of = {
        name: (kind, group["weight_decay"] > 0) for kind in groups for group in groups[kind] for name in group["names"]
    }
    assert kind_of["blocks.1.scalars.weight"] == ("adamw", False)


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=6, checkpoint_every=2, evaluate_every=6)
    assert_resumes_exactly(tree | {"model": tree["model"] | WHOLE}, at_step=5)


# ------------------------------------------------------------------------------------------- where it cannot be had


@pytest.mark.parametrize("name", ON)
def test_the_native_engine_and_tensor_parallelism_refuse_it_by_name(name: str) -> None:
    config = plain_model(**SHAPE | {"d_head": 16, "d_ff": 32} | ON[name])
    setting = name.partition(",")[0]
    assert refusal(GPT(config)) == f"it has no {setting}."
    tree: dict[str, Any] = {
        "model": config.model_dump(mode="json"), "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 1, "batch_size": 2, "optimizer": "adamw", "parallel": {"tensor_parallel": 2}},
    }  # fmt: skip
    assert f"model.{setting}" in str(arrangement_refusal(parse_recipe(tree), 2))


@pytest.mark.parametrize("name", ON)
def test_no_format_of_others_holds_it(name: str) -> None:
    config: ModelConfig = plain_model(**SHAPE | ON[name])
    setting = name.partition(",")[0]
    assert all(setting in family.obstacles(config) for family in FAMILIES.values())
    with pytest.raises(UserError, match=f"model.{setting}="):
        choose_architecture(config)
