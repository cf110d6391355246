"""Rewrites the tables of docs/reference-architectures.md for the presets that each table names.

python tests/reference_page.py
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from gptworks.config import ModelConfig
from gptworks.describe.published import published_figures
from gptworks.planning.flops import forward_flops
from gptworks.planning.params import count_parameters
from gptworks.presets import preset
from gptworks.units import readable

PAGE = Path(__file__).parent.parent / "docs" / "reference-architectures.md"


def current(page: str) -> str:
    """Return the page with up-to-date tables; the text between them is unchanged."""
    return re.sub(r"(?:^\|.*\n)+", lambda table: _table(table[0]), page, flags=re.MULTILINE)


def _table(old: str) -> str:
    header, rule = old.splitlines()[:2]
    names = dict.fromkeys(re.findall(r"^\| `([^`]+)`", old, re.MULTILINE))
    rows = _figures(names) if "| published |" in header else map(_dimensions, names)
    return "\n".join((header, rule, *("| " + " | ".join(map(str, cells)) + " |" for cells in rows))) + "\n"


def _figures(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for name in names:
        for figure in published_figures(preset(name)):
            quantity, published, exact, error, note = figure.cells
            note = note if figure.document.isdigit() else f"{figure.source}. {note}"
            yield f"`{name}`", quantity, published, f"**{exact}**", error, note


def _dimensions(name: str) -> tuple[str | float, ...]:
    c = preset(name)
    count = count_parameters(c)
    parameters = f"**{count.total:,}**" + (f", {count.active:,} for a token" if c.n_experts else "")
    inner = f"{c.n_experts} × {c.d_ff}, {c.n_experts_per_token} for a token" if c.n_experts else c.d_ff
    return (
        f"`{name}`", f"{c.vocab_size:,}", c.d_model, c.n_layers, _heads(c), inner, c.context_length, c.position,
        c.norm + (", QK-norm" if c.qk_norm else ""), c.mlp, _biases(c), "tied" if c.tie_embeddings else "untied",
        c.init, c.dropout_residual, parameters, readable(forward_flops(c).per_token_dense, "FLOP"),
    )  # fmt: skip


def _heads(c: ModelConfig) -> str:
    """Return `12`, or `12 / 4` if key/value heads differ in number; adds `of 128` if the width does not imply the head
    size."""
    heads = f"{c.n_heads}" if c.n_kv_heads == c.n_heads else f"{c.n_heads} / {c.n_kv_heads}"
    return heads if c.n_heads * c.d_head == c.d_model else f"{heads} of {c.d_head}"


def _biases(c: ModelConfig) -> str:
    """Return which layers have biases: `all`, `none`, or a list."""
    present = {"qkv": c.qkv_bias, "out": c.out_bias, "MLP": c.mlp_bias, "norms": c.norm_bias}
    return "all" if all(present.values()) else ", ".join(name for name in present if present[name]) or "none"


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
