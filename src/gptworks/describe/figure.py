"""The architecture as a figure: the whole model on the left, one of its blocks on the right.

Drawn from the configuration alone, in SVG; shapes and words are the terminal drawing's (diagram.py).
"""

from markupsafe import Markup

from gptworks.config import ModelConfig
from gptworks.describe.diagram import (
    activation,
    added_to_tokens,
    base,
    dims,
    head_gates,
    head_norms,
    logits,
    matrix,
    n_banded,
    norm_name,
    norm_weights,
    of_values,
    on_entry,
    on_the_way,
    scaled,
    scores,
    stack,
    turned,
)
from gptworks.pages.drawing import LABEL, SMALL, Drawing, combined, text_width
from gptworks.planning.params import count_parameters

WIDTH = 960.0
GAP = 12.0
"""Between boxes side by side."""
ROW = 34.0
"""Height of a box with one line."""
PAD = 12.0
"""Between a box's edge and its text."""

COLUMN_X, COLUMN_WIDTH = 34.0, 220.0
"""The whole model."""

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


# Boxes and lines ------------------------------------------------------------------------------------------------


class Column:
    """Boxes and arrows one below the other, drawn downwards from the height y."""

    def __init__(self, d: Drawing, x: float, y: float, width: float) -> None:
        self.d, self.x, self.y, self.width = d, x, y, width
        self.middle = x + width / 2

    def row(self, kind: str, name: str, weights: str = "", below: str = "") -> None:
        """A box with a name on its left and weights on its right, and perhaps a second line."""
        height, right = ROW + (18 if below else 0), self.x + self.width - PAD
        self.d.box(self.x, self.y, self.width, height, kind)
        room = self.width - 2 * PAD - (GAP if weights else 0)
        wanted = text_width(name, LABEL, bold=True), text_width(weights, SMALL)
        share = min(1.0, room / sum(wanted))
        self.d.text(self.x + PAD, self.y + 22, name, share * wanted[0], bold=True)
        if weights:
            self.d.text(right, self.y + 22, weights, share * wanted[1], anchor="end")
        if below:
            self.d.text(right, self.y + 40, below, self.width - 2 * PAD, anchor="end")
        self.y += height

    def tile(self, kind: str, name: str, weights: str = "") -> None:
        """A box with a name and weights below it, centred."""
        height = 48 if weights else ROW
        self.d.box(self.x, self.y, self.width, height, kind)
        y, room = self.y + (20 if weights else 22), self.width - PAD
        self.d.text(self.middle, y, name, room, bold=True, anchor="middle")
        if weights:
            self.d.text(self.middle, self.y + 38, weights, room, anchor="middle")
        self.y += height

    def arrow(self, gap: float) -> None:
        self.d.line((self.middle, self.y), (self.middle, self.y + gap), arrow=True)
        self.y += gap

    def flow(self, text: str, ground: str) -> None:
        """An arrow downwards that carries a shape."""
        self.arrow(40)
        _pill(self.d, self.middle, self.y - 23, text, ground)

    def fan(self, xs: tuple[float, ...], text: str, ground: str) -> None:
        """A line downwards that carries a shape and parts into several."""
        y = self.y + 30
        self.d.line((self.middle, self.y), (self.middle, y))
        self.d.line((xs[0], y), (xs[-1], y))
        for x in xs:
            self.d.line((x, y), (x, y + 16), arrow=True)
        _pill(self.d, self.middle, self.y + 14, text, ground)
        self.y += 46


def _pill(d: Drawing, x: float, y: float, text: str, ground: str) -> None:
    """A shape written over a line, which is interrupted for it."""
    width = text_width(text, SMALL) + 8
    d.box(x - width / 2, y - 8, width, 16, f"ground {ground}", radius=3)
    d.text(x, y + 4, text, width, anchor="middle")


# The whole model ------------------------------------------------------------------------------------------------


def _model(c: ModelConfig, height: float) -> Drawing:
    """From token ids to logits, the blocks drawn as bars as long as what each sees."""
    d = Drawing()
    column = Column(d, COLUMN_X, 20, COLUMN_WIDTH)
    stream, table = f"B × T × {c.d_model:,}", dims((c.vocab_size, c.d_model))
    middle, x, right = column.middle, COLUMN_X, COLUMN_X + COLUMN_WIDTH

    d.text(middle, 14, "token ids · B × T", COLUMN_WIDTH, anchor="middle")
    column.arrow(18)
    table_y = column.y + 24
    column.tile("embedding", " ".join(("Token embedding", *on_the_way(c.embedding_scale, 0))), table)
    for words, weights in added_to_tokens(c):
        column.arrow(16)
        column.tile("embedding", words, weights)
    if c.dropout_embedding:
        d.line((middle, column.y), (middle, column.y + 30))
        _pill(d, middle, column.y + 17, f"dropout {c.dropout_embedding:g}", "page")
        column.y += 30
    column.flow(stream, "page")
    foot = height - 20 - 18 - 48 - 24 - 48 - 40
    d.add("path", class_="zoom", d=f"M{right} {column.y} L{PANEL_X} 1 V{height - 1} L{right} {foot} Z")
    _stack(d, column.y, foot, c)
    column.y = foot
    column.flow(stream, "page")
    column.tile("norm", f"Final {norm_name(c)}", norm_weights(c))
    column.arrow(24)
    head_y = column.y + 24
    column.tile("embedding", "Head", table)
    column.arrow(18)
    by = logits(c) if c.logit_softcap else f"logits {logits(c)}".strip()
    d.text(middle, column.y + 13, f"{by} · B × T × {c.vocab_size:,}", COLUMN_WIDTH, anchor="middle")
    if c.tie_embeddings:
        d.line((x, table_y), (20, table_y), (20, head_y), (x, head_y), kind="tie")
        d.text(13, (table_y + head_y) / 2, "tied: the same matrix", head_y - table_y, anchor="middle", upright=True)
    return d


def _stack(d: Drawing, top: float, bottom: float, c: ModelConfig) -> None:
    """The blocks: a bar each, drawn to its right end (the token itself) from the first token that it sees."""
    x, width = COLUMN_X, COLUMN_WIDTH
    d.box(x, top, width, bottom - top, "block", radius=10)
    d.text(x + width / 2, top + 24, stack(c), width - 2 * PAD, bold=True, anchor="middle")
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
    for words, weights in (*on_entry(c), *of_values(c), *head_gates(c)):
        parts.text(PART_X, fork - 8, f"{words} ({weights})", PART_WIDTH)
        fork += 18
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
    """Attention or the MLP in a frame, fed from the height `fork`; the height of its end."""
    top = fork + 14
    column = Column(Drawing(), INNER_X, top + 40, INNER_WIDTH)
    if c.norm_placement != "after":
        column.row("norm", norm_name(c), norm_weights(c))
    if kind == "attention":
        title = "Attention"
        _attention(column, c)
    elif c.n_experts:
        title = "Mixture of experts"
        _experts(column, c)
    else:
        title = "MLP"
        _mlp(column, c, c.d_ff, "B × T", "mlp")
    if c.norms_behind:
        column.arrow(16)
        column.row("norm", norm_name(c), norm_weights(c))
    end = column.y + 16
    d.box(PART_X, top, PART_WIDTH, end - top, f"part {kind}", radius=10)
    d.text(PART_X + 16, top + 25, title, 200, bold=True)
    d.text(PART_X + PART_WIDTH - 16, top + 25, f"{count} parameters", 230, anchor="end")
    if from_stream:
        d.add("circle", class_="fork", cx=STREAM_X, cy=fork, r=4)
    start = [(STREAM_X, fork)] if from_stream else []
    d.line(*start, (MIDDLE, fork), (MIDDLE, top + 40), arrow=True)
    d.elements += column.d.elements
    d.line((MIDDLE, column.y), (MIDDLE, end))
    return end


def _added(d: Drawing, y: float, c: ModelConfig) -> float:
    """What a part gives, added to the residual stream."""
    y_plus = y + 20
    d.line((MIDDLE, y), (MIDDLE, y_plus), (STREAM_X + 10, y_plus), arrow=True)
    if words := on_the_way(c.residual_scale, c.dropout_residual):
        _pill(d, (PART_X + MIDDLE) / 2, y_plus, ", ".join(words), "panel")
    d.plus(STREAM_X, y_plus)
    return y_plus


def _attention(column: Column, c: ModelConfig) -> None:
    per_query, per_key = f"B × {c.n_heads:,} × T × {c.d_head:,}", f"B × {c.n_kv_heads:,} × T × {c.d_head:,}"
    query_width, key_width = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    d, width = column.d, (INNER_WIDTH - 2 * GAP) / 3
    thirds = [Column(d, INNER_X + i * (width + GAP), column.y + 46, width) for i in range(3)]
    query, key, value = thirds

    column.fan(tuple(third.middle for third in thirds), f"B × T × {c.d_model:,}", "attention")
    columns = (("Query", c.n_heads, query_width), ("Key", c.n_kv_heads, key_width), ("Value", c.n_kv_heads, key_width))
    for third, (name, heads, out) in zip(thirds, columns, strict=True):
        x, y, room = third.x + PAD, third.y, width - 2 * PAD
        d.box(third.x, y, width, 74, "op attention")
        d.text(x, y + 20, name, 60, bold=True)
        d.text(x + room, y + 20, f"{heads:,} head{'s' * (heads > 1)}", room - 60, anchor="end")
        d.text(x, y + 39, matrix(out, c.d_model, c.qkv_bias), room)
        _heads(d, x, y + 49, room, c.n_heads, c.n_heads // heads)
        third.y += 74
    query.flow(per_query, "attention")
    key.flow(per_key, "attention")
    pair = Column(d, INNER_X, query.y, 2 * width + GAP)
    whole = "all heads" if c.qk_norm == "whole" else "each head"
    rows = [("norm", f"RMSNorm of {whole}", head_norms(c), "")] if c.qk_norm else []
    if c.position == "rope":
        below = ", ".join(filter(None, (turned(c), scaled(c))))
        rows.append(("op attention", "Rotate by position", base(c), below))
    for row in rows:
        pair.row(*row)
        for third in (query, key):
            third.y = pair.y
            third.arrow(18)
        pair.y += 18
    _scores(pair, c)
    pair.flow(f"B × {c.n_heads:,} × T × T", "attention")
    d.line((value.middle, value.y), (value.middle, pair.y), arrow=True)
    _pill(d, value.middle, (value.y + pair.y) / 2, per_key, "attention")
    column.y = pair.y
    dropout = f"dropout {c.dropout_attention:g}" if c.dropout_attention else ""
    column.row("op attention", "Weighted sum of values", dropout)
    column.flow(f"B × T × {query_width:,}", "attention")
    column.row("op attention", "Output projection", matrix(c.d_model, query_width, c.out_bias))


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


def _scores(column: Column, c: ModelConfig) -> None:
    """The softmax, with a picture of what each query sees."""
    d, x, y = column.d, column.x, column.y
    d.box(x, y, column.width, 60, "op attention")
    banded = {window is not None for window in c.layer_windows}
    room = column.width - 2 * PAD - len(banded) * 52
    d.text(x + PAD, y + 25, scores(c), room, bold=True)
    words = "causal" if not n_banded(c) else f"{n_banded(c):,} of {c.n_layers:,} layers: last {c.window:,}"
    d.text(x + PAD, y + 45, words, room)
    for i, band in enumerate(sorted(banded, reverse=True)):
        _mask(d, x + column.width - PAD - 44 - 52 * i, y + 8, 44, band)
    column.y += 60


def _mask(d: Drawing, x: float, y: float, size: float, banded: bool) -> None:
    """Queries downwards, keys to the right: the lower triangle, or a band of it."""
    n = 8
    cell = size / n
    seen = [(i, j) for i in range(n) for j in range(i + 1) if not banded or i - j < 3]
    d.add("rect", class_="mask", x=x, y=y, width=size, height=size)
    path = "".join(f"M{x + j * cell:.6g} {y + i * cell:.6g}h{cell:.6g}v{cell:.6g}h{-cell:.6g}z" for i, j in seen)
    d.add("path", class_="heads", d=path)


def _mlp(column: Column, c: ModelConfig, d_ff: int, tokens: str, kind: str) -> None:
    """The matrices of an MLP of inner width `d_ff`, over what `tokens` says."""
    stream, inner = f"{tokens} × {c.d_model:,}", f"{tokens} × {d_ff:,}"
    up, down = matrix(d_ff, c.d_model, c.mlp_bias), matrix(c.d_model, d_ff, c.mlp_bias)
    narrow = column.width < 2 * 140 + GAP
    box = column.tile if narrow else column.row
    if narrow:
        column.tile("op mlp", *(("Gate and up", f"2 of {up}") if c.gated else ("Up", up)))
        column.flow(inner, kind)
    elif c.gated:
        half = (column.width - GAP) / 2
        sides = [Column(column.d, x, column.y + 46, half) for x in (column.x, column.x + half + GAP)]
        column.fan(tuple(side.middle for side in sides), stream, kind)
        for side, name in zip(sides, ("Gate", "Up"), strict=True):
            side.tile("op mlp", name, up)
        for side in sides:
            side.flow(inner, kind)
        column.y = sides[0].y
    else:
        column.flow(stream, kind)
        column.row("op mlp", "Up", up)
        column.flow(inner, kind)
    box("op mlp", activation(c))
    column.flow(inner, kind)
    box("op mlp", "Down", down)


def _experts(column: Column, c: ModelConfig) -> None:
    """A router, the experts in a strip with a few of them chosen, and one of them opened."""
    d, third = column.d, (INNER_WIDTH - 2 * GAP) / 3
    stream, k = f"B × T × {c.d_model:,}", c.n_experts_per_token
    routed = Column(d, INNER_X, column.y, 2 * third + GAP if c.d_ff_shared else INNER_WIDTH)
    shared = Column(d, INNER_X + INNER_WIDTH - third, column.y + 46, third)
    if c.d_ff_shared:
        column.fan((routed.middle, shared.middle), stream, "mlp")
        routed.y = column.y
    else:
        routed.flow(stream, "mlp")
    routed.row("op mlp", "Router", dims((c.n_experts, c.d_model)))
    _cells(routed, c)
    top, width = routed.y, routed.width - 8
    expert = Column(Drawing(), INNER_X + PAD, top + 30, width - 2 * PAD)
    words = f"Each of {c.n_experts:,} experts, {k:,} for a token" if c.n_experts > 1 else "The expert"
    expert.d.text(expert.x, top + 22, words, expert.width, bold=True)
    _mlp(expert, c, c.d_ff, f"B × T × {k:,}", "expert")
    for offset in (8, 4, 0):
        d.box(INNER_X + offset, top + offset, width, expert.y + PAD - top, "expert")
    d.elements += expert.d.elements
    opened = Column(d, INNER_X, expert.y + PAD + 8, width)
    d.line((opened.middle, expert.y), (opened.middle, opened.y))
    opened.flow(f"B × T × {k:,} × {c.d_model:,}", "mlp")
    column.y = opened.y
    if c.d_ff_shared:
        d.text(shared.middle, shared.y + 14, "Shared expert", third, bold=True, anchor="middle")
        shared.y += 24
        _mlp(shared, c, c.d_ff_shared, "B × T", "mlp")
        d.line((shared.middle, shared.y), (shared.middle, column.y), arrow=True)
        _pill(d, shared.middle, (shared.y + column.y) / 2, stream, "mlp")
    column.row("op mlp", "Sum, weighted by the router", "plus the shared expert's" if c.d_ff_shared else "")


def _cells(column: Column, c: ModelConfig) -> None:
    """A cell for each expert; those that some token is sent to are filled, and lines from the router lead to them."""
    k = c.n_experts_per_token
    per_row = min(c.n_experts, 32)
    n_rows = -(-c.n_experts // per_row)
    pitch, height = column.width / per_row, (20.0 if n_rows == 1 else 10.0)
    apart = c.n_experts // k
    chosen = {i * c.n_experts // k + (7 * i + 3) % apart for i in range(k)}  # one in each k-th, scattered
    top = column.y + 26
    for expert in range(c.n_experts):
        row, i = divmod(expert, per_row)
        x, y = column.x + i * pitch, top + row * height
        if expert in chosen:
            column.d.line((column.middle, column.y), (x + pitch / 2, top))
        kind = "chosen" if expert in chosen else "idle"
        column.d.add("rect", class_=kind, x=x + 1, y=y, width=pitch - 2, height=height - 2, rx=2)
    column.y = top + n_rows * height + 14


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
