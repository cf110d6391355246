"""Figures that documents print about their models, beside the exact ones."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gptworks.config import ModelConfig
from gptworks.plan.flops import TRAINING_PER_FORWARD, forward_flops
from gptworks.plan.inference import kv_cache_bytes
from gptworks.plan.params import count_parameters
from gptworks.presets import GPT3_SIZES, preset
from gptworks.units import readable


@dataclass(frozen=True)
class Figure:
    """A figure that a document prints, and the exact one."""

    document: str
    """The number of one of the five reference documents, or a publication."""
    quantity: str
    unit: str
    published: float | str
    """In units, not in thousands or millions; text where the document prints a range."""
    exact: float
    note: str = ""

    @property
    def source(self) -> str:
        return f"document {self.document}" if self.document.isdigit() else self.document

    @property
    def error_text(self) -> str:
        """How far the published figure is off: in percent, or as a factor where it is more than half or twice."""
        if isinstance(self.published, str):
            return ""
        ratio = self.published / self.exact
        if ratio == 1:
            return "exact"
        return f"{100 * (ratio - 1):+.2g} %" if 0.5 < ratio < 2 else f"× {ratio:.2g}"

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Quantity, published, exact, error and note, for a table."""
        published = self.published if isinstance(self.published, str) else readable(self.published, self.unit)
        return self.quantity, published, readable(self.exact, self.unit), self.error_text, self.note

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def published_figures(config: ModelConfig) -> tuple[Figure, ...]:
    """The figures printed about the preset whose settings these are; empty for any other model."""
    for name, (document, *rows) in _PUBLISHED.items():
        if preset(name) == config:
            exact = _exact(config)
            return tuple(
                Figure(document, quantity, unit, published, exact[unit][key], note)
                for unit, key, quantity, published, note in rows
            )
    return ()


def _exact(config: ModelConfig) -> Mapping[str, Mapping[str, float]]:
    """What documents print figures of, by unit and key."""
    count, flops = count_parameters(config), forward_flops(config)
    step = flops.per_token_dense * 512 * 2048
    counts = {"total": count.total, "active": count.active, "non_embedding": count.non_embedding}
    groups = {name: group.total for name, group in count.groups.items()}
    of_a_layer = {f"{name}, a layer": group.per_layer for name, group in count.groups.items()}
    return {
        "parameters": counts | groups | of_a_layer,
        "FLOP": {
            "token": flops.per_token_dense, "context": flops.total_dense, "step": step,
            "training step": TRAINING_PER_FORWARD * step,
        },
        "B": {
            "fp32": 4 * count.total, "fp16": 2 * count.total, "moments": 8 * count.total,
            "cache": kv_cache_bytes(config), "logits": 4 * 128 * 2048 * config.vocab_size,
        },
    }  # fmt: skip


_Row = tuple[str, str, str, float | str, str]
"""Unit and key of the exact figure, what the document calls it, what it prints, a note."""


def _total(published: float | str, note: str = "", quantity: str = "parameters") -> _Row:
    return "parameters", "total", quantity, published, note


_RELEASED = "Counted in the released weights."

_PUBLISHED: dict[str, tuple[str, *tuple[_Row, ...]]] = {
    "custom-300m": (
        "000",
        _total(300_124_416, "Its rows sum to 302,319,872; the total forgets the position embedding and the norms."),
        _total(248e6, "Takes the tied matrix off a total that is already too small.",
               "effective parameters, head tied"),
        ("parameters", "mlp_weights", "feed-forward weights", 96_534_784,
         "24 × 2 × 1024 × 4096; 201,449,472 with biases. The printed row is less than half."),
        ("parameters", "norms", "layer norms", 98_304, ""),
        ("FLOP", "token", "forward, a token", 37.8e9, "At T = 2048, scores dense."),
        ("FLOP", "step", "forward, a step of 512 × 2048", 39.7e12,
         "By its own 37.8 GFLOP a token it would be 39.6 PFLOP, a thousand times this."),
        ("FLOP", "training step", "training, a step of 512 × 2048", 119.1e12, ""),
        ("B", "fp32", "fp32 weights", 1.14e9, ""),
        ("B", "moments", "AdamW moments, fp32", 2.28e9, ""),
        ("B", "fp16", "fp16 weights", 573e6, "Its mixed-precision total leaves out the fp32 master weights."),
        ("B", "cache", "KV cache, fp16, 2048 tokens", 256e6, ""),
        ("B", "logits", "fp32 logits of 128 × 2048", "in 8 GB",
         "It plans 8 GB for all activations; the logits alone are more than six times that."),
    ),
    **{
        f"gpt3-{size}{banded}": (
            "001", _total(float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]], "Published as the size's name.")
        )
        for size in GPT3_SIZES
        for banded in ("", "-banded")
    },
    "gpt2-tiny": ("002", _total(847_872, "The dimensions printed beside it give 105,344 fewer.")),
    "gpt2-mini": (
        "002",
        _total(3_473_408, "Leaves out every bias and norm."),
        _total(3_482_112, "From its worked example, which leaves out 1,280 biases in each block."),
    ),
    "gpt2-midi": ("002", _total("20–40M", "A little over half of the lower end.")),
    "gpt2-small-untied": ("002", _total(163_037_184, "124,439,808 if the head were tied.")),
    "vaani-427m": (
        "003",
        _total(427_442_560, "Exact for another model: untied head with a bias, learned positions, biases everywhere.",
               "parameters, as stated"),
        _total(403_778_304, "Two products are off by 16,384 in each layer.", "parameters, as added up"),
        ("parameters", "attention_weights, a layer", "attention, a layer", 7_946_240, ""),
        ("parameters", "mlp_weights, a layer", "feed-forward, a layer", 15_876_096, ""),
        ("FLOP", "context", "forward over 1024 tokens", 1133.9e9,
         "873 GFLOP counting causal scores once. It doubles the feed-forward and leaves out the projections and the "
         "head."),
        ("B", "fp32", "fp32 weights", 1.63e9, "The file's 1,630.6 is MiB, and of the wrong count."),
        ("B", "fp16", "fp16 weights", 815e6, ""),
    ),
    "llm-200m": (
        "004",
        _total(200e6, quantity="parameters, by name"),
        _total(251e6, "Its own rows add to about 266.6M.", "parameters, as stated"),
        ("parameters", "attention_weights", "attention, all layers", 57.6e6,
         "2.4M a layer, rounded before it is multiplied."),
        ("parameters", "mlp_weights", "feed-forward, all layers", 170.4e6,
         "7.1M a layer, rounded before it is multiplied."),
    ),
    "smollm2-135m": ("Allal et al., 2025", _total(134_515_008, _RELEASED)),
    "tinyllama-1.1b": ("Zhang et al., 2024", _total(1_100_048_384, _RELEASED)),
    "llama-2-7b": ("Touvron et al., 2023", _total(6_738_415_616, _RELEASED)),
    "qwen3-0.6b": (
        "Yang et al., 2025",
        _total(0.6e9, "From the model card."),
        ("parameters", "non_embedding", "outside the embeddings", 0.44e9, "From the model card."),
    ),
    "mixtral-8x7b": (
        "Jiang et al., 2024",
        _total(46.7e9, "From the announcement; the paper rounds to 47B. The name would be 56B."),
        ("parameters", "active", "active for a token", 12.9e9,
         "From the announcement; the paper rounds to 13B."),
    ),
}  # fmt: skip
"""A document and the figures that it prints, by preset."""
