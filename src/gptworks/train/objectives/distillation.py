"""Distillation (Hinton et al., 2015): a student learns a teacher's distribution over the next token, and the text."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from gptworks.checkpoint import Checkpoint, Report, checkpoint_of_step, choose_checkpoint, load_run
from gptworks.config import DistillationObjective, Recipe
from gptworks.data.batches import Batches
from gptworks.data.conversations.packing import ExampleBatches, Examples, evaluation_rows
from gptworks.device import Precision
from gptworks.errors import UserError
from gptworks.evaluate.loss import LossReport, Shares, evaluate_loss
from gptworks.files import sealed_json, unsealed_json, write_whole
from gptworks.infer.engine import Engine
from gptworks.model import GPT
from gptworks.model.loss import distillation_loss
from gptworks.plan.objectives import teacher_config
from gptworks.tokenizer import fingerprint, load_tokenizer
from gptworks.train.distributed.agreed import agreed_checkpoint
from gptworks.train.objectives.base import Task
from gptworks.train.objectives.next_token import Batch, Losses, counted, with_routing

TEACHER = "teacher.json"
"""In the run folder: which checkpoint of the teacher the run learns from."""


def check_teacher(recipe: Recipe) -> None:
    """Refuse a teacher that is no run, before any work is done.

    Raises:
        UserError: it has no recipe, or a shorter context than the student.
    """
    theirs = teacher_config(recipe)
    if theirs is None:
        return
    assert isinstance(recipe.objective, DistillationObjective)
    folder = recipe.objective.teacher
    if theirs.context_length < recipe.model.context_length:
        raise UserError(
            f"model.context_length={recipe.model.context_length} and objective.teacher={folder} reads "
            f"{theirs.context_length}: set model.context_length to that or less."
        )
    if recipe.model.vocab_size not in (0, theirs.vocab_size):
        raise UserError(
            f"model.vocab_size={recipe.model.vocab_size} and objective.teacher={folder} has {theirs.vocab_size}: both "
            f"give the same tokens their probabilities. Take over its tokenizer and vocab_size."
        )


def distillation(
    objective: DistillationObjective,
    teacher: GPT,
    model: GPT,
    batch: Batch,
    *,
    balance_weight: float,
    z_weight: float,
) -> Losses:
    """ce_weight · cross-entropy + kl_weight · temperature² · KL(teacher ‖ model), sums over the batch's targets."""
    inputs, targets, *positions = batch
    router_logits: list[Tensor] = []
    with torch.no_grad():
        taught = teacher.features(inputs, None, None, *positions)
    features = model.features(inputs, None, router_logits, *positions)
    total, nats, kl = distillation_loss(
        features, model.head_weight, taught, teacher.head_weight, targets,
        objective.temperature, objective.ce_weight, objective.kl_weight,
    )  # fmt: skip
    n_targets, figures = counted(batch), {"teacher_kl": kl}
    return with_routing(total, nats, router_logits, model, n_targets, balance_weight, z_weight, figures)


def _teacher_of_the_start(folder: Path, kept: Path, report: Report) -> Checkpoint:
    """The checkpoint of the teacher that the run began with; the best one, where an older version kept no note of it.

    Raises:
        UserError: it is gone or has changed, or the note is damaged.
    """
    try:
        note = unsealed_json(kept.read_bytes())
        checkpoint = checkpoint_of_step(folder, note["step"])
    except FileNotFoundError:
        return choose_checkpoint(folder, report=report)
    except (ValueError, KeyError) as error:
        raise UserError(f"{kept} is damaged ({error}): restore it from a copy, or start anew.") from None
    if checkpoint.manifest_sha256 != note["manifest_sha256"]:
        raise UserError(
            f"objective.teacher={folder}: step {checkpoint.step}, which this run has learned from, is not there or has "
            f"changed. Restore {checkpoint.folder} from a copy, or start anew with another run_dir=."
        )
    return checkpoint


class Distillation(Task):
    """Text or conversations, read by teacher and student alike."""

    objective: DistillationObjective

    def _open(self) -> None:
        recipe = self.recipe
        assert isinstance(recipe.objective, DistillationObjective)
        self.objective = recipe.objective
        self._examples: ExampleBatches | None = None
        if recipe.data.conversations:
            examples = Examples(self.train_shards, self.context_length)
            self._examples = ExampleBatches(examples, recipe.seed)
            self._held_out = Examples(self.validation_shards, self.context_length)
        else:
            self._windows = Batches(self.train_shards, self.context_length, recipe.seed)

    @property
    def samples_per_epoch(self) -> int:
        return super().samples_per_epoch if self._examples is None else self._examples.rows_per_epoch

    @property
    def n_validation(self) -> int:
        return super().n_validation if self._examples is None else len(self._held_out.rows)

    def begin(
        self,
        model: GPT,
        engine: Engine,
        precision: Precision,
        fresh: bool,
        writes: bool,
        report: Callable[[str], None],
        shares: Shares,
    ) -> None:
        folder = self.objective.teacher
        if fingerprint(load_tokenizer(folder / "tokenizer")) != fingerprint(engine.tokenizer):
            raise UserError(
                f"the tokenizer is not that of objective.teacher={folder}, so its probabilities are of other tokens. "
                f"Set tokenizer.type=file and tokenizer.path={folder / 'tokenizer'}."
            )
        kept = self.recipe.run_dir / TEACHER
        teacher = agreed_checkpoint(
            self.ranks,
            folder,
            lambda: choose_checkpoint(folder, report=report) if fresh else _teacher_of_the_start(folder, kept, report),
        )
        assert teacher is not None
        with shares.busy():
            loaded = load_run(folder, str(teacher.step), device=model.device)
        if loaded.model.config.vocab_size != model.config.vocab_size:
            raise UserError(
                f"objective.teacher={folder} has a vocabulary of {loaded.model.config.vocab_size} and this model "
                f"{model.config.vocab_size}: set model.vocab_size={loaded.model.config.vocab_size}."
            )
        self._teacher = loaded.model.requires_grad_(False)
        if writes:
            write_whole(kept, sealed_json({"step": teacher.step, "manifest_sha256": teacher.manifest_sha256}))
        report(f"the teacher is {folder}, step {teacher.step:,}")

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        return (self._examples or self._windows).batch(position + micro_step * size, size)

    def loss(self, model: GPT, batch: Batch) -> Losses:
        return distillation(self.objective, self._teacher, model, batch, **self._routing)

    def evaluate(self, model: GPT, shares: Shares, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        if self._examples is None:
            return super().evaluate(model, shares, precision)
        rows = evaluation_rows(self._held_out, self.n_evaluated)
        return evaluate_loss(model, rows, shares=shares, autocast=precision.autocast), {}
