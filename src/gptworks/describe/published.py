"""Compares the figures that documents print about models (`published.json`) with exact figures."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from gptworks.config import ModelConfig
from gptworks.planning.flops import TRAINING_PER_FORWARD, forward_flops
from gptworks.planning.inference import kv_cache_bytes, weights_bytes
from gptworks.planning.params import count_parameters, require_vocab_size
from gptworks.presets import preset
from gptworks.units import readable


@dataclass(frozen=True)
class Figure:
    """A figure that a document prints about a model, and its exact value."""

    document: str
    """Source of the figure: the number of a reference document, such as 002, or the name of a publication."""
    quantity: str
    unit: str
    published: float | str
    """The printed figure in `unit`, without prefixes such as kilo or mega; text if the document prints a range."""
    exact: float | None
    """The exact value in `unit`; None if the value must be measured, for which `note` has the command."""
    note: str = ""

    @property
    def source(self) -> str:
        return f"document {self.document}" if self.document.isdigit() else self.document

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Cells of a table row: quantity, published figure, exact figure, error and note.

        The error is `exact` for equal figures. Otherwise it is a factor if published / exact is at most 0.5 or at least
        2, else a percentage. It is empty if one of the figures is not a number.
        """
        published = self.published if isinstance(self.published, str) else _text(self.published, self.unit)
        exact, error = "to measure" if self.exact is None else _text(self.exact, self.unit), ""
        if not isinstance(self.published, str) and self.exact:
            ratio = self.published / self.exact
            error = f"{100 * (ratio - 1):+.2g} %" if 0.5 < ratio < 2 else f"× {ratio:.2g}"
            error = "exact" if ratio == 1 else error
        return self.quantity, published, exact, error, self.note


def _text(value: float, unit: str) -> str:
    if unit in ("%", "×", "s"):
        return f"{value:.4g} {unit}"
    return f"{value:,.0f} {unit}" if unit == "steps" else readable(value, unit)


def published_figures(config: ModelConfig) -> tuple[Figure, ...]:
    """Return the figures printed about the preset whose settings equal `config`; empty for other models."""
    for name, found in _published().items():
        if preset(name) == config:
            exact = _exact(config)
            return tuple(
                Figure(found["source"], quantity, unit, published, exact[unit][key] if key else None, note)
                for unit, key, quantity, published, note in found["figures"]
            )
    return ()


def _exact(config: ModelConfig) -> Mapping[str, Mapping[str, float]]:
    """Compute the exact figures, by unit and by the key in `published.json`."""
    count, flops = count_parameters(config), forward_flops(config)
    step = flops.per_token_dense * 512 * 2048
    table = require_vocab_size(config) * config.d_model
    untied = count.total + table * config.tie_embeddings
    groups = {name: group.total for name, group in count.groups.items()}
    of_a_layer = {f"{name}, a layer": group.per_layer for name, group in count.groups.items()}
    small_vocabulary = count_parameters(config.model_copy(update={"vocab_size": 512})).total
    state = 16 * count.total  # fp32 weights, gradients and AdamW's two moments
    return {
        "parameters": {
            "total": count.total, "active": count.active, "non_embedding": count.non_embedding, "table": table,
            "tables": groups["token_embedding"] + groups["position_embedding"],
            "block": sum(group.per_layer for group in count.groups.values() if group.in_block),
            "attention": groups["attention_weights"] // config.n_layers + groups["attention_biases"] // config.n_layers,
            "mlp": groups["mlp_weights"] // config.n_layers + groups["mlp_biases"] // config.n_layers,
            "of 512 tokens": small_vocabulary, **groups, **of_a_layer, **_sizes(),
        },
        "FLOP": {
            "token": flops.per_token_dense, "context": flops.total_dense, "step": step, "backward": 2 * step,
            "training step": TRAINING_PER_FORWARD * step, "scores": flops.attention_dense, "mlp": flops.mlp,
            "attention, a token": (flops.projections + flops.attention_dense) / flops.length,
            "mlp, a token": flops.mlp / flops.length,
        },
        "B": {
            "fp32": 4 * count.total, "fp16": 2 * count.total, "moments": 8 * count.total, "int8": count.total,
            "cache": kv_cache_bytes(config), "logits": 4 * 128 * 2048 * require_vocab_size(config),
            "training": state + 4 * 128 * 2048 * require_vocab_size(config),
            "mixed training": state + 2 * 128 * 2048 * require_vocab_size(config),
            "fp16 inference": 2 * count.total + kv_cache_bytes(config),
            **{f"{name}, fp32": 4 * n for name, n in _sizes().items()},
            **{f"{name}, fp16": 2 * n for name, n in _sizes().items()},
        },
        "%": {
            **{name: 100 * n / count.total for name, n in groups.items()},
            "head": 100 * groups["head"] / count.total, "tie": 100 * (untied - count.total) / untied,
            "loss": 100 * (1 - 0.3113 / 0.9742),  # losses of epochs 3 and 1 in document 003
        },
        "×": {"fp16": 4 / 2, "int8": 4 * count.total / weights_bytes(count, "int8")},
        "steps": {"600 examples": -(-600 * 3 // 4)},
    }  # fmt: skip


@cache
def _sizes() -> dict[str, int]:
    """Return the parameter counts, by preset, of the models with which the documents compare their own models."""
    return {name: count_parameters(preset(name)).total
            for name in ("gpt2", "gpt2-medium", "gpt2-large", "llama-2-7b")}  # fmt: skip


@cache
def _published() -> dict[str, Any]:
    """Read `published.json`: for each preset, a `source` and its `figures`, each with unit, key of the exact figure,
    name in the source, printed value and note. Figures without a key must be measured."""
    tree: dict[str, Any] = json.loads((files("gptworks.describe") / "published.json").read_text(encoding="utf-8"))
    return tree
