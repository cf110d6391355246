"""Names, formulas and shapes in words, for drawings and descriptions of an architecture."""

from collections.abc import Iterable

from gptworks.config import ModelConfig

POSITIONS = {
    "learned": ("learned positions", "+ position embedding"),
    "rope": ("rotary positions", ""),
    "none": ("no positions", ""),
}
"""The kind of positions, and what is added to the tokens' embeddings."""

_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_ACTIVATIONS = {"gelu": "GELU", "gelu_tanh": "GELU (tanh)", "relu2": "ReLU²", "swiglu": "SiLU", "geglu": "GELU",
                "geglu_tanh": "GELU (tanh)"}  # fmt: skip


def dims(shape: Iterable[int]) -> str:
    """A shape as text, such as `50,257 × 768`."""
    return " × ".join(f"{size:,}" for size in shape)


def matrix(out: int, into: int, bias: bool = False) -> str:
    """The shape of a linear layer's weights as text; its bias, if any, has `out` elements."""
    return dims((out, into)) + (" + bias" if bias else "")


def norm_name(c: ModelConfig) -> str:
    return _NORMS[c.norm]


def norm_weights(c: ModelConfig) -> str:
    return f"{c.d_model:,}" + (f" + {c.d_model:,}" if c.norm_bias else "")


def head_norms(c: ModelConfig) -> str:
    """The numbers of weights of the norms of queries and keys, as text."""
    if c.qk_norm == "whole":
        return f"{c.n_heads * c.d_head:,} + {c.n_kv_heads * c.d_head:,}"
    return f"2 of {c.d_head:,}"


def activation(c: ModelConfig) -> str:
    return f"{_ACTIVATIONS[c.mlp]}(gate) × up" if c.gated else _ACTIVATIONS[c.mlp]


def turned(c: ModelConfig) -> str:
    """The layers and the part of each head that are rotated by position, as text; empty if all are."""
    layers = sum(map(c.layer_rotates, range(c.n_layers)))
    part = "" if c.d_rotary == c.d_head else f"first {c.d_rotary:,} of {c.d_head:,}"
    return ", ".join(filter(None, (f"{layers} of {c.n_layers} layers" if layers < c.n_layers else "", part)))


def base(c: ModelConfig) -> str:
    """The base of the rotary frequencies as text, and the base of windowed layers if it differs."""
    own = c.window_rope_theta
    return f"θ = {c.rope_theta:,.10g}" + ("" if own is None else f", {own:,.10g} in windows")


def scaled(c: ModelConfig) -> str:
    """The scaling of the rotary frequencies as text; empty if they are not scaled."""
    if c.rope_scaling is None:
        return ""
    factor, where = c.rope_scaling.factor, "" if c.window_rope_theta is None else ", not in windows"
    return f"{c.rope_scaling.type}, × {factor:g} from {c.original_context_length:,}{where}"


def scores(c: ModelConfig) -> str:
    by = f"/ √{c.d_head:,}" if c.attention_scale is None else f"× {c.attention_scale:g}"
    return f"softmax({capped(f'q·kᵀ {by}', c.attention_softcap)})"


def capped(words: str, softcap: float | None) -> str:
    """The formula `words` with the soft cap applied, if there is one."""
    return words if softcap is None else f"{softcap:g} tanh({words} / {softcap:g})"


def logits(c: ModelConfig) -> str:
    """The formula of the logits from the head's product; empty if they are equal."""
    divided = f"/ {c.logit_divisor:g}" if c.logit_divisor != 1 else ""
    return divided if c.logit_softcap is None else capped(f"logits {divided}".strip(), c.logit_softcap)


def on_the_way(factor: float, dropout: float) -> list[str]:
    """Names of the operations on a tensor before it begins or is added to the residual stream."""
    return [f"× {factor:g}"] * (factor != 1) + [f"dropout {dropout:g}"] * (dropout > 0)


def future_weights(c: ModelConfig) -> str:
    """The shapes of the heads for tokens beyond the next."""
    n, square = c.n_future_tokens - 1, dims((c.d_model, c.d_model))
    return square if n == 1 else f"{n:,} of {square}"


def n_banded(c: ModelConfig) -> int:
    """Number of layers that see only a window."""
    return sum(window is not None for window in c.layer_windows)


def stack(c: ModelConfig) -> str:
    """The number of blocks, and how often they run."""
    blocks = f"{c.n_layers:,} × block"
    if not c.repeats_layers:
        return blocks
    if isinstance(c.layer_repeats, int):
        return f"{blocks}, {c.layer_repeats:,} times over"
    return f"{blocks}, {len(c.layer_uses):,} runs"
