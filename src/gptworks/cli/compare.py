"""Commands that show and compare runs: report, compare, sweep."""

from pathlib import Path
from typing import Annotated

import typer

from gptworks.cli.common import (
    AsJSON,
    Overrides,
    RecipeFile,
    RunFolder,
    console_of,
    notice,
    print_json,
    refuse_unused,
    show,
)
from gptworks.cli.make import prepare_with_progress


def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: RUN/report.html.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Write it again as the run goes on, until it ends.")] = False,
) -> None:
    """Write a run as a page: curves, evaluations, samples.

    The run may still be training, or have crashed. With --watch, an open page refreshes itself.
    """
    from gptworks.runs.history import read_history
    from gptworks.runs.report import watch_report, write_report

    path = out or run / "report.html"
    if watch:
        notice(f"writing {path} as the run goes on; Ctrl-C ends this")
        watch_report(run, path)
    else:
        write_report(read_history(run), path)
    typer.echo(f"wrote {path}")


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    against: Annotated[
        Path | None, typer.Option("--against", metavar="BAND", help="Hold the runs against this band's file.")
    ] = None,
    make_band: Annotated[
        Path | None, typer.Option("--make-band", metavar="FILE", help="Make a band of the runs, each of another seed.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write a page with the curves.")] = None,
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="Instead of curves, what `gptworks evaluate` has kept of each.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Compare runs, and separate differences from noise.

    Or compare a run with the band of its recipe.
    """
    from gptworks.runs import bands
    from gptworks.runs.compare import compare as compare_runs
    from gptworks.runs.compare_page import write_comparison
    from gptworks.runs.history import read_history

    if evaluations:
        refuse_unused("does nothing with --evaluations", out=out, make_band=make_band, against=against)
    if make_band is not None:
        refuse_unused("does nothing with --make-band", out=out, against=against, json=as_json)
    histories = [read_history(run) for run in runs]
    if evaluations:
        from gptworks.runs.evaluations import compare_evaluations

        show(compare_evaluations(runs), as_json)
        return
    if make_band is not None:
        band = bands.make_band(histories)
        bands.write_band(band, make_band)
        typer.echo(f"wrote {make_band}: {len(band.points)} evaluations of {band.name}, {len(band.seeds)} seeds")
        return
    given = None if against is None else bands.read_band(against)
    comparison = compare_runs(histories, [given or bands.find_band(history) for history in histories])
    if out is not None:
        write_comparison(comparison, out)
        notice(f"wrote {out}")
    show(comparison, as_json)


def sweep(
    recipe: RecipeFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in the folder, if there is one.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Search for better settings with many trials.

    The recipe's `sweep` section says which settings, and how many trials.
    """
    from gptworks.runs.sweep import load_sweep, run_sweep
    from gptworks.runs.sweep_page import sweep_table, write_sweep_page

    prepare_with_progress(load_sweep(recipe, overrides or [], resume))
    done = run_sweep(recipe, overrides or [], resume=resume, report=notice, after_trial=write_sweep_page)
    if as_json:
        print_json(done.to_json())
    else:
        console_of().print(sweep_table(done))
    folder, ended = done.recipe.run_dir, len(done.trials) - done.count("running")
    if done.best is not None:
        notice(f"the best settings are in {folder / 'best.yaml'}, figures in {folder / 'sweep.html'}")
    if ended < done.settings.n_trials:
        notice(f"stopped after {ended} of {done.settings.n_trials} trials. Go on with --resume.")
