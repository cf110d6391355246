"""What documents print about their models, beside what the dimensions come to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gptworks.config import ModelConfig
from gptworks.plan.flops import TRAINING_PER_FORWARD, forward_flops
from gptworks.plan.inference import kv_cache_bytes
from gptworks.plan.params import count_parameters
from gptworks.presets import GPT2_SIZES, GPT3_SIZES, MODERN_SIZES, PRESETS, preset
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
    def published_text(self) -> str:
        return self.published if isinstance(self.published, str) else readable(self.published, self.unit)

    @property
    def exact_text(self) -> str:
        return readable(self.exact, self.unit)

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
        return self.quantity, self.published_text, self.exact_text, self.error_text, self.note

    def to_json(self) -> dict[str, Any]:
        return {
            "document": self.document, "quantity": self.quantity, "unit": self.unit,
            "published": self.published, "exact": self.exact, "note": self.note,
        }  # fmt: skip


def published_figures(config: ModelConfig) -> tuple[Figure, ...]:
    """The figures printed about the preset whose settings these are; empty for any other model."""
    for name, figures in _FIGURES.items():
        if preset(name) == config:
            return tuple(figures(config))
    return ()


# Exact quantities -------------------------------------------------------------------------------------------


def _total(config: ModelConfig) -> int:
    return count_parameters(config).total


def _group(config: ModelConfig, *names: str) -> int:
    groups = count_parameters(config).groups
    return sum(groups[name].total for name in names)


# What each document prints ----------------------------------------------------------------------------------


def _custom_300m(config: ModelConfig) -> Iterator[Figure]:
    flops, total = forward_flops(config), _total(config)
    step_forward = flops.per_token_dense * 512 * 2048
    doc = "000"
    yield Figure(doc, "parameters", "parameters", 300_124_416, total,
                 "Its rows sum to 302,319,872; the total forgets the position embedding and the norms.")  # fmt: skip
    yield Figure(doc, "effective parameters, head tied", "parameters", 248e6, total,
                 "Takes the tied matrix off a total that is already too small.")  # fmt: skip
    yield Figure(doc, "feed-forward weights", "parameters", 96_534_784, _group(config, "mlp_weights"),
                 "24 × 2 × 1024 × 4096; 201,449,472 with biases. The printed row is less than half.")  # fmt: skip
    yield Figure(doc, "layer norms", "parameters", 98_304, _group(config, "norms"))
    yield Figure(doc, "forward, a token", "FLOP", 37.8e9, flops.per_token_dense, "At T = 2048, scores dense.")
    yield Figure(doc, "forward, a step of 512 × 2048", "FLOP", 39.7e12, step_forward,
                 "By its own 37.8 GFLOP a token it would be 39.6 PFLOP, a thousand times this.")  # fmt: skip
    yield Figure(doc, "training, a step of 512 × 2048", "FLOP", 119.1e12, TRAINING_PER_FORWARD * step_forward)
    yield Figure(doc, "fp32 weights", "B", 1.14e9, 4 * total)
    yield Figure(doc, "AdamW moments, fp32", "B", 2.28e9, 8 * total)
    yield Figure(doc, "fp16 weights", "B", 573e6, 2 * total,
                 "Its mixed-precision total leaves out the fp32 master weights.")  # fmt: skip
    yield Figure(doc, "KV cache, fp16, 2048 tokens", "B", 256e6, kv_cache_bytes(config))
    yield Figure(doc, "fp32 logits of 128 × 2048", "B", "in 8 GB",
                 128 * 2048 * config.vocab_size * 4,
                 "It plans 8 GB for all activations; the logits alone are more than six times that.")  # fmt: skip


def _gpt3(nominal: float) -> Callable[[ModelConfig], Iterator[Figure]]:
    def figures(config: ModelConfig) -> Iterator[Figure]:
        yield Figure("001", "parameters", "parameters", nominal, _total(config), "Published as the size's name.")

    return figures


def _gpt2_from_scratch(*figures: tuple[float | str, str]) -> Callable[[ModelConfig], Iterator[Figure]]:
    def all_figures(config: ModelConfig) -> Iterator[Figure]:
        for published, note in figures:
            yield Figure("002", "parameters", "parameters", published, _total(config), note)

    return all_figures


def _vaani_427m(config: ModelConfig) -> Iterator[Figure]:
    total, flops, doc = _total(config), forward_flops(config), "003"
    yield Figure(doc, "parameters, as stated", "parameters", 427_442_560, total,
                 "Exact for another model: untied head with a bias, learned positions, biases everywhere.")  # fmt: skip
    yield Figure(doc, "parameters, as added up", "parameters", 403_778_304, total,
                 "Two products are off by 16,384 in each layer.")  # fmt: skip
    yield Figure(doc, "attention, a layer", "parameters", 7_946_240, _group(config, "attention_weights") // 16)
    yield Figure(doc, "feed-forward, a layer", "parameters", 15_876_096, _group(config, "mlp_weights") // 16)
    yield Figure(doc, "forward over 1024 tokens", "FLOP", 1133.9e9, flops.total_dense,
                 f"{readable(flops.total_causal, 'FLOP')} counting causal scores once. It doubles the feed-forward "
                 "and leaves out the projections and the head.")  # fmt: skip
    yield Figure(doc, "fp32 weights", "B", 1.63e9, 4 * total, "The file's 1,630.6 is MiB, and of the wrong count.")
    yield Figure(doc, "fp16 weights", "B", 815e6, 2 * total)


def _llm_200m(config: ModelConfig) -> Iterator[Figure]:
    total, doc = _total(config), "004"
    yield Figure(doc, "parameters, by name", "parameters", 200e6, total)
    yield Figure(doc, "parameters, as stated", "parameters", 251e6, total, "Its own rows add to about 266.6M.")
    yield Figure(doc, "attention, all layers", "parameters", 57.6e6, _group(config, "attention_weights"),
                 "2.4M a layer, rounded before it is multiplied.")  # fmt: skip
    yield Figure(doc, "feed-forward, all layers", "parameters", 170.4e6, _group(config, "mlp_weights"),
                 "7.1M a layer, rounded before it is multiplied.")  # fmt: skip


def _counted(source: str, *figures: tuple[str, float, str, str]) -> Callable[[ModelConfig], Iterator[Figure]]:
    """Figures of a publication: each a quantity, what is printed, the count it names, and a note."""

    def all_figures(config: ModelConfig) -> Iterator[Figure]:
        for quantity, published, count, note in figures:
            yield Figure(source, quantity, "parameters", published, getattr(count_parameters(config), count), note)

    return all_figures


def _nominal(size: str) -> float:
    return float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]


_FIGURES: dict[str, Callable[[ModelConfig], Iterator[Figure]]] = {
    "custom-300m": _custom_300m,
    **{f"gpt3-{size}{banded}": _gpt3(_nominal(size)) for size in GPT3_SIZES for banded in ("", "-banded")},
    "gpt2-tiny": _gpt2_from_scratch((847_872, "The dimensions printed beside it give 105,344 fewer.")),
    "gpt2-mini": _gpt2_from_scratch(
        (3_473_408, "Leaves out every bias and norm."),
        (3_482_112, "From its worked example, which leaves out 1,280 biases in each block."),
    ),
    "gpt2-midi": _gpt2_from_scratch(("20–40M", "A little over half of the lower end.")),
    "gpt2-small-untied": _gpt2_from_scratch((163_037_184, "124,439,808 if the head were tied.")),
    "vaani-427m": _vaani_427m,
    "llm-200m": _llm_200m,
    "smollm2-135m": _counted(
        "Allal et al., 2025", ("parameters", 134_515_008, "total", "Counted in the released weights.")
    ),
    "tinyllama-1.1b": _counted(
        "Zhang et al., 2024", ("parameters", 1_100_048_384, "total", "Counted in the released weights.")
    ),
    "llama-2-7b": _counted(
        "Touvron et al., 2023", ("parameters", 6_738_415_616, "total", "Counted in the released weights.")
    ),
    "qwen3-0.6b": _counted(
        "Yang et al., 2025",
        ("parameters", 0.6e9, "total", "From the model card."),
        ("outside the embeddings", 0.44e9, "non_embedding", "From the model card."),
    ),
    "mixtral-8x7b": _counted(
        "Jiang et al., 2024",
        ("parameters", 46.7e9, "total", "From the announcement; the paper rounds to 47B. The name would be 56B."),
        ("active for a token", 12.9e9, "active", "From the announcement; the paper rounds to 13B."),
    ),
}

# The documentation page -------------------------------------------------------------------------------------

_LADDERS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "Document 000 · Custom 300M": (
        "A GPT-2 of 24 layers with a context of 2,048 tokens.",
        ("custom-300m",),
        (
            "It says that it is smaller than GPT-2 Medium. It is Medium with a longer position table: 355,871,744 "
            "parameters against 354,823,168.",
            "Its table of parameters has a row for the head although the head is tied to the embedding.",
            "A batch of 128 × 2048 cannot keep its activations in 8 GB: the fp32 logits alone are 52.7 GB.",
        ),
    ),
    "Document 001 · the GPT-3 ladder": (
        "Eight sizes; each also exists as `-banded`, with every second layer seeing the last 256 tokens only, as in "
        "the GPT-3 paper's alternation of dense and locally banded layers. The band has no parameters of its own.",
        tuple(f"gpt3-{size}" for size in GPT3_SIZES),
        (
            "The sizes are names: the 350M model has 355.9M parameters with this vocabulary and context.",
            "The paper's own table gives 24 heads of 128 for 1.3B, which do not make up its width of 2048, and a "
            "width of 5140 for 13B, which its heads do not divide; here 16 heads, and 5120.",
        ),
    ),
    "Document 002 · GPT-2 from scratch": (
        "Four sizes with an untied head. Its “Small”, “Medium” and “Large” are other models than GPT-2's, so they "
        "have names of their own here.",
        ("gpt2-tiny", "gpt2-mini", "gpt2-midi", "gpt2-small-untied"),
        (
            "It prints two different counts for the same “Small” model, and neither is right.",
            "Its “Large” is GPT-2's smallest size; that count is exact, because the head is untied.",
        ),
    ),
    "Document 003 · Vaani": (
        "Rotary positions, no biases in attention, 11 heads of 128.",
        ("vaani-427m",),
        (
            "It states 427,442,560 parameters and adds up 403,778,304; the dimensions give 403,254,016. The first is "
            "the count of another model: learned positions, a bias on every linear layer, and an untied head with one.",
            "It calls its linear layers free of biases and speaks of attention alone; its list of tensors has no MLP "
            "biases either. `model.mlp_bias=true` gives the other reading, 403,366,656.",
        ),
    ),
    "Document 004 · LLM-200M": (
        "Rotary positions and SwiGLU: three matrices in each MLP.",
        ("llm-200m",),
        ("It is called 200M, states about 251M, and its rows add to about 266.6M; the dimensions give 265,165,056.",),
    ),
    "GPT-2 as released": (
        "The four published sizes, for comparison and for their released weights.",
        tuple(GPT2_SIZES),
        (),
    ),
    "Models of others as released": (
        "RMSNorm, rotary positions, SwiGLU, no biases in linear layers; all but Llama 2 7B have fewer key/value heads "
        "than query heads.",
        ("smollm2-135m", "tinyllama-1.1b", "llama-2-7b", "qwen3-0.6b", "mixtral-8x7b"),
        (
            "Mixtral's eight experts share the attention, so that 8 × 7B is 46.7B; a token passes through two of them.",
            "Qwen3's heads are wider than d / H: 16 heads of 128 on a width of 1024.",
        ),
    ),
    "gptworks's own": (
        "The defaults for small models, and a small mixture of experts.",
        (*(f"modern-{size}" for size in MODERN_SIZES), "moe-115m"),
        (),
    ),
}


def reference_architectures_markdown() -> str:
    """docs/reference-architectures.md: exact dimensions and counts, published beside exact."""
    lines = [
        "# Reference architectures",
        "",
        "<!-- Written by gptworks.describe.published.reference_architectures_markdown; do not edit by hand. -->",
        "",
        "Five documents describe the models that gptworks grew from, and each ships as a preset. Where a document's",
        "figures and its dimensions disagree, the dimensions are what is built. Every exact figure below follows from",
        "them by arithmetic, and the tests check it against the built model and torch's FLOP counter.",
        "",
        "Conventions: a multiply-add is two operations; attention scores are dense (all T × T pairs); forward FLOPs",
        "are per token at full context, and training takes three times as many; GB and GFLOP are decimal. V is the",
        "vocabulary, d the width, L the layers, H the query heads (/ key and value heads where they are fewer), f the",
        "MLP's inner width, T the context.",
        "",
    ]
    for title, (summary, names, contradictions) in _LADDERS.items():
        lines += [f"## {title}", "", summary, "", *_dimensions(names), ""]
        figures = [(name, figure) for name in names for figure in published_figures(PRESETS[name]())]
        if figures:
            lines += [
                "| preset | quantity | published | exact | off by | note |",
                "|---|---|---:|---:|---:|---|",
            ]
            for name, figure in figures:
                quantity, published, exact, error, note = figure.cells
                note = note if figure.document.isdigit() else f"{figure.source}. {note}"
                lines.append(f"| `{name}` | {quantity} | {published} | **{exact}** | {error} | {note} |")
            lines.append("")
        lines += [f"- {line}" for line in contradictions] + [""] * bool(contradictions)
    return "\n".join(lines)


def _dimensions(names: tuple[str, ...]) -> Iterator[str]:
    header = (
        "preset",
        *"VdLHfT",
        "position",
        "norm",
        "MLP",
        "biases",
        "head",
        "init",
        "dropout",
        "parameters",
        "forward",
    )
    yield "| " + " | ".join(header) + " |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|---|---|---|---|---|---:|---:|---:|"
    for name in names:
        c = preset(name)
        count = count_parameters(c)
        parameters = f"**{count.total:,}**" + (f", {count.active:,} for a token" if c.n_experts else "")
        cells = (
            f"`{name}`", f"{c.vocab_size:,}", c.d_model, c.n_layers, _heads(c), _inner(c), c.context_length, c.position,
            c.norm + (", QK-norm" if c.qk_norm else ""), c.mlp, _biases(c), "tied" if c.tie_embeddings else "untied",
            c.init, c.dropout_residual, parameters, readable(forward_flops(c).per_token_dense, "FLOP"),
        )  # fmt: skip
        yield "| " + " | ".join(map(str, cells)) + " |"


def _heads(c: ModelConfig) -> str:
    """`12`, or `12 / 4` with key/value heads of their own number; `of 128` where the width does not tell."""
    heads = f"{c.n_heads}" if c.n_kv_heads == c.n_heads else f"{c.n_heads} / {c.n_kv_heads}"
    return heads if c.n_heads * c.d_head == c.d_model else f"{heads} of {c.d_head}"


def _inner(c: ModelConfig) -> str:
    return f"{c.d_ff}" if not c.n_experts else f"{c.n_experts} × {c.d_ff}, {c.n_experts_per_token} for a token"


def _biases(c: ModelConfig) -> str:
    """Where there are biases: `all`, `norms`, `none`, or a list."""
    present = {"qkv": c.qkv_bias, "out": c.out_bias, "MLP": c.mlp_bias, "norms": c.norm_bias}
    if all(present.values()):
        return "all"
    return ", ".join(name for name, there in present.items() if there) or "none"
