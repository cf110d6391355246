"""Commands that make a run: train, fork, launch."""

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from gptworks.cli import options
from gptworks.cli.printing import notice, prepare_with_progress, say, working
from gptworks.errors import refuse_unused

Target = Literal["local", "slurm", "skypilot", "kubeflow"]

Change = Annotated[
    list[str] | None,
    Option("--change", metavar="KEY[=VALUE]", help="With --resume: change this setting, and record from which step."),
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

    If torchrun or `gptworks launch` starts several processes, they train the model together.
    """
    with working("starting"):
        from gptworks.api import train_here
        from gptworks.training.signals import exit_code_of

    outcome = train_here(
        recipe, *overrides or [], resume=resume, change=change or [], force=force, report=_first_rank_notice,
        prepare=prepare_with_progress,
    )  # fmt: skip
    raise typer.Exit(exit_code_of(outcome.stop))


def fork(
    run: Annotated[
        str, Argument(metavar="RUN[@STEP]", help="A run folder, and @STEP or @best. Default: its last checkpoint.")
    ],
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The new run folder.")],
    overrides: options.Overrides = None,
) -> None:
    """Make a new run folder that continues another run's checkpoint.

    The new run begins with the checkpoint's state and records the changed settings. `gptworks train FOLDER --resume`
    trains it.
    """
    with working("linking the checkpoint"):
        from gptworks.recipe import load_recipe
        from gptworks.training.changes import read_history
        from gptworks.training.fork import fork as fork_run
        from gptworks.training.fork import origin_of

        history = read_history(fork_run(*origin_of(run), folder, overrides or []))
    say("\n".join([f"{folder}:", *(f"  {line}" for line in history.lines())]))
    more = " --change train.max_steps=MORE" * (load_recipe(folder).train.max_steps == history.origins[0].step)
    notice(f"Next: gptworks train {shlex.quote(str(folder))} --resume{more}")


def launch(
    context: typer.Context,
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    on: Annotated[
        Target, Option(help="Where to train: this machine, or a job of a scheduler, submitted if its command is here.")
    ] = "local",
    nproc: Annotated[
        int | None, Option(min=1, help="Processes on each machine. Default: one for each GPU of --gpus, or 1.")
    ] = None,
    nodes: Annotated[
        str, Option(metavar="N|MIN:MAX", help="Machines. MIN:MAX: machines may leave and come while the run trains.")
    ] = "1",
    rendezvous: Annotated[
        str | None,
        Option(
            metavar="HOST[:PORT]", help="With --on local and several machines: the address of the first, given on each."
        ),
    ] = None,
    restarts: Annotated[
        int | None,
        Option(min=0, help="Restarts from the last checkpoint after a rank has failed. Default: 3 in a job, else 0."),
    ] = None,
    gpus: Annotated[str | None, Option(metavar="[TYPE:]N", help="In a job: GPUs of each machine.")] = None,
    time: Annotated[
        str | None, Option(help="With --on slurm or kubeflow: the time limit, as the scheduler writes it.")
    ] = None,
    partition: Annotated[str | None, Option(help="With --on slurm: the partition.")] = None,
    option: Annotated[
        list[str] | None,
        Option(
            metavar="KEY=VALUE",
            help="In a job: another request in its scheduler's words, repeatable: a line `#SBATCH --KEY=VALUE`, or one "
            "of the resources of SkyPilot or a TrainJob.",
        ),
    ] = None,
    grace: Annotated[
        int | None,
        Option(
            min=1,
            max=65535,
            help="With --on slurm or kubeflow: seconds to save, from the signal to the end. Default: 120.",
        ),
    ] = None,
    image: Annotated[str | None, Option(help="With --on kubeflow: a container image that has gptworks.")] = None,
    volume: Annotated[
        list[str] | None,
        Option(metavar="NAME:PATH", help="With --on kubeflow or skypilot: a volume and where to mount it; repeatable."),
    ] = None,
    setup: Annotated[
        str | None, Option(help="With --on skypilot: the command that installs gptworks on each machine.")
    ] = None,
    file: Annotated[Path | None, Option(help="The job file. Default: the run's name, in this folder.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Check the run and print the job file; start nothing.")] = False,
    resume: options.Resume = False,
    change: Change = None,
    force: options.Force = False,
) -> None:
    """Train in several processes, or write a job that does.

    train.parallel sets how the processes divide the work. A job continues the run's last checkpoint when it starts
    again: after a failure, after the signal before its time limit, and after preemption.
    """
    from gptworks.training.signals import exits_unfinished

    if on == "local":
        # A scheduler's signal ends this process with `UNFINISHED`, until `Agent.run` passes signals on to the ranks.
        context.with_resource(exits_unfinished())

    from gptworks.api import settings_of
    from gptworks.launch.job import Job, check_job, parse_gpus, parse_nodes, parse_pairs
    from gptworks.launch.local import check_local, run_local
    from gptworks.launch.submit import TARGETS, submit, write_job

    gpu_type, n_gpus = ("", 0) if gpus is None else parse_gpus(gpus)
    least, most = parse_nodes(nodes)
    asked = parse_pairs("--option", option or [])
    if partition is not None:
        asked = {"partition": partition} | asked
    loaded, overrides, change = settings_of(recipe, overrides or [], change or [], resume, _first_rank_notice)
    job = Job(
        str(recipe), loaded.name, overrides, change, force, least, most, nproc or n_gpus or 1, n_gpus, gpu_type,
        (0 if on == "local" else 3) if restarts is None else restarts, grace, time or "", asked, image or "",
        {path: name for name, path in parse_pairs("--volume", volume or [], ":").items()}, setup or "",
    )  # fmt: skip
    if on == "local":
        refuse_unused(
            "is for a job", gpus=gpus, time=time, partition=partition, option=asked or None, grace=grace,
            image=image, volume=volume or None, setup=setup, file=file,
        )  # fmt: skip
        host, port = check_local(job, nodes, rendezvous, resume)
    else:
        refuse_unused(f"does nothing with --on {on}, whose job chooses it", rendezvous=rendezvous)
        if on != "slurm":
            refuse_unused("is for --on slurm", partition=partition)
        else:
            refuse_unused(
                "is for containers: it does nothing with --on slurm", image=image, volume=volume or None, setup=setup
            )
    check_job(job, loaded, resume)
    if on == "local":
        if not dry_run:
            sys.exit(run_local(job, str(loaded.run_dir), host, port, resume))
        return
    if dry_run:
        say(TARGETS[on].job_file(job), end="")
        return
    path = write_job(on, job, file)
    answer = submit(on, path)
    say(answer if answer is not None else str(path))
    if answer is None:
        words = [*TARGETS[on].SUBMIT, str(path)]
        notice(f"{words[0]} is not installed here. Submit the job with: {shlex.join(words)}")


def _first_rank_notice(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        notice(text)
