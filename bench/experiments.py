"""Which changes help a small model? Train each change on each regime with each seed, and compare it with the baseline.

    python bench/experiments.py --shakespeare tinyshakespeare.txt   # continues where it stopped; one seed at a time
    python bench/experiments.py --decide 2 --shakespeare FILE       # adds seeds where 2 hours decide an open verdict
    python bench/experiments.py --regime shakespeare --minutes 40   # starts no run after 40 minutes
    python bench/experiments.py --times --shakespeare FILE          # times steps with and without each change
    python bench/experiments.py --page                              # writes docs/experiments.md from its .jsonl

The changes are in bench/changes.py. The regimes, which are recipes that train for a minute on a core, are in
bench/regimes/. A run has one thread; as many runs train at once as there are cores. Each run that ends or fails becomes
a line of docs/experiments.jsonl, to which later sessions add. An interrupted run continues from its folder; to repeat a
failed run, remove its line.
"""

import argparse
import hashlib
import math
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from blocks import FEWEST_RUNS
from changes import BASELINE, CHANGES, Change
from experiments_page import write_page
from gptworks.config import Recipe
from gptworks.data.prepare import prepare
from gptworks.data.shards import Manifest
from gptworks.device import cpu_threads
from gptworks.errors import RunError, UserError
from gptworks.recipe import load_recipe, read_recipe
from gptworks.runs.comparable import fingerprint
from gptworks.runs.trials import check_comparable, open_folder
from gptworks.runs.try_run import steps_in_turns
from rates import TUNING_SEED, next_factor, tuning_losses
from recorded import REPOSITORY, Place, Result, add_result, all_threads, provenance, read_results, train_recorded
from verdicts import compared_runs, n_tried, next_seeds, regimes_of, seeds_of, tuned_factors

REGIMES = ("shakespeare", "stdlib", "mixture")
REGIMES_FOLDER = REPOSITORY / "bench" / "regimes"
RESULTS = REPOSITORY / "docs" / "experiments.jsonl"
PACKAGES = ("torch", "sympy", "numpy")
"""Packages whose Python files the mixture reads; torch depends on the other two, so they are installed."""

PROBE_STEPS = 8
"""Number of the baseline's steps whose loss shows whether the source code still computes the same numbers."""
PARTS, LEAST_STEPS, MOST_STEPS, STEPS_SECONDS = 5, 15, 40, 4.0
"""A measurement of step times: its parts, whose ratios are compared, and its bounds in steps and seconds."""

RATES = ("learning_rate", "muon_learning_rate")
"""The settings of `train` that a factor multiplies."""

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

    def recipe(self, regime: str, change: Change = NOTHING, seed: int = 1, factor: float = 1.0) -> Recipe:
        """Return the recipe of a run; it trains on as many tokens as the baseline, or the change's multiple of them, at
        `factor` times the change's own learning rates.

        Raises:
            UserError: the change is not valid on the regime, has no effect, sets the number of steps, makes losses
                incomparable, or has batches that do not divide the tokens into an even number of steps.
        """
        return recipe_of(self.folder / f"{regime}.yaml", self._places(regime), change, seed, factor)

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


def recipe_of(path: Path, places: Sequence[str], change: Change, seed: int, factor: float = 1.0) -> Recipe:
    """Return a run's recipe, see `Laboratory.recipe`. The overrides `places` set paths that do not affect the loss."""
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
    batch, samples = recipe.train.batch_size, round(steps * change.length) * baseline.train.batch_size
    steps = samples // batch
    missing = steps * batch - recipe.train.samples_before(steps)  # because early steps have smaller batches
    steps += missing // batch
    if steps % 2 or recipe.train.samples_before(steps) != samples:
        raise UserError(f"change {change.name}: {samples:,} sequences are no even number of its batches of {batch}.")
    length = (f"train.max_steps={steps}", f"train.evaluate_every={steps // 2}", f"train.checkpoint_every={steps}")
    rates = (f"train.{key}={factor * getattr(recipe.train, key):.6g}" for key in RATES if factor != 1)
    recipe = load_recipe(tree, [*places, *change.settings, *length, *rates])
    name = f"{change.name}-{factor:g}-{seed}".replace(".", "-")
    return recipe.model_copy(update={"seed": seed, "name": name, "run_dir": recipe.run_dir / name})


@dataclass(frozen=True)
class Run:
    """A run to do."""

    regime: str
    change: Change
    seed: int
    factor: float = 1.0
    """Factor of the learning rates."""


@dataclass(frozen=True)
class Session:
    """The runs to do in this session, and where to write the results."""

    laboratory: Laboratory
    results: Path
    regimes: Sequence[str]
    changes: Sequence[Change]
    seeds: int
    """Number of pairs that each change gets at tuned rates; a failed run counts as one."""
    threads: int
    report: Callable[[str], None]
    jobs: int = 1
    """Number of runs side by side."""
    hours: float | None = None
    """Train only runs that decide an open verdict within this many hours, and finish searches for learning rates; None:
    train `seeds` pairs of each change."""

    @cached_property
    def recipes(self) -> dict[str, str]:
        """A hash, for each regime, of the settings that affect the baseline's loss."""
        return {regime: fingerprint(self.laboratory.recipe(regime))[:16] for regime in self.regimes}

    @cached_property
    def provenance(self) -> Result:
        return provenance(self.threads)

    @cached_property
    def manifests(self) -> dict[str, Manifest]:
        """The manifest of each regime's text, which is prepared first if necessary."""
        return {regime: prepare(self.laboratory.recipe(regime)).manifest for regime in self.regimes}

    @cached_property
    def places(self) -> dict[str, Place]:
        """The `Place` of this session's runs, by regime."""
        return {
            regime: (
                self.provenance["processor"], manifest.fingerprint, self.numerics(regime),
            )
            for regime, manifest in self.manifests.items()
        }  # fmt: skip

    def numerics(self, regime: str) -> str:
        """Return a hash of the baseline's validation losses in `PROBE_STEPS` steps. A new hash means that rounding or
        random numbers have changed. Runs with different hashes form no pair, even with the same seed."""
        length = PROBE_STEPS / (self.laboratory.recipe(regime).train.max_steps or 1)
        recipe = self.laboratory.recipe(regime, Change("probe", (), "", length))
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"evaluate_sequences": 16})})
        shutil.rmtree(recipe.run_dir, ignore_errors=True)
        found = train_recorded(recipe, lambda: None, self.report)
        assert found is not None
        return hashlib.sha256(repr(found["losses"]).encode()).hexdigest()[:8]

    def described(self, kind: str, regime: str, change: Change) -> Result:
        """Return the part of a result line that describes a change on a regime."""
        return {
            "kind": kind, "change": change.name, "settings": change.words, "source": change.source,
            "regime": regime, "recipe": self.recipes[regime],
        }  # fmt: skip

    def wanted(self) -> Iterator[Run]:
        """Yield the runs that the results so far lack, the most useful first."""
        results = read_results(self.results)
        yield from self._tuning_runs(results)
        yield from self._first_runs(results) if self.hours is None else self._deciding_runs(results, self.hours)

    def _tuning_runs(self, results: Sequence[Result]) -> Iterator[Run]:
        """Yield the next run of each unfinished search for learning rates; with `hours`, only for the changes that the
        regime has on record."""
        for regime in self.regimes:
            for change in (NOTHING, *self.changes):
                runs = self._runs(results, regime, change)
                factor = next_factor(tuning_losses(runs, self.places[regime]))
                if factor is not None and (runs or self.hours is None):
                    yield Run(regime, change, TUNING_SEED, factor)

    def _first_runs(self, results: Sequence[Result]) -> Iterator[Run]:
        """Yield every change's first pair, then its second, and so on, so that partial results are useful."""
        for n in range(1, self.seeds + 1):
            for regime in self.regimes:
                for change in self.changes:
                    runs, _ = self._compared(results, regime, change)
                    if (missing := n - n_tried(change.name, runs)) > 0:
                        (*_, seed) = next_seeds(change.name, runs, self.places[regime], missing)
                        yield from self._pair(results, regime, change, seed)

    def _deciding_runs(self, results: Sequence[Result], hours: float) -> Iterator[Run]:
        """Yield the runs that decide open verdicts, those of the cheapest decision first."""
        known = {change.name: change for change in self.changes}
        rows = [
            (further, regime.name, known[row.change])
            for regime in regimes_of(results, self.places)
            for row in regime.rows
            if regime.name in self.regimes and row.change in known
            if (further := row.further) and further.verdict != "open" and further.hours <= hours
        ]
        for further, regime, change in sorted(rows, key=lambda row: row[0].hours):
            for seed in further.seeds:
                yield from self._pair(results, regime, change, seed)

    def _pair(self, results: Sequence[Result], regime: str, change: Change, seed: int) -> Iterator[Run]:
        """Yield the missing runs of a pair, the baseline's first; none until the rates of both are tuned."""
        runs, factors = self._compared(results, regime, change)
        if len(factors) == 2:
            for each in (NOTHING, change):
                if seed not in seeds_of(each.name, runs, self.places[regime]):
                    yield Run(regime, each, seed, factors[each.name])

    def _compared(
        self, results: Sequence[Result], regime: str, change: Change
    ) -> tuple[list[Result], dict[str, float]]:
        """Return the compared runs of a change and of the baseline, and their factors, as far as they are known."""
        runs = [run for each in (NOTHING, change) for run in self._runs(results, regime, each)]
        factors = tuned_factors(runs)
        return compared_runs(runs, factors) if factors else [], factors

    def _runs(self, results: Sequence[Result], regime: str, change: Change) -> list[Result]:
        expected = self.described("run", regime, change)
        return [line for line in results if _agree(line, expected)]

    def train(self, stop_asked: Callable[[], Any], until: float) -> None:
        """Train the wanted runs; start none after `until`, in seconds of `time.monotonic`."""
        with ThreadPoolExecutor(self.jobs) as pool:
            running: dict[Future[Result | None], Run] = {}
            while True:
                while len(running) < self.jobs and not stop_asked() and time.monotonic() <= until:
                    run = next((run for run in self.wanted() if run not in running.values()), None)
                    if run is None:
                        break
                    running[pool.submit(self._train, run, stop_asked)] = run
                if not running:
                    return
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    run, line = running.pop(ended), ended.result()
                    if line is not None:
                        add_result(self.results, line)
                        found = line.get("failed") or round(line["loss"], 4)
                        self.report(f"{run.regime}, {run.change.name}, {run.factor:g} ×, seed {run.seed}: {found}")

    def _train(self, run: Run, stop_asked: Callable[[], Any]) -> Result | None:
        """Return the line of a run; None if a stop was asked for."""
        _, data, numerics = self.places[run.regime]
        recipe = self.laboratory.recipe(run.regime, run.change, run.seed, run.factor)
        recipe = recipe.model_copy(update={"run_dir": recipe.run_dir.parent / numerics / recipe.name})
        held_out = self.manifests[run.regime].splits["validation"]
        line = self.described("run", run.regime, run.change) | {
            "seed": run.seed, "rates": run.factor, "data": data, "numerics": numerics,
            "token_bytes": round(held_out.text_bytes / held_out.tokens, 4),
        }  # fmt: skip
        try:
            found = train_recorded(recipe, stop_asked, self.report)
        except RunError as error:
            return line | {"failed": str(error).partition(" Its log is")[0]} | self.provenance
        if found is None:
            return None
        shutil.rmtree(recipe.run_dir)
        return found | line | self.provenance

    def measure(self, stop_asked: Callable[[], Any]) -> None:
        """Measure steps with and without each change, in turns, so that other load on the machine affects both
        alike. With one thread, measure CPU time, which excludes other processes on the core."""
        known = read_results(self.results)
        clock = time.process_time if self.threads == 1 else time.perf_counter
        for regime in self.regimes:
            baseline = self.laboratory.recipe(regime)
            for change in (change for change in self.changes if change.settings):
                expected = {"processor": self.provenance["processor"], "threads": self.threads}
                if any(_agree(line, self.described("time", regime, change) | expected) for line in known):
                    continue
                if stop_asked():
                    return
                recipe = self.laboratory.recipe(regime, change)
                tokens = recipe.train.batch_size / baseline.train.batch_size
                before, after = parts_of(steps_in_turns((baseline, recipe), clock))
                seconds = {"baseline_seconds": before, "seconds": [each / tokens for each in after]}
                add_result(self.results, self.described("time", regime, change) | seconds | self.provenance)
                self.report(f"{regime}, {change.name}: {median(after) / tokens / median(before):.2f} times as long")


def _agree(line: Result, expected: Result) -> bool:
    """Whether a line has all expected values; only the wording of its source may differ."""
    return all(line.get(key) == value for key, value in expected.items() if key != "source")


def parts_of(steps: Iterator[tuple[float, ...]]) -> tuple[list[float], list[float]]:
    """Return the median seconds of a step in each part of a measurement, without and with a change."""
    pairs: list[tuple[float, ...]] = []
    for pair in islice(steps, 1, 1 + MOST_STEPS):  # the first step of each is slower
        pairs.append(pair)
        if len(pairs) >= LEAST_STEPS and sum(map(sum, pairs)) > STEPS_SECONDS:
            break
    size = len(pairs) // PARTS
    parts = [pairs[i * size : (i + 1) * size] for i in range(PARTS)]
    return [median(before for before, _ in part) for part in parts], [
        median(after for _, after in part) for part in parts
    ]


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
    parser.add_argument("--times", action="store_true", help="measure steps instead, in CPU time if of one thread")
    parser.add_argument("--regime", action="append", choices=REGIMES, help="this one alone; repeatable")
    parser.add_argument("--change", action="append", help="this one alone, and the baseline; repeatable")
    parser.add_argument("--seeds", type=int, default=FEWEST_RUNS, help="number of pairs of each change")
    parser.add_argument("--decide", type=float, metavar="HOURS", help="train what decides an open verdict in HOURS")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long")
    parser.add_argument("--threads", type=int, default=1, help="threads of a run")
    parser.add_argument("--jobs", type=int, help="runs side by side; by default, as many as there are cores for")
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
        lambda text: print(text, flush=True), options.jobs or max(1, all_threads() // options.threads), options.decide,
    )  # fmt: skip
    for regime in session.regimes:  # report invalid changes before the first run
        for change in session.changes:
            laboratory.recipe(regime, change)
    with open_folder(laboratory.work / "runs", "session", "--work") as stop_asked:
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
