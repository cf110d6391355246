"""Writes a model's data sheet as an HTML page without scripts or downloads, for light and dark screens and A4 paper."""

from markupsafe import Markup

from gptworks.config import ModelConfig
from gptworks.describe.diagram import flow
from gptworks.describe.sheet import KINDS, Sheet, summary, traits
from gptworks.describe.words import stack
from gptworks.pages import parts as html
from gptworks.pages.chart import WIDE
from gptworks.pages.drawing import SMALL, Drawing, text_width
from gptworks.pages.page import page
from gptworks.units import readable

SHORT = {"query_key_value": "q, k, v", "attention_scores": "scores", "output_projection": "output"}
"""Short names of parts, for labels inside bars."""

NAMES = {"embedding": "embedding", "attention": "attention", "mlp": "MLP", "norm": "norms", "head": "head"}


def to_html(sheet: Sheet) -> str:
    """Return a data sheet as an HTML page, in which <data> elements hold the exact numbers."""
    parts = (
        _key_figures(sheet),
        html.section("Architecture", architecture(sheet.config)),
        html.section("Parameters and operations by part", html.figure(_shares(sheet))),
        html.section("Parameters", sheet.parameters_table.html()),
        html.columns(
            html.section("Memory", _memory(sheet)), html.section("Operations for a token", sheet.flops_table.html())
        ),
        html.section("Published and exact", sheet.published_table.html()),
        html.section("Settings", html.settings(sheet.config.model_dump(mode="json"))),
    )
    return page(
        sheet.name, (html.unbroken(summary(sheet)), html.unbroken(traits(sheet.config))), parts, _conventions(sheet)
    )


def architecture(c: ModelConfig) -> Markup:
    """Return a drawing of the data flow through the model and one block, as `diagram` draws it for a terminal."""
    return html.flow_boxes(flow(c), stack(c), f"B × T × {c.vocab_size:,}", c.parallel_residual)


def _key_figures(sheet: Sheet) -> Markup:
    count, flops, length = sheet.parameters, sheet.flops, sheet.config.context_length
    second, n = ("outside the embeddings", count.non_embedding)
    if sheet.config.n_experts:
        second, n = ("active for a token", count.active)
    return html.key_figures((
        ("parameters", html.large(count.total), f"{count.total:,}"),
        (second, html.large(n), f"{n:,}"),
        ("weights", html.large(2 * count.total, "B"), "in bf16"),
        ("KV cache", html.large(sheet.kv_cache_bytes, "B"), f"in fp16, {length:,} tokens"),
        ("forward, a token", html.large(flops.per_token_dense, "FLOP"), f"at {length:,} tokens"),
        ("training, a token", html.large(flops.training_per_token_dense, "FLOP"), "forward and backward"),
    ))  # fmt: skip


def _memory(sheet: Sheet) -> Markup:
    total, length = sheet.parameters.total, sheet.config.context_length
    return html.byte_table((
        ("weights in fp32", 4 * total),
        ("weights in bf16", 2 * total),
        ("KV cache in fp16, a token", sheet.kv_cache_bytes_per_token),
        (f"KV cache in fp16, {length:,} tokens", sheet.kv_cache_bytes),
    ))  # fmt: skip


Share = tuple[str, str, float]
"""A segment of a bar: kind of the part, which decides the colour; name of the part; amount."""


def _shares(sheet: Sheet) -> Markup:
    """Draw a bar with the parts' shares of the parameters and a bar with their shares of the FLOPs. For a model with
    experts, also draw a bar of the parameters active for a token."""
    count, flops = sheet.parameters, sheet.flops
    stored = dict.fromkeys(NAMES, 0)
    for group in count.groups.values():
        stored[KINDS[group.name]] += group.total
    active = stored | {"mlp": stored["mlp"] - (count.total - count.active)}

    def shares(amounts: dict[str, int]) -> list[Share]:
        return [(kind, NAMES[kind], amount) for kind, amount in amounts.items() if amount]

    rows = [("Parameters", f"{count.total:,}", shares(stored))]
    if sheet.config.n_experts:
        rows.append(("Parameters for a token", f"{count.active:,}", shares(active)))
    parts: list[Share] = [
        (KINDS.get(part, "mlp"), SHORT.get(part, sheet.words_of(part)), n) for part, n in sheet.flops_by_part.items()
    ]
    rows.append(("Operations for a token", f"{readable(flops.per_token_dense, 'FLOP')} forward", parts))
    drawing, described = Drawing(), []
    for i, (title, total, row) in enumerate(rows):
        y, x, whole = 84.0 * i, 0.0, sum(amount for _, _, amount in row)
        drawing.text(0, y + 14, title, 300, bold=True)
        drawing.text(WIDE, y + 14, total, 500, anchor="end")
        for kind, part, amount in row:
            width, text = WIDE * amount / whole, f"{part} {amount / whole:.1%}"
            drawing.add("rect", class_=f"share {kind}", x=x, y=y + 24, width=max(width - 2, 0.5), height=34, rx=2)
            fitting = (each for each in (text, text.rpartition(" ")[2]) if text_width(each, SMALL) <= width - 14)
            if words := next(fitting, None):
                drawing.text(x + 7, y + 45, words, width - 12)
            x += width
        described.append(f"{title}: " + ", ".join(f"{part} {amount / whole:.1%}" for _, part, amount in row))
    title = "Shares of parameters and operations"
    return drawing.svg(WIDE, 84.0 * len(rows) - 24, title, "; ".join(described), "shares")


def _conventions(sheet: Sheet) -> str:
    pairs = ", or those of its blocks in a layer with a short window" if sheet.config.window else ""
    return (
        "B sequences of T tokens; matrices are [out × in]. A multiply-add is two operations; matrix products are "
        "counted, norms, activations and softmax are not. Attention is counted over all pairs that plain products "
        f"form, T × T{pairs}; “only causal pairs” counts each pair that a token may see once. Operations are for one "
        f"token at the full context of {sheet.flops.length:,} tokens; training takes three times the forward pass. "
        "A tied head has no parameters of its own. kB, MB and GB are decimal. Written by gptworks describe."
    )
