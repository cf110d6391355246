"""Train a recipe, and what a notebook shows of a run."""

from collections.abc import Callable, Collection
from os import PathLike
from pathlib import Path
from typing import Any

from gptworks.checkpoint import Report
from gptworks.config import Recipe
from gptworks.data.prepare import prepare as prepare_data
from gptworks.device import choose_device, choose_precision
from gptworks.errors import UserError
from gptworks.interface.overrides import overrides_of
from gptworks.pages.cell import Figure, cell
from gptworks.pages.parts import number, paragraph, samples
from gptworks.recipe import RecipeLike, load_recipe
from gptworks.runs.history import History, read_history
from gptworks.runs.report import key_figures_of
from gptworks.training.changes import load_to_resume
from gptworks.training.distributed.parallel import run_layout
from gptworks.training.distributed.ranks import join
from gptworks.training.loop import check_train
from gptworks.training.loop import train as train_model
from gptworks.training.record.curves import curves_picture
from gptworks.training.record.display import Display, clock
from gptworks.training.record.metrics import Record
from gptworks.training.record.notebook import NotebookDisplay, in_notebook
from gptworks.training.record.outcome import read_outcome
from gptworks.training.rehearsal.preflight import check_memory


class TrainedRun(History):
    """A run as its folder shows it: figures, curves and samples, which a notebook shows.

    It stands for its folder: `gptworks.load(run)`, `gptworks.evaluate(run)`, `gptworks.train(run, resume=True)`.
    """

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def samples(self) -> list[Record]:
        """What the model wrote on its way: `step`, `prompt` and `text` of each."""
        return self.kind("sample")

    @property
    def ended(self) -> str:
        """How training last ended and where it stands; or why that is not known."""
        outcome = read_outcome(self.folder)
        if isinstance(outcome, str):
            return outcome
        return f"{outcome.reason} at step {outcome.step:,} after {clock(outcome.seconds)}, {outcome.tokens:,} tokens"

    def curves(self) -> Figure:
        """Loss and learning rate over the tokens."""
        return Figure(curves_picture(self.train, self.validation, self.name), f"Curves of {self.name}")

    def __repr__(self) -> str:
        best = self.best
        loss = "" if best is None else (
            f"\nbest validation loss {best['loss']:.4f} {self.loss_unit} at step {best['step']:,}"
        )  # fmt: skip
        return f"{self.folder}: {self.parameters:,} parameters\n{self.ended}{loss}"

    def _repr_html_(self) -> str:
        last = max((record["step"] for record in self.samples), default=0)
        texts = [(number(r["step"]), r["prompt"], r["text"]) for r in self.samples if r["step"] == last]
        return cell(
            paragraph(f"{self.folder}: {self.ended}"),
            key_figures_of(self),
            self.curves().markup(),
            *([samples(texts)] if texts else []),
        )


def read_run(folder: str | PathLike[str]) -> TrainedRun:
    """The run in a folder, also one that still trains.

    Raises:
        UserError: it is none.
    """
    return TrainedRun(**vars(read_history(Path(folder))))


def train(
    recipe: RecipeLike,
    *overrides: str,
    resume: bool = False,
    change: Collection[str] = (),
    force: bool = False,
    report: Report | None = None,
    prepare: Callable[[Recipe], object] | None = None,
    **settings: Any,
) -> TrainedRun:
    """Train a recipe's model until its end: `gptworks.train("demo", max_steps=20)`.

    Args:
        recipe: a file, a shipped recipe's name or a run folder; or a recipe as nested dictionaries, or a `Recipe`.
        overrides: settings that win over it, as on the command line: `"train.max_steps=20"`.
        resume: go on from the newest checkpoint of the run folder.
        change: settings by path that a resumed run may change, though its loss curve depends on them.
        force: start even if it should not fit in memory.
        report: called with each setting of an earlier session that is kept; None: the display shows it.
        prepare: makes the recipe's tokenizer and shards; None: quietly, or as the notebook shows it.
        settings: more settings: of the section `train` by name (`max_steps=20`), others by section
            (`model={"n_layers": 2}`, `run_dir="runs/small"`).

    Raises:
        UserError: the recipe, its data or the run folder cannot be used, or the run does not fit in memory.
        RunError: loss or gradients stayed non-finite, or a checkpoint could not be written.
    """
    given, change = with_changes([*overrides, *overrides_of(settings)], change, resume)
    display = NotebookDisplay() if in_notebook() else None
    loaded = settings_of(recipe, given, resume, report or (display or Display()).message)
    device = choose_device(loaded.train.device)
    precision = choose_precision(loaded.train.precision, device)  # refused before preparing
    with join(loaded.train.parallel.timeout_seconds, device) as ranks:

        def check_and_prepare() -> None:
            check_train(loaded, resume, ranks.size, change)
            check_memory(loaded, device, precision, force, run_layout(loaded, ranks, device), ranks.local_size)
            if prepare is not None:
                prepare(loaded)
            elif display is not None:
                prepare_data(loaded, report=display.preparing)

        ranks.from_rank_zero(check_and_prepare)
        train_model(
            loaded, resume=resume, change=change, force=force, ranks=ranks, overrides=given,
            display=display if ranks.is_rank_zero else None,
        )  # fmt: skip
    return read_run(loaded.run_dir)


def with_changes(overrides: list[str], change: Collection[str], resume: bool) -> tuple[list[str], list[str]]:
    """The overrides with those that a change gives as `KEY=VALUE`, and the keys that it names."""
    if change and not resume:
        [first, *_] = change
        raise UserError(f"--change {first} is for a run that goes on: add --resume, or give KEY=VALUE alone.")
    return [*overrides, *(one for one in change if "=" in one)], [one.partition("=")[0] for one in change]


def settings_of(recipe: RecipeLike, overrides: list[str], resume: bool, report: Report) -> Recipe:
    """The recipe; of a run that goes on, with the settings of its earlier command lines, which are reported."""
    if not resume:
        return load_recipe(recipe, overrides)
    loaded, kept = load_to_resume(recipe, overrides)
    if kept:
        report(f"settings of the earlier command line are kept: {' '.join(kept)}")
    return loaded
