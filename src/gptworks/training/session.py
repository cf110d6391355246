"""A session of a run: builds the objects that train the run, and starts from the run's newest checkpoint, from another
run's weights, or from random weights."""

import torch

from gptworks.chat_template import load_chat_template, other_templates, save_chat_template, save_other_templates
from gptworks.checkpoint import checkpoints
from gptworks.data.beginnings import Beginning, beginnings
from gptworks.errors import UserError
from gptworks.files import shown, write_sums
from gptworks.infer.engine import Engine
from gptworks.recipe import load_recipe, save_recipe
from gptworks.tokenizer import save_tokenizer
from gptworks.training.changes import Change, change_words, record
from gptworks.training.checkpoint_files import remove_newer
from gptworks.training.distributed.agreed import check_shared
from gptworks.training.distributed.parallel import choose_parallel
from gptworks.training.objectives.base import choose_objective
from gptworks.training.objectives.next_token import LossFunction
from gptworks.training.optim.trainable import trainable_model
from gptworks.training.prefetch import Prefetcher
from gptworks.training.progress import Length, Progress
from gptworks.training.record.display import Display
from gptworks.training.record.reporter import Reporter
from gptworks.training.rehearsal.measure import StepMemory
from gptworks.training.setup import PreparedRun
from gptworks.training.start import starting_weights
from gptworks.training.state import TrainingState
from gptworks.training.step import LayerNorms, TrainStep


class Session:
    """The model and all other objects of a run in training, built from its setup; `loop.Run` adds the steps."""

    def __init__(self, setup: PreparedRun, display: Display, loss: LossFunction | None = None) -> None:
        """
        Args:
            loss: the loss function to use instead of the objective's.

        Raises:
            UserError: the data, or a prompt in `train.sample_prompts`, cannot be used.
        """
        recipe, ranks, device = setup.recipe, setup.ranks, setup.device
        self.setup, self.recipe, self.settings, self.ranks, self.display = setup, recipe, recipe.train, ranks, display
        self.parallel = choose_parallel(recipe, ranks, device, setup.layout)
        has_room = setup.need is not None and setup.need.gathers_once
        self.parallel.gathers_once = not ranks.all_reduce_max(not has_room)  # true only if all ranks have enough memory
        with ranks.busy():
            self.objective = choose_objective(recipe, setup.prepared.folder, verify=ranks.is_rank_zero)
        torch.manual_seed(recipe.seed)
        self.step_memory = StepMemory(setup)
        self.model = self.parallel.build(lambda: trainable_model(recipe.model, recipe.adapter, recipe.freeze), device)
        self.model.activation_checkpointing = recipe.train.activation_checkpointing
        self.step = TrainStep(self.model, recipe.train, loss or self.objective.loss, setup.precision, self.parallel)
        self.prefetcher = Prefetcher(self.objective, self.parallel, device)
        self.length = Length(recipe, self.objective.samples)
        manifest = self.objective.samples.train_shards.manifest
        start = Progress(
            data_fingerprint=manifest.fingerprint, validation_text_sha256=manifest.validation_text_sha256 or ""
        )
        self.state = TrainingState(recipe, self.step, start, display)
        self.reporter = Reporter(recipe, self.objective, self.step, self.length, display)
        tokenizer = setup.prepared.tokenizer
        template = load_chat_template(setup.prepared.folder / "tokenizer", tokenizer)
        self.engine = Engine(self.model, tokenizer, cache_dtype=setup.precision.dtype, chat_template=template)
        self.samples = self._samples()
        self.norms = LayerNorms(self.model, self.parallel, recipe.train.log_every)

    def _samples(self) -> list[Beginning]:
        """Return the texts that the run's samples continue: held-out beginnings, then the recipe's prompts; empty
        without `train.sample_every`."""
        train, held_out = self.settings, self.objective.samples.validation_shards
        if not train.sample_every:
            return []
        chosen = [Beginning(prompt, None, None) for prompt in train.sample_prompts]
        if train.sample_held_out:
            most, tokenizer = train.held_out_tokens(self.recipe.model.context_length), self.setup.prepared.tokenizer
            chosen = beginnings(held_out, tokenizer, train.sample_held_out, most, train.sample_tokens) + chosen
        for one in chosen:
            try:
                self.engine.encode_prompt(one.prompt)
            except UserError as error:
                name = "sample_prompts" if one.follows is None else "sample_held_out"
                raise UserError(
                    f"train.{name} has {one.text[:100]!r}: {error} Or set train.sample_every=0 for no samples."
                ) from None
        return chosen

    @property
    def progress(self) -> Progress:
        """The run's progress."""
        return self.state.progress

    def restore(self) -> bool:
        """Restore the newest undamaged checkpoint bit for bit. If the run has no checkpoint, load the weights of
        `initialize_from`, if set. Return whether the run starts at step 0, without a checkpoint.

        Raises:
            UserError: the run folder, its checkpoints or the weights of `initialize_from` cannot be used; or the run
                has exceeded its planned length.
        """
        setup, ranks, folder, report = self.setup, self.ranks, self.recipe.run_dir, self.display.message
        check_shared(ranks, folder)
        checkpoint = self.state.newest_checkpoint() if setup.resume else None
        if checkpoint is not None:
            self.state.restore(checkpoint)
            ranks.from_rank_zero(lambda: self.length.check_resume(self.progress))
            report(f"resuming {shown(folder)} from step {self.progress.step:,}")
            return False

        def refuse_damaged() -> None:
            if checkpoints(folder):
                raise UserError(
                    f"every checkpoint of {folder} is damaged: restore one from a copy, or give another run_dir=."
                )

        ranks.from_rank_zero(refuse_damaged)
        if setup.resume:
            report(f"{shown(folder)} has no checkpoint to go on from: starting from step 0")
        if self.recipe.initialize_from is not None:
            with ranks.busy():
                self.state.start_from(starting_weights(self.recipe, setup.prepared.tokenizer, report, ranks))
        return True

    def write_settings(self, is_new: bool) -> None:
        """Write the recipe, the tokenizer and the record of changes to the run folder. If the run is resumed, remove
        newer checkpoints that hold only weights. Only rank 0 calls this."""
        setup, recipe, folder, step = self.setup, self.recipe, self.recipe.run_dir, self.progress.step
        before = load_recipe(folder) if (folder / "recipe.yaml").exists() else None
        change = None if before is None or is_new else Change.between(before, recipe, step)
        history = record(folder, step, change, setup.overrides, before)
        if setup.resume:  # the run will save these again
            remove_newer(folder, step, weights_only=True)
        if change is not None:
            each = "".join(f"\n  {change_words({path: pair})}" for path, pair in change.settings.items())
            self.display.message(f"changed from step {step:,} on:{each}")
        save_recipe(recipe, folder / "recipe.yaml", history.lines())
        save_tokenizer(setup.prepared.tokenizer, folder / "tokenizer", recipe.sampling.stated())
        if self.engine.chat_template is not None:
            save_chat_template(self.engine.chat_template, folder / "tokenizer")
        save_other_templates(other_templates(setup.prepared.folder / "tokenizer"), folder / "tokenizer")
        write_sums(folder / "tokenizer")
