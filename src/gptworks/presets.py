"""Named architectures as plain functions returning ModelConfig."""

from collections.abc import Callable
from functools import partial
from typing import Any

from gptworks.config import ModelConfig
from gptworks.errors import UserError, nearest

PRESETS: dict[str, Callable[[], ModelConfig]] = {}
"""Every preset by name."""


def preset(name: str) -> ModelConfig:
    """The architecture called `name`.

    Raises:
        UserError: no preset has this name; the nearest one is suggested.
    """
    if name not in PRESETS:
        near = nearest(name, PRESETS)
        raise UserError(
            f"no preset is called `{name}`"
            + (f"; did you mean `{near}`?" if near else ".")
            + " `gptworks presets` lists them all."
        )
    return PRESETS[name]()


def expand_preset(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace the key `preset` by that preset's settings; the other keys win over them.

    Only what the preset states itself is taken, so that a changed `d_model` also changes what follows from it.
    """
    if "preset" not in settings:
        return settings
    rest = {key: value for key, value in settings.items() if key != "preset"}
    return preset(str(settings["preset"])).model_dump(mode="json", exclude_unset=True) | rest


# Document 000: Custom 300M ----------------------------------------------------------------------------------


def custom_300m() -> ModelConfig:
    """Document 000. GPT-2 shaped, 24 layers, 2,048 tokens of context. Exactly 355,871,744 parameters."""
    return ModelConfig(
        vocab_size=50_257, context_length=2048, n_layers=24, d_model=1024, n_heads=16,
        position="learned", norm="layernorm", norm_eps=1e-5, mlp="gelu_tanh", attention_bias=True, mlp_bias=True,
        dropout_embedding=0.1, dropout_attention=0.1, dropout_residual=0.1, init="normal",
    )  # fmt: skip


# Document 001: the GPT-3 ladder -----------------------------------------------------------------------------

GPT3_SIZES: dict[str, tuple[int, int, int]] = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 16), "1.3b": (2048, 24, 16),
    "2.7b": (2560, 32, 32), "6.7b": (4096, 32, 32), "13b": (5120, 40, 40), "175b": (12288, 96, 96),
}  # fmt: skip
"""d_model, n_layers and n_heads of each size (Brown et al., 2020, table 2.1, with document 001's widths)."""


def gpt3(size: str, *, banded: bool = False) -> ModelConfig:
    """Document 001. `banded` alternates dense and locally banded layers as the GPT-3 paper does (section 2.1).

    The paper leaves the band's width to Child et al. (2019), whose text models use 128 to 256 tokens; 256 here.
    """
    d_model, n_layers, n_heads = GPT3_SIZES[size]
    band: dict[str, Any] = {"window": 256, "window_pattern": ("full", "window")} if banded else {}
    return ModelConfig(
        vocab_size=50_257, context_length=2048, n_layers=n_layers, d_model=d_model, n_heads=n_heads,
        position="learned", norm="layernorm", norm_eps=1e-5, mlp="gelu_tanh", attention_bias=True, mlp_bias=True,
        init="xavier", **band,
    )  # fmt: skip


# Document 002: GPT-2 from scratch ---------------------------------------------------------------------------


def _gpt2_from_scratch(vocab_size: int, d_model: int, n_layers: int, n_heads: int, context_length: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size, context_length=context_length, n_layers=n_layers, d_model=d_model, n_heads=n_heads,
        position="learned", norm="layernorm", norm_eps=1e-5, mlp="gelu_tanh", attention_bias=True, mlp_bias=True,
        tie_embeddings=False, init="normal",
    )  # fmt: skip


def gpt2_tiny() -> ModelConfig:
    """Document 002, "Tiny (for testing)". Untied head."""
    return _gpt2_from_scratch(512, 128, 3, 4, 128)


def gpt2_mini() -> ModelConfig:
    """Document 002, "Small (for experiments)". Untied head."""
    return _gpt2_from_scratch(512, 256, 4, 4, 256)


def gpt2_midi() -> ModelConfig:
    """Document 002, "Medium". Untied head."""
    return _gpt2_from_scratch(512, 384, 6, 6, 256)


def gpt2_small_untied() -> ModelConfig:
    """Document 002, "Large (GPT-2 Small)": GPT-2's smallest size with an untied head."""
    return _gpt2_from_scratch(50_257, 768, 12, 12, 1024)


# Document 003: Vaani ----------------------------------------------------------------------------------------


def vaani_427m() -> ModelConfig:
    """Document 003. RoPE, no biases in linear layers, word tokenizer. Exactly 403,254,016 parameters.

    The document leaves the MLP's biases open; `mlp_bias=true` gives its variant of 403,366,656.
    """
    return ModelConfig(
        vocab_size=16_000, context_length=1024, n_layers=16, d_model=1408, n_heads=11,
        position="rope", norm="layernorm", norm_eps=1e-5, mlp="gelu", attention_bias=False, mlp_bias=False,
        dropout_embedding=0.1, dropout_attention=0.1, dropout_residual=0.1, init="normal",
    )  # fmt: skip


# Document 004: LLM-200M -------------------------------------------------------------------------------------


def llm_200m() -> ModelConfig:
    """Document 004. RoPE, SwiGLU, LayerNorm, no biases in linear layers. Exactly 265,165,056 parameters."""
    return ModelConfig(
        vocab_size=50_257, context_length=2048, n_layers=24, d_model=768, n_heads=12, d_ff=3072,
        position="rope", norm="layernorm", norm_eps=1e-5, mlp="swiglu",
        dropout_embedding=0.1, dropout_attention=0.1, dropout_residual=0.1, init="normal",
    )  # fmt: skip


# GPT-2 as published -----------------------------------------------------------------------------------------

GPT2_SIZES: dict[str, tuple[int, int, int]] = {
    "gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20), "gpt2-xl": (1600, 48, 25),
}  # fmt: skip
"""d_model, n_layers and n_heads of each size (Radford et al., 2019, table 2)."""


def gpt2(size: str) -> ModelConfig:
    """GPT-2 as released: tied head, residual projections scaled by 1/sqrt(2L) at initialization."""
    d_model, n_layers, n_heads = GPT2_SIZES[size]
    return ModelConfig(
        vocab_size=50_257, context_length=1024, n_layers=n_layers, d_model=d_model, n_heads=n_heads,
        position="learned", norm="layernorm", norm_eps=1e-5, mlp="gelu_tanh", attention_bias=True, mlp_bias=True,
        dropout_embedding=0.1, dropout_attention=0.1, dropout_residual=0.1, init="gpt2",
    )  # fmt: skip


# Architectures of today -------------------------------------------------------------------------------------


def llama(
    vocab_size: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_ff: int,
    context_length: int,
    **rest: Any,
) -> ModelConfig:
    """RoPE, RMSNorm, SwiGLU, no biases, grouped queries (Touvron et al., 2023)."""
    return ModelConfig(
        vocab_size=vocab_size, context_length=context_length, n_layers=n_layers, d_model=d_model, n_heads=n_heads,
        n_kv_heads=n_kv_heads, d_ff=d_ff, position="rope", norm="rmsnorm", mlp="swiglu",
        **{"norm_eps": 1e-5, "tie_embeddings": False} | rest,
    )  # fmt: skip


def smollm2_135m() -> ModelConfig:
    """SmolLM2 135M (Allal et al., 2025): deep and narrow, 9 query heads on 3 key/value heads, tied."""
    return llama(49_152, 576, 30, 9, 3, 1536, 8192, rope_theta=100_000, tie_embeddings=True)


def tinyllama_1_1b() -> ModelConfig:
    """TinyLlama 1.1B (Zhang et al., 2024)."""
    return llama(32_000, 2048, 22, 32, 4, 5632, 2048)


def llama_2_7b() -> ModelConfig:
    """Llama 2 7B (Touvron et al., 2023)."""
    return llama(32_000, 4096, 32, 32, 32, 11_008, 4096)


def qwen3_0_6b() -> ModelConfig:
    """Qwen3 0.6B (Yang et al., 2025): QK-norm, and heads wider than d_model / n_heads."""
    return llama(
        151_936, 1024, 28, 16, 8, 3072, 40_960,
        d_head=128, rope_theta=1_000_000, norm_eps=1e-6, qk_norm=True, tie_embeddings=True,
    )  # fmt: skip


def mixtral_8x7b() -> ModelConfig:
    """Mixtral 8x7B (Jiang et al., 2024): 8 experts a layer, 2 for each token."""
    return llama(
        32_000, 4096, 32, 32, 8, 14_336, 32_768, rope_theta=1_000_000, n_experts=8, n_experts_per_token=2,
    )  # fmt: skip


MODERN_SIZES: dict[str, tuple[int, int, int, int]] = {
    "9m": (8_192, 256, 8, 512), "24m": (16_384, 384, 10, 1024),
    "110m": (32_768, 768, 12, 2048), "336m": (32_768, 1024, 24, 2048),
}  # fmt: skip
"""vocab_size, d_model, n_layers and context_length of each size."""


def modern(size: str) -> ModelConfig:
    """Our default for small models: what their speedruns kept, as far as every other tool can run it.

    RoPE, RMSNorm, QK-norm, SwiGLU of 8/3 the width, projections that start at zero, a tied head; heads of 64. ReLU²
    does as well at this size, and no architecture of Hugging Face or llama.cpp has it together with QK-norm.
    """
    vocab_size, d_model, n_layers, context_length = MODERN_SIZES[size]
    return ModelConfig(
        vocab_size=vocab_size, context_length=context_length, n_layers=n_layers, d_model=d_model,
        n_heads=d_model // 64, d_ff=round(d_model * 8 / 3 / 64) * 64, position="rope", norm="rmsnorm", norm_eps=1e-6,
        mlp="swiglu", qk_norm=True, zero_init_projections=True,
    )  # fmt: skip


def moe_115m() -> ModelConfig:
    """A small mixture of experts: 115M parameters, 40M of them for any one token."""
    return llama(
        16_384, 512, 8, 8, 4, 1024, 1024, norm_eps=1e-6, tie_embeddings=True, n_experts=8, n_experts_per_token=2,
    )  # fmt: skip


PRESETS |= {
    "custom-300m": custom_300m,
    "gpt2-tiny": gpt2_tiny,
    "gpt2-mini": gpt2_mini,
    "gpt2-midi": gpt2_midi,
    "gpt2-small-untied": gpt2_small_untied,
    "vaani-427m": vaani_427m,
    "llm-200m": llm_200m,
}
PRESETS |= {f"modern-{size}": partial(modern, size) for size in MODERN_SIZES}
PRESETS |= {
    "moe-115m": moe_115m,
    "smollm2-135m": smollm2_135m,
    "tinyllama-1.1b": tinyllama_1_1b,
    "llama-2-7b": llama_2_7b,
    "qwen3-0.6b": qwen3_0_6b,
    "mixtral-8x7b": mixtral_8x7b,
}
PRESETS |= {name: partial(gpt2, name) for name in GPT2_SIZES}
PRESETS |= {f"gpt3-{size}": partial(gpt3, size) for size in GPT3_SIZES}
PRESETS |= {f"gpt3-{size}-banded": partial(gpt3, size, banded=True) for size in GPT3_SIZES}
