"""The command that measures a run: on held-out text, on any text, on tasks, in lm-evaluation-harness."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gptworks.choices import PrecisionName
from gptworks.cli.common import (
    AsJSON,
    Device,
    Overrides,
    RunFolder,
    WhichCheckpoint,
    console_of,
    notice,
    print_json,
    refuse_unused,
    working,
)
from gptworks.cli.make import prepare_with_progress
from gptworks.errors import UserError
from gptworks.units import significant

if TYPE_CHECKING:
    from gptworks.evaluate.results import Evaluation
    from gptworks.evaluate.run import EvaluatedRun


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
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --task or --harness: ask only this many items.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="With --task: ask by the run's chat template.")] = False,
    run_generated_code: Annotated[
        bool,
        typer.Option(
            "--run-generated-code",
            help="Let tasks run programs that the model wrote, closed off from this machine by Linux's namespaces and "
            "limits of time, memory and disk. Refused where the system does not allow that.",
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
    compressors: Annotated[bool, typer.Option("--compressors", help="Also gzip and xz on the same text.")] = False,
    precision: Annotated[
        PrecisionName | None, typer.Option(help="Precision of matrix products. Default: the run's own.")
    ] = None,
    device: Device = "auto",
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Leave the run folder as it is: no evaluations/, no lines in its card.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Measure a run: loss, perplexity, bits per byte, tasks.

    By default on the whole validation split.

    What --text, --task, --harness, --calibration and --memorization find is kept in RUN/evaluations and in the
    model card. KEY=VALUE settings win over the run's: model.context_length=1024 model.rope_scaling.type=yarn.
    """
    from gptworks.evaluate.task import load_task

    if text or task or harness or calibration or memorization:
        only = "is for the validation split: it does nothing with --text, --task or another measurement"
        refuse_unused(only, by_position=by_position, compressors=compressors)
        if not text:
            refuse_unused("is for text: give --text FILE, or", stride=stride)
        if not (text or calibration or memorization):
            refuse_unused("does nothing with tasks, which are computed as texts are generated", precision=precision)
    tasks = [load_task(path, shots=n, limit=limit) for path in task or [] for n in shots or (None,)]
    texts = {path: _read_text(path) for path in text or []}
    if tasks and all(each.settings.type != "code" for each in tasks):
        refuse_unused("is for tasks of the type code", run_generated_code=run_generated_code)
    if not tasks:
        refuse_unused("is for tasks: give --task FILE, or", shots=shots or None, run_generated_code=run_generated_code)
        if not harness:
            refuse_unused("is for tasks: give --task FILE or --harness TASK, or", chat=chat, limit=limit)
    if harness:
        from gptworks.interop.lm_eval import run_harness
    others = bool(tasks or texts or harness or calibration or memorization)
    if not others:
        refuse_unused("does nothing: what is measured on the validation split is not saved", no_save=no_save)
    found: list[Evaluation] = []
    with working(f"evaluating {run}") as show:
        from gptworks.evaluate.run import EvaluatedRun

        one = EvaluatedRun(
            run, checkpoint, overrides=overrides or [], device=device, precision=precision, report=notice,
            prepare=prepare_with_progress, progress=show,
        )  # fmt: skip
        validation = {} if others else one.validation(stride, by_position, compressors)
        found += [one.text(path, contents, stride) for path, contents in texts.items()]
        found += [one.task(each, chat=chat, run_programs=run_generated_code) for each in tasks]
        if harness:
            found += run_harness(one.engine, harness, run=one.name, step=one.step, limit=limit, chat=chat)
        found += [one.calibration()] if calibration else []
        found += [one.memorization()] if memorization else []
    if not others:
        _show_validation(one, validation, as_json)
        return
    if not no_save:
        from gptworks.evaluate.results import save_evaluations

        save_evaluations(run, found)
    _show(found, as_json, None if no_save else run)


def _show_validation(one: "EvaluatedRun", result: dict[str, Any], as_json: bool) -> None:
    """Print the loss on the whole validation split."""
    if as_json:
        print_json(result)
        return
    typer.echo(
        f"validation loss  {result['loss']:.4f} nats per token, {result['tokens']:,} tokens, step {result['step']:,}"
    )
    typer.echo(f"perplexity       {significant(result['perplexity'])}")
    if result["bits_per_byte"] is None:
        why = "this tokenizer does not keep the whole text"
        if one.prepared.manifest.holds_examples:
            why = "the text is conversations, of which not every byte is predicted"
        typer.echo(f"bits per byte    undefined: {why}")
    else:
        typer.echo(f"bits per byte    {result['bits_per_byte']:.4f} over {result['text_bytes']:,} bytes")
    _show_positions(result.get("positions", []))
    for name, bits in result.get("compressors", {}).items():
        typer.echo(f"{name.replace('_', ' -'):<16} {bits:.4f}")


def _show_positions(positions: list[dict[str, Any]]) -> None:
    for part in positions:
        bits = part["bits_per_byte"]
        note = "" if bits is None else f"  {bits:.4f} bits per byte"
        typer.echo(f"tokens {part['first']:>6,} to {part['last']:>6,}  {part['loss']:.4f} nats per token{note}")


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # line ends as they are
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}. Give a text file.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is wrong.") from None


def _show(found: "list[Evaluation]", as_json: bool, saved_in: Path | None) -> None:
    from gptworks.evaluate.results import table

    if as_json:
        print_json([one.summary() for one in found])
        return
    console_of().print(table(found).rich())
    for one in found:
        _show_positions(one.details.get("positions", []))
        for part in one.details.get("bins", []):
            if part["n_tokens"]:
                typer.echo(
                    f"given {part['low']:.2f} to {part['high']:.2f}  {part['n_tokens']:>11,} tokens, mean "
                    f"{part['confidence']:.3f}, right {part['accuracy']:.3f}"
                )
        for note in one.notes:
            notice(f"{one.name}: {note}.")
    if saved_in is not None:
        notice(f"saved in {saved_in / 'evaluations'} and in {saved_in / 'model-card.md'}")
