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


PRESETS |= {
    "custom-300m": custom_300m,
    "gpt2-tiny": gpt2_tiny,
    "gpt2-mini": gpt2_mini,
    "gpt2-midi": gpt2_midi,
    "gpt2-small-untied": gpt2_small_untied,
    "vaani-427m": vaani_427m,
    "llm-200m": llm_200m,
}
PRESETS |= {name: partial(gpt2, name) for name in GPT2_SIZES}
PRESETS |= {f"gpt3-{size}": partial(gpt3, size) for size in GPT3_SIZES}
PRESETS |= {f"gpt3-{size}-banded": partial(gpt3, size, banded=True) for size in GPT3_SIZES}
