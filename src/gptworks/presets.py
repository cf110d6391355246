"""Presets: model architectures by name. The reference documents are in docs/reference-architectures.md."""

from typing import Any

from gptworks.config import EARLIER_DEFAULTS, ModelConfig
from gptworks.errors import UserError, did_you_mean

Settings = dict[str, Any]


def preset(name: str) -> ModelConfig:
    """Return the architecture of the preset called `name`.

    Raises:
        UserError: no preset has this name; the message suggests the nearest one.
    """
    return ModelConfig(**_settings(name))


def expand_preset(settings: Settings) -> Settings:
    """Return the settings with the key `preset` replaced by the preset's settings, which the other keys override.

    The result lacks settings that the preset does not state, so that derived defaults follow a changed `d_model`.

    Raises:
        UserError: no preset has this name.
    """
    if "preset" not in settings:
        return settings
    rest = {key: value for key, value in settings.items() if key != "preset"}
    return _settings(str(settings["preset"])) | rest


def _settings(name: str) -> Settings:
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise UserError(f"no preset is called `{name}`{hint} `gptworks presets` lists them all.")
    return PRESETS[name]


def _sized(vocab_size: int, d_model: int, n_layers: int, n_heads: int, context_length: int, **rest: Any) -> Settings:
    return EARLIER_DEFAULTS | {"vocab_size": vocab_size, "context_length": context_length, "n_layers": n_layers,
                               "d_model": d_model, "n_heads": n_heads} | rest  # fmt: skip


def _gpt2(vocab_size: int, d_model: int, n_layers: int, n_heads: int, context_length: int, **rest: Any) -> Settings:
    """Return settings of GPT-2's architecture: learned positions, LayerNorm, all biases (Radford et al., 2019)."""
    return _sized(
        vocab_size, d_model, n_layers, n_heads, context_length, position="learned", norm="layernorm", norm_eps=1e-5,
        mlp="gelu_tanh", attention_bias=True, mlp_bias=True, **rest,
    )  # fmt: skip


def _llama(
    vocab_size: int, d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int, context_length: int,
    **rest: Any,
) -> Settings:  # fmt: skip
    """Return settings of Llama's architecture: RoPE, RMSNorm, SwiGLU, grouped queries (Touvron et al., 2023)."""
    more = {"norm_eps": 1e-5, "tie_embeddings": False} | rest
    return _sized(
        vocab_size, d_model, n_layers, n_heads, context_length, n_kv_heads=n_kv_heads, d_ff=d_ff, position="rope",
        norm="rmsnorm", mlp="swiglu", **more,
    )  # fmt: skip


def _modern(vocab_size: int, d_model: int, n_layers: int, context_length: int) -> Settings:
    """Return settings of the default small architecture, with choices from speedruns that other tools support.

    RoPE, RMSNorm, QK-norm, SwiGLU of 8/3 the width, zero-initialized projections, a tied head; 64 channels per head.
    ReLU² is as good at this size, but no architecture of Hugging Face or llama.cpp combines it with QK-norm.
    """
    return _sized(
        vocab_size, d_model, n_layers, d_model // 64, context_length, d_ff=round(d_model * 8 / 3 / 64) * 64,
        position="rope", norm="rmsnorm", norm_eps=1e-6, mlp="swiglu", qk_norm=True, zero_init_projections=True,
    )  # fmt: skip


_DROPOUT = {"dropout_embedding": 0.1, "dropout_attention": 0.1, "dropout_residual": 0.1}
_FROM_SCRATCH: Settings = {"tie_embeddings": False, "init": "normal"}

GPT3_SIZES = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 16), "1.3b": (2048, 24, 16),
    "2.7b": (2560, 32, 32), "6.7b": (4096, 32, 32), "13b": (5120, 40, 40), "175b": (12288, 96, 96),
}  # fmt: skip
"""d_model, n_layers and n_heads of GPT-3's sizes (Brown et al., 2020, table 2.1). Two values that contradict the
table's head widths are corrected: 1.3b has 16 heads, not 24, and 13b has a width of 5120, not 5140."""

_GPT3 = {f"gpt3-{size}": _gpt2(50_257, *shape, 2048, init="xavier") for size, shape in GPT3_SIZES.items()}

_BANDED: Settings = {"window": 256, "window_pattern": ["full", "window"]}
"""Alternating layers with full attention and with a window, as in the GPT-3 paper (section 2.1). The window's width is
from Child et al. (2019), whose text models use 128 to 256 tokens."""

PRESETS: dict[str, Settings] = {
    # Reference document 000: GPT-2's architecture, 24 layers, 2,048 tokens of context. Exactly 355,871,744 parameters.
    "custom-300m": _gpt2(50_257, 1024, 24, 16, 2048, **_DROPOUT, init="normal"),
    # Reference document 002: "Tiny (for testing)", "Small (for experiments)", "Medium", "Large" (as GPT-2's smallest).
    "gpt2-tiny": _gpt2(512, 128, 3, 4, 128, **_FROM_SCRATCH),
    "gpt2-mini": _gpt2(512, 256, 4, 4, 256, **_FROM_SCRATCH),
    "gpt2-midi": _gpt2(512, 384, 6, 6, 256, **_FROM_SCRATCH),
    "gpt2-small-untied": _gpt2(50_257, 768, 12, 12, 1024, **_FROM_SCRATCH),
    # Reference document 003: RoPE, no biases in linear layers, word tokenizer. Exactly 403,254,016 parameters.
    # The document does not state whether the MLP has biases. With `mlp_bias=true`, there are 403,366,656 parameters.
    "vaani-427m": _sized(
        16_000, 1408, 16, 11, 1024, position="rope", norm="layernorm", norm_eps=1e-5, mlp="gelu",
        attention_bias=False, mlp_bias=False, **_DROPOUT, dropout_mlp=0.1, init="normal",
    ),
    # Reference document 004: RoPE, SwiGLU, LayerNorm, no biases in linear layers. Exactly 265,165,056 parameters.
    "llm-200m": _sized(
        50_257, 768, 24, 12, 2048, d_ff=3072, position="rope", norm="layernorm", norm_eps=1e-5, mlp="swiglu",
        **_DROPOUT, init="normal",
    ),
    "modern-9m": _modern(8_192, 256, 8, 512),
    "modern-24m": _modern(16_384, 384, 10, 1024),
    "modern-110m": _modern(32_768, 768, 12, 2048),
    "modern-336m": _modern(32_768, 1024, 24, 2048),
    # A small mixture of experts: 115M parameters, 40M of them active per token.
    "moe-115m": _llama(
        16_384, 512, 8, 8, 4, 1024, 1024, norm_eps=1e-6, tie_embeddings=True, n_experts=8, n_experts_per_token=2,
    ),
    # SmolLM2 (Allal et al., 2025): deep and narrow, 9 query heads on 3 key/value heads, tied head.
    "smollm2-135m": _llama(49_152, 576, 30, 9, 3, 1536, 8192, rope_theta=100_000, tie_embeddings=True),
    "tinyllama-1.1b": _llama(32_000, 2048, 22, 32, 4, 5632, 2048),  # Zhang et al., 2024
    "llama-2-7b": _llama(32_000, 4096, 32, 32, 32, 11_008, 4096),  # Touvron et al., 2023
    # Qwen3 (Yang et al., 2025): QK-norm, and heads wider than d_model / n_heads.
    "qwen3-0.6b": _llama(
        151_936, 1024, 28, 16, 8, 3072, 40_960, d_head=128, rope_theta=1_000_000, norm_eps=1e-6, qk_norm=True,
        tie_embeddings=True,
    ),
    # Mixtral (Jiang et al., 2024): 8 experts a layer, 2 for each token.
    "mixtral-8x7b": _llama(
        32_000, 4096, 32, 32, 8, 14_336, 32_768, rope_theta=1_000_000, n_experts=8, n_experts_per_token=2,
    ),
    # GPT-2 as released (Radford et al., 2019, table 2): tied head; init of residual projections scaled by 1/sqrt(2L).
    "gpt2": _gpt2(50_257, 768, 12, 12, 1024, **_DROPOUT, init="gpt2"),
    "gpt2-medium": _gpt2(50_257, 1024, 24, 16, 1024, **_DROPOUT, init="gpt2"),
    "gpt2-large": _gpt2(50_257, 1280, 36, 20, 1024, **_DROPOUT, init="gpt2"),
    "gpt2-xl": _gpt2(50_257, 1600, 48, 25, 1024, **_DROPOUT, init="gpt2"),
    # Reference document 001: GPT-3's sizes, with full attention and with windows in every second layer.
    **_GPT3,
    **{f"{name}-banded": settings | _BANDED for name, settings in _GPT3.items()},
}  # fmt: skip
"""Each preset's settings by its name."""
