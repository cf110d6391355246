"""Figures that documents print about their models, beside the exact ones."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from gptworks.config import ModelConfig
from gptworks.planning.flops import TRAINING_PER_FORWARD, forward_flops
from gptworks.planning.inference import kv_cache_bytes, weights_bytes
from gptworks.planning.params import count_parameters, require_vocab_size
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
    exact: float | None
    """None: only a measurement can give it; the note says which."""
    note: str = ""

    @property
    def source(self) -> str:
        return f"document {self.document}" if self.document.isdigit() else self.document

    @property
    def error_text(self) -> str:
        """How far the published figure is off: in percent, or as a factor where it is more than half or twice."""
        if isinstance(self.published, str) or not self.exact:
            return ""
        ratio = self.published / self.exact
        if ratio == 1:
            return "exact"
        return f"{100 * (ratio - 1):+.2g} %" if 0.5 < ratio < 2 else f"× {ratio:.2g}"

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Quantity, published, exact, error and note, for a table."""
        published = self.published if isinstance(self.published, str) else _text(self.published, self.unit)
        exact = "to measure" if self.exact is None else _text(self.exact, self.unit)
        return self.quantity, published, exact, self.error_text, self.note

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _text(value: float, unit: str) -> str:
    if unit in ("%", "×", "s"):
        return f"{value:.4g} {unit}"
    return f"{value:,.0f} {unit}" if unit == "steps" else readable(value, unit)


def published_figures(config: ModelConfig) -> tuple[Figure, ...]:
    """The figures printed about the preset whose settings these are; empty for any other model."""
    for name, (document, *rows) in _PUBLISHED.items():
        if preset(name) == config:
            exact = _exact(config)
            return tuple(
                Figure(document, quantity, unit, published, exact[unit][key] if key else None, note)
                for unit, key, quantity, published, note in rows
            )
    return ()


def _exact(config: ModelConfig) -> Mapping[str, Mapping[str, float]]:
    """What documents print figures of, by unit and key."""
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
            "loss": 100 * (1 - _VAANI_LOSSES[-1] / _VAANI_LOSSES[0]),
        },
        "×": {"fp16": 4 / 2, "int8": 4 * count.total / weights_bytes(count, "int8")},
        "steps": {"600 examples": -(-600 * 3 // 4)},
    }  # fmt: skip


@cache
def _sizes() -> dict[str, int]:
    """Parameters of the models that documents compare theirs with."""
    return {name: count_parameters(preset(name)).total
            for name in ("gpt2", "gpt2-medium", "gpt2-large", "llama-2-7b")}  # fmt: skip


_VAANI_LOSSES = (0.9742, 0.3189, 0.3113)
"""Average training losses of the three epochs of document 003."""


_Row = tuple[str, str, str, float | str, str]
"""Unit and key of the exact figure, what the document calls it, what it prints, a note. Without a key the figure can
only be measured."""


def _total(published: float | str, note: str = "", quantity: str = "parameters") -> _Row:
    return "parameters", "total", quantity, published, note


def _measured(unit: str, quantity: str, published: float | str, command: str) -> _Row:
    return unit, "", quantity, published, f"A measurement: `{command}`."


def _size(quantity: str, name: str, published: float) -> _Row:
    return "parameters", name, quantity, published, f"The preset `{name}`."


_GENERATE = "gptworks generate RUN --prompt TEXT"
_RUN = "gptworks describe {} --run --length {}"

_RELEASED = "Counted in the released weights."

_PUBLISHED: dict[str, tuple[str, *tuple[_Row, ...]]] = {
    "custom-300m": (
        "000",
        _total(300_124_416, "Its rows sum to 302,319,872; the total forgets the position embedding and the norms."),
        _total(248e6, "Takes the tied matrix off a total that is already too small.",
               "effective parameters, head tied"),
        ("parameters", "token_embedding", "token embedding", 51_463_168, ""),
        ("%", "token_embedding", "token embedding, share", 17.15, "Of a total that is too small, as all its shares."),
        ("parameters", "position_embedding", "position embedding", 2_097_152, ""),
        ("%", "position_embedding", "position embedding, share", 0.70, ""),
        ("parameters", "attention_weights", "attention weights", 100_663_296, ""),
        ("%", "attention_weights", "attention, share", 33.54, ""),
        ("%", "mlp_weights", "feed-forward, share", 32.17, ""),
        ("%", "norms", "layer norms, share", 0.03, ""),
        ("%", "head", "output layer, share", 17.15, "The head is tied, so it has no parameters of its own."),
        ("parameters", "table", "saved by the tied head", 51e6, ""),
        ("%", "tie", "tied head saves, share", 17.0, "Of the model with an untied head."),
        ("parameters", "mlp_weights", "feed-forward weights", 96_534_784,
         "24 × 2 × 1024 × 4096; 201,449,472 with biases. The printed row is less than half."),
        ("parameters", "norms", "layer norms", 98_304, ""),
        ("FLOP", "token", "forward, a token", 37.8e9, "At T = 2048, scores dense."),
        ("FLOP", "attention, a token", "attention, a token", 12.6e9, "Projections and dense scores."),
        ("FLOP", "mlp, a token", "feed-forward, a token", 25.2e9, ""),
        ("FLOP", "step", "forward, a step of 512 × 2048", 39.7e12,
         "By its own 37.8 GFLOP a token it would be 39.6 PFLOP, a thousand times this."),
        ("FLOP", "backward", "backward, a step of 512 × 2048", 79.4e12, ""),
        ("FLOP", "training step", "training, a step of 512 × 2048", 119.1e12, ""),
        ("B", "fp32", "fp32 weights", 1.14e9, ""),
        ("B", "fp32", "fp32 gradients", 1.14e9, ""),
        ("B", "moments", "AdamW moments, fp32", 2.28e9, ""),
        ("B", "training", "training in fp32, 128 × 2048", 12.5e9,
         "At least: weights, gradients, moments and the logits, without other activations."),
        ("B", "fp16", "fp16 weights", 573e6, "Its mixed-precision total leaves out the fp32 master weights."),
        ("B", "fp16", "fp16 gradients", 573e6, ""),
        ("B", "mixed training", "mixed precision, 128 × 2048", 7.4e9,
         "At least: fp32 weights, gradients and moments, and the logits in 16 bits."),
        ("B", "cache", "KV cache, fp16, 2048 tokens", 256e6, ""),
        ("B", "fp16 inference", "fp16 weights and KV cache", 830e6, ""),
        ("B", "logits", "fp32 logits of 128 × 2048", "in 8 GB",
         "It plans 8 GB for all activations; the logits alone are more than six times that."),
        ("×", "int8", "smaller in int8", 4.0, "Norms, biases and positions stay fp32, and rows have scales."),
        ("×", "fp16", "smaller in fp16", 2.0, ""),
        _measured("×", "faster in int8", "2–3 ×", f"{_GENERATE} --weights int8"),
        _measured("×", "faster in fp16", "1.5–2 ×", f"{_GENERATE} --weights bf16"),
        _measured("×", "faster with a KV cache", "~10 ×", "python bench/infer.py"),
        _measured("tokens/s", "generation, 32 to 64 texts", "~1,200 tokens/s", "python bench/infer.py"),
        _size("GPT-2 Small", "gpt2", 117e6),
        _size("GPT-2 Medium", "gpt2-medium", 345e6),
        _size("GPT-2 Large", "gpt2-large", 774e6),
    ),
    **{
        f"gpt3-{size}{banded}": (
            "001", _total(float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]], "Published as the size's name.")
        )
        for size in GPT3_SIZES
        for banded in ("", "-banded")
    },
    "gpt2-tiny": (
        "002",
        _total(847_872, "The dimensions printed beside it give 105,344 fewer."),
        _measured("s", "forward, 1 × 16 tokens", 0.008234, _RUN.format("gpt2-tiny", 16)),
    ),
    "gpt2-mini": (
        "002",
        _total(3_473_408, "Leaves out every bias and norm."),
        _total(3_482_112, "From its worked example, which leaves out 1,280 biases in each block."),
        ("parameters", "tables", "embeddings", 196_608, ""),
        ("parameters", "attention", "attention, a block", 263_168, ""),
        ("parameters", "mlp", "feed-forward, a block", 525_312, "Counts 512 of its 1,280 biases."),
        ("parameters", "block", "a block", 788_480, ""),
        ("B", "fp32", "fp32 weights", 14e6, ""),
        _measured("s", "forward, 1 × 32 tokens", 0.035, _RUN.format("gpt2-mini", 32)),
    ),
    "gpt2-midi": (
        "002",
        _total("20–40M", "A little over half of the lower end."),
        _measured("s", "forward, 1 × 64 tokens", 0.2, _RUN.format("gpt2-midi", 64)),
    ),
    "gpt2-small-untied": (
        "002",
        _total(163_037_184, "124,439,808 if the head were tied."),
        ("parameters", "of 512 tokens", "with a vocabulary of 512", 87e6, ""),
        ("B", "fp32", "fp32 weights", 650e6, ""),
        _measured("s", "forward, 1 × 128 tokens", "2–3 s", _RUN.format("gpt2-small-untied", 128)),
    ),
    "vaani-427m": (
        "003",
        _total(427_442_560, "Exact for another model: untied head with a bias, learned positions, biases everywhere.",
               "parameters, as stated"),
        _total(403_778_304, "Two products are off by 16,384 in each layer.", "parameters, as added up"),
        ("parameters", "attention_weights, a layer", "attention, a layer", 7_946_240, ""),
        ("parameters", "mlp_weights, a layer", "feed-forward, a layer", 15_876_096, ""),
        ("parameters", "token_embedding", "token embedding", 22_528_000, ""),
        ("parameters", "table", "saved by the tied head", 22.5e6, ""),
        ("FLOP", "scores", "attention over 1024 tokens", 94.3e9, "Scores and weighted sum, without the projections."),
        ("FLOP", "mlp", "feed-forward over 1024 tokens", 1039.6e9, "Two matrices, which it counts twice."),
        ("FLOP", "context", "forward over 1024 tokens", 1133.9e9,
         "873 GFLOP counting causal scores once. It doubles the feed-forward and leaves out the projections and the "
         "head."),
        ("B", "fp32", "fp32 weights", 1.63e9, "The file's 1,630.6 is MiB, and of the wrong count."),
        ("B", "fp16", "fp16 weights", 815e6, ""),
        ("B", "fp32", "fp32 gradients", 1.63e9, ""),
        ("B", "moments", "AdamW moments, fp32", "3.26–4.89 GB", "Two values a parameter; its upper end counts three."),
        ("B", "int8", "int8 weights", 400e6, "A byte a parameter, without scales."),
        ("steps", "600 examples", "training steps", 56, "600 examples × 3 epochs, four to a step."),
        _measured("nats", "training loss, epoch 1", f"{_VAANI_LOSSES[0]}", "gptworks train RECIPE, on its data"),
        _measured("nats", "training loss, epoch 2", f"{_VAANI_LOSSES[1]}", "gptworks train RECIPE, on its data"),
        _measured("nats", "training loss, epoch 3", f"{_VAANI_LOSSES[2]}", "gptworks train RECIPE, on its data"),
        ("%", "loss", "fall of the training loss", 68.0, "From its own losses."),
        _measured("s", "training time", "~7 minutes", "gptworks train RECIPE, on its data"),
        _size("GPT-2 Small", "gpt2", 124e6),
        _size("GPT-2 Medium", "gpt2-medium", 355e6),
        _size("GPT-2 Large", "gpt2-large", 774e6),
        _size("LLaMA-7B", "llama-2-7b", 7e9),
        ("B", "gpt2, fp32", "GPT-2 Small, size", 0.5e9, "fp32."),
        ("B", "gpt2-medium, fp32", "GPT-2 Medium, size", 1.4e9, "fp32."),
        ("B", "gpt2-large, fp32", "GPT-2 Large, size", 3.0e9, "fp32."),
        ("B", "llama-2-7b, fp16", "LLaMA-7B, size", 13e9, "fp16."),
    ),
    "llm-200m": (
        "004",
        _total(200e6, quantity="parameters, by name"),
        _total(251e6, "Its own rows add to about 266.6M.", "parameters, as stated"),
        ("parameters", "token_embedding", "token embedding", 38_597_376, ""),
        _measured("×", "flash attention, faster", "2–4 ×", "python bench/gpu.py, on a GPU"),
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
