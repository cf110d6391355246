"""The architecture as a figure: the whole model on the left, one of its blocks on the right.

Drawn from the configuration alone, in SVG; shapes and words are the terminal drawing's (diagram.py). Each function
draws from a height y downwards and returns the height that it reached.
"""

from markupsafe import Markup

from gptworks.config import ModelConfig
from gptworks.describe.diagram import (
    activation,
    dims,
    matrix,
    n_banded,
    norm_name,
    norm_weights,
    scaled,
    scores,
    turned,
)
from gptworks.pages.drawing import LABEL, SMALL, Drawing, combined, text_width
from gptworks.plan.params import count_parameters

WIDTH = 960.0
GAP = 12.0
"""Between boxes side by side."""
ROW = 34.0
"""Height of a box with one line."""
PAD = 12.0
"""Between a box's edge and its text."""

COLUMN_X, COLUMN_WIDTH = 34.0, 220.0
"""The whole model."""
COLUMN_MIDDLE = COLUMN_X + COLUMN_WIDTH / 2

PANEL_X, STREAM_X = 312.0, 348.0
"""One block, and the residual stream in it."""
PART_X, PART_WIDTH = 386.0, 548.0
"""Attention, or the MLP."""
INNER_X, INNER_WIDTH = PART_X + 16, PART_WIDTH - 32
MIDDLE = PART_X + PART_WIDTH / 2
ASIDE_X = 947.0
"""Where a parallel MLP's line runs past attention."""


def architecture_svg(config: ModelConfig, name: str, words: str) -> Markup:
    """The figure. `words` describe it to those who cannot see it."""
    block, bottom = _block(config)
    panel = Drawing()
    panel.box(PANEL_X, 0.5, WIDTH - PANEL_X - 0.5, bottom - 1, "panel", radius=10)
    return combined((panel, block, _model(config, bottom))).svg(
        WIDTH, bottom, f"Architecture of {name}", words, "architecture"
    )


# The whole model ------------------------------------------------------------------------------------------------


def _model(c: ModelConfig, height: float) -> Drawing:
    """From token ids to logits, the blocks drawn as bars as long as what each sees."""
    d = Drawing()
    stream, table = f"B × T × {c.d_model:,}", dims((c.vocab_size, c.d_model))
    middle, x, width = COLUMN_MIDDLE, COLUMN_X, COLUMN_WIDTH

    d.text(middle, 14, "token ids · B × T", width, anchor="middle")
    y = _arrow(d, middle, 20, 18)
    table_y = y + 24
    y = _tile(d, x, y, width, "embedding", "Token embedding", table)
    if c.position == "learned":
        positions = dims((c.context_length, c.d_model))
        y = _tile(d, x, _arrow(d, middle, y, 16), width, "embedding", "+ position embedding", positions)
    if c.dropout_embedding:
        d.line((middle, y), (middle, y + 30))
        _pill(d, middle, y + 17, f"dropout {c.dropout_embedding:g}", "page")
        y += 30
    y = _flow(d, middle, y, stream, "page", gap=40)
    foot = height - 20 - 18 - 48 - 24 - 48 - 40
    d.add("path", class_="zoom", d=f"M{x + width} {y} L{PANEL_X} 1 V{height - 1} L{x + width} {foot} Z")
    _stack(d, y, foot, c)
    y = _flow(d, middle, foot, stream, "page", gap=40)
    y = _tile(d, x, y, width, "norm", f"Final {norm_name(c)}", norm_weights(c))
    y = _arrow(d, middle, y, 24)
    head_y = y + 24
    y = _tile(d, x, y, width, "embedding", "Head", table)
    y = _arrow(d, middle, y, 18)
    d.text(middle, y + 13, f"logits · B × T × {c.vocab_size:,}", width, anchor="middle")
    if c.tie_embeddings:
        d.line((x, table_y), (20, table_y), (20, head_y), (x, head_y), kind="tie")
        d.text(13, (table_y + head_y) / 2, "tied: the same matrix", head_y - table_y, anchor="middle", upright=True)
    return d


def _stack(d: Drawing, top: float, bottom: float, c: ModelConfig) -> None:
    """The blocks: a bar each, drawn to its right end (the token itself) from the first token that it sees."""
    x, width = COLUMN_X, COLUMN_WIDTH
    d.box(x, top, width, bottom - top, "block", radius=10)
    d.text(x + width / 2, top + 24, f"{c.n_layers:,} × block", width - 2 * PAD, bold=True, anchor="middle")
    legend = [f"each sees all {c.context_length:,} tokens"]
    if n_banded(c):
        legend = [f"{n_banded(c):,} see the last {c.window:,} token{'s' * (c.window != 1)}"]
        if n_banded(c) < c.n_layers:
            legend.insert(0, f"{c.n_layers - n_banded(c):,} see all {c.context_length:,} tokens")
    for i, line in enumerate(reversed(legend)):
        d.text(x + width / 2, bottom - 14 - 17 * i, line, width - 2 * PAD, anchor="middle")
    first, room = top + 38, bottom - top - 38 - 14 - 17 * len(legend)
    pitch, left, longest = room / c.n_layers, x + 20, width - 40
    thickness = min(pitch / 2, 18.0)
    d.line((x + width / 2, first), (x + width / 2, first + room))
    for i, window in enumerate(c.layer_windows):
        length = longest * (window or c.context_length) / c.context_length
        bar_y = first + pitch * (i + 0.5) - thickness / 2
        if window is not None:
            d.add("rect", class_="unseen", x=left, y=bar_y, width=longest, height=thickness)
        d.add("rect", class_="seen", x=left + longest - length, y=bar_y, width=max(length, 1), height=thickness)


# One block ------------------------------------------------------------------------------------------------------


def _block(c: ModelConfig) -> tuple[Drawing, float]:
    """Attention and MLP beside the residual stream."""
    parts, count = Drawing(), count_parameters(c)
    per_layer = {name: group.per_layer for name, group in count.groups.items() if group.in_block}
    attention = sum(per_layer[name] for name in ("attention_weights", "attention_biases", "qk_norms"))
    mlp = sum(per_layer[name] for name in ("router", "mlp_weights", "mlp_biases", "shared_expert"))
    parts.text(PART_X, 27, "One block", 200, bold=True)
    parts.text(PART_X + PART_WIDTH, 27, f"{sum(per_layer.values()):,} parameters", 300, anchor="end")

    fork = 54.0
    bottom = _part(parts, fork, c, "attention", f"{attention:,}")
    end = _added(parts, bottom, c)
    middle = (fork + bottom) / 2
    if c.parallel_residual:
        beside = end + 26
        parts.line((MIDDLE, fork), (ASIDE_X, fork), (ASIDE_X, beside), (MIDDLE, beside))
    else:
        beside = end + 28
    bottom = _part(parts, beside, c, "mlp", f"{mlp:,}", from_stream=not c.parallel_residual)
    end = _added(parts, bottom, c)

    stream = Drawing()
    stream.line((STREAM_X, 1), (STREAM_X, end + 30), kind="stream", arrow=True)
    words = f"residual stream · B × T × {c.d_model:,}"
    stream.text(STREAM_X - 11, middle, words, bottom - fork, anchor="middle", upright=True)
    return combined((stream, parts)), end + 31


def _part(d: Drawing, fork: float, c: ModelConfig, kind: str, count: str, from_stream: bool = True) -> float:
    """Attention or the MLP in its frame, fed from the height `fork`."""
    top = fork + 14
    inside = Drawing()
    y = _row(inside, top + 40, "norm", norm_name(c), norm_weights(c))
    if kind == "attention":
        title, bottom = "Attention", _attention(inside, y, c)
    elif c.n_experts:
        title, bottom = "Mixture of experts", _experts(inside, y, c)
    else:
        title, bottom = "MLP", _mlp(inside, y, c, c.d_ff, "B × T", INNER_X, INNER_WIDTH, "mlp")
    d.box(PART_X, top, PART_WIDTH, bottom + 16 - top, f"part {kind}", radius=10)
    d.text(PART_X + 16, top + 25, title, 200, bold=True)
    d.text(PART_X + PART_WIDTH - 16, top + 25, f"{count} parameters", 230, anchor="end")
    if from_stream:
        d.add("circle", class_="fork", cx=STREAM_X, cy=fork, r=4)
        d.line((STREAM_X, fork), (MIDDLE, fork), (MIDDLE, top + 40), arrow=True)
    else:
        d.line((MIDDLE, fork), (MIDDLE, top + 40), arrow=True)
    d.elements += inside.elements
    d.line((MIDDLE, bottom), (MIDDLE, bottom + 16))
    return bottom + 16


def _added(d: Drawing, y: float, c: ModelConfig) -> float:
    """What a part gives, added to the residual stream."""
    y_plus = y + 20
    d.line((MIDDLE, y), (MIDDLE, y_plus), (STREAM_X + 10, y_plus), arrow=True)
    if c.dropout_residual:
        _pill(d, (PART_X + MIDDLE) / 2, y_plus, f"dropout {c.dropout_residual:g}", "panel")
    d.plus(STREAM_X, y_plus)
    return y_plus


def _attention(d: Drawing, y: float, c: ModelConfig) -> float:
    per_query, per_key = f"B × {c.n_heads:,} × T × {c.d_head:,}", f"B × {c.n_kv_heads:,} × T × {c.d_head:,}"
    query_width, key_width = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    width = (INNER_WIDTH - 2 * GAP) / 3
    left = [INNER_X + i * (width + GAP) for i in range(3)]
    query_x, key_x, value_x = (x + width / 2 for x in left)
    pair_width, pair_middle = 2 * width + GAP, INNER_X + width + GAP / 2

    y = _fan(d, MIDDLE, y, (query_x, key_x, value_x), f"B × T × {c.d_model:,}", "attention")
    columns = (("Query", c.n_heads, query_width), ("Key", c.n_kv_heads, key_width), ("Value", c.n_kv_heads, key_width))
    for x, (name, heads, out) in zip(left, columns, strict=True):
        d.box(x, y, width, 74, "op attention")
        d.text(x + PAD, y + 20, name, 60, bold=True)
        d.text(x + width - PAD, y + 20, f"{heads:,} head{'s' * (heads > 1)}", width - 2 * PAD - 60, anchor="end")
        d.text(x + PAD, y + 39, matrix(out, c.d_model, c.qkv_bias), width - 2 * PAD)
        _heads(d, x + PAD, y + 49, width - 2 * PAD, c.n_heads, c.n_heads // heads)
    y += 74
    value_y = y
    for x in (query_x, key_x):
        _flow(d, x, y, per_query if x == query_x else per_key, "attention")
    y += 40
    if c.qk_norm:
        y = _row(d, y, "norm", "RMSNorm of each head", f"2 of {c.d_head:,}", INNER_X, pair_width)
        for x in (query_x, key_x):
            _arrow(d, x, y, 18)
        y += 18
    if c.position == "rope":
        theta, below = f"θ = {c.rope_theta:,.10g}", ", ".join(filter(None, (turned(c), scaled(c))))
        y = _row(d, y, "op attention", "Rotate by position", theta, INNER_X, pair_width, below)
        for x in (query_x, key_x):
            _arrow(d, x, y, 18)
        y += 18
    y = _scores(d, y, pair_width, c)
    _flow(d, pair_middle, y, f"B × {c.n_heads:,} × T × T", "attention")
    d.line((value_x, value_y), (value_x, y + 40), arrow=True)
    _pill(d, value_x, (value_y + y + 40) / 2, per_key, "attention")
    dropout = f"dropout {c.dropout_attention:g}" if c.dropout_attention else ""
    y = _row(d, y + 40, "op attention", "Weighted sum of values", dropout)
    y = _flow(d, MIDDLE, y, f"B × T × {query_width:,}", "attention")
    return _row(d, y, "op attention", "Output projection", matrix(c.d_model, query_width, c.out_bias))


def _heads(d: Drawing, x: float, y: float, width: float, n_heads: int, n_queries: int) -> None:
    """A cell for each head, as wide as the `n_queries` query heads that it serves, in rows of at most 32 of these."""
    n_rows = -(-n_heads // 32)
    per_row = -(-n_heads // (n_rows * n_queries)) * n_queries
    n_rows = -(-n_heads // per_row)
    pitch, height = width / per_row, 14 / n_rows
    gap = min(2.0, pitch * n_queries * 0.25)
    cells = ""
    for head in range(n_heads // n_queries):
        row, column = divmod(head * n_queries, per_row)
        size = pitch * n_queries - gap
        cells += f"M{x + column * pitch:.6g} {y + row * height:.6g}h{size:.6g}v{height * 0.8:.6g}h{-size:.6g}z"
    d.add("path", class_="heads", d=cells)


def _scores(d: Drawing, y: float, width: float, c: ModelConfig) -> float:
    """The softmax, with a picture of what each query sees."""
    d.box(INNER_X, y, width, 60, "op attention")
    banded = {window is not None for window in c.layer_windows}
    masks = len(banded) * 52
    d.text(INNER_X + PAD, y + 25, scores(c), width - 2 * PAD - masks, bold=True)
    words = "causal" if not n_banded(c) else f"{n_banded(c):,} of {c.n_layers:,} layers: last {c.window:,}"
    d.text(INNER_X + PAD, y + 45, words, width - 2 * PAD - masks)
    for i, band in enumerate(sorted(banded, reverse=True)):
        _mask(d, INNER_X + width - PAD - 44 - 52 * i, y + 8, 44, band)
    return y + 60


def _mask(d: Drawing, x: float, y: float, size: float, banded: bool) -> None:
    """Queries downwards, keys to the right: the lower triangle, or a band of it."""
    n = 8
    cell = size / n
    seen = [(i, j) for i in range(n) for j in range(i + 1) if not banded or i - j < 3]
    d.add("rect", class_="mask", x=x, y=y, width=size, height=size)
    path = "".join(f"M{x + j * cell:.6g} {y + i * cell:.6g}h{cell:.6g}v{cell:.6g}h{-cell:.6g}z" for i, j in seen)
    d.add("path", class_="heads", d=path)


def _mlp(d: Drawing, y: float, c: ModelConfig, d_ff: int, tokens: str, x: float, width: float, kind: str) -> float:
    """The matrices of an MLP of inner width `d_ff`, over what `tokens` says."""
    middle, inner = x + width / 2, f"{tokens} × {d_ff:,}"
    up, down = matrix(d_ff, c.d_model, c.mlp_bias), matrix(c.d_model, d_ff, c.mlp_bias)
    if width < 2 * 140 + GAP:
        names = ("Gate and up", f"2 of {up}") if c.gated else ("Up", up)
        y = _tile(d, x, y, width, "op mlp", *names)
        y = _tile(d, x, _flow(d, middle, y, inner, kind), width, "op mlp", activation(c))
        return _tile(d, x, _flow(d, middle, y, inner, kind), width, "op mlp", "Down", down)
    if c.gated:
        half = (width - GAP) / 2
        left, right = x + half / 2, x + width - half / 2
        y = _fan(d, middle, y, (left, right), f"{tokens} × {c.d_model:,}", kind)
        _tile(d, x, y, half, "op mlp", "Gate", up)
        y = _tile(d, x + half + GAP, y, half, "op mlp", "Up", up)
        for side in (left, right):
            _flow(d, side, y, inner, kind)
        y += 40
    else:
        y = _row(d, _flow(d, middle, y, f"{tokens} × {c.d_model:,}", kind), "op mlp", "Up", up, x, width)
        y = _flow(d, middle, y, inner, kind)
    y = _row(d, y, "op mlp", activation(c), "", x, width)
    return _row(d, _flow(d, middle, y, inner, kind), "op mlp", "Down", down, x, width)


def _experts(d: Drawing, y: float, c: ModelConfig) -> float:
    """A router, the experts in a strip with a few of them chosen, and one of them opened."""
    third = (INNER_WIDTH - 2 * GAP) / 3
    width = 2 * third + GAP if c.d_ff_shared else INNER_WIDTH
    middle, shared_x = INNER_X + width / 2, INNER_X + INNER_WIDTH - third
    stream, k = f"B × T × {c.d_model:,}", c.n_experts_per_token
    if c.d_ff_shared:
        shared_y = y = _fan(d, MIDDLE, y, (middle, shared_x + third / 2), stream, "mlp")
    else:
        y = _flow(d, middle, y, stream, "mlp")
    y = _row(d, y, "op mlp", "Router", dims((c.n_experts, c.d_model)), INNER_X, width)
    y = _cells(d, y, middle, width, c)
    frame_y, frame_width, inside = y, width - 8, Drawing()
    words = f"Each of {c.n_experts:,} experts, {k:,} for a token" if c.n_experts > 1 else "The expert"
    inside.text(INNER_X + PAD, y + 22, words, frame_width - 2 * PAD, bold=True)
    y = _mlp(inside, y + 30, c, c.d_ff, f"B × T × {k:,}", INNER_X + PAD, frame_width - 2 * PAD, "expert")
    for offset in (8, 4, 0):
        d.box(INNER_X + offset, frame_y + offset, frame_width, y + PAD - frame_y, "expert")
    d.elements += inside.elements
    inside_middle = INNER_X + frame_width / 2
    d.line((inside_middle, y), (inside_middle, y + PAD + 8))
    y = _flow(d, inside_middle, y + PAD + 8, f"B × T × {k:,} × {c.d_model:,}", "mlp")
    if c.d_ff_shared:
        d.text(shared_x + third / 2, shared_y + 14, "Shared expert", third, bold=True, anchor="middle")
        bottom = _mlp(d, shared_y + 24, c, c.d_ff_shared, "B × T", shared_x, third, "mlp")
        d.line((shared_x + third / 2, bottom), (shared_x + third / 2, y), arrow=True)
        _pill(d, shared_x + third / 2, (bottom + y) / 2, stream, "mlp")
    name = "Sum, weighted by the router"
    return _row(d, y, "op mlp", name, "plus the shared expert's" if c.d_ff_shared else "")


def _cells(d: Drawing, y: float, middle: float, width: float, c: ModelConfig) -> float:
    """A cell for each expert; those that some token is sent to are filled, and lines from the router lead to them."""
    k = c.n_experts_per_token
    per_row = min(c.n_experts, 32)
    n_rows = -(-c.n_experts // per_row)
    pitch, height = width / per_row, (20.0 if n_rows == 1 else 10.0)
    apart = c.n_experts // k
    chosen = {i * c.n_experts // k + (7 * i + 3) % apart for i in range(k)}  # one in each k-th, scattered
    top = y + 26
    for expert in range(c.n_experts):
        row, column = divmod(expert, per_row)
        x = INNER_X + column * pitch
        kind = "chosen" if expert in chosen else "idle"
        if expert in chosen:
            d.line((middle, y), (x + pitch / 2, top))
        d.add("rect", class_=kind, x=x + 1, y=top + row * height, width=pitch - 2, height=height - 2, rx=2)
    return top + n_rows * height + 14


# Shares ---------------------------------------------------------------------------------------------------------

Share = tuple[str, str, float]
"""A part's kind (its colour), its name, and how much it is."""


def shares_svg(rows: list[tuple[str, str, list[Share]]], words: str) -> Markup:
    """A bar a row, each cut into its parts: a title, the sum in words, and the shares."""
    d, y = Drawing(), 0.0
    for title, total, shares in rows:
        d.text(0, y + 14, title, 300, bold=True)
        d.text(WIDTH, y + 14, total, 500, anchor="end")
        x, whole = 0.0, sum(amount for _, _, amount in shares)
        for kind, part, amount in shares:
            width = WIDTH * amount / whole
            d.add("rect", class_=f"share {kind}", x=x, y=y + 24, width=max(width - 2, 0.5), height=34, rx=2)
            percent = f"{amount / whole:.1%}"
            for text in (f"{part} {percent}", percent):
                if text_width(text, SMALL) <= width - 14:
                    d.text(x + 7, y + 45, text, width - 12)
                    break
            x += width
        y += 84
    return d.svg(WIDTH, y - 24, "Shares of parameters and operations", words, "shares")


# Boxes and lines ------------------------------------------------------------------------------------------------


def _row(
    d: Drawing,
    y: float,
    kind: str,
    name: str,
    weights: str = "",
    x: float = INNER_X,
    width: float = INNER_WIDTH,
    below: str = "",
) -> float:
    """A box with a name on its left and weights on its right, and perhaps a second line."""
    height = ROW + (18 if below else 0)
    d.box(x, y, width, height, kind)
    room = width - 2 * PAD - (GAP if weights else 0)
    wanted = text_width(name, LABEL, bold=True), text_width(weights, SMALL)
    share = min(1.0, room / sum(wanted))
    d.text(x + PAD, y + 22, name, share * wanted[0], bold=True)
    if weights:
        d.text(x + width - PAD, y + 22, weights, share * wanted[1], anchor="end")
    if below:
        d.text(x + width - PAD, y + 40, below, width - 2 * PAD, anchor="end")
    return y + height


def _tile(d: Drawing, x: float, y: float, width: float, kind: str, name: str, weights: str = "") -> float:
    """A box with a name and weights below it, centred."""
    height = 48 if weights else ROW
    d.box(x, y, width, height, kind)
    d.text(x + width / 2, y + (20 if weights else 22), name, width - PAD, bold=True, anchor="middle")
    if weights:
        d.text(x + width / 2, y + 38, weights, width - PAD, anchor="middle")
    return y + height


def _flow(d: Drawing, x: float, y: float, text: str, ground: str, gap: float = 40) -> float:
    """An arrow downwards that carries a shape."""
    d.line((x, y), (x, y + gap), arrow=True)
    _pill(d, x, y + gap / 2 - 3, text, ground)
    return y + gap


def _arrow(d: Drawing, x: float, y: float, gap: float) -> float:
    d.line((x, y), (x, y + gap), arrow=True)
    return y + gap


def _fan(d: Drawing, start: float, y: float, xs: tuple[float, ...], text: str, ground: str) -> float:
    """A line from (start, y) that carries a shape and parts into several."""
    d.line((start, y), (start, y + 30))
    d.line((xs[0], y + 30), (xs[-1], y + 30))
    for x in xs:
        d.line((x, y + 30), (x, y + 46), arrow=True)
    _pill(d, start, y + 14, text, ground)
    return y + 46


def _pill(d: Drawing, x: float, y: float, text: str, ground: str) -> None:
    """A shape written over a line, which is interrupted for it."""
    width = text_width(text, SMALL) + 8
    d.box(x - width / 2, y - 8, width, 16, f"ground {ground}", radius=3)
    d.text(x, y + 4, text, width, anchor="middle")
