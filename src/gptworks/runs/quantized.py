"""Write a quantized copy of a run folder, which can be used like any other run folder. A report compares size,
perplexity, predictions and speed of the copy with those of the run."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table as RichTable

from gptworks.checkpoint import LoadedRun, Report, load_run
from gptworks.choices import HeadWeights, Rounding, Weights
from gptworks.config import IGNORED, Recipe, TextSource, ValidationSplit
from gptworks.config.objective import NextTokenObjective
from gptworks.data.batches import evaluation_windows
from gptworks.data.opened import Prepared, find_of_run
from gptworks.data.prepare import prepare as prepare_data
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.evaluation.divergence import Divergence, measure_divergence
from gptworks.evaluation.evaluated_run import PLACEHOLDER_SOURCES
from gptworks.evaluation.loss import batches_of
from gptworks.evaluation.results import MAX_CARD_BYTES
from gptworks.files import check_free, copy_folder, new_folder, read_text, write_sums, write_whole
from gptworks.infer.engine import Engine
from gptworks.infer.text import Pace
from gptworks.model.gpt import GPT
from gptworks.pages.tables import Table
from gptworks.quantize.convert import matrix_kinds, quantize_model
from gptworks.quantize.linear import QuantizedGPT, packed_matrices
from gptworks.recipe import save_recipe
from gptworks.tokenizer import load_tokenizer
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.units import significant

FILE = "quantization.json"
"""The file of a quantized run that holds its origin and the figures of the `QuantizationReport`."""

CALIBRATION_TOKENS = 32_768
"""Default number of tokens of training text with which GPTQ calibrates."""

REPORT_TOKENS = 65_536
"""Approximate number of held-out tokens for the report, in windows evenly spaced over the validation split."""

_PROMPT_TOKENS, _DECODED_TOKENS = 16, 64


@dataclass(frozen=True)
class QuantizationReport:
    """Figures of a model in fp32 and of its quantized copy; each pair is (fp32, quantized)."""

    weights: str
    """The requested format of the weights, such as int8."""
    rounding: str
    calibration_tokens: int
    """Number of training tokens with which the rounding was calibrated; 0 without calibration."""
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

    def __rich__(self) -> RichTable:
        return self.table.rich()

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


def quantize_run(
    run: str | Path,
    out: str | Path,
    weights: Weights,
    *,
    rounding: Rounding | None = None,
    head: HeadWeights = "int8",
    calibration_tokens: int | None = None,
    texts: Sequence[str | Path] = (),
    checkpoint: str = "best",
    device: torch.device | str = "cpu",
    prepare: Callable[[Recipe], Prepared] = prepare_data,
    report: Report = lambda _: None,
    progress: Callable[[int, int], None] = lambda done_tokens, tokens: None,
) -> QuantizationReport:
    """Write a quantized copy of a run: recipe, tokenizer, one checkpoint, `quantization.json` and `model-card.md`.

    Args:
        rounding: nearest, or gptq (int4 only, calibrated on training text). Default: gptq for int4, else nearest.
        head: format of the output head with int4 weights: int8; or int4, which is smaller and faster but less accurate.
        calibration_tokens: number of training tokens, rounded up to whole windows. Default: CALIBRATION_TOKENS.
        texts: files, or folders of .txt and .md; the last tenth of each is held out. Default: the run's own text.
        prepare: function that returns the run's text as token shards.
        report: called with a line of text at each stage.
        progress: called with the number of held-out tokens compared so far, and the total.

    Raises:
        UserError: the run does not exist or is quantized; `out` is not empty; arguments contradict one another; the
            text is missing (an imported run needs `texts`); or the format cannot hold a weight.
        RunError: the disk is full, fails or denies access. No partial copy is left.
    """
    run, out = Path(run), Path(out)
    check_free(out)
    rounding = _check_rounding(weights, rounding, calibration_tokens)
    loaded = load_run(run, checkpoint, device=device, full=True, report=report)
    matrix_kinds(loaded.model, weights, head)  # raises an error for an unknown format, before the text is prepared
    prepared = _prepared(loaded, run, texts, prepare)
    context = loaded.model.config.context_length
    batches = []
    if rounding == "gptq":
        n_windows = -(-(calibration_tokens or CALIBRATION_TOKENS) // context)
        windows = evaluation_windows(TokenShards(prepared.folder, "train"), context, n_windows)
        batches = [inputs for inputs, _ in batches_of(windows)]  # each [B, T]
    report(f"rounding to {weights}, {rounding}")
    quantized = quantize_model(loaded.model, weights, batches, step=report, head=head)
    report("comparing it with the run on held-out text")
    held_out = TokenShards(prepared.folder, "validation")
    compared = list(evaluation_windows(held_out, context, max(1, REPORT_TOKENS // context)))
    n_tokens = sum(int((targets != IGNORED).sum()) for _, targets in compared)
    n_bytes = (_bytes(loaded.model), _bytes(quantized))
    divergence = measure_divergence(quantized, loaded.model, compared, lambda done: progress(done, n_tokens))
    # Measure speed last: an engine changes the layout of the matrices, which makes other torch code slower.
    tokenizer, prompt = load_tokenizer(loaded.tokenizer_folder), compared[0][0][:_PROMPT_TOKENS].tolist()
    speed, speed_after = (_decode_speed(Engine(one, tokenizer), prompt) for one in (loaded.model, quantized))
    measured = QuantizationReport(
        weights, rounding, sum(batch.numel() for batch in batches), _parameters_by_kind(quantized), n_bytes, divergence,
        (speed, speed_after),
    )  # fmt: skip
    _write(out, run, loaded, quantized, measured)
    return measured


def _prepared(
    loaded: LoadedRun, run: Path, texts: Sequence[str | Path], prepare: Callable[[Recipe], Prepared]
) -> Prepared:
    """Return the text for calibration and for the comparison, as token shards."""
    recipe = loaded.recipe
    if texts:
        sources = tuple(TextSource(type="text", path=str(text)) for text in texts)
        data = recipe.data.model_copy(
            update={"sources": sources, "validation": ValidationSplit(fraction=0.1, by="tail")}
        )
        return prepare(recipe.model_copy(update={"data": data, "objective": NextTokenObjective()}))
    trained_on = str(loaded.checkpoint.state().get("data_fingerprint", ""))
    if not trained_on and recipe.data.sources == PLACEHOLDER_SOURCES:
        raise UserError(
            f"{run} was imported and has no text of its own to calibrate and to compare on. Give --text FILE, of the "
            f"kind that the model is for."
        )
    return find_of_run(recipe, run, trained_on) or prepare(recipe)


def _check_rounding(weights: Weights, rounding: Rounding | None, calibration_tokens: int | None) -> Rounding:
    chosen: Rounding = rounding or ("gptq" if weights == "int4" else "nearest")
    if chosen not in ("nearest", "gptq"):
        raise UserError(f"rounding={chosen}: it must be nearest or gptq.")
    if chosen == "gptq" and weights != "int4":
        raise UserError(f"rounding=gptq with weights={weights}: it is for int4. Leave it out.")
    if calibration_tokens is not None and chosen == "nearest":
        raise UserError("calibration text with rounding=nearest: only gptq uses it. Leave one of them out.")
    if calibration_tokens is not None and calibration_tokens < 1:
        raise UserError(f"calibrate={calibration_tokens}: it must be 1 token or more.")
    return chosen


def _write(out: Path, run: Path, loaded: LoadedRun, quantized: QuantizedGPT, measured: QuantizationReport) -> None:
    """Write the copy under a temporary name and rename it to `out`, so that `out` is complete or absent."""
    step = loaded.checkpoint.step
    origin = {"run": loaded.recipe.name, "folder": run.name, "step": step}
    with new_folder(out) as aside:
        save_recipe(loaded.recipe.model_copy(update={"run_dir": out}), aside / "recipe.yaml")
        copy_folder(loaded.tokenizer_folder, aside / "tokenizer", inside=run)
        write_sums(aside / "tokenizer")
        save_checkpoint(aside, step, quantized.state_dict(), {}, loaded.checkpoint.state() | {"best_step": step})
        figures = json.dumps({"made_from": origin, **measured.to_json()}, indent=2)
        write_whole(aside / FILE, figures + "\n")
        write_whole(aside / "model-card.md", _card(run, loaded, measured))


def _card(run: Path, loaded: LoadedRun, measured: QuantizationReport) -> str:
    """Return the run's model card, followed by the report."""
    card = run / "model-card.md"
    before = read_text(card, MAX_CARD_BYTES, inside=run) if card.exists() else f"# {loaded.recipe.name}\n"
    origin = f"Made from the run in `{run}`, step {loaded.checkpoint.step:,}, whose weights are in fp32.\n"
    return f"{before.rstrip()}\n\n{measured.to_markdown()}\n{origin}"


def _parameters_by_kind(model: QuantizedGPT) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for _, matrix in packed_matrices(model):
        counts[matrix.kind] += matrix.rows * matrix.columns
    return dict(counts) | {"fp32": sum(parameter.numel() for parameter in model.parameters())}


def _bytes(model: GPT) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


def _decode_speed(engine: Engine, prompt: list[int]) -> float | None:
    """Return the tokens per second of a greedy continuation, without its first token; None for fewer than two
    tokens."""
    room = engine.model.config.context_length - len(prompt)
    pace = Pace()
    for piece in engine.pieces(prompt, temperature=0.0, max_tokens=max(1, min(_DECODED_TOKENS, room))):
        pace.push(piece)
    return pace.tokens_per_second
