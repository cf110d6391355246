"""Commands that make a run: train, fork, launch."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from gptworks.cli import options
from gptworks.cli.prepare import prepare_with_progress
from gptworks.cli.printing import notice, working

Change = Annotated[
    list[str] | None,
    Option("--change", metavar="KEY[=VALUE]", help="With --resume: change this, and record from which step on."),
]


def train(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    resume: options.Resume = False,
    change: Change = None,
    force: options.Force = False,
) -> None:
    """Train the recipe's model.

    Writes its results to the run folder (run_dir=...).

    Processes that torchrun or `gptworks launch` starts train the model together.
    """
    with working("starting"):
        from gptworks.api import train as train_recipe

    train_recipe(
        recipe, *overrides or [], resume=resume, change=change or [], force=force, report=_first_rank_notice,
        prepare=prepare_with_progress,
    )  # fmt: skip


def fork(
    run: Annotated[str, Argument(metavar="RUN[@STEP]", help="A run folder; its last checkpoint, or @best.")],
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The new run folder.")],
    overrides: options.Overrides = None,
) -> None:
    """Continue a run's checkpoint in a new folder.

    The new run begins with the checkpoint's state and records the changed settings.
    """
    with working("linking the checkpoint"):
        from gptworks.recipe import load_recipe
        from gptworks.training.changes import read_history
        from gptworks.training.fork import fork as fork_run
        from gptworks.training.fork import origin_of

        history = read_history(fork_run(*origin_of(run), folder, overrides or []))
    typer.echo("\n".join([f"{folder}:", *(f"  {line}" for line in history.lines())]))
    more = " --change train.max_steps=MORE" * (load_recipe(folder).train.max_steps == history.origins[0].step)
    notice(f"Next: gptworks train {shlex.quote(str(folder))} --resume{more}")


def launch(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    nproc: Annotated[int, Option(min=1, help="Processes; one for each GPU.")] = 1,
    resume: options.Resume = False,
    change: Change = None,
    force: options.Force = False,
) -> None:
    """Train in several processes on this machine.

    train.parallel sets how the processes divide the work.
    """
    from gptworks.api import settings_of, with_changes
    from gptworks.training.distributed.launch import launch as start
    from gptworks.training.setup import check_train

    overrides, change = with_changes(overrides or [], change or [], resume)
    check_train(settings_of(recipe, overrides, resume, _first_rank_notice), resume, nproc, change)
    flags = [name for name, given in (("--resume", resume), ("--force", force)) if given]
    sys.exit(start(nproc, ["train", str(recipe), *overrides, *flags, *(f"--change={key}" for key in change)]))


def _first_rank_notice(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        notice(text)
