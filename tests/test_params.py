"""Closed-form parameter counts against the built model and figures computed by hand."""

import random
from typing import Any

import pytest
import torch

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.model.shapes import ShapesOnly
from gptworks.planning.params import count_parameters
from gptworks.presets import PRESETS, preset
from tiny import plain_model


def built_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with ShapesOnly():
        model = GPT(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def random_config(seed: int) -> ModelConfig:
    choose = random.Random(seed)
    n_kv_heads, d_head = choose.randint(1, 4), 2 * choose.randint(1, 16)
    norm, window = choose.choice(["layernorm", "rmsnorm"]), choose.choice([None, 3])
    n_experts = choose.choice([0, 0, 4, 5])
    settings: dict[str, Any] = dict(
        vocab_size=choose.randint(1, 300), context_length=choose.randint(3, 40), n_layers=choose.randint(1, 4),
        d_model=choose.randint(1, 90), n_heads=n_kv_heads * choose.randint(1, 3), n_kv_heads=n_kv_heads, d_head=d_head,
        d_ff=choose.randint(1, 200), position=choose.choice(["learned", "rope", "none"]), norm=norm,
        norm_bias=norm == "layernorm" and choose.random() < 0.5,
        mlp=choose.choice(["gelu", "gelu_tanh", "relu2", "swiglu", "geglu", "geglu_tanh"]),
        attention_bias=choose.choice([False, True, "qkv", "out"]), n_experts=n_experts,
        n_experts_per_token=choose.randint(1, n_experts or 2), d_ff_shared=choose.choice([0, 7]) if n_experts else 0,
        **choose.choice([{"parallel_residual": True}, {"norm_placement": "after"}, {"norm_placement": "both"}, {}]),
        mlp_bias=choose.random() < 0.5, qk_norm=choose.choice([False, True, "whole"]),
        tie_embeddings=choose.random() < 0.5, bigram_vocab_size=choose.choice([0, 0, 7]),
        window=window, window_pattern=("full", "window") if window else ("full",),
        n_future_tokens=choose.choice([1, 1, 2, 3]),
    )  # fmt: skip
    return plain_model(**settings | random_laboratory(choose, settings["n_layers"], settings["d_model"]))


def random_laboratory(choose: random.Random, n_layers: int, d_model: int) -> dict[str, Any]:
    """Return a random choice of model/lab's settings: none, some or all."""
    share, deep = choose.choice([0.0, 0.3, 1.0]), n_layers > 1
    names = ("attention_gate", "smear", *(("unet_skips", "value_residual") if deep else ()))
    settings: dict[str, Any] = {name: choose.random() < share for name in names}
    kinds = [("table",), ("projected", "table"), ("none", "table"), ("projected",)]
    if deep and choose.random() < share:
        settings["value_embeddings"] = choose.choice(kinds)
    if settings["attention_gate"] or settings["smear"] or "value_embeddings" in settings:
        settings["gate_channels"] = choose.choice([None, 1, d_model])
    return settings


# Parameters of the reference architectures, worked out by hand.
EXACT = {
    "custom-300m": 355_871_744,
    "gpt2-medium": 354_823_168,
    "gpt2": 124_439_808,
    "gpt2-tiny": 742_528,
    "gpt2-mini": 3_487_232,
    "gpt2-midi": 11_139_072,
    "gpt2-small-untied": 163_037_184,
    "vaani-427m": 403_254_016,
    "llm-200m": 265_165_056,
    "gpt3-125m": 125_226_240,
    "gpt3-350m": 355_871_744,
    "gpt3-760m": 760_300_032,
    "gpt3-1.3b": 1_315_723_264,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
}


@pytest.mark.parametrize("name", EXACT)
def test_presets_have_the_published_exact_size(name: str) -> None:
    assert count_parameters(preset(name)).total == EXACT[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_built_with_the_counted_tensors(name: str) -> None:
    shapes = built_shapes(preset(name))
    assert count_parameters(preset(name)).shapes == shapes
    n_built = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert n_built == EXACT.get(name.removesuffix("-banded"), n_built)


@pytest.mark.parametrize("seed", range(200))
def test_random_models_are_built_with_the_counted_tensors(seed: int) -> None:
    config = random_config(seed)
    shapes, count = built_shapes(config), count_parameters(config)
    assert count.shapes == shapes
    assert count.total == sum(torch.Size(shape).numel() for shape in shapes.values())


@pytest.mark.parametrize(
    ("name", "changes", "exact"),
    [
        ("gpt2-small-untied", {"tie_embeddings": True}, 124_439_808),
        ("vaani-427m", {"mlp_bias": True}, 403_366_656),
        ("gpt3-175b-banded", {}, 174_604_259_328),
    ],
)
def test_variants(name: str, changes: dict[str, Any], exact: int) -> None:
    assert count_parameters(preset(name).model_copy(update=changes)).total == exact


def test_where_document_003_has_its_count_from() -> None:
    other = {"mlp_bias": True, "attention_bias": True, "position": "learned", "tie_embeddings": False}
    head_bias = 16_000
    assert count_parameters(preset("vaani-427m").model_copy(update=other)).total + head_bias == 427_442_560


def test_groups_of_the_custom_300m() -> None:
    count = count_parameters(preset("custom-300m"))
    totals = {name: group.total for name, group in count.groups.items()}
    assert totals == {
        "token_embedding": 51_463_168,
        "position_embedding": 2_097_152,
        "attention_weights": 100_663_296,
        "attention_biases": 24 * 4 * 1024,
        "qk_norms": 0,
        "router": 0,
        "mlp_weights": 201_326_592,
        "mlp_biases": 201_449_472 - 201_326_592,
        "shared_expert": 0,
        "norms": 98_304,
        "final_norm": 2_048,
        "head": 0,
    }
    assert count.groups["mlp_weights"].per_layer == 2 * 1024 * 4096
    assert count.embedding == 51_463_168 + 2_097_152
    assert count.non_embedding == 355_871_744 - 53_560_320


def test_an_untied_head_counts_as_outside_the_embeddings() -> None:
    count = count_parameters(preset("gpt2-tiny"))
    assert count.groups["head"].total == 512 * 128
    assert count.embedding == 512 * 128 + 128 * 128


def test_block_matrices_are_the_blocks_parameters_of_two_dimensions() -> None:
    config = preset("llm-200m")
    shapes = built_shapes(config)
    matrices = sum(shape[0] * shape[1] for name, shape in shapes.items() if "blocks" in name and len(shape) == 2)
    assert count_parameters(config).block_matrices == matrices


def test_an_unknown_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"Set model\.vocab_size"):
        count_parameters(plain_model(context_length=8, n_layers=1, d_model=8, n_heads=1))
