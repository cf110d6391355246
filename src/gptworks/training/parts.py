"""The parts of a run in training, built from its setup."""

import torch

from gptworks.training.distributed.parallel import choose_parallel
from gptworks.training.engine import training_engine
from gptworks.training.events import Listener
from gptworks.training.length import Length
from gptworks.training.objectives.base import choose_objective
from gptworks.training.objectives.next_token import LossFunction
from gptworks.training.optim.trainable import trainable_model
from gptworks.training.prefetch import Prefetcher
from gptworks.training.progress import Progress
from gptworks.training.record.display import Display
from gptworks.training.record.layer_norms import LayerNorms
from gptworks.training.record.reporter import Reporter
from gptworks.training.rehearsal.held import StepMemory
from gptworks.training.setup import PreparedRun
from gptworks.training.state import TrainingState
from gptworks.training.step import TrainStep


class RunParts:
    """A model in training and its collaborators; `loop.Run` has the steps."""

    def __init__(self, setup: PreparedRun, display: Display, loss: LossFunction | None = None) -> None:
        """
        Args:
            loss: replaces the objective's loss.
        """
        recipe, ranks, device = setup.recipe, setup.ranks, setup.device
        self.setup, self.recipe, self.settings, self.ranks, self.display = setup, recipe, recipe.train, ranks, display
        self.parallel = choose_parallel(recipe, ranks, device, setup.layout)
        with ranks.busy():
            self.objective = choose_objective(recipe, setup.prepared.folder, verify=ranks.is_rank_zero)
        torch.manual_seed(recipe.seed)
        self.step_memory = StepMemory(setup)
        self.model = self.parallel.place(trainable_model(recipe.model, recipe.adapter, recipe.freeze), device)
        self.model.activation_checkpointing = recipe.train.activation_checkpointing
        self.step = TrainStep(
            self.model, recipe.train, loss or self.objective.loss, setup.precision, self.parallel, ranks
        )
        self.prefetcher = Prefetcher(self.objective, self.parallel, device)
        self.length = Length(recipe, self.objective.samples)
        manifest = self.objective.samples.train_shards.manifest
        start = Progress(
            data_fingerprint=manifest.fingerprint, validation_text_sha256=manifest.validation_text_sha256 or ""
        )
        self.state = TrainingState(recipe, self.step, start, self.length, display)
        self.reporter = Reporter(recipe, self.objective, self.step, self.length, display, setup.precision)
        self.engine = training_engine(recipe, setup.prepared, setup.precision, self.model)
        norms = LayerNorms(self.model, self.parallel, recipe.train.log_every)
        self.listeners: tuple[Listener, ...] = (norms, self.state, self.reporter)
