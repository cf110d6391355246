"""Commands that write a recipe: init, tune."""

import secrets
import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from gptworks.cli import options
from gptworks.cli.printing import notice, prepare_with_progress, show_lines, working
from gptworks.errors import UserError, refuse_unused

Out = Annotated[Path, Option("-o", "--out", metavar="FILE", help="The recipe to write.")]

MINUTES = 10


def init(
    texts: Annotated[
        Path | None, Argument(metavar="TEXTS", help="A folder of texts, programs or records; or a file.")
    ] = None,
    minutes: Annotated[
        float | None, Option(min=0.1, max=100_000, help=f"Minutes of training. Default: {MINUTES}.")
    ] = None,
    like: Annotated[
        str | None, Option(metavar="RECIPE", help="Copy the settings of model and training from this recipe.")
    ] = None,
    look: Annotated[bool, Option("--look", help="Only list the files, and show ten random passages.")] = False,
    out: Out = Path("mine.yaml"),
    as_json: options.AsJSON = False,
) -> None:
    """Write a recipe for a folder of texts.

    Reads plain text in any encoding, code, tables, documents and web pages, and leaves out files that it cannot read.
    Measures a training step on this machine, and sizes the recipe for the given training time.
    """
    from gptworks.files import write_whole

    if look:
        refuse_unused("does nothing with --look", minutes=minutes, like=like)
        return _look(texts, as_json)
    _check_new(out)
    if texts is None:
        if like is None:
            raise UserError("give a folder of texts, or --like with a recipe to copy: `gptworks recipes` lists some.")
        from gptworks.recipe import recipe_text

        refuse_unused("does nothing without TEXTS", minutes=minutes, json=as_json)
        write_whole(out, recipe_text(like)[1], new=True)
        notice(f"wrote {out}, a copy of {like}")
        return
    from gptworks.describe.plan_tables import plan_json
    from gptworks.draft.like import Like
    from gptworks.draft.pretraining import Search
    from gptworks.draft.texts import look_at

    minutes = minutes or MINUTES
    with working(f"looking at {texts}") as progress:
        found = look_at(texts, progress)
    with working(f"drafting a recipe for {texts}"):
        search = Search(found, minutes, out, notice) if like is None else Like(found, minutes, out, notice, like=like)
        drafted = search.run()
    write_whole(out, drafted.text(), new=True)
    notice(f"wrote {out}")
    tree = {
        "recipe": str(out), "files": found.items, "minutes": drafted.minutes, "epochs": drafted.epochs,
        "plan": plan_json(drafted.plan),
    }  # fmt: skip
    then = f"next        gptworks train {shlex.quote(str(out))}"
    show_lines(tree, as_json, *found.lines(), "", *drafted.lines(), then)


def _look(path: Path | None, as_json: bool) -> None:
    from gptworks.draft.texts import look_at

    if path is None:
        raise UserError("--look needs a folder of texts, or a file.")
    with working(f"looking at {path}") as progress:
        found = look_at(path, progress)
    passages = found.passages(seed=secrets.randbits(32))
    texts = (f"\n--- {passage.file}\n{passage.text}" for passage in passages)
    show_lines({"files": found.items, "passages": passages}, as_json, *found.lines(), *texts)


def _check_new(path: Path) -> None:
    """Check, before long work, that a new file can be written at a path.

    Raises:
        UserError: the file exists, or its folder is missing.
    """
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists, and it is not overwritten: give another file with -o.")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is not a folder: give a file in an existing folder with -o.")


def tune(
    base: Annotated[str, Argument(metavar="BASE", help="A run, a Hugging Face folder, or ORG/NAME[@revision].")],
    data: Annotated[Path, Argument(metavar="DATA", help="Conversations or questions: .jsonl, .json, .csv, .parquet.")],
    out: Out = Path("tune.yaml"),
    preference: Annotated[bool, Option("--preference", help="The records are pairs of answers.")] = False,
    as_json: options.AsJSON = False,
) -> None:
    """Write a recipe that fine-tunes a model.

    The model and the examples determine chat template, context length, learning rate and epochs.
    """
    from gptworks.describe.plan_tables import plan_json
    from gptworks.draft.finetuning import base_run, draft_tuning
    from gptworks.files import write_whole

    _check_new(out)
    with working(f"drafting the tuning of {base}"):
        drafted = draft_tuning(base_run(base, notice), data, out, preference, prepare=prepare_with_progress)
    write_whole(out, drafted.text(), new=True)
    notice(f"wrote {out}")
    tree = {"recipe": out, "findings": drafted.findings, "minutes": drafted.minutes, "plan": plan_json(drafted.plan)}
    faults = (f"stops training: {finding.name}: {finding.text}" for finding in drafted.findings)
    then = f"next        gptworks {'inspect' if drafted.findings else 'train'} {out}"
    show_lines(tree, as_json, *drafted.data_lines, *drafted.lines(), *faults, then)
