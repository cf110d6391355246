"""Describes an architecture's parts in the order of the data flow: name, weights, function, publication, and the
operations that a drawing shows (diagram.py).

Shapes: B sequences of T tokens; weights are [out × in].
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gptworks.config import ModelConfig
from gptworks.describe.words import (
    activation,
    base,
    dims,
    future_weights,
    head_norms,
    logits,
    matrix,
    n_banded,
    norm_name,
    norm_weights,
    on_the_way,
    scaled,
    scores,
    turned,
)

Row = tuple[str, str, str]
"""An operation in a drawing: its name, the shape of its weights, the shape of its output."""


@dataclass(frozen=True)
class Part:
    """A part of an architecture, such as an embedding, a norm, a projection or the scores of attention."""

    key: str
    name: str
    kind: str
    """One of embedding, attention, mlp, norm and head; it decides the colour on pages."""
    place: str
    """Where the part is: `input` or `output` of the model, or `attention` or `mlp` of a block."""
    weights: str
    """Shapes of the part's weights, as text; empty if it has no weights."""
    shape: str
    """Shape of the part's output, as text."""
    words: str
    """The part's function, in a sentence or two."""
    source: str
    """The publication that introduced the part."""
    modules: tuple[str, ...] = ()
    """Names of the part's modules, within the block if the part is in blocks."""
    tensors_of: tuple[str, ...] = ()
    """Other modules whose tensors the part uses. A tied head uses the tensor of the token embedding."""
    drawn: str = ""
    """Name of the part's operation in a drawing, next to `weights` and `shape`; if empty, only `more_rows` is drawn."""
    more_rows: tuple[Row, ...] = ()
    """Further operations in a drawing. One row may cover several parts, such as query, key and value."""

    @property
    def in_block(self) -> bool:
        """Whether the part is in blocks."""
        return self.place in ("attention", "mlp")

    @property
    def rows(self) -> list[Row]:
        """The part's operations in a drawing."""
        return [*([(self.drawn, self.weights, self.shape)] if self.drawn else []), *self.more_rows]

    def in_layer(self, modules: Iterable[str], layer: int) -> list[str]:
        """Return the full names of `modules` of this part; for a part in blocks, the names in layer `layer`."""
        return [f"blocks.{layer}.{name}" if self.in_block else name for name in modules]


_NORMS = {
    "layernorm": ("Takes the mean off each token's vector and divides by its standard deviation, then multiplies each "
                  "channel by a learned gain{shift}.", "Ba et al., 2016"),
    "rmsnorm": ("Divides each token's vector by its root mean square, then multiplies each channel by a learned gain.",
                "Zhang & Sennrich, 2019"),
}  # fmt: skip
_WHERE = {
    "norm1": "It comes before attention, so that the residual stream itself is unchanged.",
    "norm2": "It comes before the MLP, so that the residual stream itself is unchanged.",
    "norm1_after": "It comes after attention, before the result is added to the residual stream.",
    "norm2_after": "It comes after the MLP, before the result is added to the residual stream.",
    "norm": "It comes before the head.",
}
_ACTIVATIONS = {
    "gelu": ("passes each channel as far as it is positive, with a smooth bend (GELU)", "Hendrycks & Gimpel, 2016"),
    "gelu_tanh": ("passes each channel as far as it is positive, with a smooth bend (GELU by tanh)",
                  "Hendrycks & Gimpel, 2016"),
    "relu2": ("squares what is positive of each channel, and makes zero of the rest (ReLU²)", "So et al., 2021"),
    "swiglu": ("multiplies up by SiLU of gate, channel by channel (SwiGLU)", "Shazeer, 2020"),
    "geglu": ("multiplies up by GELU of gate, channel by channel (GEGLU)", "Shazeer, 2020"),
    "geglu_tanh": ("multiplies up by GELU of gate, channel by channel (GEGLU by tanh)", "Shazeer, 2020"),
}  # fmt: skip


def parts(c: ModelConfig, layer: int | None = 0) -> list[Part]:
    """Return the parts of the model and of the block `layer`, in the order of the data flow. If `layer` is None, return
    the parts that at least one block has, described as in the first block."""
    return [*_input(c), *_attention(c, layer), *_mlp(c), *_output(c)]


def _stream(c: ModelConfig) -> str:
    return f"B × T × {c.d_model:,}"


def _input(c: ModelConfig) -> Iterator[Part]:
    scales = on_the_way(c.embedding_scale, 0)
    scaled_by = "".join(f" It is multiplied ({words})." for words in scales)
    stream = _stream(c)
    yield Part(
        "token_embedding", "Token embedding", "embedding", "input", dims((c.vocab_size, c.d_model)), stream,
        f"A table with a vector for each of the {c.vocab_size:,} tokens. A token's vector enters the residual stream, "
        f"which every block reads and adds to.{scaled_by}", "Bengio et al., 2003", ("token_embedding",),
        drawn="token embedding", more_rows=tuple((words, "", stream) for words in scales),
    )  # fmt: skip
    if c.smear:
        yield Part(
            "smear", "Smear", "embedding", "input", f"{c.d_gate:,} + 1", stream,
            "Adds the embedding of the token before, times a learned number and a sigmoid of the token's own.",
            "Jordan et al., 2024 (modded-nanogpt)", ("smear",),
            drawn="+ gate · the token before",
        )  # fmt: skip
    if tables := [i for i in range(c.n_layers) if c.layer_value_embedding(i) == "table"]:
        width = c.n_kv_heads * c.d_head
        yield Part(
            "value_embeddings", "Value embeddings", "embedding", "input",
            f"{len(tables):,} × {dims((c.vocab_size, width))}", f"B × T × {width:,}",
            f"Tables of {len(tables):,} layers, each with a vector for each token, which is added to the values there.",
            "Jordan et al., 2024 (modded-nanogpt)", tuple(f"value_embeddings.{i}" for i in tables),
        )  # fmt: skip
    if rows := c.bigram_vocab_size:
        yield Part(
            "bigram_embedding", "Embedding of token pairs", "embedding", "input",
            dims((rows, c.d_model)), stream,
            "A table whose row for each token is chosen by a hash of that token and the one before it. Its vector is "
            "added to the token's, times a learned scale.",
            "Huang et al., 2025", ("bigram_embedding", "bigram_embedding.table"),
            drawn="+ embedding of token pairs",
        )  # fmt: skip
    if c.position == "learned":
        yield Part(
            "position_embedding", "Position embedding", "embedding", "input", dims((c.context_length, c.d_model)),
            stream,
            "A table with a vector for each position, which is added to the token's.",
            "Gehring et al., 2017", ("position_embedding",), drawn="+ position embedding",
        )  # fmt: skip


def _norm(c: ModelConfig, module: str, place: str, where: str) -> Part:
    words, source = _NORMS[c.norm]
    words = words.format(shift=" and adds a learned shift" if c.norm_bias else "")
    name = f"Final {norm_name(c)}" if place == "output" else norm_name(c)
    return Part(
        module if place != "output" else "final_norm", name, "norm", place, norm_weights(c), _stream(c),
        f"{words} {_WHERE[where]}", source, (module,), drawn=norm_name(c),
    )  # fmt: skip


def _attention(c: ModelConfig, layer: int | None) -> Iterator[Part]:
    place, behind, stream = "attention", c.norms_behind, _stream(c)
    per_query, per_key = f"B × {c.n_heads:,} × T × {c.d_head:,}", f"B × {c.n_kv_heads:,} × T × {c.d_head:,}"
    query_width, key_width = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    if c.unet_skips if layer is None else c.layer_skips(layer):
        yield Part(
            "skip", "Skip from the first half", "norm", place, "1", stream,
            f"Adds what layer {c.n_layers - 1 - (layer or 0):,} gave, times a learned scalar.",
            "Jordan et al., 2024 (modded-nanogpt)", ("skip",),
            drawn=f"stream + w · its mirror, in {c.n_layers // 2:,} of {c.n_layers:,}",
        )  # fmt: skip
    if c.norm_placement != "after":
        yield _norm(c, "norm1", place, "norm1")
    per_group = c.n_heads // c.n_kv_heads
    shared = f" Each serves {per_group:,} query heads." if per_group > 1 else ""
    source = "Ainslie et al., 2023" if per_group > 1 else "Vaswani et al., 2017"
    of_query, of_key = (matrix(width, c.d_model, c.qkv_bias) for width in (query_width, key_width))
    if query_width == key_width:
        drawn = {"query": ("query, key, value", f"3 of {of_query}", per_query)}
    else:
        drawn = {"query": ("query", of_query, per_query), "key": ("key, value", f"2 of {of_key}", per_key)}
    linear = (
        ("query", "Query", of_query, per_query, "What each token looks for in the tokens before it, in each of "
         f"{c.n_heads:,} heads of {c.d_head:,} channels.", "Vaswani et al., 2017"),
        ("key", "Key", of_key, per_key, f"What each token offers to be found by, in {c.n_kv_heads:,} "
         f"heads.{shared} The KV cache keeps it.", source),
        ("value", "Value", of_key, per_key, f"What a token hands on where it is found, in {c.n_kv_heads:,} "
         f"heads.{shared} The KV cache keeps it.", source),
    )  # fmt: skip
    for key, name, weights, shape, words, source in linear:
        rows = (drawn[key],) if key in drawn else ()
        yield Part(key, name, "attention", place, weights, shape, words, source, (f"attention.{key}",), more_rows=rows)
    yield from _values(c, layer, per_key)
    if c.qk_norm:
        over = "all heads of a token together" if c.qk_norm == "whole" else "each head by itself"
        yield Part(
            "qk_norm", "RMSNorm of queries and keys", "norm", place, head_norms(c), per_query,
            f"Divides queries and keys by their root mean square, over {over}, so that scores stay bounded.",
            "Henry et al., 2020", ("attention.query_norm", "attention.key_norm"),
            more_rows=(("RMSNorm of queries and keys", head_norms(c), ""),),
        )  # fmt: skip
    if c.position == "rope":
        yield _rotary(c, layer or 0, per_query)
    window = c.layer_window(layer or 0)
    sees = f"the last {window:,} tokens, itself included" if window else "all tokens up to itself"
    seen = f"causal; {n_banded(c)} of {c.n_layers} see {c.window:,}" if n_banded(c) else "causal"
    dropped = f"dropout {c.dropout_attention:g}" if c.dropout_attention else ""
    yield Part(
        "scores", "Scores and weighted sum", "attention", place, "", per_query,
        f"{scores(c)}: how much each token takes of each that it sees. In this layer it sees {sees}. The values are "
        "summed with these weights.", "Vaswani et al., 2017" if window is None else "Beltagy et al., 2020",
        ("attention",),
        more_rows=(
            (scores(c), seen, f"B × {c.n_heads:,} × T × T"), ("weighted sum of values", dropped, per_query),
        ),
    )  # fmt: skip
    if c.attention_gate:
        yield Part(
            "attention_gate", "Gate of each head", "attention", place, dims((c.n_heads, c.d_gate)), per_query,
            f"Multiplies each head's result by a sigmoid of {_gate_reads(c)}.", "Qiu et al., 2025",
            ("attention.gating",), drawn="gate of each head",
        )  # fmt: skip
    yield Part(
        "out", "Output projection", "attention", place, matrix(c.d_model, query_width, c.out_bias), stream,
        f"Mixes the heads. The result{_scaled_residual(c)} is added to the residual stream.",
        "Vaswani et al., 2017", ("attention.out",), drawn="output projection",
    )  # fmt: skip
    if behind:
        yield _norm(c, behind[0], place, "norm1_after")


def _gate_reads(c: ModelConfig) -> str:
    return "what attention reads" if c.d_gate == c.d_model else f"the first {c.d_gate:,} channels that attention reads"


def _values(c: ModelConfig, layer: int | None, shape: str) -> Iterator[Part]:
    if c.value_residual and layer != 0:
        yield Part(
            "value_residual", "Value residual", "attention", "attention", "2", shape,
            "Mixes the layer's own values with the first layer's, by two learned scalars.", "Zhou et al., 2024",
            ("values.scalars",), more_rows=(("a · values + b · the first layer's", "2", ""),),
        )  # fmt: skip
    kinds = [c.layer_value_embedding(i) for i in range(c.n_layers)]
    width, gate = c.n_kv_heads * c.d_head, dims((c.n_kv_heads, c.d_gate))
    projection = dims((width, c.d_model))
    for kind, drawn, weights, added in (
        ("table", "token's vector", dims((c.vocab_size, width)), "the token's vector of this layer's table"),
        ("projected", "projection", projection, "what was projected"),
    ):
        if kind not in (kinds if layer is None else kinds[layer : layer + 1]):
            continue
        if kind == "projected":
            yield Part(
                "value_projection", "Projected value embedding", "attention", "attention", projection, shape,
                "Projects what entered the first block.", "Zhou et al., 2024", ("values.projection",),
            )  # fmt: skip
        n = kinds.count(kind)
        where = "" if n == c.n_layers else f", {n:,} of {c.n_layers:,}"
        yield Part(
            "value_gate", "Gate of the value embedding", "attention", "attention", gate, shape,
            f"Adds {added} to the values, times twice a sigmoid of {_gate_reads(c)}, one for each head.",
            "Karpathy, 2025 (nanochat)", ("values.gating",),
            more_rows=((f"values + gate · {drawn}{where}", f"{gate}, {weights}", ""),),
        )  # fmt: skip


def _rotary(c: ModelConfig, layer: int, shape: str) -> Part:
    if not c.layer_rotates(layer):
        words = "This layer does not turn queries and keys: it does not know positions."
    else:
        which = f"the first {c.d_rotary:,} of {c.d_head:,} channels" if c.d_rotary != c.d_head else "the channels"
        own = c.rotating_windows if c.layer_window(layer) else None
        how = ", ".join(filter(None, (base(own or c), scaled(own or c))))
        words = f"Turns {which} of queries and keys in pairs by the token's position ({how}), so that a score depends "
        words += "on how far two tokens are apart."
    rows: list[Row] = [("rotate queries and keys", ", ".join(filter(None, (turned(c), base(c)))), "")]
    if c.rope_scaling is not None:
        rows.append(("  scaled", scaled(c), ""))
    return Part(
        "rotary", "Rotate by position", "attention", "attention", "", shape, words, "Su et al., 2021",
        more_rows=tuple(rows),
    )  # fmt: skip


def _mlp(c: ModelConfig) -> Iterator[Part]:
    place = "mlp"
    if c.norm_placement != "after":
        yield _norm(c, "norm2", place, "norm2")
    yield from _experts(c) if c.n_experts else _matrices(c)
    if c.norms_behind:
        yield _norm(c, c.norms_behind[1], place, "norm2_after")


def _rows_of_mlp(c: ModelConfig, d_ff: int, tokens: str, indent: str = "") -> Iterator[Row]:
    """Yield the operations of an MLP with inner width `d_ff`; `tokens` are the leading dimensions of its shapes."""
    inner, up = f"{tokens} × {d_ff:,}", matrix(d_ff, c.d_model, c.mlp_bias)
    yield (f"{indent}gate, up", f"2 of {up}", inner) if c.gated else (f"{indent}up", up, inner)
    for words in (activation(c), *on_the_way(1, c.dropout_mlp)):
        yield f"{indent}{words}", "", inner
    yield f"{indent}down", matrix(c.d_model, d_ff, c.mlp_bias), f"{tokens} × {c.d_model:,}"


def _matrices(c: ModelConfig) -> Iterator[Part]:
    inner, up = f"B × T × {c.d_ff:,}", matrix(c.d_ff, c.d_model, c.mlp_bias)
    does, source = _ACTIVATIONS[c.mlp]
    if c.gated:
        yield Part(
            "gate", "Gate", "mlp", "mlp", up, inner, f"How much passes of each of {c.d_ff:,} channels.",
            "Shazeer, 2020", ("mlp.gate",),
        )  # fmt: skip
    yield Part(
        "up", "Up", "mlp", "mlp", up, inner, f"Reads {c.d_ff:,} features from each token's vector.",
        "Vaswani et al., 2017", ("mlp.up",), more_rows=tuple(_rows_of_mlp(c, c.d_ff, "B × T")),
    )  # fmt: skip
    dropped = "".join(f" Then {words}." for words in on_the_way(1, c.dropout_mlp))
    yield Part("activation", activation(c), "mlp", "mlp", "", inner, f"It {does}.{dropped}", source)
    yield Part(
        "down", "Down", "mlp", "mlp", matrix(c.d_model, c.d_ff, c.mlp_bias), _stream(c),
        f"Writes what the features stand for. The result{_scaled_residual(c)} is added to the residual stream.",
        "Vaswani et al., 2017", ("mlp.down",),
    )  # fmt: skip


def _experts(c: ModelConfig) -> Iterator[Part]:
    does, _ = _ACTIVATIONS[c.mlp]
    names = ("gate", "up", "down") if c.gated else ("up", "down")
    n, stream = c.n_experts_per_token, _stream(c)
    yield Part(
        "router", "Router", "mlp", "mlp", dims((c.n_experts, c.d_model)), f"B × T × {c.n_experts:,}",
        f"Chooses {n:,} of {c.n_experts:,} experts for each token, and how much of each counts.",
        "Shazeer et al., 2017", ("mlp.router",), drawn="router",
    )  # fmt: skip
    yield Part(
        "experts", f"{c.n_experts:,} experts", "mlp", "mlp", f"{c.n_experts:,} × {_of_mlp(c, c.d_ff)}", stream,
        f"MLPs of which {n:,} compute for a token; each {does}. The weighted sum"
        f"{_scaled_residual(c)} is added to the residual stream.", "Shazeer et al., 2017",
        tuple(f"mlp.experts.{e}.{name}" for e in range(c.n_experts) for name in names),
        more_rows=(
            (f"{c.n_experts:,} experts, {n:,} for each token:", "", ""),
            *_rows_of_mlp(c, c.d_ff, f"B × T × {n:,}", indent="  "), ("sum, weighted by the router", "", stream),
        ),
    )  # fmt: skip
    if c.d_ff_shared:
        yield Part(
            "shared_expert", "Shared expert", "mlp", "mlp", _of_mlp(c, c.d_ff_shared), stream,
            "An MLP that computes for every token, in addition to the chosen experts.", "Dai et al., 2024",
            tuple(f"mlp.shared.{name}" for name in names),
            more_rows=(
                ("+ a shared expert for every token", "", ""), *_rows_of_mlp(c, c.d_ff_shared, "B × T", indent="  "),
            ),
        )  # fmt: skip


def _of_mlp(c: ModelConfig, d_ff: int) -> str:
    up = matrix(d_ff, c.d_model, c.mlp_bias)
    return f"({'2 of ' if c.gated else ''}{up} · {matrix(c.d_model, d_ff, c.mlp_bias)})"


def _output(c: ModelConfig) -> Iterator[Part]:
    yield _norm(c, "norm", "output", "norm")
    then = f" The logits are {logits(c)}." if logits(c) else ""
    name, shape = "Head (tied)" if c.tie_embeddings else "Head", f"B × T × {c.vocab_size:,}"
    tied = " It is the token embedding's matrix, which is stored once." if c.tie_embeddings else ""
    yield Part(
        "head", name, "head", "output", dims((c.vocab_size, c.d_model)), shape,
        "Compares each token's vector with a vector for each token of the vocabulary: the logits of the next token."
        f"{tied}{then}",
        "Press & Wolf, 2017" if c.tie_embeddings else "Bengio et al., 2003",
        ("head",) if c.tie_embeddings else ("untied_head",), ("token_embedding",) if c.tie_embeddings else (),
        drawn=name.lower(), more_rows=((logits(c), "", shape),) if logits(c) else (),
    )  # fmt: skip
    if n := c.n_future_tokens - 1:
        which = (
            "the token after the next" if n == 1 else f"the {n:,} tokens after the next, each by a matrix of its own"
        )
        yield Part(
            "future_heads", "Heads of later tokens", "head", "output", future_weights(c), _stream(c),
            f"For training and for drafts: predicts {which}. SiLU of a projection is added to the vector that the head "
            "reads, and the head's matrix makes logits of the sum. Those of the next token do not depend on it.",
            "Gloeckle et al., 2024", tuple(f"future_heads.{i}" for i in range(n)),
            drawn="heads of later tokens, for training",
        )  # fmt: skip


def _scaled_residual(c: ModelConfig) -> str:
    scales = on_the_way(c.residual_scale, c.dropout_residual)
    return f" ({', '.join(scales)})" if scales else ""
