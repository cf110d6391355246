"""The league: which small models learn the most from the same text in 5 or 60 minutes on two cores?

    python bench/league.py --text tinyshakespeare.txt         # train the 5-minute contenders without an entry here
    python bench/league.py --contender small --text FILE      # only this one
    python bench/league.py --minutes 60 --text FILE           # those of 60 minutes
    python bench/league.py --replay small --text FILE         # train its entry again and compare the result
    python bench/league.py --page                             # docs/league.md from docs/league.jsonl

A contender is a recipe in bench/league/5-minutes/ or 60-minutes/: a model, its tokenizer and its training. The league
gives it the text, TinyShakespeare without its last tenth, and the length. Its score is the bits per byte of that tenth
after its last step. It competes in the smallest class that holds all its parameters: 1M, 3M or 10M.

A run has a fixed number of steps, so it does not depend on the clock, and a replay gives the same score on the same
kind of processor. The speed of a step, measured before the run, determines the number of steps. A run's time is the
time of its steps, with reading batches and the optimizer, without the start, the evaluation and the checkpoint after
the last step. A run that turns out too slow is stopped before it is scored, and a new run with fewer steps begins. Each
entry is a line of docs/league.jsonl, with all that a replay needs.
"""

import argparse
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gptworks.config import ENDS, BPETokenizer, CharTokenizer, Recipe
from gptworks.data.prepare import prepare
from gptworks.device import cpu_threads
from gptworks.errors import RunError, UserError
from gptworks.planning.params import count_parameters
from gptworks.recipe import load_recipe, read_recipe, with_vocab_size
from gptworks.runs.try_run import measured_step_seconds
from gptworks.training.record.metrics import MetricsReader
from gptworks.training.signals import stop_signals
from league_entries import NAME, Entry, Minutes, read_entries, size_class
from league_page import write_page
from recorded import REPOSITORY, Result, add_result, provenance, train_recorded

TEXT_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TEXT_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
HELD_OUT = 0.1
"""Fraction of the text that is held out, at its end."""
THREADS = 2
FITTING = 0.95
"""Fraction of the allowed time that the steps are planned to take."""
MEASUREMENTS = 3
"""Number of times that a step is measured; the minimum counts, since other load can only add time."""
TRIAL = 0.1
"""Fraction of a run after which its own speed decides whether it is in time."""
ATTEMPTS = 3
"""Maximum number of runs that are begun for an entry."""

CONTENDERS = REPOSITORY / "bench" / "league"
RESULTS = REPOSITORY / "docs" / "league.jsonl"
SECTIONS = ("model", "tokenizer", "train")
"""Sections of a contender's recipe."""
CIRCUMSTANCES = ("processor", "precision", "torch", "gptworks", "commit")
"""If one of these differs from the entry, a replay may give another score."""
MANY_STEPS = 1_000_000

Report = Callable[[str], None]


@dataclass(frozen=True)
class League:
    """The rules, and the paths of the runs."""

    contenders: Path
    """A folder of recipes."""
    work: Path
    text: Path | None
    """The file of the text; None: download it."""
    minutes: Minutes = 5
    text_sha256: str = TEXT_SHA256

    @property
    def seconds(self) -> float:
        return 60.0 * self.minutes

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.contenders.glob("*.yaml"))

    def contender(self, name: str) -> dict[str, Any]:
        """Return a contender's recipe as it is in its file.

        Raises:
            UserError: no contender has this name, or its recipe breaks a rule.
        """
        if name not in self.names():
            raise UserError(f"{name} is no contender: {self.contenders} has {', '.join(self.names()) or 'none'}.")
        if not re.fullmatch(NAME, name):
            raise UserError(f"{name}: a contender's name has small letters, digits and hyphens, at most 40.")
        tree = read_recipe(self.contenders / f"{name}.yaml")[1]
        train = tree.get("train")
        if isinstance(train, dict) and (given := sorted(ENDS & train.keys())):
            raise UserError(f"{name}: the league sets the length: leave out train.{given[0]}.")
        self.size(self.run_recipe(tree, name, 1, MANY_STEPS))
        return tree

    def run_recipe(self, tree: Mapping[str, Any], name: str, seed: int, steps: int) -> Recipe:
        """Return the recipe of a run with a fixed number of steps, evaluated once on all held-out text.

        Args:
            tree: a contender's recipe, or an entry's.

        Raises:
            UserError: the recipe breaks a rule.
        """
        if strange := sorted(tree.keys() - set(SECTIONS)):
            raise UserError(
                f"{name}: `{strange[0]:.40}` is not a contender's to set: it has the sections {', '.join(SECTIONS)}. "
                f"All learn the next token of one text, from random weights."
            )
        data = {
            "sources": [{"type": "text", "url": TEXT_URL, "sha256": self.text_sha256}],
            "validation": {"fraction": HELD_OUT, "by": "tail"},
        }
        settings = [
            f"train.max_steps={steps}", "train.max_minutes=null", "train.epochs=null", f"train.evaluate_every={steps}",
            f"train.checkpoint_every={steps}", "train.evaluate_sequences=0", "train.sample_every=0",
            "train.keep_every=0", "train.loggers=[]", "train.device=cpu", "train.threads=null",
            f"train.log_every={max(1, steps // 50)}", f"data.cache_dir={self.work / 'data'}",
            f"run_dir={self.work / name}", f"seed={seed}",
        ]  # fmt: skip
        if self.text is not None:
            settings.append(f"data.sources.0.path={self.text.resolve()}")
        recipe = load_recipe(dict(tree) | {"name": name, "data": data}, settings)
        if not isinstance(recipe.tokenizer, CharTokenizer | BPETokenizer):
            raise UserError(
                f"{name}: tokenizer.type={recipe.tokenizer.type} knows other text, or loses some: set char or bpe, "
                f"which are learned from the training text."
            )
        return recipe

    def size(self, recipe: Recipe) -> str:
        """Return the class in which a contender competes.

        Raises:
            UserError: the model has more parameters than the largest class holds.
        """
        known = with_vocab_size(recipe, prepare(recipe).manifest.vocab_size)
        return size_class(recipe.name, count_parameters(known.model).total)

    def fitting_steps(self, recipe: Recipe) -> int:
        """Return the number of steps that fit in the time at the measured speed of a step. Earlier steps with smaller
        batches count as part of a step."""
        with cpu_threads(THREADS):
            seconds = min(measured_step_seconds(recipe) for _ in range(MEASUREMENTS))
        return recipe.train.steps_with(int(FITTING * self.seconds / seconds) * recipe.train.batch_size)


class Clock:
    """Follows the time of a run in its log, to stop a run that would take longer than allowed."""

    def __init__(self, recipe: Recipe, seconds: float) -> None:
        self._log, self._limit = MetricsReader(recipe.run_dir / "metrics.jsonl", kinds=("train",)), seconds
        self._steps = recipe.train.max_steps or 0
        self._times: list[tuple[int, float]] = [(0, 0.0)]

    @property
    def is_late(self) -> bool:
        """Whether the run, at the speed of the later half of its steps so far, takes longer than allowed."""
        self._times += [(record["step"], record["seconds"]) for _, record in self._log.read()]
        step, seconds = self._times[-1]
        return step >= TRIAL * self._steps and seconds + (self._steps - step) * self._step_seconds() > self._limit

    def fitting_steps(self) -> int:
        """Return the number of steps that fit in the time at the run's present speed."""
        step, seconds = self._times[-1]
        return max(0, step + int((FITTING * self._limit - seconds) / self._step_seconds()))

    def _step_seconds(self) -> float:
        step, seconds = self._times[-1]
        before, seconds_before = max(one for one in self._times if one[0] <= step / 2)
        return (seconds - seconds_before) / max(1, step - before)


def cpu_generation(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's family and model number, such as `family 26, model 2`, on Linux on x86; empty elsewhere.
    Generations of a server's processor can share one name, such as AMD EPYC."""
    lines = (line.partition(":") for line in cpuinfo.read_text().splitlines()) if cpuinfo.exists() else ()
    numbers = {key.strip(): value.strip() for key, _, value in lines}
    return f"family {numbers['cpu family']}, model {numbers['model']}" if "cpu family" in numbers else ""


def here() -> Result:
    """Return the `CIRCUMSTANCES` of a run that is trained here, and the date."""
    found = provenance(THREADS)
    del found["threads"]
    name = re.sub(r"[^A-Za-z0-9 .,:()@+_/-]", " ", found["processor"]) or platform.machine()
    return found | {"processor": ", ".join(filter(None, (name, cpu_generation())))}


def compete(league: League, name: str, seed: int, stop_asked: Callable[[], Any], report: Report) -> Entry | None:
    """Train a contender and return its entry; None if a stop was asked for.

    Raises:
        UserError: the recipe breaks a rule, not one of its steps fits in the time, or the source is not committed.
        RunError: a run failed, or all runs were too slow.
    """
    circumstances = here()
    if not re.fullmatch("[0-9a-f]+", circumstances["commit"]):
        raise UserError(
            "src/ has changes that no commit holds, or is in no Git repository, so that an entry could not be trained "
            "again: commit first."
        )
    tree = league.contender(name)
    recipe = league.run_recipe(tree, name, seed, MANY_STEPS)
    steps, size = league.fitting_steps(recipe), league.size(recipe)
    for _ in range(ATTEMPTS):
        if not steps:
            raise UserError(f"{name}: not one step fits in {league.minutes} minutes: make model or batch smaller.")
        report(f"{name}, class {size}: {steps:,} steps fit in {league.minutes} minutes")
        recipe = league.run_recipe(tree, name, seed, steps)
        found, clock = _train_in_time(recipe, league.seconds, stop_asked, report)
        if stop_asked():
            return None
        if found is not None and found["seconds"] <= league.seconds:
            figures = {key: found[key] for key in Entry.model_fields.keys() & found.keys()}
            whole = recipe.model_dump(mode="json", include=set(SECTIONS))
            given = {"contender": name, "minutes": league.minutes, "seed": seed, "recipe": whole}
            return Entry.model_validate(figures | given | circumstances)
        report(f"{name}: too slow here for {steps:,} steps")
        steps = min(steps - 1, clock.fitting_steps())
    raise RunError(
        f"{name}: {ATTEMPTS} runs in a row became slower than they began, so none was in time: run it when the machine "
        f"has nothing else to do."
    )


def _train_in_time(
    recipe: Recipe, seconds: float, stop_asked: Callable[[], Any], report: Report
) -> tuple[Result | None, Clock]:
    """Train from the first step, and return the figures and the clock. A run that will not end in time is stopped, and
    its figures are None."""
    clock = Clock(recipe, seconds)
    return _train_anew(recipe, lambda: stop_asked() or clock.is_late, report), clock


def _train_anew(recipe: Recipe, stop_asked: Callable[[], Any], report: Report) -> Result | None:
    """Train from the first step, and return the figures; None if stopped. An earlier run is not continued, because its
    time was measured under other conditions."""
    shutil.rmtree(recipe.run_dir, ignore_errors=True)
    found = train_recorded(recipe, stop_asked, report)
    shutil.rmtree(recipe.run_dir, ignore_errors=True)
    return found


def replay(
    league: League, entries: Sequence[Entry], name: str, stop_asked: Callable[[], Any], report: Report
) -> bool | None:
    """Train a contender's last entry again, one of this processor if there is one; return whether loss, bits per byte,
    data and sizes are equal to the last bit. None if a stop was asked for.

    Raises:
        UserError: there is no entry, or its recipe breaks a rule or is not valid in this version. RunError: its run
            failed.
    """
    now = here()
    of_name = [entry for entry in entries if (entry.contender, entry.minutes) == (name, league.minutes)]
    if not of_name:
        raise UserError(f"{name} has no entry of {league.minutes} minutes in the file of results.")
    entry = max(enumerate(of_name), key=lambda found: (found[1].processor == now["processor"], found[0]))[1]
    try:
        recipe = league.run_recipe(entry.recipe, f"{name}-replay", entry.seed, entry.steps)
    except UserError as error:
        raise UserError(
            f"{name}: its entry's recipe, of gptworks {entry.gptworks} at commit {entry.commit}, is not valid here: "
            f"{error} Replay it at that commit."
        ) from None
    found = _train_anew(recipe, stop_asked, report)
    if found is None:
        return None
    then = entry.model_dump()
    differing = [f"{key} was {then[key]} and is {now[key]}" for key in CIRCUMSTANCES if then[key] != now[key]]
    report(f"{name}: entry {entry.bits_per_byte!r} bits per byte, replay {found['bits_per_byte']!r}")
    keys = ("loss", "bits_per_byte", "data", "held_out", "steps", "tokens", "parameters")
    unequal = [f"{key} was {then[key]} and is {found[key]}" for key in keys if found[key] != then[key]]
    report("; ".join([f"not equal: {', '.join(unequal)}" if unequal else "equal", *differing]))
    return not unequal


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--replay", metavar="NAME", help="train an entry again; exit code 1 where it is not equal")
    parser.add_argument("--contender", action="append", help="this one alone; repeatable")
    parser.add_argument("--minutes", type=int, choices=get_args(Minutes), default=5, help="the time of each run")
    parser.add_argument("--again", action="store_true", help="also who has an entry of this kind of processor")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--text", type=Path, help="the file of TinyShakespeare; else it is downloaded")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "league")
    parser.add_argument("--results", type=Path, default=RESULTS, help="lines; the page is beside it")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # inherited by the runs
    folder = CONTENDERS / f"{options.minutes}-minutes"
    league = League(folder, options.work.resolve(), options.text, options.minutes)
    entries = read_entries(options.results)

    def report(text: str) -> None:
        print(text, flush=True)

    with stop_signals() as stop_asked:
        if options.replay:
            if not replay(league, entries, options.replay, stop_asked, report):
                sys.exit(1)
            return
        names = [] if options.page else options.contender or league.names()
        for name in names:
            league.contender(name)  # report broken rules before the first run
        for name in names:
            if not options.again and has_entry(entries, league, name, options.seed):
                report(f"{name} has an entry of this kind of processor: --again trains it again")
                continue
            entry = compete(league, name, options.seed, stop_asked, report)
            if entry is None:
                break
            add_result(options.results, entry.model_dump())
            report(f"{name}: {entry.bits_per_byte:.4f} bits per byte after {entry.seconds:.0f} s")
    write_page(read_entries(options.results), options.results.with_suffix(".md"))


def has_entry(entries: Sequence[Entry], league: League, name: str, seed: int) -> bool:
    """Whether a contender has an entry with this time, seed and kind of processor."""
    key = (name, league.minutes, seed, here()["processor"])
    return any((entry.contender, entry.minutes, entry.seed, entry.processor) == key for entry in entries)


if __name__ == "__main__":
    try:
        main()
    except (UserError, RunError) as error:
        sys.exit(f"error: {error}")
