"""Commands that show and compare runs: report, compare, sweep, try."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from gptworks.cli import options
from gptworks.cli.printing import (
    console_of,
    notice,
    prepare_with_progress,
    print_json,
    say,
    show,
    show_lines,
    working,
    write_html,
)
from gptworks.errors import refuse_unused
from gptworks.files import send, shown, url_of

if TYPE_CHECKING:
    from gptworks.runs.sweep import Sweep


def report(
    run: options.RunFolder,
    html: Annotated[Path | None, Option(metavar="FILE", help="Where to write it. Default: RUN/report.html.")] = None,
    watch: Annotated[bool, Option("--watch", help="Write it again as the run continues, until it ends.")] = False,
) -> None:
    """Write an HTML report of a run: curves, evaluations, samples.

    The run may still be training, or have crashed. With --watch, an open report refreshes itself.
    """
    from gptworks.runs.history import read_history
    from gptworks.runs.report import watch_report, write_report

    path = html or run / "report.html"
    if watch:
        notice(f"writing {path} as the run continues; Ctrl-C stops")
        watch_report(run, path)
    else:
        with working(f"reading {run}"):
            write_report(read_history(run), path)
    send([path])
    say(f"wrote {shown(path)}")


def compare(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Run folders.", callback=options.fetched_paths)],
    against: Annotated[Path | None, Option(metavar="BAND", help="Compare the runs with the band in this file.")] = None,
    make_band: Annotated[
        Path | None, Option(metavar="FILE", help="Write a band: the losses of these runs, which differ in the seed.")
    ] = None,
    html: options.PageFile = None,
    evaluations: Annotated[bool, Option("--evaluations", help="Compare what `gptworks evaluate` saved.")] = False,
    as_json: options.AsJSON = False,
) -> None:
    """Compare runs, and separate differences from noise.

    Each run is also compared with the band of --against, or with the shipped band of its settings, if there is one. A
    band has the losses of several seeds of a recipe.
    """
    from gptworks.runs import bands
    from gptworks.runs.compare import compare as compare_runs
    from gptworks.runs.compare import to_html
    from gptworks.runs.history import read_history

    if evaluations:
        refuse_unused("does nothing with --evaluations", html=html, make_band=make_band, against=against)
    if make_band is not None:
        refuse_unused("does nothing with --make-band", html=html, against=against, json=as_json)
    with working(f"reading {len(runs)} runs"):
        histories = [read_history(run) for run in runs]
    if evaluations:
        from gptworks.runs.compare_evaluations import compare_evaluations

        show(compare_evaluations(runs), as_json)
        return
    if make_band is not None:
        band = bands.make_band(histories)
        bands.write_band(band, make_band)
        say(f"wrote {make_band}: {len(band.points)} evaluations of {band.name}, {len(band.seeds)} seeds")
        return
    given = None if against is None else bands.read_band(against)
    with working(f"comparing {len(runs)} runs"):
        comparison = compare_runs(histories, [given or bands.find_band(history.recipe) for history in histories])
    if html is not None:
        write_html(to_html(comparison), html)
    show(comparison, as_json)


def sweep(
    recipe: options.RecipeFile,
    overrides: options.Overrides = None,
    resume: options.Resume = False,
    as_json: options.AsJSON = False,
) -> None:
    """Search for better settings with many trials.

    The recipe's `sweep` section names the settings and the number of trials.
    """
    from gptworks.runs.sweep import load_sweep, run_sweep
    from gptworks.runs.sweep_page import trials_table, write_sweep_page

    prepare_with_progress(load_sweep(recipe, overrides or [], resume))
    with working("trials") as progress:

        def after_trial(so_far: "Sweep") -> None:
            write_sweep_page(so_far)
            progress(len(so_far.trials) - so_far.count("running"), so_far.settings.n_trials)

        done = run_sweep(recipe, overrides or [], resume=resume, report=notice, after_trial=after_trial)
    if as_json:
        print_json(done.to_json())
    else:
        console_of().print(trials_table(done).rich())
    folder, ended = done.recipe.run_dir, len(done.trials) - done.count("running")
    if done.best is not None:
        notice(f"the best settings are in {folder / 'best.yaml'}, figures in {folder / 'sweep.html'}")
    if ended < done.settings.n_trials:
        notice(f"stopped after {ended} of {done.settings.n_trials} trials. Continue with --resume.")


def try_(
    recipe: options.RecipeFile,
    changes: Annotated[list[str], Argument(metavar="KEY=VALUE", help="The change, such as train.optimizer=adamw.")],
    minutes: Annotated[float, Option(min=0.1, max=1e6, help="Minutes that all runs together may take.")] = 30,
    steps: options.Steps = None,
    worth: options.Worth = 0.005,
    folder: Annotated[
        Path | None, Option(metavar="FOLDER", help="Folder of the runs and the result. Default: RUN_DIR-try.")
    ] = None,
    resume: options.Resume = False,
    as_json: options.AsJSON = False,
) -> None:
    """Find out whether a change helps, with pairs of runs.

    Each pair trains the recipe without and with the change, from the same seed. A clear verdict ends the test early.
    """
    from gptworks.recipe import load_recipe
    from gptworks.runs.try_page import try_lines, write_try_page
    from gptworks.runs.try_run import plan_try, run_try

    loaded = load_recipe(recipe)
    run_dir = loaded.run_dir if url_of(loaded.run_dir) is None else Path("runs") / loaded.name
    folder = folder or run_dir.with_name(f"{run_dir.name}-try")
    begun = plan_try(recipe, changes, folder, minutes, worth, steps, resume, notice, prepare_with_progress)
    design = begun.design
    notice(
        f"up to {design.most_pairs} pairs of runs of {design.steps:,} steps, in {design.minutes:g} minutes. A short "
        f"measurement estimates that the same tokens take {design.estimated_step_time:.2f} times as long with the "
        f"change; "
        f"the runs decide whether that is so, and whether each pair has a third run, in equal time."
    )
    done = run_try(begun, recipe, notice, write_try_page)
    show_lines(done.to_json(), as_json, *try_lines(done))
    if done.pairs:
        notice(f"figures in {folder / 'try.html'}")
    if not done.decided:
        notice("more pairs may answer what is open: give more --minutes in another --folder, or longer runs.")
