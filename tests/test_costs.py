"""The costs of modules in 1,500 random configurations: their tensors against the built model's, their FLOPs against
torch's counter, and saved activations against the traced step.

`make test` takes the first of them, `make test-memory` the others.
"""

import random
from typing import Any

import pytest

from gptworks.config import ModelConfig
from gptworks.planning.flops import forward_flops
from gptworks.planning.params import count_parameters
from test_flops import counted_flops
from test_memory import error
from test_params import built_shapes, random_config, random_laboratory
from tiny import plain_model

N_DRAWN = 1500


def parts(size: int) -> list[Any]:
    """Return the seeds in parts of `size`; all but the first part are only for `make test-memory`."""
    grid = [pytest.mark.grid, pytest.mark.timeout(3600)]
    return [
        pytest.param(range(first, first + size), id=f"from {first}", marks=grid if first else [])
        for first in range(0, N_DRAWN, size)
    ]


@pytest.mark.parametrize("seeds", parts(100))
def test_tensors_and_products_are_the_built_models(seeds: range) -> None:
    for seed in seeds:
        config = random_config(seed)
        assert count_parameters(config).shapes == built_shapes(config), seed
        length = random.Random(seed).randint(1, config.context_length)
        assert forward_flops(config, length).total_dense == counted_flops(config, length), seed


def drawn_model(seed: int) -> ModelConfig:
    """Return a random model, wide enough for activations to dominate a step's memory."""
    choose = random.Random(seed)
    n_layers, norm, n_heads = choose.randint(1, 4), choose.choice(["rmsnorm", "layernorm"]), choose.choice([2, 4, 8])
    experts = choose.choice([{}, {}, {}, {"n_experts": 4, "d_ff": 256, "d_ff_shared": choose.choice([0, 128])}])
    settings: dict[str, Any] = {
        "vocab_size": choose.choice([1000, 3000]), "context_length": choose.choice([128, 256, 512]),
        "n_layers": n_layers, "d_model": choose.choice([192, 256, 384]), "d_head": choose.choice([32, 64]),
        "n_heads": n_heads, "n_kv_heads": choose.choice([d for d in (1, 2, 4, 8) if n_heads % d == 0]),
        "d_ff": 640, "position": choose.choice(["learned", "rope", "none"]), "norm": norm,
        "norm_bias": norm == "layernorm" and choose.random() < 0.5,
        "mlp": choose.choice(["gelu", "gelu_tanh", "relu2", "swiglu", "geglu"]),
        "attention_bias": choose.choice([False, True, "qkv", "out"]), "mlp_bias": choose.random() < 0.5,
        "qk_norm": choose.choice([False, True, "whole"]), "tie_embeddings": choose.random() < 0.5,
        "attention_softcap": choose.choice([None, None, 30.0]), "logit_softcap": choose.choice([None, None, 30.0]),
        "bigram_vocab_size": choose.choice([0, 0, 3000]), "n_future_tokens": choose.choice([1, 1, 1, 3]),
        "dropout_residual": choose.choice([0.0, 0.0, 0.1]), "dropout_mlp": choose.choice([0.0, 0.0, 0.1]),
        **choose.choice([{"parallel_residual": True}, {"norm_placement": "after"}, {"norm_placement": "both"}, {}, {}]),
        **choose.choice([{}, {}, {"window": 64, "window_pattern": ("full", "window")}]),
    }  # fmt: skip
    laboratory = random_laboratory(choose, n_layers, settings["d_model"])
    return plain_model(**settings | experts | laboratory | {"gate_channels": None})


@pytest.mark.parametrize("seeds", parts(12))
def test_what_operations_save_is_what_a_trace_finds(seeds: range) -> None:
    """The largest deviation among the traced seeds is 3.7% too low, of seed 941."""
    off = {}
    for seed in seeds:
        choose = random.Random(-seed)
        precision, checkpointing = (
            choose.choice(["fp32", "bf16"]),
            choose.choice(["none", "none", "selective", "block"]),
        )
        off[seed] = error(drawn_model(seed), "cpu", precision, choose.choice([1, 2, 4]),
                          activation_checkpointing=checkpointing)  # fmt: skip
    assert {seed: share for seed, share in off.items() if abs(share) > 0.04} == {}
