"""What `gptworks describe` and `gptworks plan` print: as data first, then for a terminal and as Markdown.

Bytes and FLOPs are decimal (1 GB is 10⁹ bytes). Memory in training and time are not planned yet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gptworks.config import ModelConfig, Recipe, TrainConfig
from gptworks.errors import UserError
from gptworks.plan.diagram import diagram, dims
from gptworks.plan.flops import ForwardFlops, forward_flops
from gptworks.plan.params import ParameterCount, ParameterGroup, Shape, count_parameters
from gptworks.plan.published import Figure, kv_cache_bytes, published_figures, readable

COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. (2022), table 3: about 20 tokens for each parameter at every size."""

WIDTH = 100
"""Columns that a sheet is laid out for."""


# ------------------------------------------------------------------------------------------------- describe


@dataclass(frozen=True)
class Sheet:
    """A model's data sheet. Print it with rich, or take it as Markdown or JSON."""

    name: str
    config: ModelConfig
    parameters: ParameterCount
    flops: ForwardFlops
    """Of one forward pass over the full context."""
    published: tuple[Figure, ...]

    @property
    def kv_cache_bytes_per_token(self) -> int:
        """fp16 bytes that the first tokens of a sequence take; banded layers stop growing at their window."""
        return kv_cache_bytes(self.config, length=1)

    @property
    def kv_cache_bytes(self) -> int:
        """fp16 bytes of one sequence at full context."""
        return kv_cache_bytes(self.config)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Labelled figures for people."""
        total, length = self.parameters.total, self.config.context_length
        return [
            ("parameters", f"{total:,}"),
            ("outside the embeddings", f"{self.parameters.non_embedding:,}"),
            ("weights in fp32", readable(4 * total, "B")),
            ("weights in bf16", readable(2 * total, "B")),
            ("KV cache in fp16, a token", f"{self.kv_cache_bytes_per_token:,} B"),
            (f"KV cache in fp16, {length:,} tokens", readable(self.kv_cache_bytes, "B")),
            ("forward, a token", readable(self.flops.per_token_dense, "FLOP")),
            ("forward, causal pairs alone", readable(self.flops.per_token_causal, "FLOP")),
            ("training, a token", readable(self.flops.training_per_token_dense, "FLOP")),
        ]

    @property
    def flops_by_part(self) -> list[tuple[str, float]]:
        """Forward FLOPs per token of each kind of product, attention dense."""
        flops, length = self.flops, self.flops.length
        return [
            ("query, key, value", (flops.query + flops.key + flops.value) / length),
            ("scores and weighted sum", flops.attention_dense / length),
            ("output projection", flops.out / length),
            ("MLP", flops.mlp / length),
            ("head", flops.head / length),
        ]

    def to_json(self) -> dict[str, Any]:
        """Stable keys. Counts are exact integers, bytes bytes, FLOPs per token floats at full context."""
        sheet = {
            "name": self.name,
            "model": self.config.model_dump(mode="json"),
            "parameters": _parameters_json(self.parameters),
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
                "training_per_token": self.flops.training_per_token_dense,
                "parts_per_token": dict(self.flops_by_part),
            },
        }
        return sheet | ({"published": [figure.to_json() for figure in self.published]} if self.published else {})

    @property
    def _tables(self) -> tuple["_Table", "_Table", "_Table"]:
        header = ("parameters", "tensors [out × in]", "a layer", "all layers")
        shares = _share_rows(self.flops_by_part, self.flops.per_token_dense)
        return (
            _Table(header, "llrr", _parameter_rows(self.parameters)),
            _Table((f"at {self.flops.length:,} tokens", ""), "lr", self.facts),
            _Table(("forward FLOPs a token", "", "share"), "lrr", shares),
        )

    def to_markdown(self) -> str:
        """The sheet for a document: the diagram as a code block, the tables as tables."""
        drawing = "\n".join(("```text", *diagram(self.config), "```"))
        blocks = [f"# {self.name}", _summary(self), drawing, *(table.markdown() for table in self._tables)]
        if self.published:
            header = (f"document {self.published[0].document}", "published", "exact", "off by", "note")
            blocks.append(_Table(header, "lrrrl", [figure.cells for figure in self.published]).markdown())
        return "\n\n".join(blocks) + "\n"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(WIDTH, options.max_width)
        parameters, facts, flops = (table.rich() for table in self._tables)
        beside: RenderableType = Group(facts, flops)
        if width == WIDTH:
            beside = Table.grid(padding=(0, 2))
            beside.add_row(facts, flops)
        summary = Panel(Text(_summary(self), justify="center"), title=f"[bold]{escape(self.name)}[/]", box=box.ROUNDED)
        content = Group(summary, _styled(diagram(self.config, width)), Text(), parameters, beside, *self._published())
        yield from console.render(content, options.update(width=width))

    def _published(self) -> Iterator[RenderableType]:
        """Published beside exact, the notes below."""
        if self.published:
            header = (f"document {self.published[0].document}", "published", "exact", "off by")
            yield _Table(header, "lrrr", [figure.cells[:-1] for figure in self.published]).rich()
            for figure in self.published:
                if figure.note:
                    yield Padding(Text(f"{figure.quantity}: {figure.note}", style="dim"), (0, 1))


def describe(config: ModelConfig, name: str | None = None) -> Sheet:
    """The data sheet of a model. Published figures stand on it where the settings are exactly a preset's.

    Raises:
        UserError: the vocabulary is not known yet.
    """
    return Sheet(name or "model", config, count_parameters(config), forward_flops(config), published_figures(config))


# ----------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Plan:
    """What a run comes to before it starts."""

    name: str
    parameters: ParameterCount
    flops_per_token: float
    """Forward and backward, at the training length, attention dense."""
    tokens_per_step: int
    steps: int | None
    """Optimizer steps; None where nothing known bounds them."""
    steps_reason: str
    """Which setting gives the steps, or why they are unknown."""
    optimizer_state_bytes: int
    shard_bytes_per_token: int
    n_train_tokens: int | None

    @property
    def tokens(self) -> int | None:
        """Tokens that the run reads, repeats included."""
        return None if self.steps is None else self.steps * self.tokens_per_step

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.tokens_per_step

    @property
    def total_flops(self) -> float | None:
        return None if self.steps is None else self.steps * self.flops_per_step

    @property
    def tokens_per_parameter(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.parameters.total

    @property
    def compute_optimal_tokens(self) -> int:
        """About as many tokens as a model of this size deserves (Hoffmann et al., 2022)."""
        return COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER * self.parameters.total

    @property
    def weights_bytes(self) -> int:
        """Weights in fp32, a tied head once; the file adds a header of some kilobytes."""
        return 4 * self.parameters.total

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and optimizer state."""
        return self.weights_bytes + self.optimizer_state_bytes

    @property
    def shards_bytes(self) -> int | None:
        """Training tokens on disk."""
        return None if self.n_train_tokens is None else self.n_train_tokens * self.shard_bytes_per_token

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Labelled figures for people."""
        optimal = f"about {COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER} are compute-optimal (Hoffmann et al., 2022)"
        shards = f"{self.shard_bytes_per_token} B a token"
        if self.shards_bytes is not None:
            shards = f"{readable(self.shards_bytes, 'B')} ({shards})"
        return [
            ("parameters", f"{self.parameters.total:,}"),
            ("tokens a step", f"{self.tokens_per_step:,}"),
            ("steps", f"{_or_unknown(self.steps)} ({self.steps_reason})"),
            ("tokens in all", _or_unknown(self.tokens)),
            ("tokens a parameter", f"{_or_unknown(self.tokens_per_parameter, '.3g')} ({optimal})"),
            ("training FLOPs a token", readable(self.flops_per_token, "FLOP")),
            ("training FLOPs a step", readable(self.flops_per_step, "FLOP")),
            ("training FLOPs in all", "unknown" if self.total_flops is None else readable(self.total_flops, "FLOP")),
            ("weights on disk, fp32", readable(self.weights_bytes, "B")),
            ("one checkpoint on disk", readable(self.checkpoint_bytes, "B")),
            ("token shards on disk", shards),
        ]

    def to_json(self) -> dict[str, Any]:
        """Stable keys; null where a figure is unknown before the run."""
        return {
            "name": self.name,
            "parameters": _parameters_json(self.parameters),
            "tokens_per_step": self.tokens_per_step,
            "steps": self.steps,
            "steps_reason": self.steps_reason,
            "tokens": self.tokens,
            "tokens_per_parameter": self.tokens_per_parameter,
            "compute_optimal_tokens": self.compute_optimal_tokens,
            "flops": {
                "per_token": self.flops_per_token,
                "per_step": self.flops_per_step,
                "total": self.total_flops,
            },
            "disk": {
                "weights_bytes": self.weights_bytes,
                "optimizer_state_bytes": self.optimizer_state_bytes,
                "checkpoint_bytes": self.checkpoint_bytes,
                "shard_bytes_per_token": self.shard_bytes_per_token,
                "shards_bytes": self.shards_bytes,
            },
        }

    def to_markdown(self) -> str:
        """The plan as a table."""
        return f"# {self.name}: plan\n\n{_Table(('', ''), 'll', self.facts).markdown()}\n"

    def __rich__(self) -> RenderableType:
        return _Table((self.name, "plan"), "ll", self.facts).rich()


def plan(recipe: Recipe, n_train_tokens: int | None = None) -> Plan:
    """What training `recipe` comes to, where `n_train_tokens` is the size of its prepared training split, if known.

    Raises:
        UserError: the vocabulary is not known yet, or the training split is shorter than one window.
    """
    model, train = recipe.model, recipe.train
    parameters = count_parameters(model)
    steps, reason = planned_steps(train, model.context_length, n_train_tokens)
    muon = parameters.block_matrices if train.optimizer == "muon" else 0
    return Plan(
        name=recipe.name,
        parameters=parameters,
        flops_per_token=forward_flops(model).training_per_token_dense,
        tokens_per_step=train.batch_size * model.context_length,
        steps=steps,
        steps_reason=reason,
        optimizer_state_bytes=4 * (2 * (parameters.total - muon) + muon),
        shard_bytes_per_token=2 if model.vocab_size <= 2**16 else 4,
        n_train_tokens=n_train_tokens,
    )


def planned_steps(train: TrainConfig, context_length: int, n_train_tokens: int | None) -> tuple[int | None, str]:
    """Optimizer steps and the setting that gives them: the first reached of max_steps and epochs, as far as known.

    An epoch visits each window of `gptworks.data.batches.Batches` once; a run is a whole number of steps.
    """
    if n_train_tokens is not None and n_train_tokens <= context_length:
        raise UserError(
            f"n_train_tokens={n_train_tokens} is shorter than one window (context_length={context_length}, and one): "
            f"use more text or a shorter context_length"
        )
    bounds: list[tuple[int, str]] = []
    unknown: list[str] = []
    if train.max_steps is not None:
        bounds.append((train.max_steps, f"max_steps={train.max_steps}"))
    if train.epochs is not None and n_train_tokens is not None:
        windows = max(1, (n_train_tokens - context_length) // context_length)
        steps = max(1, round(train.epochs * windows / train.batch_size))
        bounds.append((steps, f"epochs={train.epochs:g} over {n_train_tokens:,} tokens"))
    elif train.epochs is not None:
        unknown.append(f"epochs={train.epochs:g} needs the number of training tokens")
    if train.max_minutes is not None:
        unknown.append(f"max_minutes={train.max_minutes:g} depends on the machine's speed")
    if not bounds:
        return None, "; ".join(unknown)
    steps, reason = min(bounds)
    return steps, "; ".join((f"{'at most, by ' if unknown else ''}{reason}", *unknown))


# ------------------------------------------------------------------------------------------------- the rows


def _parameters_json(parameters: ParameterCount) -> dict[str, Any]:
    return {
        "total": parameters.total,
        "embedding": parameters.embedding,
        "non_embedding": parameters.non_embedding,
        "groups": {
            group.name: {
                "per_layer": group.per_layer if group.in_block else None,
                "total": group.total,
                "tensors": {name: list(shape) for name, shape in group.tensors.items()},
            }
            for group in parameters.groups.values()
        },
    }


def _summary(sheet: Sheet) -> str:
    c = sheet.config
    heads = f"{c.n_heads} heads of {c.d_head}" + (f" ({c.n_kv_heads} key/value)" if c.n_kv_heads != c.n_heads else "")
    layers = f"{c.n_layers} layer{'s' * (c.n_layers > 1)}"
    return (
        f"{sheet.parameters.total:,} parameters · {layers} · {c.d_model:,} wide · {heads} · {c.context_length:,} tokens"
    )


def _tensors_text(group: ParameterGroup) -> str:
    """Tensors of one shape together: `query out 768 × 768 · key value 256 × 768`."""
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in group.tensors.items():
        words = name.removesuffix(".weight").split(".")
        by_shape.setdefault(shape, []).append(words[-1] if len(words) < 3 else words[-2])
    if group.name in ("norms", "final_norm"):
        return " · ".join(f"{len(names)} × [{dims(shape)}]" for shape, names in by_shape.items())
    alone = len(group.tensors) == 1
    return " · ".join(
        ("" if alone else " ".join(names) + " ") + f"[{dims(shape)}]" for shape, names in by_shape.items()
    )


def _parameter_rows(parameters: ParameterCount) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for group in parameters.groups.values():
        label = group.name.replace("_", " ").replace("qk", "query/key").replace("mlp", "MLP")
        if group.total:
            per_layer = f"{group.per_layer:,}" if group.in_block else ""
            rows.append((label, _tensors_text(group), per_layer, f"{group.total:,}"))
        elif group.name == "head":
            rows.append((label, "tied to the token embedding", "", "0"))
    layer = sum(group.per_layer for group in parameters.groups.values() if group.in_block)
    return [*rows, ("total", "", f"{layer:,}", f"{parameters.total:,}")]


def _share_rows(parts: list[tuple[str, float]], total: float) -> list[tuple[str, ...]]:
    return [(part, readable(flops, "FLOP"), f"{flops / total:.1%}") for part, flops in [*parts, ("total", total)]]


def _or_unknown(value: float | None, form: str = ",") -> str:
    return "unknown" if value is None else f"{value:{form}}"


# ---------------------------------------------------------------------------------------------- renderings


@dataclass(frozen=True)
class _Table:
    header: tuple[str, ...]
    align: str
    """`l` or `r` for each column."""
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        rule = tuple("---:" if side == "r" else "---" for side in self.align)
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.rows))

    def rich(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for i, (title, side) in enumerate(zip(self.header, self.align, strict=True)):
            table.add_column(Text(title), justify="right" if side == "r" else "left", no_wrap=side == "r" or i == 0)
        for row in self.rows:
            table.add_row(*map(Text, row), style="bold" if row[0] == "total" else None)
        return table


def _styled(lines: list[str]) -> Text:
    text = Text("\n".join(lines), no_wrap=True)
    text.highlight_regex(r"[─│╭╮╰╯├┤┬║═╔╗╚╝╪]+", "dim")
    text.highlight_regex(r"[▼◄+]", "bold cyan")
    text.highlight_regex(r"(?m)B × [^│║]*$", "cyan")
    text.highlight_regex(r"\d+ × block", "bold")
    return text
