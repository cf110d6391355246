"""A model's data sheet as a page: one file without network or script, for light and dark screens and for A4."""

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from gptworks.errors import UserError
from gptworks.files import write_whole
from gptworks.plan.figure import Share, architecture_svg, shares_svg
from gptworks.plan.published import readable
from gptworks.plan.sheet import Sheet, label, summary, tensors_text, traits

KINDS = {
    "token_embedding": "embedding", "position_embedding": "embedding", "attention_weights": "attention",
    "attention_biases": "attention", "qk_norms": "attention", "router": "mlp", "mlp_weights": "mlp",
    "mlp_biases": "mlp", "shared_expert": "mlp", "norms": "norm", "final_norm": "norm", "head": "head",
    "query, key, value": "attention", "scores and weighted sum": "scores", "output projection": "attention",
}  # fmt: skip
"""Colour of each group of parameters and of each part of the operations; the rest are the MLP's."""

SHORT = {"query, key, value": "q, k, v", "scores and weighted sum": "scores", "output projection": "output"}
"""Names that fit into a bar."""

COUNTS = {"k": "thousand", "M": "million", "G": "billion", "T": "trillion"}

NAMES = {"embedding": "embedding", "attention": "attention", "mlp": "MLP", "norm": "norms", "head": "head"}


def to_html(sheet: Sheet) -> str:
    """The page. Numbers stand in <data> elements with their exact values."""
    style = files("gptworks.plan").joinpath("sheet.css").read_text(encoding="utf-8")
    words = f"{summary(sheet)}. {traits(sheet.config)}."
    sections = (
        f"<figure>{architecture_svg(sheet.config, sheet.name, words)}</figure>",
        f"<h2>Parameters and operations by part</h2><figure>{_shares(sheet)}</figure>",
        f"<h2>Parameters</h2>{_parameters(sheet)}",
        *([f"<h2>Published beside exact</h2>{_published(sheet)}"] if sheet.published else []),
        f"<h2>Settings</h2>{_settings(sheet)}",
    )
    beside = "".join(
        f"<section><h2>{title}</h2>{table}</section>"
        for title, table in (("Memory", _memory(sheet)), ("Operations for a token", _operations(sheet)))
    )
    written = [f"<section>{section}</section>" for section in sections]
    written.insert(3, f'<div class="columns">{beside}</div>')
    name = escape(sheet.name)
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{name}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>",
            f"<header><h1>{name}</h1><p>{_line(summary(sheet))}</p><p>{_line(traits(sheet.config))}</p></header>",
            _key_figures(sheet),
            *written,
            f"<footer><p>{_conventions(sheet)}</p></footer>",
            "</main>\n</body>\n</html>\n",
        )
    )


def write_html(sheet: Sheet, path: Path) -> None:
    """Write the page at once, over an older one.

    Raises:
        UserError: the path is a folder, or lies in none.
    """
    if path.is_dir():
        raise UserError(f"--html {path} is a folder: name a file, such as {path / 'sheet.html'}")
    if not path.parent.is_dir():
        raise UserError(f"--html {path}: there is no folder {path.parent}; make it first")
    write_whole(path, to_html(sheet))


def _line(text: str) -> str:
    """Broken between its parts alone."""
    return escape(text).replace(" ", "\xa0").replace("\xa0·\xa0", "\xa0· ")


def _key_figures(sheet: Sheet) -> str:
    count, flops, length = sheet.parameters, sheet.flops, sheet.config.context_length
    second, n = ("outside the embeddings", count.non_embedding)
    if sheet.config.n_experts:
        second, n = ("active for a token", count.active)
    figures = (
        ("parameters", count.total, "", f"{count.total:,}"),
        (second, n, "", f"{n:,}"),
        ("weights", 2 * count.total, "B", "in bf16"),
        ("KV cache", sheet.kv_cache_bytes, "B", f"in fp16, {length:,} tokens"),
        ("forward, a token", flops.per_token_dense, "FLOP", f"at {length:,} tokens"),
        ("training, a token", flops.training_per_token_dense, "FLOP", "forward and backward"),
    )
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{_large(value, unit)}</dd><dd>{note}</dd></div>"
        for name, value, unit, note in figures
    )
    return f'<dl class="figures">{tiles}</dl>'


def _large(value: float, unit: str) -> str:
    """`265.2 million` for a count, `530.3 MB` for the rest."""
    number, _, prefixed = readable(value, unit).partition(" ")
    words = prefixed if unit else COUNTS.get(prefixed, prefixed)
    return f'<data value="{_plain(value)}">{number} <small>{words}</small></data>'


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _number(value: float, text: str | None = None) -> str:
    return f'<data value="{_plain(value)}">{f"{value:,}" if text is None else text}</data>'


def _table(header: Sequence[str], align: str, rows: Iterable[Sequence[str]], foot: Iterable[Sequence[str]] = ()) -> str:
    """Cells are markup; in `align` a letter a column: l, r (numbers), q (quiet), t (the track of a bar), n (a note)."""
    kinds = {"l": "", "r": ' class="number"', "q": ' class="quiet"', "t": ' class="track"', "n": ' class="note"'}
    heads = "".join(
        f'<th scope="col"{kinds[side] if side == "r" else ""}>{title}</th>' if title else "<td></td>"
        for title, side in zip(header, align, strict=True)
    )

    def lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
        for first, *rest in rows:
            cells = "".join(f"<td{kinds[side]}>{cell}</td>" for cell, side in zip(rest, align[1:], strict=True))
            yield f'<tr><th scope="row">{first}</th>{cells}</tr>'

    footer = "".join(lines(foot))
    return (
        f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines(rows))}</tbody>"
        + (f"<tfoot>{footer}</tfoot>" if footer else "")
        + "</table>"
    )


def _percent(share: float) -> str:
    return "" if not share else "&lt; 0.1%" if share < 0.0005 else f"{share:.1%}"


def _bar(share: float, kind: str) -> str:
    return f'<span class="bar {kind}" style="width:{share:.2%}"></span>'


def _parameters(sheet: Sheet) -> str:
    count, per_layer = sheet.parameters, sheet.parameters_per_layer
    groups = [group for group in count.groups.values() if group.total or group.name == "head"]
    largest = max(group.total for group in groups)
    rows = [
        (
            label(group),
            escape(tensors_text(group)).replace(" × ", "\xa0×\xa0") if group.total else "tied to the token embedding",
            _number(group.per_layer) if group.in_block else "",
            _number(group.total),
            _percent(group.total / count.total),
            _bar(group.total / largest, KINDS[group.name]) if group.total else "",
        )
        for group in groups
    ]
    foot = [("total", "", _number(per_layer), _number(count.total), "", "")]
    if sheet.config.n_experts:
        idle = count.total - count.active
        active = _number(per_layer - idle // sheet.config.n_layers), _number(count.active)
        foot.append(("for a token", "", *active, _percent(count.active / count.total), ""))
    header = ("group", "tensors [out × in]", "a layer", "all layers", "share", "")
    return _table(header, "lqrrrt", rows, foot)


def _memory(sheet: Sheet) -> str:
    total, length = sheet.parameters.total, sheet.config.context_length
    figures = (
        ("weights in fp32", 4 * total),
        ("weights in bf16", 2 * total),
        ("KV cache in fp16, a token", sheet.kv_cache_bytes_per_token),
        (f"KV cache in fp16, {length:,} tokens", sheet.kv_cache_bytes),
    )
    largest = max(n_bytes for _, n_bytes in figures)
    rows = [(name, _number(n, readable(n, "B")), _bar(n / largest, "memory")) for name, n in figures]
    return _table(("", "bytes", ""), "lrt", rows)


def _operations(sheet: Sheet) -> str:
    flops = sheet.flops
    total, parts = flops.per_token_dense, sheet.flops_by_part
    largest = max(n for _, n in parts)
    rows = [
        (part, _number(n, readable(n, "FLOP")), _percent(n / total), _bar(n / largest, KINDS.get(part, "mlp")))
        for part, n in parts
    ]
    totals = (
        ("forward", total),
        ("forward, causal pairs alone", flops.per_token_causal),
        ("training", flops.training_per_token_dense),
    )
    foot = [(name, _number(n, readable(n, "FLOP")), "", "") for name, n in totals]
    return _table(("", "FLOP", "share", ""), "lrrt", rows, foot)


def _shares(sheet: Sheet) -> str:
    """Bars of the parameters, of those that take part for one token, and of the operations."""
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
    parts: list[Share] = [(KINDS.get(part, "mlp"), SHORT.get(part, part), n) for part, n in sheet.flops_by_part]
    rows.append(("Operations for a token", f"{readable(flops.per_token_dense, 'FLOP')} forward", parts))
    words = "; ".join(
        f"{title}: " + ", ".join(f"{part} {n / sum(a for _, _, a in row):.1%}" for _, part, n in row)
        for title, _, row in rows
    )
    return shares_svg(rows, words)


def _published(sheet: Sheet) -> str:
    rows = []
    for figure in sheet.published:
        quantity, published, exact, error, note = map(escape, figure.cells)
        as_printed = published if isinstance(figure.published, str) else _number(figure.published, published)
        rows.append((quantity, as_printed, f'<span class="exact">{_number(figure.exact, exact)}</span>', error, note))
    header = (escape(sheet.published[0].source), "published", "exact", "off by", "")
    return _table(header, "lrrrn", rows)


def _settings(sheet: Sheet) -> str:
    """Each setting as a recipe has it."""
    pairs = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in _flat(sheet.config.model_dump(mode="json"))
    )
    return f'<dl class="settings">{pairs}</dl>'


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield prefix + name, ", ".join(map(str, value))
        else:
            yield prefix + name, value if isinstance(value, str) else json.dumps(value)


def _conventions(sheet: Sheet) -> str:
    pairs = ", or those of its blocks in a layer with a short window" if sheet.config.window else ""
    return (
        "B sequences of T tokens; matrices are [out × in]. A multiply-add is two operations; matrix products are "
        "counted, norms, activations and softmax are not. Attention is counted over all pairs that plain products "
        f"form, T × T{pairs}; “causal pairs alone” counts each pair that a token may see once. Operations are for one "
        f"token at the full context of {sheet.flops.length:,} tokens; training takes three times the forward pass. "
        "A tied head has no parameters of its own. kB, MB and GB are decimal. Written by gptworks describe."
    )
