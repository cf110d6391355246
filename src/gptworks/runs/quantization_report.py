"""Report how quantizing changes size, perplexity, divergence and speed, as a table, JSON and Markdown."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from tokenizers import Tokenizer
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.evaluation.divergence import Divergence, measure_divergence
from gptworks.infer.engine import Engine
from gptworks.infer.text import Pace
from gptworks.model.gpt import GPT
from gptworks.pages.tables import Table
from gptworks.quantize.linear import QuantizedGPT, packed_matrices
from gptworks.units import significant

_PROMPT_TOKENS, _DECODED_TOKENS = 16, 64


@dataclass(frozen=True)
class QuantizationReport:
    """Figures of a model in fp32 and of its quantized copy; each pair is (fp32, quantized)."""

    weights: str
    """The requested format of the weights, such as int8."""
    rounding: str
    calibration_tokens: int
    """Number of training tokens that calibrated the rounding; 0 without calibration."""
    matrices: dict[str, int]
    """Number of parameters stored in each format."""
    n_bytes: tuple[int, int]
    """Total bytes of each model's tensors."""
    divergence: Divergence
    tokens_per_second: tuple[float | None, float | None]
    """Speed of greedy decoding; None if the model generated fewer than two tokens."""

    @property
    def perplexities(self) -> tuple[float, float]:
        return self.divergence.reference.perplexity, self.divergence.model.perplexity

    @property
    def perplexity_change(self) -> float:
        """Relative change of the perplexity: quantized over fp32, minus 1."""
        before, after = self.perplexities
        return after / before - 1

    @property
    def table(self) -> Table:
        """Table of the figures, with a column for the fp32 model and one for the quantized model."""
        kept = ", ".join(f"{count:,} in {kind}" for kind, count in self.matrices.items())
        calibrated = f", on {self.calibration_tokens:,} tokens" if self.calibration_tokens else ""
        before, after = self.perplexities
        speed, speed_after = ("" if one is None else f"{one:,.1f}" for one in self.tokens_per_second)
        rows = [
            ("parameters", f"{sum(self.matrices.values()):,}", kept),
            ("rounding", "", f"{self.rounding}{calibrated}"),
            ("size (bytes)", f"{self.n_bytes[0]:,}", f"{self.n_bytes[1]:,} ({self.n_bytes[1] / self.n_bytes[0]:.1%})"),
            ("perplexity", significant(before), f"{significant(after)} ({self.perplexity_change:+.3%})"),
            ("KL divergence (nats per token)", "0", f"{self.divergence.kl_nats:.6f}"),
            ("same likeliest token", "", f"{self.divergence.agreement:.2%}"),
            ("held-out tokens", "", f"{self.divergence.model.n_tokens:,}"),
            ("decoding (tokens/s)", speed, speed_after),
        ]
        return Table(("", "fp32", self.weights), "lrl", rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table.rich()

    def to_markdown(self) -> str:
        return f"## Quantization\n\n{self.table.markdown()}\n"

    def to_json(self) -> dict[str, Any]:
        def pair(values: tuple[Any, Any]) -> dict[str, Any]:
            return dict(zip(("fp32", "quantized"), values, strict=True))

        return {
            "weights": self.weights,
            "rounding": self.rounding,
            "calibration_tokens": self.calibration_tokens,
            "parameters": self.matrices,
            "bytes": pair(self.n_bytes),
            "perplexity": pair(self.perplexities),
            "perplexity_change": self.perplexity_change,
            "kl_nats": self.divergence.kl_nats,
            "same_likeliest_token": self.divergence.agreement,
            "held_out_tokens": self.divergence.model.n_tokens,
            "decode_tokens_per_second": pair(self.tokens_per_second),
        }


def make_report(
    model: GPT,
    quantized: QuantizedGPT,
    tokenizer: Tokenizer,
    windows: Iterable[tuple[Tensor, Tensor]],
    *,
    weights: str,
    rounding: str,
    calibration_tokens: int,
    progress: Callable[[int, int], None] = lambda done_tokens, tokens: None,
) -> QuantizationReport:
    """Compare a quantized model with its original on held-out windows of inputs and targets, as for `evaluate_loss`."""
    windows = list(windows)
    n_tokens = sum(int((targets != IGNORED).sum()) for _, targets in windows)
    prompt = windows[0][0][:_PROMPT_TOKENS].tolist()
    n_bytes = (_bytes(model), _bytes(quantized))
    divergence = measure_divergence(quantized, model, windows, lambda done: progress(done, n_tokens))
    # Measure speed last: an engine changes the layout of the matrices, which makes other torch code slower.
    speed, speed_after = (_decode_speed(Engine(one, tokenizer), prompt) for one in (model, quantized))
    return QuantizationReport(
        weights=weights,
        rounding=rounding,
        calibration_tokens=calibration_tokens,
        matrices=_parameters_by_kind(quantized),
        n_bytes=n_bytes,
        divergence=divergence,
        tokens_per_second=(speed, speed_after),
    )


def _parameters_by_kind(model: QuantizedGPT) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for _, matrix in packed_matrices(model):
        counts[matrix.kind] += matrix.rows * matrix.columns
    return dict(counts) | {"fp32": sum(parameter.numel() for parameter in model.parameters())}


def _bytes(model: GPT) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def _decode_speed(engine: Engine, prompt: list[int]) -> float | None:
    """Return the tokens per second of a greedy continuation after its first token; None for fewer than two tokens."""
    room = engine.model.config.context_length - len(prompt)
    pace = Pace()
    for piece in engine.pieces(prompt, temperature=0.0, max_tokens=max(1, min(_DECODED_TOKENS, room))):
        pace.push(piece)
    return pace.tokens_per_second
