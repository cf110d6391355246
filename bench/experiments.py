"""Which changes help a small model? Train each change on each regime with each seed, and compare it with the baseline.

    python bench/experiments.py --shakespeare tinyshakespeare.txt   # continues where it stopped; one seed at a time
    python bench/experiments.py --regime shakespeare --minutes 40   # starts no run after 40 minutes
    python bench/experiments.py --times --shakespeare FILE          # times steps with and without each change
    python bench/experiments.py --page                              # writes docs/experiments.md from its .jsonl

The changes are in bench/changes.py; the regimes, recipes of a minute or two on two cores, in bench/regimes/. Each run
that ends or fails becomes a line of docs/experiments.jsonl, to which later sessions add. An interrupted run continues
from its folder; to repeat a failed run, remove its line.
"""

import argparse
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from changes import BASELINE, CHANGES, Change
from experiments_page import N_SEEDS, ROUNDS, write_page
from gptworks.config import Recipe
from gptworks.data.prepare import prepare
from gptworks.device import cpu_threads
from gptworks.errors import RunError, UserError
from gptworks.recipe import load_recipe, read_recipe
from gptworks.runs.settings import fingerprint
from gptworks.runs.trials import check_comparable
from gptworks.runs.try_run import measured_step_seconds
from gptworks.training.signals import stop_signals
from recorded import REPOSITORY, Result, add_result, all_threads, provenance, read_results, train_recorded

REGIMES = ("shakespeare", "stdlib", "mixture")
REGIMES_FOLDER = REPOSITORY / "bench" / "regimes"
RESULTS = REPOSITORY / "docs" / "experiments.jsonl"
PACKAGES = ("torch", "sympy", "numpy")
"""Packages whose Python files the mixture reads; torch depends on the other two, so they are installed."""

NOTHING = Change(BASELINE, (), "")


@dataclass(frozen=True)
class Laboratory:
    """The regimes on this machine."""

    folder: Path
    """Folder of the regimes' recipes."""
    work: Path
    """Folder of runs and prepared text."""
    shakespeare: Path | None
    """The file of TinyShakespeare; None: download it."""

    def recipe(self, regime: str, change: Change = NOTHING, seed: int = 1) -> Recipe:
        """Return the recipe of a run; it trains on as many tokens as the baseline, whatever the change.

        Raises:
            UserError: the change is not valid there, changes nothing, or makes losses incomparable.
        """
        return recipe_of(self.folder / f"{regime}.yaml", self._places(regime), change, seed)

    def _places(self, regime: str) -> tuple[str, ...]:
        places = [f"run_dir={self.work / 'runs' / regime}", f"data.cache_dir={self.work / 'data'}"]
        source = "data.mixture.0.sources.0" if regime == "mixture" else "data.sources.0"
        if self.shakespeare is not None and regime != "stdlib":
            places.append(f"{source}.path={self.shakespeare.resolve()}")
        if regime == "mixture":
            installed = Path(sysconfig.get_paths()["purelib"]).resolve()
            places += [f"data.mixture.2.sources.{i}.path={installed / name}" for i, name in enumerate(PACKAGES)]
        return tuple(places)


@cache
def _tree(path: Path) -> dict[str, Any]:
    return read_recipe(path)[1]


def recipe_of(path: Path, places: Sequence[str], change: Change, seed: int) -> Recipe:
    """See `Laboratory.recipe`. `places` are overrides of paths in the regime's recipe, which do not affect the loss."""
    tree = _tree(path)
    baseline = load_recipe(tree, places)
    for setting in change.settings:
        check_comparable(baseline, setting.partition("=")[0], f"change {change.name}")
    recipe = load_recipe(tree, [*places, *change.settings])
    steps = baseline.train.max_steps
    if steps is None or recipe.train.max_steps != steps:
        raise UserError(f"change {change.name}: a regime sets train.max_steps, and a change leaves it as it is.")
    if change.settings and fingerprint(recipe) == fingerprint(baseline):
        raise UserError(f"change {change.name}: {' '.join(change.settings)} is what the regime has already.")
    batch, samples = recipe.train.batch_size, steps * baseline.train.batch_size
    steps = samples // batch
    missing = steps * batch - recipe.train.samples_before(steps)  # because early steps have smaller batches
    steps += missing // batch
    if steps % 2 or recipe.train.samples_before(steps) != samples:
        raise UserError(f"change {change.name}: {samples:,} sequences are no even number of its batches of {batch}.")
    length = (f"train.max_steps={steps}", f"train.evaluate_every={steps // 2}", f"train.checkpoint_every={steps}")
    recipe = load_recipe(tree, [*places, *change.settings, *length])
    name = f"{change.name}-{seed}"
    return recipe.model_copy(update={"seed": seed, "name": name, "run_dir": recipe.run_dir / name})


@dataclass(frozen=True)
class Session:
    """The runs to do in this session, and where to write the results."""

    laboratory: Laboratory
    results: Path
    regimes: Sequence[str]
    changes: Sequence[Change]
    seeds: Sequence[int]
    threads: int
    report: Callable[[str], None]

    @cached_property
    def recipes(self) -> dict[str, str]:
        """A hash, for each regime, of the settings that affect the baseline's loss."""
        return {regime: fingerprint(self.laboratory.recipe(regime))[:16] for regime in self.regimes}

    @cached_property
    def provenance(self) -> Result:
        return provenance(self.threads)

    def order(self) -> Iterator[tuple[int, str, Change]]:
        """Yield all runs: every change with one seed, then with the next, so that partial results are useful."""
        for seed in self.seeds:
            for regime in self.regimes:
                for change in (NOTHING, *self.changes):
                    yield seed, regime, change

    def described(self, kind: str, regime: str, change: Change) -> Result:
        """Return the part of a result line that describes a change on a regime."""
        return {
            "kind": kind, "change": change.name, "settings": list(change.settings), "source": change.source,
            "regime": regime, "recipe": self.recipes[regime],
        }  # fmt: skip

    def is_done(self, line: Result) -> bool:
        """Whether the file already has this line's result from this kind of processor."""
        keys = ("kind", "change", "settings", "regime", "recipe", "seed")
        return any(
            all(found.get(key) == line.get(key) for key in keys)
            and found.get("processor") == self.provenance["processor"]
            for found in read_results(self.results)
        )

    def train(self, stop_asked: Callable[[], Any], until: float) -> None:
        """Train the runs that have no result yet; start none after `until`, in seconds of `time.monotonic`."""
        for seed, regime, change in self.order():
            line = self.described("run", regime, change) | {"seed": seed}
            if self.is_done(line):
                continue
            if stop_asked() or time.monotonic() > until:
                return
            recipe = self.laboratory.recipe(regime, change, seed)
            try:
                found = train_recorded(recipe, stop_asked, self.report)
            except RunError as error:
                found = {"failed": str(error).partition(" Its log is")[0]}
            if found is None:
                return
            add_result(self.results, line | found | self.provenance)
            if "failed" not in found:
                shutil.rmtree(recipe.run_dir)
            self.report(f"{regime}, {change.name}, seed {seed}: {found.get('failed') or round(found['loss'], 4)}")

    def measure(self, stop_asked: Callable[[], Any]) -> None:
        """Measure steps with and without each change, alternately, so that other load on the machine affects both
        alike."""
        for regime in self.regimes:
            baseline = self.laboratory.recipe(regime)
            for change in self.changes:
                line = self.described("time", regime, change)
                if self.is_done(line):
                    continue
                if stop_asked():
                    return
                recipe = self.laboratory.recipe(regime, change)
                pairs = [(measured_step_seconds(baseline), measured_step_seconds(recipe)) for _ in range(ROUNDS)]
                samples = recipe.train.batch_size / baseline.train.batch_size
                seconds = {
                    "baseline_seconds": [before for before, _ in pairs],
                    "seconds": [after / samples for _, after in pairs],
                }
                add_result(self.results, line | seconds | self.provenance)
                self.report(f"{regime}, {change.name}: {seconds}")


def chosen(names: Sequence[str] | None) -> list[Change]:
    """Return the changes with these names; None: all.

    Raises:
        UserError: there is no change of a name.
    """
    known = {change.name: change for change in CHANGES}
    if unknown := [name for name in names or () if name not in known]:
        raise UserError(f"--change {unknown[0]}: bench/changes.py has {', '.join(known)}.")
    return [known[name] for name in names or known]


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--times", action="store_true", help="measure steps instead; on an idle machine")
    parser.add_argument("--regime", action="append", choices=REGIMES, help="this one alone; repeatable")
    parser.add_argument("--change", action="append", help="this one alone, and the baseline; repeatable")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, N_SEEDS + 1)))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--threads", type=int, default=all_threads())
    parser.add_argument("--shakespeare", type=Path, help="TinyShakespeare, where it is not to be downloaded")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "experiments", help="runs and their text")
    parser.add_argument("--results", type=Path, default=RESULTS, help="lines; the page is beside it")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    if options.page:
        write_page(read_results(options.results), options.results.with_suffix(".md"))
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # inherited by the runs
    until = time.monotonic() + 60 * options.minutes
    laboratory = Laboratory(REGIMES_FOLDER, options.work.resolve(), options.shakespeare)
    session = Session(
        laboratory, options.results, options.regime or REGIMES, chosen(options.change), options.seeds, options.threads,
        lambda text: print(text, flush=True),
    )  # fmt: skip
    for regime in session.regimes:  # report invalid changes before the first run
        for change in session.changes:
            laboratory.recipe(regime, change)
    for regime in session.regimes:
        prepare(laboratory.recipe(regime))
    with stop_signals() as stop_asked:
        if options.times:
            with cpu_threads(options.threads):
                session.measure(stop_asked)
        else:
            session.train(stop_asked, until)
    write_page(read_results(options.results), options.results.with_suffix(".md"))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
