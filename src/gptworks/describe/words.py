"""Formats names, formulas and shapes as text, for drawings and descriptions of an architecture."""

from collections.abc import Iterable

from gptworks.config import ModelConfig

_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_ACTIVATIONS = {"gelu": "GELU", "gelu_tanh": "GELU (tanh)", "relu2": "ReLU²", "swiglu": "SiLU", "geglu": "GELU",
                "geglu_tanh": "GELU (tanh)"}  # fmt: skip


def dims(shape: Iterable[int]) -> str:
    """Return a shape as text, such as `50,257 × 768`."""
    return " × ".join(f"{size:,}" for size in shape)


def matrix(out: int, into: int, bias: bool = False) -> str:
    """Return the shape of a linear layer's weights as text, such as `3,072 × 768 + bias`."""
    return dims((out, into)) + (" + bias" if bias else "")


def norm_name(c: ModelConfig) -> str:
    return _NORMS[c.norm]


def norm_weights(c: ModelConfig) -> str:
    return f"{c.d_model:,}" + (f" + {c.d_model:,}" if c.norm_bias else "")


def head_norms(c: ModelConfig) -> str:
    """Return the numbers of weights in the query norm and in the key norm, as text."""
    if c.qk_norm == "whole":
        return f"{c.n_heads * c.d_head:,} + {c.n_kv_heads * c.d_head:,}"
    return f"2 of {c.d_head:,}"


def activation(c: ModelConfig) -> str:
    return f"{_ACTIVATIONS[c.mlp]}(gate) × up" if c.gated else _ACTIVATIONS[c.mlp]


def turned(c: ModelConfig) -> str:
    """Return the layers and the channels of a head that have rotary positions, as text; empty if all have them."""
    layers = sum(map(c.layer_rotates, range(c.n_layers)))
    part = "" if c.d_rotary == c.d_head else f"first {c.d_rotary:,} of {c.d_head:,}"
    return ", ".join(filter(None, (f"{layers} of {c.n_layers} layers" if layers < c.n_layers else "", part)))


def base(c: ModelConfig) -> str:
    """Return the base of the rotary frequencies as text, with the base of layers with a window if that is set."""
    own = c.window_rope_theta
    return f"θ = {c.rope_theta:,.10g}" + ("" if own is None else f", {own:,.10g} in windows")


def scaled(c: ModelConfig) -> str:
    """Return the scaling of the rotary frequencies as text; empty if they are not scaled."""
    if c.rope_scaling is None:
        return ""
    factor, where = c.rope_scaling.factor, "" if c.window_rope_theta is None else ", not in windows"
    return f"{c.rope_scaling.type}, × {factor:g} from {c.original_context_length:,}{where}"


def scores(c: ModelConfig) -> str:
    by = f"/ √{c.d_head:,}" if c.attention_scale is None else f"× {c.attention_scale:g}"
    return f"softmax({capped(f'q·kᵀ {by}', c.attention_softcap)})"


def capped(words: str, softcap: float | None) -> str:
    """Return the formula `words` with a soft cap applied; unchanged if `softcap` is None."""
    return words if softcap is None else f"{softcap:g} tanh({words} / {softcap:g})"


def logits(c: ModelConfig) -> str:
    """Return the operations that turn the head's product into logits, as a formula; empty if there are none."""
    divided = f"/ {c.logit_divisor:g}" if c.logit_divisor != 1 else ""
    return divided if c.logit_softcap is None else capped(f"logits {divided}".strip(), c.logit_softcap)


def on_the_way(factor: float, dropout: float) -> list[str]:
    """Return the names of the scaling and the dropout that a tensor goes through, each only if it has an effect."""
    return [f"× {factor:g}"] * (factor != 1) + [f"dropout {dropout:g}"] * (dropout > 0)


def future_weights(c: ModelConfig) -> str:
    """Return the shapes of the heads that predict tokens beyond the next, as text."""
    n, square = c.n_future_tokens - 1, dims((c.d_model, c.d_model))
    return square if n == 1 else f"{n:,} of {square}"


def n_banded(c: ModelConfig) -> int:
    """Return the number of layers whose attention has a window."""
    return sum(window is not None for window in c.layer_windows)


def stack(c: ModelConfig) -> str:
    """Return the number of blocks as text, with the number of runs if blocks repeat."""
    blocks = f"{c.n_layers:,} × block"
    if not c.repeats_layers:
        return blocks
    if isinstance(c.layer_repeats, int):
        return f"{blocks}, {c.layer_repeats:,} times over"
    return f"{blocks}, {len(c.layer_uses):,} runs"
