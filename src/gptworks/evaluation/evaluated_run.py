"""A run to evaluate, loaded once for all measurements."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from gptworks.checkpoint import Report, choose_checkpoint
from gptworks.choices import LoadedWeights
from gptworks.config import PythonStdlibSource, Recipe
from gptworks.data.batches import evaluation_windows
from gptworks.data.conversations.packing import held_out_rows
from gptworks.data.opened import Prepared, find_of_run, held_out_text
from gptworks.data.prepare import prepare
from gptworks.data.shards import SPLITS, Stretch, TokenShards
from gptworks.device import choose_device, choose_precision
from gptworks.errors import UserError
from gptworks.evaluation.calibration import measure_calibration
from gptworks.evaluation.loss import compressor_bits_per_byte, evaluate_by_position, evaluate_loss, watched
from gptworks.evaluation.memorization import measure_memorization
from gptworks.evaluation.results import Evaluation, Measured
from gptworks.evaluation.scoring import SLOTS, Progress
from gptworks.evaluation.text import evaluate_text, positions_table
from gptworks.files import fetched_path
from gptworks.infer.engine import load
from gptworks.recipe import load_recipe
from gptworks.tokenizer import fingerprint, token_bytes

PLACEHOLDER_SOURCES = (PythonStdlibSource(type="python-stdlib"),)
"""Placeholder for the sources in the recipe of an imported run, whose real sources are unknown."""


class EvaluatedRun:
    """A loaded checkpoint, with a method for each measurement on text. `run_task` and `run_harness` use its engine."""

    def __init__(
        self,
        run_dir: str | PathLike[str],
        checkpoint: str = "best",
        *,
        overrides: Sequence[str] = (),
        device: str = "auto",
        precision: str | None = None,
        weights: LoadedWeights = "auto",
        report: Report = lambda _: None,
        prepare: Callable[[Recipe], Prepared] = prepare,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """Load a checkpoint of a run. The arguments are those of `gptworks.evaluate`.

        `precision` applies to losses and calibration. For tasks and memorization, the engine scores and generates text
        in the model's dtype.

        Raises:
            UserError: run, checkpoint or device is missing, files are damaged, or a quantized run's format is not
                `weights`.
        """
        self.folder = fetched_path(run_dir)
        chosen = choose_checkpoint(self.folder, checkpoint, report)
        self.step, self._trained_on = chosen.step, str(chosen.state().get("data_fingerprint", ""))
        self.recipe = load_recipe(self.folder, overrides)
        self.name = self.folder.resolve().name
        self.precision = choose_precision(precision or self.recipe.train.precision, choose_device(device))
        self.engine = load(self.folder, self.step, overrides=overrides, device=device, weights=weights, n_slots=SLOTS)
        self.rounded_to = None if weights in ("auto", "fp32") or chosen.is_quantized else weights
        """The format to which weights were rounded while loading; None if they were not rounded."""
        self.model, self.tokenizer = self.engine.model, self.engine.tokenizer
        self._prepare, self._progress = prepare, progress
        others = (key for key in overrides if not key.startswith("data.cache_dir="))
        self._own_text = not any(key.startswith(("data.", "tokenizer.")) for key in others)

    @cached_property
    def prepared(self) -> Prepared:
        """The dataset of the validation split: the shards that the run was trained on if they still exist and no
        override changes `data` (except `data.cache_dir`) or `tokenizer`, else the recipe's data.

        Raises:
            UserError: the run was imported without data, the data is missing, or its vocabulary exceeds the model's.
        """
        found, was_trained = None, self._own_text and bool(self._trained_on)
        if was_trained:
            found = find_of_run(self.recipe, self.folder, self._trained_on)
        elif self._own_text and self.recipe.data.sources == PLACEHOLDER_SOURCES:
            raise UserError(
                f"{self.folder} was imported and has no held-out text: the `data` of its recipe is a placeholder. Give "
                f"--text FILE, --task FILE, or a text such as data.sources.0.type=text data.sources.0.path=texts/."
            )
        try:
            prepared = self._prepare(self.recipe) if found is None else found
        except UserError as error:
            if not was_trained:
                raise
            raise UserError(
                f"{error} The run needs no text where its shards are: data.cache_dir=FOLDER names the folder that "
                f"holds them. --text FILE evaluates another text."
            ) from None
        if prepared.manifest.vocab_size > self.model.config.vocab_size:
            raise UserError(
                f"{prepared.folder} has tokens of a vocabulary of {prepared.manifest.vocab_size} and the model one of "
                f"{self.model.config.vocab_size}: this is not the run's text."
            )
        return prepared

    def validation(
        self, stride: int | None = None, by_position: bool = False, compressors: bool = False
    ) -> dict[str, Any]:
        """Compute loss, perplexity and bits per byte over the entire validation split, as JSON; for the arguments, see
        `gptworks.evaluate`. If the run learned only answers, only tokens of answers count; in preference pairs, only
        tokens of the chosen answers.

        Raises:
            UserError: the stride is not between 1 and the context length, `stride` or `by_position` is given for a run
                that learned only answers, `by_position` has no window as long as the context, `compressors` is given
                for conversations or a tokenizer that does not restore the text, or `prepared` raises an error.
        """
        context, round_trips = self.model.config.context_length, self.prepared.manifest.round_trips
        shards = TokenShards(self.prepared.folder, "validation")
        text_bytes = shards.text_bytes if round_trips else None
        answers_alone = self.prepared.manifest.holds_examples and not self.recipe.objective.learns_prompts
        if answers_alone and (stride is not None or by_position):
            raise UserError(
                "--stride and --by-position are for text: this run's held-out conversations are rows of their own."
            )
        compressed = compressor_bits_per_byte(b"".join(held_out_text(self.prepared))) if compressors else None
        windows: Iterable[tuple[torch.Tensor, ...]] = (
            held_out_rows(shards, self.recipe) if answers_alone else evaluation_windows(shards, context, stride=stride)
        )
        windows = watched(windows, shards.n_tokens, stride, self._progress)
        with self.precision.autocast():
            report = evaluate_loss(self.model, windows, text_bytes=text_bytes)
        result: dict[str, Any] = {
            "loss": report.loss, "perplexity": report.perplexity, "bits_per_byte": report.bits_per_byte,
            "tokens": report.n_tokens, "text_bytes": text_bytes, "precision": self.precision.name,
            "weights": self.engine.weights, "step": self.step,
        }  # fmt: skip
        if self.prepared.manifest.parts:
            result["datasets"] = [self._of_dataset(shards, part, round_trips) for part in shards.stretches]
        if by_position:
            sizes = token_bytes(self.prepared.tokenizer) if round_trips else None
            whole = watched(evaluation_windows(shards, context), shards.n_tokens, None, self._progress)
            with self.precision.autocast():
                parts = evaluate_by_position(self.model, whole, token_bytes=sizes)
            result["positions"] = positions_table(parts)
        if compressed is not None:
            result["compressors"] = compressed
        return result

    def _of_dataset(self, shards: TokenShards, part: Stretch, round_trips: bool) -> dict[str, Any]:
        """Compute the loss on the held-out text of a mixture's dataset, as JSON; `loss` is None without targets."""
        if part.n_tokens < 2:
            return {"name": part.name, "loss": None, "bits_per_byte": None, "tokens": 0}
        windows = evaluation_windows(shards, self.model.config.context_length, part=part)
        text_bytes = part.text_bytes if round_trips else None
        with self.precision.autocast():
            report = evaluate_loss(self.model, windows, text_bytes=text_bytes)
        figures = {"loss": report.loss, "bits_per_byte": report.bits_per_byte, "tokens": report.n_tokens}
        return {"name": part.name, **figures}

    def text(self, path: Path, text: str, stride: int | None = None) -> Evaluation:
        """Compute loss, perplexity and bits per byte of a text; see `evaluate_text`."""
        with self.precision.autocast():
            found = evaluate_text(self.model, self.tokenizer, text, stride=stride, progress=self._progress)
        notes = () if found.report.text_bytes else ("the tokenizer does not keep the whole text: no bits per byte",)
        details = {"tokens": found.report.n_tokens, "positions": positions_table(found.positions)}
        questions = sha256(text.encode("utf-8")).hexdigest()  # the text alone determines the passages
        return self._evaluation(
            "text", found.measured(), questions, name=f"text-{path.stem}", notes=notes, details=details, stride=stride,
        )  # fmt: skip

    def calibration(self) -> Evaluation:
        """Compare probabilities with frequencies over the entire validation split; see `measure_calibration`."""
        shards = TokenShards(self.prepared.folder, "validation")
        windows = evaluation_windows(shards, self.model.config.context_length)
        windows = watched(windows, shards.n_tokens, None, self._progress)
        with self.precision.autocast():
            measured, bins = measure_calibration(self.model, windows)
        return self._evaluation("calibration", measured, self.prepared.manifest.fingerprint, details={"bins": bins})

    def memorization(self) -> Evaluation:
        """Measure the share of generated n-grams that occur in the training text; see `measure_memorization`."""
        training, held_out = (TokenShards(self.prepared.folder, split) for split in SPLITS)
        measured = measure_memorization(
            self.engine, training, held_out, autocast=self.precision.autocast, progress=self._progress
        )
        return self._evaluation("memorization", measured, self.prepared.manifest.fingerprint)

    def of_these_weights(self, found: Evaluation) -> Evaluation:
        """Return an evaluation; if loading rounded the weights, with their format in its name, settings and notes."""
        if self.rounded_to is None:
            return found
        note = f"weights rounded to {self.rounded_to} as they were loaded; the run's own are in fp32"
        settings = {**found.settings, "weights": self.rounded_to}
        return replace(found, name=f"{found.name}-{self.rounded_to}", settings=settings, notes=(*found.notes, note))

    def _evaluation(
        self, kind: str, metrics: dict[str, Measured], questions: str, *, name: str | None = None,
        notes: tuple[str, ...] = (), details: dict[str, Any] | None = None, **settings: Any,
    ) -> Evaluation:  # fmt: skip
        settings = {
            "tokenizer": fingerprint(self.tokenizer), "context_length": self.model.config.context_length,
            "precision": self.precision.name, **settings,
        }  # fmt: skip
        return Evaluation(
            name=name or kind, kind=kind, run=self.name, step=self.step,
            n_items=len(next(iter(metrics.values())).statistics), metrics=metrics,
            fingerprint=questions, settings=settings, notes=notes, details=details or {},
        )  # fmt: skip
