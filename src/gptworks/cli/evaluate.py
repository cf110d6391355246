"""The command that measures a run: on held-out text, on any text, on tasks, in lm-evaluation-harness."""

from pathlib import Path
from typing import Annotated

from typer import Option

from gptworks.choices import PrecisionName
from gptworks.cli import options
from gptworks.cli.printing import console_of, notice, prepare_with_progress, print_json, say, working


def evaluate(
    run: options.RunFolder,
    overrides: options.Overrides = None,
    checkpoint: options.WhichCheckpoint = "best",
    text: options.Texts = None,
    task: Annotated[
        list[Path] | None, Option(metavar="FILE", help="Measure the task in this file; repeatable.")
    ] = None,
    shots: Annotated[
        list[int] | None, Option(help="With --task: solved items before each item. Repeated: measure with each number.")
    ] = None,
    limit: Annotated[
        int | None, Option(min=1, help="With --task or --harness: ask only this many items of each task.")
    ] = None,
    chat: Annotated[bool, Option("--chat", help="With --task or --harness: ask with the run's chat template.")] = False,
    run_generated_code: Annotated[
        bool,
        Option(
            "--run-generated-code",
            help="Let tasks run programs that the model wrote, closed off from this machine by Linux's namespaces and "
            "limits of time, memory and disk. Refused where the system does not allow that.",
        ),
    ] = False,
    harness: Annotated[
        list[str] | None, Option(metavar="TASK", help="A task of lm-evaluation-harness; repeatable.")
    ] = None,
    calibration: Annotated[bool, Option("--calibration", help="Compare probabilities with frequencies.")] = False,
    memorization: Annotated[
        bool, Option("--memorization", help="Measure how much training text the model copies.")
    ] = False,
    stride: Annotated[
        int | None, Option(help="Tokens between the starts of windows. Default: the context, with --text half of it.")
    ] = None,
    by_position: Annotated[bool, Option("--by-position", help="Also measure each eighth of the context.")] = False,
    compressors: Annotated[bool, Option("--compressors", help="Also measure gzip and xz on the same text.")] = False,
    precision: Annotated[
        PrecisionName | None, Option(help="Precision of matrix products. Default: the run's own.")
    ] = None,
    weights: options.KeptWeights = "auto",
    device: options.Device = "auto",
    no_save: Annotated[bool, Option("--no-save", help="Write nothing into the run folder.")] = False,
    as_json: options.AsJSON = False,
) -> None:
    """Measure a run: loss, perplexity, bits per byte, tasks.

    By default, measures loss on the whole validation split.

    Results of --text, --task, --harness, --calibration and --memorization are saved in RUN/evaluations and in the
    model card; with --weights int8 their names end in -int8. KEY=VALUE overrides a setting of the run, as in
    model.context_length=1024 model.rope_scaling.type=yarn.
    """
    from gptworks.api import evaluate as measure

    with working(f"evaluating {run}") as show:
        found = measure(
            run, *overrides or [], checkpoint=checkpoint, text=text or (), task=task or (), shots=shots or (),
            limit=limit, chat=chat, run_generated_code=run_generated_code, harness=harness or (),
            calibration=calibration, memorization=memorization, stride=stride, by_position=by_position,
            compressors=compressors, precision=precision, weights=weights, device=device, save=not no_save,
            report=notice, prepare=prepare_with_progress, progress=show,
        )  # fmt: skip
    if as_json:
        print_json(found.to_json())
        return
    if found.table is not None:
        console_of().print(found.table.rich())
    for line in found.lines:
        say(line)
    for note in found.notes:
        notice(note)
    if found.evaluations and not no_save:
        notice(f"saved in {run / 'evaluations'} and in {run / 'model-card.md'}")
