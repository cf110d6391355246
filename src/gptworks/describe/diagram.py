"""A model's data flow, which is each operation with the shapes of its weights and its output, and a drawing in text.

Pages draw the same flow (page.py), and parts.py uses the same names. Shapes: B sequences of T tokens; weights are
[out × in].
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gptworks.config import ModelConfig

Row = tuple[str, str, str]
"""An operation, the shape of its weights, the shape of its output."""

Line = tuple[str, str]
"""A line of the drawing and the shape to its right."""

MIN_WIDTH = 80
"""Width in columns that the longest rows need."""

POSITIONS = {
    "learned": ("learned positions", "+ position embedding"),
    "rope": ("rotary positions", ""),
    "none": ("no positions", ""),
}
"""The kind of positions, and what is added to the tokens' embeddings."""

_SHAPE_WIDTH = 20
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


@dataclass(frozen=True)
class Flow:
    """The operations from token ids to logits."""

    embedding: list[Row]
    entry: list[Row]
    """Operations on the residual stream as it enters a block."""
    attention: list[Row]
    """Operations of a block's attention, whose output is added to the residual stream."""
    mlp: list[Row]
    output: list[Row]


def flow(c: ModelConfig) -> Flow:
    """The operations of the model and of one of its blocks."""
    stream, logits_shape = f"B × T × {c.d_model:,}", f"B × T × {c.vocab_size:,}"
    norm: Row = (norm_name(c), norm_weights(c), stream)
    before, after = [norm] * (c.norm_placement != "after"), [norm] * (c.norms_behind is not None)
    residual: list[Row] = [(words, "", stream) for words in on_the_way(c.residual_scale, c.dropout_residual)]
    inside = _experts(c) if c.n_experts else _matrices(c, c.d_ff, "B × T")
    head = f"head{' (tied)' if c.tie_embeddings else ''}"
    output: list[Row] = [norm, (head, dims((c.vocab_size, c.d_model)), logits_shape)]
    if words := logits(c):
        output.append((words, "", logits_shape))
    if c.n_future_tokens > 1:
        output.append(("heads of later tokens, for training", future_weights(c), stream))
    return Flow(
        embedding=[(words, weights, stream) for words, weights in _embedding(c)],
        entry=[(words, weights, stream) for words, weights in _entry(c)],
        attention=[*before, *_attention(c), *after, *residual],
        mlp=[*before, *inside, *after, *residual],
        output=output,
    )


def _embedding(c: ModelConfig) -> Iterator[tuple[str, str]]:
    """The operations that make the residual stream from token ids, with the shapes of their weights."""
    yield "token embedding", dims((c.vocab_size, c.d_model))
    yield from ((words, "") for words in on_the_way(c.embedding_scale, 0))
    if c.smear:
        yield "+ gate · the token before", f"{c.d_gate:,} + 1"
    if c.bigram_vocab_size:
        yield "+ embedding of token pairs", dims((c.bigram_vocab_size, c.d_model))
    if words := POSITIONS[c.position][1]:
        yield words, dims((c.context_length, c.d_model))
    yield from ((words, "") for words in on_the_way(1, c.dropout_embedding))


def _entry(c: ModelConfig) -> Iterator[tuple[str, str]]:
    if c.unet_skips:
        yield f"stream + w · its mirror, in {c.n_layers // 2:,} of {c.n_layers:,}", "1"


def _attention(c: ModelConfig) -> Iterator[Row]:
    per_query, per_key = f"B × {c.n_heads:,} × T × {c.d_head:,}", f"B × {c.n_kv_heads:,} × T × {c.d_head:,}"
    query_width, key_width = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    if query_width == key_width:
        yield "query, key, value", f"3 of {matrix(query_width, c.d_model, c.qkv_bias)}", per_query
    else:
        yield "query", matrix(query_width, c.d_model, c.qkv_bias), per_query
        yield "key, value", f"2 of {matrix(key_width, c.d_model, c.qkv_bias)}", per_key
    yield from ((words, weights, "") for words, weights in _values(c))
    if c.qk_norm:
        yield "RMSNorm of queries and keys", head_norms(c), ""
    if c.position == "rope":
        yield "rotate queries and keys", ", ".join(filter(None, (turned(c), base(c)))), ""
    if c.rope_scaling is not None:
        yield "  scaled", scaled(c), ""
    sight = f"causal; {n_banded(c)} of {c.n_layers} see {c.window:,}" if n_banded(c) else "causal"
    yield scores(c), sight, f"B × {c.n_heads:,} × T × T"
    yield "weighted sum of values", f"dropout {c.dropout_attention:g}" if c.dropout_attention else "", per_query
    if c.attention_gate:
        yield "gate of each head", dims((c.n_heads, c.d_gate)), per_query
    yield "output projection", matrix(c.d_model, query_width, c.out_bias), f"B × T × {c.d_model:,}"


def _values(c: ModelConfig) -> Iterator[tuple[str, str]]:
    """The operations on values, and the shapes of their weights."""
    if c.value_residual:
        yield "a · values + b · the first layer's", "2"
    width, gate = c.n_kv_heads * c.d_head, dims((c.n_kv_heads, c.d_gate))
    for kind, words, shape in (
        ("table", "token's vector", (c.vocab_size, width)),
        ("projected", "projection", (width, c.d_model)),
    ):
        n = sum(c.layer_value_embedding(layer) == kind for layer in range(c.n_layers))
        if n:
            where = "" if n == c.n_layers else f", {n:,} of {c.n_layers:,}"
            yield f"values + gate · {words}{where}", f"{gate}, {dims(shape)}"


def _matrices(c: ModelConfig, d_ff: int, tokens: str, indent: str = "") -> Iterator[Row]:
    """The operations of an MLP of inner width `d_ff`; `tokens` has the leading dimensions of its input's shape."""
    inner = f"{tokens} × {d_ff:,}"
    up = matrix(d_ff, c.d_model, c.mlp_bias)
    yield (f"{indent}gate, up", f"2 of {up}", inner) if c.gated else (f"{indent}up", up, inner)
    yield f"{indent}{activation(c)}", "", inner
    yield from [(f"{indent}{words}", "", inner) for words in on_the_way(1, c.dropout_mlp)]
    yield f"{indent}down", matrix(c.d_model, d_ff, c.mlp_bias), f"{tokens} × {c.d_model:,}"


def _experts(c: ModelConfig) -> Iterator[Row]:
    yield "router", dims((c.n_experts, c.d_model)), f"B × T × {c.n_experts:,}"
    yield f"{c.n_experts:,} experts, {c.n_experts_per_token:,} for each token:", "", ""
    yield from _matrices(c, c.d_ff, f"B × T × {c.n_experts_per_token:,}", indent="  ")
    yield "sum, weighted by the router", "", f"B × T × {c.d_model:,}"
    if c.d_ff_shared:
        yield "+ a shared expert for every token", "", ""
        yield from _matrices(c, c.d_ff_shared, "B × T", indent="  ")


def diagram(config: ModelConfig, width: int = MIN_WIDTH) -> list[str]:
    """The lines of the drawing, `width` columns wide."""
    frame_width = max(width, MIN_WIDTH) - _SHAPE_WIDTH
    lines = _lines(config, frame_width)
    return [f"{line:<{frame_width}}{shape:>{_SHAPE_WIDTH}}".rstrip() for line, shape in lines]


def _lines(c: ModelConfig, width: int) -> Iterator[Line]:
    drawn = flow(c)
    yield "   token ids", "B × T"
    yield "      │", ""
    yield from _box(drawn.embedding, width)
    yield "      │", ""
    yield f"╔═════▼{f' {stack(c)} '.ljust(width - 8, '═')}╗", ""
    for words, weights, stream in drawn.entry:
        yield f"║     ● {words}{weights:>{width - 11 - len(words)}}  ║", stream
    yield from (_parallel if c.parallel_residual else _serial)(drawn.attention, drawn.mlp, width)
    yield f"╚═════╪{'═' * (width - 8)}╝", ""
    yield "      │", ""
    yield from _box(drawn.output, width)
    yield "      ▼", ""
    yield "   logits of the next token", f"B × T × {c.vocab_size:,}"


def _box(rows: list[Row], width: int) -> Iterator[Line]:
    """The lines of a box around the residual stream."""
    yield f"╭─────▼{'─' * (width - 8)}╮", ""
    for text, shape in _fitted(rows, width - 6):
        yield f"│  {text}  │", shape
    yield f"╰─────┬{'─' * (width - 8)}╯", ""


def _serial(attention: list[Row], mlp: list[Row], width: int) -> Iterator[Line]:
    """Two boxes inside the block, each fed from the residual stream on its left and added back to it."""
    for rows in (attention, mlp):
        yield f"║     ├────╮{' ' * (width - 13)}║", ""
        yield from _branch(rows, width - 14, "║")


def _parallel(attention: list[Row], mlp: list[Row], width: int) -> Iterator[Line]:
    """Two boxes that both read the block's input: the second box's line passes to the right of the first box."""
    yield f"║     ├────┬{'─' * (width - 15)}╮ ║", ""
    yield from _branch(attention, width - 16, "│ ║")
    yield f"║     │    ╭{'─' * (width - 15)}╯ ║", ""
    yield from _branch(mlp, width - 14, "║")


def _branch(rows: list[Row], width: int, beside: str) -> Iterator[Line]:
    """The lines of a box of `width` columns inside the block, with `beside` on its right."""
    yield f"║     │ ╭──▼{'─' * (width - 1)}╮ {beside}", ""
    for text, shape in _fitted(rows, width):
        yield f"║     │ │ {text} │ {beside}", shape
    yield f"║     │ ╰──┬{'─' * (width - 1)}╯ {beside}", ""
    yield f"║     +◄───╯{' ' * (width + 1)}{beside}", ""


def _fitted(rows: list[Row], width: int) -> Iterator[Line]:
    """Each row on one line, or with its weights on a second line if one line is too short."""
    for operation, weights, shape in rows:
        if len(operation) + 1 + len(weights) <= width:
            yield f"{operation}{weights:>{width - len(operation)}}", shape
        else:
            yield f"{operation:<{width}}", shape
            yield f"{weights:>{width}}", ""
