"""The command that measures a run: on held-out text, on any text, on tasks, in lm-evaluation-harness."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gptworks.cli.common import AsJSON, Device, Overrides, RunFolder, WhichCheckpoint, console_of, notice, print_json
from gptworks.cli.make import prepare_with_progress
from gptworks.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gptworks.checkpoint import LoadedRun
    from gptworks.device import Precision
    from gptworks.evaluate.results import Evaluation
    from gptworks.infer.engine import Engine


def evaluate(
    run: RunFolder,
    overrides: Overrides = None,
    checkpoint: WhichCheckpoint = "best",
    text: Annotated[
        list[Path] | None, typer.Option("--text", metavar="FILE", help="How well it predicts this text; repeatable.")
    ] = None,
    task: Annotated[
        list[Path] | None, typer.Option("--task", metavar="FILE", help="Ask it the items of a task; repeatable.")
    ] = None,
    shots: Annotated[
        list[int] | None, typer.Option(help="With --task: solved items shown before each; repeatable, for 0, 1, 5.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --task or --harness: the first so many items.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="With --task: ask by the run's chat template.")] = False,
    run_generated_code: Annotated[
        bool,
        typer.Option(
            "--run-generated-code",
            help="Let tasks run programs that the model wrote, on this machine and with your rights. Limits of time and "
            "memory stop accidents, not malice: use a container.",
        ),
    ] = False,
    harness: Annotated[
        list[str] | None,
        typer.Option("--harness", metavar="TASK", help="A task of lm-evaluation-harness, by name or file; repeatable."),
    ] = None,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="Whether its probabilities are as often right as they say.")
    ] = False,
    memorization: Annotated[
        bool, typer.Option("--memorization", help="How much of what it writes is copied from the training text.")
    ] = False,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows; below the context, each sees more.")
    ] = None,
    by_position: Annotated[bool, typer.Option("--by-position", help="Also in each eighth of the context.")] = False,
    compressors: Annotated[bool, typer.Option("--compressors", help="Beside gzip and xz on the same text.")] = False,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16. Default: the run's own.")] = None,
    device: Device = "auto",
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Leave the run folder as it is: no evaluations/, no lines in its card.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Measure a run: loss, perplexity and bits per byte over the whole validation split, or what is asked for.

    What --text, --task, --harness, --calibration and --memorization find is kept in RUN/evaluations and told in the
    model card. KEY=VALUE settings win over the run's: model.context_length=1024 model.rope_scaling.type=yarn, for example.
    """
    from gptworks.evaluate.task import load_task

    tasks = [load_task(path, shots=n, limit=limit) for path in task or [] for n in shots or [None]]
    texts = {path: _read_text(path) for path in text or []}
    if not tasks and (shots or chat):
        raise UserError("--shots and --chat are for tasks: give --task FILE.")
    if not tasks and not harness and limit is not None:
        raise UserError("--limit is for tasks: give --task FILE or --harness TASK.")
    if harness:
        from gptworks.interop.lm_eval import check_harness

        check_harness()
    work = _Work(run, checkpoint, overrides or [], device, precision)
    if not (tasks or texts or harness or calibration or memorization):
        _validation(work, stride, by_position, compressors, as_json)
        return
    found: list[Evaluation] = []
    for path, contents in texts.items():
        found.append(work.text(path, contents, stride))
    for one in tasks:
        found.append(work.task(one, chat, run_generated_code))
    if harness:
        found += work.harness(harness, limit)
    if calibration:
        found.append(work.calibration())
    if memorization:
        found.append(work.memorization())
    if not no_save:
        from gptworks.evaluate.results import save_evaluations

        save_evaluations(run, found)
    _show(found, as_json, None if no_save else run)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is wrong.") from None


def _show(found: "list[Evaluation]", as_json: bool, saved_in: Path | None) -> None:
    from gptworks.evaluate.results import table

    if as_json:
        print_json([one.summary() for one in found])
        return
    console_of().print(table(found).rich())
    for one in found:
        for note in one.notes:
            notice(f"{one.name}: {note}")
        for line in one.details.get("lines", []):
            typer.echo(line)
    if saved_in is not None:
        notice(f"kept in {saved_in / 'evaluations'} and told in {saved_in / 'model-card.md'}")
