"""Distillation (Hinton et al., 2015): the model learns from text and from a teacher's next-token distribution."""

from pathlib import Path

import torch
from torch import Tensor

from gptworks.checkpoint import Checkpoint, checkpoint_of_step, choose_checkpoint, load_run
from gptworks.config import Recipe
from gptworks.config.objective import DistillationObjective
from gptworks.data.samples import Batch
from gptworks.errors import UserError
from gptworks.files import read_regular, sealed_json, unsealed_json, write_whole
from gptworks.model.gpt import GPT
from gptworks.model.loss import distillation_loss
from gptworks.planning.state import teacher_config
from gptworks.recipe import load_recipe
from gptworks.tokenizer import fingerprint, load_tokenizer
from gptworks.training.distributed.agreed import agreed_checkpoint
from gptworks.training.objectives.base import Objective, RunContext
from gptworks.training.objectives.next_token import Losses, LossFunction, counted, with_routing

TEACHER = "teacher.json"
"""The file in the run folder that identifies the teacher's checkpoint."""


_MOST_NOTE_BYTES = 1 << 16


def _teacher_of_the_start(folder: Path, kept: Path) -> Checkpoint:
    """Return the teacher's checkpoint in `folder` that the file `kept` records; UserError if the file or the
    checkpoint is missing, damaged or changed."""
    try:
        note = unsealed_json(read_regular(kept, _MOST_NOTE_BYTES, inside=kept.parent))
        checkpoint, sha256 = checkpoint_of_step(folder, note["step"]), note["manifest_sha256"]
    except UserError:
        raise
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{kept} is missing or damaged ({error}): restore it from a copy, or start a new run."
        ) from None
    if checkpoint.manifest_sha256 != sha256:
        raise UserError(
            f"objective.teacher={folder}: step {checkpoint.step}, which this run learned from, is missing or has "
            f"changed. Restore {checkpoint.folder} from a copy, or start a new run with another run_dir=."
        )
    return checkpoint


class Distillation(Objective):
    """The objective of distillation. Teacher and student read the same text or conversations."""

    settings: DistillationObjective
    kept_files = (TEACHER,)

    def check(self, recipe: Recipe) -> None:
        theirs = teacher_config(recipe)
        assert theirs is not None
        folder = self.settings.teacher
        if theirs.context_length < recipe.row_length:
            name = "model.context_length" if recipe.train.row_tokens is None else "train.row_tokens"
            raise UserError(
                f"{name}={recipe.row_length} and objective.teacher={folder} reads {theirs.context_length}: set {name} "
                f"to that or less."
            )
        if recipe.model.vocab_size not in (0, theirs.vocab_size):
            raise UserError(
                f"model.vocab_size={recipe.model.vocab_size} and objective.teacher={folder} has {theirs.vocab_size}: "
                f"both give the same tokens their probabilities. Take over its tokenizer and vocab_size."
            )

    def loss_without_data(self, model: GPT) -> LossFunction:
        self._teacher = GPT(load_recipe(self.settings.teacher).model).requires_grad_(False).eval()
        return self.loss

    def begin(self, run: RunContext) -> None:
        folder, kept = self.settings.teacher, self.recipe.run_dir / TEACHER
        if fingerprint(load_tokenizer(folder / "tokenizer")) != fingerprint(run.engine.tokenizer):
            raise UserError(
                f"the tokenizer is not that of objective.teacher={folder}, so its probabilities are of other tokens. "
                f"Set tokenizer.type=file and tokenizer.path={folder / 'tokenizer'}."
            )
        teacher = agreed_checkpoint(
            run.ranks,
            folder,
            lambda: choose_checkpoint(folder, report=run.report) if run.is_new else _teacher_of_the_start(folder, kept),
        )
        assert teacher is not None
        with run.ranks.busy():
            loaded = load_run(folder, str(teacher.step), device=run.model.device)
        theirs, ours = loaded.model.config.vocab_size, run.model.config.vocab_size
        if theirs != ours:
            raise UserError(
                f"objective.teacher={folder} has a vocabulary of {theirs} and this model {ours}: set "
                f"model.vocab_size={theirs}."
            )
        self._teacher = loaded.model.requires_grad_(False)
        if run.ranks.is_rank_zero:
            write_whole(kept, sealed_json({"step": teacher.step, "manifest_sha256": teacher.manifest_sha256}))
        run.report(f"the teacher is {folder}, step {teacher.step:,}")

    def loss(self, model: GPT, batch: Batch) -> Losses:
        """Return ce_weight · cross-entropy + kl_weight · temperature² · KL(teacher ‖ model), summed over targets.

        The KL divergence is between distributions at that temperature. With experts, add the routers' losses.
        """
        inputs, targets, *texts = batch
        settings, teacher = self.settings, self._teacher
        router_logits: list[Tensor] = []
        with torch.no_grad():
            teacher_features = teacher.features(inputs, None, None, *texts)
        features = model.features(inputs, None, router_logits, *texts)
        total, nats, kl = distillation_loss(
            features, model.head_weight, teacher_features, teacher.head_weight, targets,
            settings.temperature, settings.ce_weight, settings.kl_weight,
            model.config.logit_softcap, teacher.config.logit_softcap,
        )  # fmt: skip
        return with_routing(total, nats, router_logits, model, counted(batch), self._routing, {"teacher_kl": kl})
