"""The beginning of a session: from the run's newest checkpoint, from another run's weights, or from random ones."""

from dataclasses import dataclass

from gptworks.chat_template import other_templates, save_chat_template, save_other_templates
from gptworks.checkpoint import checkpoints
from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.files import write_sums
from gptworks.infer.engine import Engine
from gptworks.recipe import load_recipe, save_recipe
from gptworks.tokenizer import save_tokenizer
from gptworks.training.changes import change_words, changed, inexact, record
from gptworks.training.distributed.agreed import check_shared
from gptworks.training.length import Length
from gptworks.training.record.display import Display
from gptworks.training.saving import remove_newer
from gptworks.training.setup import PreparedRun
from gptworks.training.start import starting_weights
from gptworks.training.state import TrainingState


@dataclass(frozen=True)
class Beginning:
    """The beginning of a session of a run."""

    is_new: bool
    """Whether the run starts at step 0, not at a checkpoint."""
    before: Recipe | None
    """The recipe in the run folder; None for a new folder, or on ranks other than 0."""


def start_or_resume(setup: PreparedRun, state: TrainingState, length: Length, display: Display) -> Beginning:
    """Restore the newest undamaged checkpoint, bit for bit; without one, take the weights of `initialize_from`.

    Raises:
        UserError: the run folder or its checkpoints cannot be used; or the run has already reached its length.
    """
    recipe, ranks, folder = setup.recipe, setup.ranks, setup.recipe.run_dir
    before = load_recipe(folder) if ranks.is_rank_zero and (folder / "recipe.yaml").exists() else None
    checkpoint = state.newest_checkpoint() if setup.resume else None
    if checkpoint is not None:
        state.restore(checkpoint)
        ranks.from_rank_zero(lambda: length.check_resume(state.progress, before))
        display.message(f"resuming {folder} from step {state.progress.step:,}")
        return Beginning(False, before)
    check_shared(ranks, folder)

    def refuse_damaged() -> None:
        if checkpoints(folder):
            raise UserError(
                f"every checkpoint of {folder} is damaged: restore one from a copy, or give another run_dir=."
            )

    ranks.from_rank_zero(refuse_damaged)
    if setup.resume:
        display.message(f"{folder} has no checkpoint to go on from: starting from step 0")
    if recipe.initialize_from is not None:
        with ranks.busy():
            state.start_from(starting_weights(recipe, setup.prepared.tokenizer, display.message, ranks))
    return Beginning(True, before)


def write_settings(setup: PreparedRun, beginning: Beginning, step: int, engine: Engine, display: Display) -> None:
    """Write the recipe, the tokenizer and the record of changes to the run folder; only rank 0 calls this.

    Args:
        step: the step at which the run begins.
    """
    recipe, before, folder = setup.recipe, beginning.before, setup.recipe.run_dir
    resumed = None if beginning.is_new else before
    changes = {} if resumed is None else changed(resumed, recipe)
    exact = resumed is None or not inexact(resumed, recipe, changes, step)
    history = record(folder, step, changes, setup.overrides, before, exact)
    if setup.resume:  # the run will write them again
        remove_newer(folder, step, weights_only=True)
    if changes:
        each = "".join(f"\n  {change_words({path: pair})}" for path, pair in changes.items())
        display.message(f"changed from step {step:,} on:{each}")
    save_recipe(recipe, folder / "recipe.yaml", history.lines())
    save_tokenizer(setup.prepared.tokenizer, folder / "tokenizer")
    if engine.chat_template is not None:
        save_chat_template(engine.chat_template, folder / "tokenizer")
    save_other_templates(other_templates(setup.prepared.folder / "tokenizer"), folder / "tokenizer")
    write_sums(folder / "tokenizer")
