"""A model's data flow drawn in text: each operation, the shape of its weights, and the shape of what leaves it.

Shapes: B sequences of T tokens; weights are [out × in].
"""

from collections.abc import Iterable, Iterator

from gptworks.config import ModelConfig

Row = tuple[str, str, str]
"""An operation, the shape of its weights, the shape of what leaves it."""

Line = tuple[str, str]
"""A line of the drawing and the shape that stands beside it."""

MIN_WIDTH = 80
"""Columns that the longest rows need."""

_SHAPE_WIDTH = 20
_ACTIVATIONS = {"gelu": "GELU", "gelu_tanh": "GELU (tanh)", "relu2": "ReLU²", "swiglu": "SiLU", "geglu": "GELU"}


def dims(shape: Iterable[int]) -> str:
    """`50,257 × 768`."""
    return " × ".join(f"{size:,}" for size in shape)


def diagram(config: ModelConfig, width: int = MIN_WIDTH) -> list[str]:
    """The lines of the drawing, `width` columns wide."""
    frame_width = max(width, MIN_WIDTH) - _SHAPE_WIDTH
    lines = _lines(config, frame_width)
    return [f"{line:<{frame_width}}{shape:>{_SHAPE_WIDTH}}".rstrip() for line, shape in lines]


def _lines(c: ModelConfig, width: int) -> Iterator[Line]:
    stream, logits = f"B × T × {c.d_model:,}", f"B × T × {c.vocab_size:,}"
    norm_weights = f"{c.d_model:,}" + (f" + {c.d_model:,}" if c.norm_bias else "")
    norm: Row = ({"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[c.norm], norm_weights, stream)
    embedding: list[Row] = [("token embedding", dims((c.vocab_size, c.d_model)), stream)]
    if c.position == "learned":
        embedding.append(("+ position embedding", dims((c.context_length, c.d_model)), stream))
    if c.dropout_embedding:
        embedding.append((f"dropout {c.dropout_embedding:g}", "", stream))
    head = f"head{' (tied)' if c.tie_embeddings else ''}"
    residual: list[Row] = [(f"dropout {c.dropout_residual:g}", "", stream)] if c.dropout_residual else []
    yield "   token ids", "B × T"
    yield "      │", ""
    yield from _box(embedding, width)
    yield "      │", ""
    yield f"╔═════▼{f' {c.n_layers} × block '.ljust(width - 8, '═')}╗", ""
    yield from _branch([norm, *_attention(c), *residual], width)
    yield from _branch([norm, *_mlp(c), *residual], width)
    yield f"╚═════╪{'═' * (width - 8)}╝", ""
    yield "      │", ""
    yield from _box([norm, (head, dims((c.vocab_size, c.d_model)), logits)], width)
    yield "      ▼", ""
    yield "   logits of the next token", logits


def _attention(c: ModelConfig) -> Iterator[Row]:
    per_query, per_key = f"B × {c.n_heads:,} × T × {c.d_head:,}", f"B × {c.n_kv_heads:,} × T × {c.d_head:,}"
    query_width, key_width = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    if query_width == key_width:
        yield "query, key, value", f"3 of {dims((query_width, c.d_model))}", per_query
    else:
        yield "query", dims((query_width, c.d_model)), per_query
        yield "key, value", f"2 of {dims((key_width, c.d_model))}", per_key
    if c.qk_norm:
        yield "RMSNorm of queries and keys", f"2 of {c.d_head:,}", ""
    if c.position == "rope":
        yield "rotate queries, keys by position", f"θ = {c.rope_theta:,.0f}", ""
    yield f"softmax(q·kᵀ / √{c.d_head:,})", _sight(c), f"B × {c.n_heads:,} × T × T"
    yield "weighted sum of values", f"dropout {c.dropout_attention:g}" if c.dropout_attention else "", per_query
    yield "output projection", dims((c.d_model, query_width)), f"B × T × {c.d_model:,}"


def _sight(c: ModelConfig) -> str:
    """What a token sees."""
    banded = sum(window is not None for window in c.layer_windows)
    return "causal" if not banded else f"causal; {banded} of {c.n_layers} see {c.window:,}"


def _mlp(c: ModelConfig) -> Iterator[Row]:
    inner, activation = f"B × T × {c.d_ff:,}", _ACTIVATIONS[c.mlp]
    yield ("gate, up" if c.gated else "up"), ("2 of " if c.gated else "") + dims((c.d_ff, c.d_model)), inner
    yield (f"{activation}(gate) × up" if c.gated else activation), "", inner
    yield "down", dims((c.d_model, c.d_ff)), f"B × T × {c.d_model:,}"


def _box(rows: list[Row], width: int) -> Iterator[Line]:
    """A box that the residual stream runs into and out of."""
    yield f"╭─────▼{'─' * (width - 8)}╮", ""
    for operation, weights, shape in rows:
        yield f"│  {operation}{weights:>{width - 6 - len(operation)}}  │", shape
    yield f"╰─────┬{'─' * (width - 8)}╯", ""


def _branch(rows: list[Row], width: int) -> Iterator[Line]:
    """A box inside the block, fed from the residual stream on its left and added back to it."""
    yield f"║     ├────╮{' ' * (width - 13)}║", ""
    yield f"║     │ ╭──▼{'─' * (width - 15)}╮ ║", ""
    for operation, weights, shape in rows:
        yield f"║     │ │ {operation}{weights:>{width - 14 - len(operation)}} │ ║", shape
    yield f"║     │ ╰──┬{'─' * (width - 15)}╯ ║", ""
    yield f"║     +◄───╯{' ' * (width - 13)}║", ""
