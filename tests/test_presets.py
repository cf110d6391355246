"""Every preset against a table of the reference architectures, typed by hand."""

from typing import Any

import pytest

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.planning.params import count_parameters
from gptworks.presets import PRESETS, expand_preset, preset

# vocabulary, d_model, layers, heads, d_ff, context
DIMENSIONS = {
    "custom-300m": (50257, 1024, 24, 16, 4096, 2048),
    "gpt3-125m": (50257, 768, 12, 12, 3072, 2048),
    "gpt3-350m": (50257, 1024, 24, 16, 4096, 2048),
    "gpt3-760m": (50257, 1536, 24, 16, 6144, 2048),
    "gpt3-1.3b": (50257, 2048, 24, 16, 8192, 2048),
    "gpt3-2.7b": (50257, 2560, 32, 32, 10240, 2048),
    "gpt3-6.7b": (50257, 4096, 32, 32, 16384, 2048),
    "gpt3-13b": (50257, 5120, 40, 40, 20480, 2048),
    "gpt3-175b": (50257, 12288, 96, 96, 49152, 2048),
    "gpt2-tiny": (512, 128, 3, 4, 512, 128),
    "gpt2-mini": (512, 256, 4, 4, 1024, 256),
    "gpt2-midi": (512, 384, 6, 6, 1536, 256),
    "gpt2-small-untied": (50257, 768, 12, 12, 3072, 1024),
    "vaani-427m": (16000, 1408, 16, 11, 5632, 1024),
    "llm-200m": (50257, 768, 24, 12, 3072, 2048),
    "gpt2": (50257, 768, 12, 12, 3072, 1024),
    "gpt2-medium": (50257, 1024, 24, 16, 4096, 1024),
    "gpt2-large": (50257, 1280, 36, 20, 5120, 1024),
    "gpt2-xl": (50257, 1600, 48, 25, 6400, 1024),
}

# position, MLP, attention biases, MLP biases, tied, init, dropout
CUSTOM_300M = ("learned", "gelu_tanh", True, True, True, "normal", 0.1)
GPT3 = ("learned", "gelu_tanh", True, True, True, "xavier", 0.0)
FROM_SCRATCH = ("learned", "gelu_tanh", True, True, False, "normal", 0.0)
GPT2 = ("learned", "gelu_tanh", True, True, True, "gpt2", 0.1)
CHOICES = {
    "custom-300m": CUSTOM_300M,
    **{name: GPT3 for name in DIMENSIONS if name.startswith("gpt3")},
    **dict.fromkeys(("gpt2-tiny", "gpt2-mini", "gpt2-midi", "gpt2-small-untied"), FROM_SCRATCH),
    "vaani-427m": ("rope", "gelu", False, False, True, "normal", 0.1),
    "llm-200m": ("rope", "swiglu", False, False, True, "normal", 0.1),
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), GPT2),
}


def dimensions(c: ModelConfig) -> tuple[int, ...]:
    return (c.vocab_size, c.d_model, c.n_layers, c.n_heads, c.d_ff, c.context_length)


def choices(c: ModelConfig) -> tuple[Any, ...]:
    return (c.position, c.mlp, c.attention_bias, c.mlp_bias, c.tie_embeddings, c.init, c.dropout_residual)


def test_the_table_names_every_preset() -> None:
    banded = {f"{name}-banded" for name in DIMENSIONS if name.startswith("gpt3")}
    assert set(PRESETS) == set(DIMENSIONS) | banded | set(TODAY)


# (vocabulary, d_model, layers, heads, key/value heads, d_head, d_ff, context), rotary base, epsilon, tied, QK-norm,
# experts
TODAY = {
    "smollm2-135m": ((49152, 576, 30, 9, 3, 64, 1536, 8192), 1e5, 1e-5, True, False, 0),
    "tinyllama-1.1b": ((32000, 2048, 22, 32, 4, 64, 5632, 2048), 1e4, 1e-5, False, False, 0),
    "llama-2-7b": ((32000, 4096, 32, 32, 32, 128, 11008, 4096), 1e4, 1e-5, False, False, 0),
    "qwen3-0.6b": ((151936, 1024, 28, 16, 8, 128, 3072, 40960), 1e6, 1e-6, True, True, 0),
    "mixtral-8x7b": ((32000, 4096, 32, 32, 8, 128, 14336, 32768), 1e6, 1e-5, False, False, 8),
    "modern-9m": ((8192, 256, 8, 4, 4, 64, 704, 512), 1e4, 1e-6, True, True, 0),
    "modern-24m": ((16384, 384, 10, 6, 6, 64, 1024, 1024), 1e4, 1e-6, True, True, 0),
    "modern-110m": ((32768, 768, 12, 12, 12, 64, 2048, 2048), 1e4, 1e-6, True, True, 0),
    "modern-336m": ((32768, 1024, 24, 16, 16, 64, 2752, 2048), 1e4, 1e-6, True, True, 0),
    "moe-115m": ((16384, 512, 8, 8, 4, 64, 1024, 1024), 1e4, 1e-6, True, False, 8),
}


@pytest.mark.parametrize("name", TODAY)
def test_settings_of_todays_architectures(name: str) -> None:
    c = preset(name)
    shape = (c.vocab_size, c.d_model, c.n_layers, c.n_heads, c.n_kv_heads, c.d_head, c.d_ff, c.context_length)
    assert (shape, c.rope_theta, c.norm_eps, c.tie_embeddings, c.qk_norm, c.n_experts) == TODAY[name]
    assert (c.position, c.norm, c.mlp, c.attention_bias, c.mlp_bias) == ("rope", "rmsnorm", "swiglu", False, False)
    assert c.zero_init_projections == name.startswith("modern")


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("smollm2-135m", 134_515_008, 134_515_008),
        ("tinyllama-1.1b", 1_100_048_384, 1_100_048_384),
        ("llama-2-7b", 6_738_415_616, 6_738_415_616),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
    ],
)
def test_they_have_the_sizes_of_the_released_weights(name: str, total: int, active: int) -> None:
    count = count_parameters(preset(name))
    assert (count.total, count.active) == (total, active)


@pytest.mark.parametrize("name", DIMENSIONS)
def test_settings_are_the_documents(name: str) -> None:
    config = preset(name)
    assert dimensions(config) == DIMENSIONS[name]
    assert choices(config) == CHOICES[name]
    assert config.dropout_embedding == config.dropout_attention == config.dropout_residual
    assert config.dropout_mlp == (0.1 if name == "vaani-427m" else 0.0)
    assert (config.norm, config.norm_eps, config.norm_bias) == ("layernorm", 1e-5, True)
    assert config.init_std == 0.02
    assert not config.qk_norm
    assert not config.zero_init_projections
    assert config.n_kv_heads == config.n_heads
    assert config.d_head * config.n_heads == config.d_model
    assert set(config.layer_windows) == {None}


@pytest.mark.parametrize("name", [name for name in DIMENSIONS if name.startswith("gpt3")])
def test_banded_sizes_alternate_and_differ_in_nothing_else(name: str) -> None:
    dense, banded = preset(name), preset(f"{name}-banded")
    assert banded.layer_windows == (None, 256) * (dense.n_layers // 2)
    assert banded.model_copy(update={"window": None, "window_pattern": ("full",)}) == dense


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean `llm-200m`"):
        preset("llm-200")


def test_a_changed_width_changes_what_follows_from_it() -> None:
    changed = ModelConfig.model_validate(expand_preset({"preset": "gpt2", "d_model": 96, "n_heads": 4}))
    assert (changed.d_ff, changed.d_head, changed.n_kv_heads, changed.n_layers) == (384, 24, 4, 12)
