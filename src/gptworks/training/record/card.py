"""`model-card.md`: describes a run's model, training text, training time and results."""

import contextlib
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gptworks import __version__
from gptworks.config import Recipe
from gptworks.device import Precision, device_name
from gptworks.errors import UserError
from gptworks.evaluation.results import write_card_section
from gptworks.files import write_whole
from gptworks.pages.tables import in_a_cell
from gptworks.planning.fit import layout_words
from gptworks.planning.layout import ONE_DEVICE, Layout
from gptworks.planning.params import count_parameters
from gptworks.training.changes import read_history
from gptworks.training.progress import Progress
from gptworks.training.record.display import clock
from gptworks.training.record.metrics import LOG, Record, read_metrics
from gptworks.training.record.outcome import FILE, RunOutcome
from gptworks.units import epochs_words, readable, significant


@dataclass(frozen=True)
class MemoryPeaks:
    """The peak memory of a run, planned and measured."""

    predicted_memory_bytes: int
    """Predicted peak memory of the device's tensors; on a CPU, including the copy for a checkpoint."""
    measured_memory_bytes: int | None
    """Measured peak memory of tensors: on CUDA during the run; on a CPU during one step, plus the largest copy for a
    checkpoint. None if not measured."""
    grown_memory_bytes: int | None = None
    """Growth of the process's resident memory during the run, on a CPU. None if unknown, such as when the run used
    memory that the process had freed before."""


def write_model_card(
    recipe: Recipe,
    progress: Progress,
    reason: str | None,
    samples_per_epoch: int,
    precision: Precision,
    memory: MemoryPeaks | None = None,
    layout: Layout = ONE_DEVICE,
    epochs: Mapping[str, float] | None = None,
) -> None:
    """Write `model-card.md`, with results from the run's metrics, and `outcome.json` into the run folder.

    Args:
        reason: why the run has ended; None if the run continues. `outcome.json` is then not written.
        samples_per_epoch: number of samples in the training split.
        epochs: number of passes over each dataset of a mixture.
    """
    validation = list(read_metrics(recipe.run_dir / LOG, kinds=("validation",)))
    ranks = {"ranks": f"{layout.world_size}: {layout_words(layout)}"} if layout.world_size > 1 else {}
    training = _mixture(recipe, epochs or {}) | _training(recipe, progress, reason, samples_per_epoch, precision)
    training |= ranks | _memory(memory)
    sections = {"Results": _results(recipe, validation), "Architecture": _architecture(recipe), "Training": training}
    history, repeats = read_history(recipe.run_dir), "`recipe.yaml` next to this file repeats the run."
    if history.origins:
        sections["Origin"] = history.origin_rows()
    if history.changes:
        sections["Changed on the way"] = history.change_rows()
    if not history.exact:
        repeats = "`recipe.yaml` next to this file has its last settings: it does not repeat the run, see the changes."
    parts = [f"# {recipe.name}", "A language model trained with gptworks. Every figure here was counted or measured."]
    for heading, rows in sections.items():
        table = "\n".join(f"| {in_a_cell(key)} | {in_a_cell(value)} |" for key, value in rows.items())
        parts.append(f"## {heading}\n\n| | |\n|---|---|\n{table}")
    parts.append(f"Use it with `gptworks generate` and this folder. {repeats}")
    write_whole(recipe.run_dir / "model-card.md", "\n\n".join(parts) + "\n")
    if reason is not None:
        outcome = RunOutcome(
            reason=reason, step=progress.step, tokens=progress.tokens, seconds=progress.seconds,
            skipped_steps=progress.skipped, best_step=progress.best_step,
            best_validation_loss=progress.best_loss if math.isfinite(progress.best_loss) else None,
            **({} if memory is None else asdict(memory)), training=training,
        )  # fmt: skip
        write_whole(recipe.run_dir / FILE, outcome.model_dump_json(indent=2) + "\n")
    with contextlib.suppress(UserError):  # a damaged file of evaluations must not end a run
        write_card_section(recipe.run_dir)


def _results(recipe: Recipe, validation: list[Record]) -> dict[str, str]:
    rows = {"parameters": f"{count_parameters(recipe.model).total:,}"}
    if not validation:
        return rows
    best = min(validation, key=lambda record: record["loss"] if math.isfinite(record["loss"]) else math.inf)
    for name, record in (("best", best), ("last", validation[-1])):
        figures = f"{record['loss']:.4f} {record.get('unit', 'nats per token')}"
        figures += "" if record["perplexity"] is None else f", perplexity {significant(record['perplexity'])}"
        if record["bits_per_byte"] is not None:
            figures += f", {record['bits_per_byte']:.4f} bits per byte"
        n_read, n_there = record.get("sequences"), record.get("sequences_held_out")
        part = f" over {n_read:,} of {n_there:,} windows" if n_read and n_there and n_read < n_there else ""
        rows[f"{name} validation loss"] = f"{figures}, at step {record['step']:,}{part}"
    return rows


def _architecture(recipe: Recipe) -> dict[str, str]:
    model = recipe.model
    n_windowed = sum(window is not None for window in model.layer_windows)
    shared = f" ({model.n_kv_heads} key/value heads)" if model.n_kv_heads != model.n_heads else ""
    return {
        "layers × width × heads": f"{model.n_layers} × {model.d_model} × {model.n_heads}{shared}",
        "context": f"{model.context_length:,} tokens"
        + (f"; {n_windowed} layers see {model.window:,}" if n_windowed else ""),
        "vocabulary": f"{model.vocab_size:,} ({recipe.tokenizer.type})",
        "position, norm, MLP": f"{model.position}, {model.norm}, {model.mlp} of {model.d_ff:,}",
        "head": "tied to the embedding" if model.tie_embeddings else "its own matrix",
    }


def _training(
    recipe: Recipe, progress: Progress, reason: str | None, samples_per_epoch: int, precision: Precision
) -> dict[str, str]:
    train = recipe.train
    speed = progress.tokens / progress.seconds if progress.seconds else 0.0
    cut = f" in {train.accumulation_steps} micro-batches" if train.accumulation_steps > 1 else ""
    between = "; a better one between these: weights only" if train.evaluate_every % train.checkpoint_every else ""
    cautious = "cautious " if train.cautious_weight_decay else ""
    matrices = f" ({train.muon_learning_rate:g} for matrices)" if train.orthogonalizes else ""
    factors = [f"{name} × {factor:g}" for name, factor in train.rate_factors if factor != 1]
    return {
        **({} if recipe.initialize_from is None else {"started from": f"the run {recipe.initialize_from.name}"}),
        "in training" if reason is None else "ended": f"{reason or 'so far'}, step {progress.step:,}",
        **({"sources": ", ".join(map(source_name, recipe.data.sources))} if recipe.data.sources else {}),
        "tokens": f"{progress.tokens:,}, {progress.samples / samples_per_epoch:.2f} epochs of the training text",
        "time": f"{clock(progress.seconds)} of training, {speed:,.0f} tokens/s",
        "batch": f"{train.in_words(recipe.row_length)} tokens{cut}",
        "optimizer": f"{train.optimizer}, peak rate {train.learning_rate:g}{matrices}, "
        f"{cautious}decay {train.weight_decay:g}",
        **({"rates": ", ".join(factors)} if factors else {}),
        "schedule": f"{train.schedule}, {train.warmup_steps:,} steps of warmup",
        "checkpoints": f"every {train.checkpoint_every:,} steps and at the end" + between,
        "precision": precision.name,
        "steps skipped as non-finite or spikes": f"{progress.skipped:,}",
        "seed": str(recipe.seed),
        "device": device_name(torch.device(precision.device_type)),
        "versions": f"gptworks {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def _mixture(recipe: Recipe, epochs: Mapping[str, float]) -> dict[str, str]:
    """Return the card's rows about a mixture: each dataset's weight and number of epochs; empty without a mixture."""
    if not recipe.data.mixture:
        return {}
    anneal, first = recipe.data.anneal, recipe.anneal_from
    weights = ", ".join(f"{member.name} {member.weight:g}" for member in recipe.data.mixture)
    if anneal is not None and first is not None:
        later = ", ".join(f"{name} {weight:g}" for name, weight in anneal.weights.items())
        weights += f"; from sample {first:,} on {later}"
    return {"datasets by weight": weights, "epochs of each dataset": epochs_words(epochs)}


def _memory(memory: MemoryPeaks | None) -> dict[str, str]:
    if memory is None:
        return {}
    words = f"{readable(memory.predicted_memory_bytes, 'B')} of tensors planned"
    if memory.measured_memory_bytes is not None:
        words += f", {readable(memory.measured_memory_bytes, 'B')} measured"
    if memory.grown_memory_bytes is not None:
        words += f"; the process grew by {readable(memory.grown_memory_bytes, 'B')}, with code, files and freed memory"
    return {"memory at the peak": words}


def source_name(source: object) -> str:
    """Return a source's type, followed by its URL, or by the last part of its path or dataset, if it has one. Of
    several URLs, the first is named and the others are counted."""
    kind, names = getattr(source, "type", ""), (getattr(source, name, None) for name in ("url", "path", "dataset"))
    place = next((name for name in names if name), "")
    first, *more = (place,) if isinstance(place, str) else place
    name = first if "://" in first else Path(first).name
    return f"{kind} {name}".strip() + (f" and {len(more):,} more" if more else "")
