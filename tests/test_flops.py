"""FLOPs in closed form, against torch's counter and figures computed by hand."""

import time
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.model.shapes import ShapesOnly
from gptworks.planning.flops import forward_flops, training_work, visible_pairs
from gptworks.presets import preset
from gptworks.recipe import parse_recipe
from gptworks.training.optim.trainable import trainable_model
from test_params import random_config
from test_stream import WHOLE
from tiny import plain_model


def counted_flops(config: ModelConfig, length: int, *, backward: bool = False) -> int:
    """Return torch's count on the meta device, which allocates nothing; attention is MATH, so that only products
    count."""
    with ShapesOnly():
        model = GPT(config).eval()
        tokens = torch.zeros(1, length, dtype=torch.long)
        with torch.set_grad_enabled(backward), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            logits = model(tokens)
            if backward:
                logits.sum().backward()
    total: int = counter.get_total_flops()
    return total


@pytest.mark.parametrize(
    "name", ["custom-300m", "gpt3-125m-banded", "gpt2-midi", "gpt2-small-untied", "vaani-427m", "llm-200m"]
)
def test_dense_total_is_what_torch_counts(name: str) -> None:
    config = preset(name)
    assert forward_flops(config).total_dense == counted_flops(config, config.context_length)


@pytest.mark.parametrize("seed", range(20))
def test_random_models_at_random_lengths(seed: int) -> None:
    config = random_config(seed)
    length = 2 + seed % (config.context_length - 1)
    assert forward_flops(config, length).total_dense == counted_flops(config, length)


def test_training_is_three_times_forward() -> None:
    config = preset("gpt2-mini")
    flops = forward_flops(config)
    assert flops.training_per_token_dense * flops.length == counted_flops(config, flops.length, backward=True)


TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "adapter": {"adapter": {"rank": 4}},
    "adapter of queries": {"adapter": {"rank": 4, "targets": ["query"]}},
    "adapter of the MLP, embeddings too": {"adapter": {"rank": 3, "targets": ["mlp"], "embeddings": True}},
    "adapter over int8": {"adapter": {"rank": 4, "base": "int8"}},
    "first block frozen": {"freeze": {"first_blocks": 1, "embeddings": True}},
    "norms alone": {"freeze": {"embeddings": True, "patterns": ["*.attention.*", "*.mlp.*"]}},
    "last MLP alone": {"freeze": {"embeddings": True, "first_blocks": 2, "patterns": ["*norm*", "*attention*"]}},
    "values alone": {"freeze": {"embeddings": True, "patterns": ["*norm*", "*query*", "*key*", "*out*", "*mlp*"]}},
}


@pytest.mark.parametrize("kind", ["dense", "grouped", "untied", "parallel", "windowed", "looped", "repeated", "stream"])
@pytest.mark.parametrize("name", TRAINED)
def test_frozen_parts_and_adapters_cost_what_torch_counts(name: str, kind: str) -> None:
    """A backward pass ends at the first trained parameter, and a frozen matrix has no gradient."""
    changes = {
        "dense": {},
        "grouped": {"n_kv_heads": 2, "mlp": "swiglu", "qk_norm": True, "norm_placement": "both",
                    "attention_softcap": 9.0},
        "untied": {"tie_embeddings": False, "norm_placement": "after"},
        "parallel": {"parallel_residual": True, "attention_gate": True},
        "windowed": {"window": 8, "window_pattern": ("full", "window")},
        "stream": WHOLE | {"value_embeddings": ("projected", "table"), "norm_placement": "both",
                           "n_experts": 4, "bigram_vocab_size": 9, "tie_embeddings": False},
        "looped": {"layer_repeats": 2}, "repeated": {"layer_repeats": (1, 3, 2), "bigram_vocab_size": 9},
    }[kind]  # fmt: skip
    model = {"vocab_size": 50, "context_length": 32, "n_layers": 3, "d_model": 48, "n_heads": 4} | changes
    recipe = parse_recipe({
        "model": model, "tokenizer": {"type": "char"}, "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 1}, **TRAINED[name],
    })  # fmt: skip
    work = training_work(recipe)
    counted: dict[bool, int] = {}
    with ShapesOnly():
        built = trainable_model(recipe.model, recipe.adapter, recipe.freeze).eval()
        tokens = torch.zeros(1, 32, dtype=torch.long)
        for backward in (False, True):
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                with torch.set_grad_enabled(backward):
                    logits = built(tokens)
                if backward:
                    logits.sum().backward()
            counted[backward] = counter.get_total_flops()
    assert sum(work.forward.values()) * 32 == pytest.approx(counted[False])
    assert work.per_token * 32 == pytest.approx(counted[True])


@pytest.mark.parametrize(
    ("checkpointing", "changes"),
    [
        ("block", {}),
        ("selective", WHOLE),
        ("selective", {"window": 8, "window_pattern": ("window", "full")}),
        ("selective", {"layer_repeats": (1, 3, 2), "parallel_residual": True}),
        ("block", {"norm_placement": "after"}),
        ("block", {"n_experts": 4}),
        ("block", {"dropout_residual": 0.1}),
    ],
    ids=str,
)
def test_what_is_computed_again_is_what_torch_counts_beyond_the_step(
    changes: dict[str, Any], checkpointing: str
) -> None:
    model = {"vocab_size": 50, "context_length": 32, "n_layers": 3, "d_model": 48, "n_heads": 4, "mlp": "swiglu"}
    recipe = parse_recipe({
        "model": model | changes, "tokenizer": {"type": "char"}, "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 1, "activation_checkpointing": checkpointing},
    })  # fmt: skip
    counted = []
    for setting in ("none", checkpointing):
        with ShapesOnly():
            built = GPT(recipe.model).train()
            built.activation_checkpointing = setting
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                built(torch.zeros(1, 32, dtype=torch.long)).sum().backward()
        counted.append(counter.get_total_flops())
    assert training_work(recipe).again_per_token * 32 == pytest.approx(counted[1] - counted[0])


def test_causal_pairs_by_counting_them() -> None:
    for length in (1, 2, 7, 12):
        for window in (None, 1, 3, 7, 12):
            span = length if window is None else window
            pairs = sum(1 for i in range(length) for j in range(length) if i - span < j <= i)
            assert visible_pairs(length, window) == pairs


def test_banded_layers_cost_what_they_see() -> None:
    dense, banded = (forward_flops(preset(f"gpt3-125m{kind}")) for kind in ("", "-banded"))
    per_pair = 4 * 768
    band_pairs = 256 * 257 // 2 + (2048 - 256) * 256
    assert dense.attention_causal == per_pair * 12 * (2048 * 2049 // 2)
    assert banded.attention_causal == per_pair * (6 * (2048 * 2049 // 2) + 6 * band_pairs)
    assert banded.attention_dense == per_pair * 6 * (2048**2 + 2048 * 2 * 256)  # blocks of 256 and those before them
    assert banded.total_dense - banded.attention_dense == dense.total_dense - dense.attention_dense


def test_a_token_costs_its_own_experts_alone() -> None:
    dense = plain_model(vocab_size=100, context_length=32, n_layers=2, d_model=48, n_heads=4, d_ff=64, mlp="swiglu")
    moe = dense.model_copy(update={"n_experts": 8, "n_experts_per_token": 2, "d_ff_shared": 96})
    per_token = 2 * 2 * 48 * (3 * (2 * 64 + 96) + 8)
    assert (
        forward_flops(moe).mlp
        == 32 * per_token
        == counted_flops(moe, 32) - counted_flops(dense, 32) + (forward_flops(dense).mlp)
    )


def test_experts_that_are_alike_are_counted_at_once() -> None:
    dense = plain_model(vocab_size=100, context_length=32, n_layers=1000, d_model=48, n_heads=4, d_ff=64, mlp="swiglu")
    moe = dense.model_copy(update={"n_experts": 4096, "n_experts_per_token": 3})
    recipe = parse_recipe({
        "model": moe.model_dump(), "tokenizer": {"type": "char"}, "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 1},
    })  # fmt: skip
    began = time.process_time()
    mlp = forward_flops(moe).mlp
    work = training_work(recipe)
    assert time.process_time() - began < 10  # one by one, they take minutes
    assert mlp == 1000 * 32 * 2 * 48 * (3 * 3 * 64 + 4096)
    assert work.forward["mlp"] == mlp / 32


# FLOPs of the reference architectures, worked out by hand.


def test_document_000() -> None:
    flops = forward_flops(preset("custom-300m"))
    giga = 2048 * 1e9
    assert flops.projections / giga == pytest.approx(0.201, abs=5e-4)
    assert flops.attention_dense / giga == pytest.approx(0.201, abs=5e-4)
    assert flops.mlp / giga == pytest.approx(0.403, abs=5e-4)
    assert flops.head / giga == pytest.approx(0.103, abs=5e-4)
    assert flops.per_token_dense / 1e9 == pytest.approx(0.908, abs=5e-4)
    step_tokens = 512 * 2048
    assert flops.per_token_dense * step_tokens / 1e12 == pytest.approx(952, abs=0.5)
    assert flops.training_per_token_dense * step_tokens / 1e12 == pytest.approx(2857, abs=0.5)


def test_document_003() -> None:
    flops = forward_flops(preset("vaani-427m"), 1024)
    assert flops.total_dense / 1e9 == pytest.approx(920.2, abs=0.05)
    assert flops.total_causal / 1e9 == pytest.approx(872.9, abs=0.1)  # 872.965, cut there


@pytest.mark.parametrize("length", [0, 129])
def test_a_length_outside_the_context_is_refused(length: int) -> None:
    with pytest.raises(UserError, match=f"length={length} .* context_length=128"):
        forward_flops(preset("gpt2-tiny"), length)
