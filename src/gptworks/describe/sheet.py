"""The data sheet of `gptworks describe`, as JSON, for a terminal and as Markdown; page.py writes it as HTML.

Units are decimal (1 GB is 10⁹ bytes).
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from gptworks.config import ModelConfig
from gptworks.describe.diagram import diagram
from gptworks.describe.published import Figure, published_figures
from gptworks.describe.words import dims, n_banded, norm_name
from gptworks.pages import parts as html
from gptworks.pages.tables import Table
from gptworks.planning.flops import ForwardFlops, forward_flops
from gptworks.planning.inference import kv_cache_bytes
from gptworks.planning.params import ParameterCount, ParameterGroup, Shape, count_parameters
from gptworks.units import readable

WIDTH = 100
"""Maximum width of a sheet on a terminal, in columns."""


KINDS = {
    "token_embedding": "embedding", "position_embedding": "embedding",
    "bigram_embedding": "embedding", "attention_weights": "attention",
    "attention_biases": "attention", "qk_norms": "attention", "router": "mlp", "mlp_weights": "mlp",
    "mlp_biases": "mlp", "shared_expert": "mlp", "norms": "norm", "final_norm": "norm", "head": "head",
    "unet_skips": "norm", "value_residual": "attention", "value_embeddings": "embedding",
    "smear": "embedding", "value_projections": "attention", "value_gates": "attention", "attention_gates": "attention",
    "query_key_value": "attention", "attention_scores": "scores", "output_projection": "attention",
    "laboratory": "attention", "future_heads": "head",
}  # fmt: skip
"""Maps each group of parameters and each part of the FLOPs to its kind, which decides the colour. Unlisted parts of the
FLOPs are mlp."""

WORDS = {"query_key_value": "query, key, value", "attention_scores": "scores and weighted sum", "mlp": "MLP"}
"""Displayed names of parts of the FLOPs, if they differ from the keys."""


@dataclass(frozen=True)
class Sheet:
    """A model's data sheet, which rich can print; it converts to Markdown and JSON."""

    name: str
    config: ModelConfig
    parameters: ParameterCount
    flops: ForwardFlops
    """FLOPs of a forward pass over the full context."""
    published: tuple[Figure, ...]

    @property
    def kv_cache_bytes_per_token(self) -> int:
        """Bytes that each token of a sequence takes in an fp16 KV cache."""
        return kv_cache_bytes(self.config, length=1)

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of an fp16 KV cache for one sequence as long as the context."""
        return kv_cache_bytes(self.config)

    @property
    def groups(self) -> list[ParameterGroup]:
        """Groups that have parameters, and the head, which has none of its own if it is tied."""
        return [group for group in self.parameters.groups.values() if group.total or group.name == "head"]

    @property
    def totals(self) -> list[tuple[str, int, int]]:
        """Rows (label, number per block, number in the model) of all parameters and, with experts, of the parameters
        active for a token."""
        count, per_layer = self.parameters, sum(group.per_layer for group in self.groups if group.in_block)
        idle = (count.total - count.active) // self.config.n_layers
        for_a_token = [("for a token", per_layer - idle, count.active)] if self.config.n_experts else []
        return [("total", per_layer, count.total), *for_a_token]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The model's main figures as pairs (label, text)."""
        total, active, length = self.parameters.total, self.parameters.active, self.config.context_length
        return [
            ("parameters", f"{total:,}"),
            *([("active for a token", f"{active:,}")] if self.config.n_experts else []),
            ("outside the embeddings", f"{self.parameters.non_embedding:,}"),
            ("weights in fp32", readable(4 * total, "B")),
            ("weights in bf16", readable(2 * total, "B")),
            ("KV cache in fp16, a token", f"{self.kv_cache_bytes_per_token:,} B"),
            (f"KV cache in fp16, {length:,} tokens", readable(self.kv_cache_bytes, "B")),
            ("forward, a token", readable(self.flops.per_token_dense, "FLOP")),
            ("forward, only causal pairs", readable(self.flops.per_token_causal, "FLOP")),
            *([("heads of later tokens", readable(self.flops.future / length, "FLOP"))] if self.flops.future else []),
            ("training, a token", readable(self.flops.training_per_token_dense, "FLOP")),
        ]

    @property
    def flops_by_part(self) -> dict[str, float]:
        """Forward FLOPs per token by part, at the full context with dense attention."""
        flops, length = self.flops, self.flops.length
        return {
            "query_key_value": flops.query_key_value / length,
            "attention_scores": flops.attention_dense / length,
            "output_projection": flops.out / length,
            **dict(self._mlp_flops()),
            **({"laboratory": flops.laboratory / length} if flops.laboratory else {}),
            "head": flops.head / length,
        }

    def words_of(self, part: str) -> str:
        """Return the displayed name of a part of the FLOPs."""
        if part == "experts":
            return f"{self.config.n_experts_per_token:,} of {self.config.n_experts:,} experts"
        return WORDS.get(part, part.replace("_", " "))

    def _mlp_flops(self) -> Iterator[tuple[str, float]]:
        c, mlp = self.config, self.flops.mlp / self.flops.length
        if not c.n_experts:
            yield "mlp", mlp
            return
        router = 2.0 * len(c.layer_uses) * c.d_model * c.n_experts
        shared = 2.0 * len(c.layer_uses) * c.d_model * c.d_ff_shared * (3 if c.gated else 2)
        yield "router", router
        yield "experts", mlp - router - shared
        if shared:
            yield "shared_expert", shared

    def to_json(self) -> dict[str, Any]:
        """Return the sheet as JSON with stable keys: exact integer counts, and FLOPs per token at the full context."""
        sheet = {
            "name": self.name,
            "model": self.config.model_dump(mode="json"),
            "parameters": parameters_json(self.parameters),
            "memory": {
                "weights_fp32_bytes": 4 * self.parameters.total,
                "weights_bf16_bytes": 2 * self.parameters.total,
                "kv_cache_fp16_bytes_per_token": self.kv_cache_bytes_per_token,
                "kv_cache_fp16_bytes": self.kv_cache_bytes,
            },
            "flops": {
                "context_tokens": self.flops.length,
                "forward_per_token": self.flops.per_token_dense,
                "forward_per_token_causal": self.flops.per_token_causal,
                **({"future_heads_per_token": self.flops.future / self.flops.length} if self.flops.future else {}),
                "training_per_token": self.flops.training_per_token_dense,
                "parts_per_token": self.flops_by_part,
            },
        }
        return sheet | ({"published": [asdict(figure) for figure in self.published]} if self.published else {})

    @property
    def parameters_table(self) -> Table:
        """Table of the groups of parameters, with each group's share of all parameters."""
        total, largest = self.parameters.total, max(group.total for group in self.groups)
        rows: list[tuple[html.Cell, ...]] = [
            (
                label(group), tensors_text(group), html.number(group.per_layer) if group.in_block else "",
                html.number(group.total), html.percent(group.total / total),
                html.Bar(group.total / largest, KINDS[group.name]) if group.total else "",
            )
            for group in self.groups
        ]  # fmt: skip
        foot: list[tuple[html.Cell, ...]] = [
            (name, "", html.number(per_layer), html.number(n), "" if name == "total" else html.percent(n / total), "")
            for name, per_layer, n in self.totals
        ]
        return Table(("parameters", "tensors [out × in]", "a layer", "all layers", "share", ""), "lqrrrt", rows, foot)

    @property
    def flops_table(self) -> Table:
        """Table of the forward FLOPs of each part, with each part's share of all forward FLOPs."""
        total, parts = self.flops.per_token_dense, self.flops_by_part
        rows: list[tuple[html.Cell, ...]] = [
            (
                self.words_of(part), html.number(n, readable(n, "FLOP")), html.percent(n / total),
                html.Bar(n / max(parts.values()), KINDS.get(part, "mlp")),
            )
            for part, n in parts.items()
        ]  # fmt: skip
        totals = (
            ("forward", total), ("forward, only causal pairs", self.flops.per_token_causal),
            ("training", self.flops.training_per_token_dense),
        )  # fmt: skip
        foot = [(name, html.number(n, readable(n, "FLOP")), "", "") for name, n in totals]
        return Table(("forward FLOPs a token", "", "share", ""), "lrrt", rows, foot)

    @property
    def published_table(self) -> Table:
        """Table of published and exact figures with notes; without rows if `published` is empty."""
        rows: list[tuple[html.Cell, ...]] = []
        for each in self.published:
            quantity, published, exact, error, note = each.cells
            printed = published if isinstance(each.published, str) else html.number(each.published, published)
            ours = exact if each.exact is None else html.exact(html.number(each.exact, exact))
            rows.append((quantity, printed, ours, error, note))
        source = self.published[0].source if self.published else ""
        return Table((source, "published", "exact", "off by", "note"), "lrrrn", rows)

    @property
    def _tables(self) -> tuple[Table, ...]:
        facts = Table((f"at {self.flops.length:,} tokens", ""), "lr", self.facts)
        total = ("total", readable(self.flops.per_token_dense, "FLOP"), "")  # `facts` has the other totals
        return self.parameters_table.first(4), facts, replace(self.flops_table.first(3), foot=[total])

    def to_markdown(self) -> str:
        """Return the sheet as Markdown, with the diagram in a code block."""
        drawing = "\n".join(("```text", *diagram(self.config), "```"))
        lines = (summary(self), traits(self.config), drawing)
        tables = self._tables + ((self.published_table,) if self.published else ())
        blocks = [f"# {self.name}", *lines, *(table.markdown() for table in tables)]
        return "\n\n".join(blocks) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(WIDTH, options.max_width)
        parameters, facts, flops = (table.rich() for table in self._tables)
        right: RenderableType = Group(facts, flops)
        if width == WIDTH:
            right = RichTable.grid(padding=(0, 2))
            right.add_row(facts, flops)
        lines = Text(_wrapped(summary(self), width - 4), justify="center")
        lines.append("\n" + _wrapped(traits(self.config), width - 4), style="dim")
        panel = Panel(lines, title=f"[bold]{escape(self.name)}[/]", box=box.ROUNDED)
        notes = (Text(f" {each.quantity}: {each.note}", "dim") for each in self.published if each.note)
        published: list[RenderableType] = [self.published_table.first(4).rich(), *notes] if self.published else []
        content = Group(panel, _styled(diagram(self.config, width)), Text(), parameters, right, *published)
        yield from console.render(content, options.update(width=width))


def describe(config: ModelConfig, name: str | None = None) -> Sheet:
    """Return the data sheet of a model, with published figures if its settings equal a preset's. Raise a UserError if
    the vocabulary size is unknown."""
    return Sheet(name or "model", config, count_parameters(config), forward_flops(config), published_figures(config))


def parameters_json(parameters: ParameterCount) -> dict[str, Any]:
    """Return the parameter counts as JSON, in total and by group, with the shape of each tensor."""
    groups = {
        group.name: {
            "per_layer": group.per_layer if group.in_block else None,
            "total": group.total,
            "tensors": {name: list(shape) for name, shape in group.tensors.items()},
        }
        for group in parameters.groups.values()
    }
    return {name: getattr(parameters, name) for name in ("total", "active", "embedding", "non_embedding")} | {
        "groups": groups
    }


def summary(sheet: Sheet) -> str:
    """Return the model's size and dimensions in one line."""
    c, count = sheet.config, sheet.parameters
    parts = [
        f"{count.total:,} parameters" + (f", {count.active:,} for a token" if c.n_experts else ""),
        f"{c.n_layers:,} layer{'s' * (c.n_layers > 1)}",
        f"{c.d_model:,} wide",
        f"{c.n_heads:,} heads of {c.d_head:,}"
        + (f" ({c.n_kv_heads:,} key/value)" if c.n_kv_heads != c.n_heads else ""),
        *([f"{c.n_experts:,} experts"] if c.n_experts else []),
        f"{c.context_length:,} tokens",
    ]
    return " · ".join(parts)


def traits(c: ModelConfig) -> str:
    """Return the model's design choices in one line: positions, norms, activation, biases and so on."""
    biased = [name for name, there in (("qkv", c.qkv_bias), ("output", c.out_bias), ("MLP", c.mlp_bias)) if there]
    parts = [
        {"learned": "learned positions", "rope": "rotary positions", "none": "no positions"}[c.position]
        + (" in some layers" if "none" in c.rope_pattern else "")
        + (f" scaled × {c.rope_scaling.factor:g}" if c.rope_scaling else "")
        + (" outside windows" if c.rope_scaling and c.window_rope_theta else ""),
        norm_name(c)
        + {"before": "", "after": " behind each part", "both": " before and behind each part"}[c.norm_placement]
        + (" and QK-norm" if c.qk_norm else ""),
        *(["grouped queries"] if c.n_kv_heads != c.n_heads else []),
        *([f"{n_banded(c):,} of {c.n_layers:,} layers banded"] if n_banded(c) else []),
        {"gelu": "GELU", "gelu_tanh": "GELU", "relu2": "ReLU²", "swiglu": "SwiGLU"}.get(c.mlp, "GEGLU"),
        *(["parallel residual"] if c.parallel_residual else []),
        *(["Granite's multipliers"] if (c.residual_scale, c.logit_divisor) != (1, 1) else []),
        *(["scaled embedding"] if c.embedding_scale != 1 else []),
        *(name.replace("_", " ") for name in c.laboratory),
        *([f"learns {c.n_future_tokens:,} tokens ahead"] if c.n_future_tokens > 1 else []),
        *(["soft caps"] if c.attention_softcap or c.logit_softcap else []),
        {0: "no linear biases", 3: "linear biases"}.get(len(biased), f"biases in {' and '.join(biased)}"),
        "tied head" if c.tie_embeddings else "untied head",
    ]
    return " · ".join(parts)


def label(group: ParameterGroup) -> str:
    """Return the displayed name of a group of parameters."""
    return group.name.replace("_", " ").replace("qk", "query/key").replace("mlp", "MLP")


def tensors_text(group: ParameterGroup) -> str:
    """Return a group's tensors by shape: `query out [768 × 768] · key value [256 × 768]`; equal experts only once."""
    if not group.tensors:
        return "tied to the token embedding"
    tensors = {name: shape for name, shape in group.tensors.items() if not re.search(r"experts\.[1-9]", name)}
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in tensors.items():
        by_shape.setdefault(shape, []).append(name.split(".")[-2])
    if group.name in ("norms", "final_norm"):
        return " · ".join(f"{len(names)} × [{dims(shape)}]" for shape, names in by_shape.items())
    if len(group.tensors) == 1:
        return f"[{dims(*by_shape)}]"
    text = " · ".join(f"{' '.join(names)} [{dims(shape)}]" for shape, names in by_shape.items())
    n_alike = len(group.tensors) // len(tensors)
    return f"{n_alike:,} × ({text})" if n_alike > 1 else text


def _wrapped(text: str, width: int) -> str:
    """Break the text into lines of at most `width` columns, only between the parts that ` · ` separates."""
    first, *rest = text.split(" · ")
    lines = [first]
    for part in rest:
        if len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def _styled(lines: list[str]) -> Text:
    text = Text("\n".join(lines), no_wrap=True)
    text.highlight_regex(r"[─│╭╮╰╯├┤┬║═╔╗╚╝╪]+", "dim")
    text.highlight_regex(r"[▼◄+]", "bold cyan")
    text.highlight_regex(r"(?m)B × [^│║]*$", "cyan")
    text.highlight_regex(r"\d+ × block", "bold")
    return text
