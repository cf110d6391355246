"""The league: which recipe learns the most from the same text in five minutes on two cores?

    python bench/league.py --text tinyshakespeare.txt         # train those without an entry of this machine
    python bench/league.py --contender small --text FILE      # only this one
    python bench/league.py --flops 1e14 --text FILE           # limit FLOPs instead of time: for any machine
    python bench/league.py --replay small --text FILE         # train its entry again and compare the result
    python bench/league.py --page                             # docs/league.md from docs/league.jsonl

A contender is a recipe in bench/league/. It trains on TinyShakespeare (fixed by its sha256) without the last tenth, and
its score is the bits per byte of that tenth after its last step. It may choose tokenizer, model and training, but no
other text and no trained weights. Before a run, a step is timed, and the run gets the number of steps that fit. A run
therefore does not depend on the clock, and a replay gives the same score on the same kind of machine. Each run is a
line of docs/league.jsonl, with all that a replay needs.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.config import BPETokenizer, CharTokenizer, Recipe, TextSource
from gptworks.config.objective import NextTokenObjective
from gptworks.data.prepare import prepare
from gptworks.device import cpu_threads
from gptworks.errors import RunError, UserError
from gptworks.planning.flops import forward_flops
from gptworks.recipe import load_recipe, read_recipe, with_vocab_size
from gptworks.runs.try_run import measured_step_seconds
from gptworks.training.signals import stop_signals
from league_page import write_page
from recorded import REPOSITORY, Result, add_result, all_threads, provenance, read_results, train_recorded

TEXT_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
HELD_OUT = 0.1
"""Fraction of the text that is held out, at its end."""
SECONDS = 300.0
"""Training time of a contender, unless FLOPs are given."""
FITTING = 0.95
"""Fraction of the seconds that the steps may take as measured, since the steps of a run are slightly slower."""
MEASUREMENTS = 3
"""Number of times that a step is measured; the minimum counts, since other load can only add time."""

CONTENDERS = REPOSITORY / "bench" / "league"
RESULTS = REPOSITORY / "docs" / "league.jsonl"
CIRCUMSTANCES = ("processor", "threads", "precision", "torch", "gptworks", "commit")
"""If one of these differs from the entry, a replay may give another score."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class League:
    """The rules, and the paths of the runs."""

    contenders: Path
    """A folder of recipes."""
    work: Path
    text: Path | None
    """The file of the text; None: download it."""
    threads: int
    flops: float | None = None
    """FLOPs of each run; None: the limit is `SECONDS`."""
    text_sha256: str = TEXT_SHA256

    @property
    def budget(self) -> str:
        return f"{SECONDS:g} s" if self.flops is None else f"{self.flops:.3g} FLOPs"

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.contenders.glob("*.yaml"))

    def contender(self, name: str) -> dict[str, Any]:
        """Return a contender's recipe as it is in its file.

        Raises:
            UserError: there is none, or it breaks a rule.
        """
        if name not in self.names():
            raise UserError(f"{name} is no contender: {self.contenders} has {', '.join(self.names())}.")
        tree = read_recipe(self.contenders / f"{name}.yaml")[1] | {"name": name}
        self.check(load_recipe(tree))
        return tree

    def check(self, recipe: Recipe) -> None:
        """Check that a recipe follows the rules.

        Raises:
            UserError: it names the rule.
        """
        data = recipe.data
        source = data.sources[0] if len(data.sources) == 1 else None
        if not isinstance(source, TextSource) or source.sums != (self.text_sha256,):
            raise UserError(f"{recipe.name}: all contenders read one text, of sha256 {self.text_sha256}.")
        if data.clean or (data.validation.fraction, data.validation.by) != (HELD_OUT, "tail"):
            raise UserError(
                f"{recipe.name}: the last {HELD_OUT:.0%} of the text as it is are held out: set data.validation to "
                f"{{fraction: {HELD_OUT}, by: tail}}, and no data.clean."
            )
        if not isinstance(recipe.tokenizer, CharTokenizer | BPETokenizer):
            raise UserError(
                f"{recipe.name}: tokenizer.type={recipe.tokenizer.type} knows other text, or loses some: set char or "
                f"bpe, which are learned from the training text."
            )
        if recipe.initialize_from or recipe.adapter or not isinstance(recipe.objective, NextTokenObjective):
            raise UserError(f"{recipe.name}: contenders learn the next token from random weights.")
        if recipe.train.max_steps is not None or recipe.train.epochs is not None:
            raise UserError(
                f"{recipe.name}: the league sets the length: leave out train.max_steps and train.epochs, and give "
                f"train.max_minutes={SECONDS / 60:g} instead."
            )

    def run_recipe(self, tree: dict[str, Any], name: str, seed: int, steps: int) -> Recipe:
        """Return the recipe of a run with a fixed number of steps, evaluated once on all held-out text."""
        settings = [
            f"train.max_steps={steps}", "train.max_minutes=null", f"train.evaluate_every={steps}",
            f"train.checkpoint_every={steps}", "train.evaluate_sequences=0", "train.sample_every=0",
            "train.loggers=[]", "train.device=cpu", f"train.log_every={max(1, steps // 50)}", "sweep=null",
            f"data.cache_dir={self.work / 'data'}", f"run_dir={self.work / name}", f"seed={seed}",
        ]  # fmt: skip
        if self.text is not None:
            settings.append(f"data.sources.0.path={self.text.resolve()}")
        return load_recipe(tree, settings)

    def fitting_steps(self, recipe: Recipe) -> int:
        """Return the number of training steps that the budget allows.

        Raises:
            UserError: it allows none.
        """
        if self.flops is not None:
            steps = int(self.flops / (flops_per_token(recipe) * step_tokens(recipe)))
        else:
            with cpu_threads(self.threads):
                seconds = min(measured_step_seconds(recipe) for _ in range(MEASUREMENTS))
            steps = int(FITTING * SECONDS / seconds)
        if not steps:
            raise UserError(f"{recipe.name}: not one step fits in {self.budget}: make the model or the batch smaller.")
        return steps


def flops_per_token(recipe: Recipe) -> float:
    """Return the training FLOPs per token as `gptworks plan` counts them, with attention as if no token were masked."""
    known = with_vocab_size(recipe, prepare(recipe).manifest.vocab_size)
    return forward_flops(known.model).training_per_token_dense


def step_tokens(recipe: Recipe) -> int:
    return recipe.train.batch_size * recipe.model.context_length


def compete(league: League, name: str, seed: int, stop_asked: Callable[[], Any], report: Report) -> Result | None:
    """Train a contender and return its entry; None if a stop was asked for.

    Raises:
        UserError: it breaks a rule. RunError: its run failed.
    """
    contender = league.contender(name)
    measured = league.run_recipe(contender, name, seed, 1000)  # the length does not affect the step time
    steps = league.fitting_steps(measured)
    report(f"{name}: {steps:,} steps of {step_tokens(measured):,} tokens fit in {league.budget}")
    recipe = league.run_recipe(contender, name, seed, steps)
    found = _train_anew(recipe, stop_asked, report)
    if found is None:
        return None
    return {
        "contender": name, "budget": league.budget, "seed": seed, **found,
        "flops": flops_per_token(recipe) * found["tokens"],
        "over": league.flops is None and found["seconds"] > SECONDS,
        "text_sha256": league.text_sha256, "recipe": _portable(recipe), **provenance(league.threads),
    }  # fmt: skip


def _train_anew(recipe: Recipe, stop_asked: Callable[[], Any], report: Report) -> Result | None:
    """Train from the first step: a run that continues after a stop would have measured its time under other
    conditions."""
    shutil.rmtree(recipe.run_dir, ignore_errors=True)
    found = train_recorded(recipe, stop_asked, report)
    shutil.rmtree(recipe.run_dir, ignore_errors=True)
    return found


def _portable(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved recipe without paths of this machine."""
    tree = recipe.model_dump(mode="json", exclude={"run_dir", "sweep"})
    del tree["data"]["cache_dir"], tree["data"]["sources"][0]["path"]
    return tree


def replay(
    league: League, entries: Sequence[Result], name: str, stop_asked: Callable[[], Any], report: Report
) -> bool | None:
    """Train a contender's last entry again, one of this processor if there is one; return whether loss and bits per
    byte are equal to the last bit. None if a stop was asked for.

    Raises:
        UserError: there is no entry. RunError: its run failed.
    """
    here = provenance(league.threads)
    of_name = [entry for entry in entries if entry["contender"] == name]
    if not of_name:
        raise UserError(f"{name} has no entry in the league: its entries are those of a file of results.")
    entry = max(enumerate(of_name), key=lambda found: (found[1]["processor"] == here["processor"], found[0]))[1]
    recipe = league.run_recipe(entry["recipe"], f"{name}-replay", entry["seed"], entry["steps"])
    found = _train_anew(recipe, stop_asked, report)
    if found is None:
        return None
    differing = [f"{key} was {entry[key]} and is {here[key]}" for key in CIRCUMSTANCES if entry[key] != here[key]]
    report(f"{name}: entry {entry['bits_per_byte']!r} bits per byte, replay {found['bits_per_byte']!r}")
    same = all(found[key] == entry[key] for key in ("loss", "bits_per_byte", "data", "held_out", "steps"))
    words = "equal" if same else f"not equal: {found['bits_per_byte'] - entry['bits_per_byte']:+.6f} bits per byte"
    report(words + (f"; {', '.join(differing)}" if differing else "; on the same kind of machine"))
    return same


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--replay", metavar="NAME", help="train an entry again; exit code 1 where it is not equal")
    parser.add_argument("--contender", action="append", help="this one alone; repeatable")
    parser.add_argument("--flops", type=float, help="the length of each run in FLOPs, such as 1e14")
    parser.add_argument("--again", action="store_true", help="also who has an entry of this kind of machine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=min(2, all_threads()))
    text = os.environ.get("LEAGUE_TEXT")
    parser.add_argument("--text", type=Path, default=text and Path(text), help="TinyShakespeare; or $LEAGUE_TEXT")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "league")
    parser.add_argument("--results", type=Path, default=RESULTS, help="lines; the page is beside it")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # inherited by the runs
    league = League(CONTENDERS, options.work.resolve(), options.text, options.threads, options.flops)
    entries = read_results(options.results)

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
                continue
            entry = compete(league, name, options.seed, stop_asked, report)
            if entry is None:
                break
            add_result(options.results, entry)
            report(f"{name}: {entry['bits_per_byte']:.4f} bits per byte after {entry['seconds']:.0f} s")
    write_page(read_results(options.results), options.results.with_suffix(".md"))


def has_entry(entries: Sequence[Result], league: League, name: str, seed: int) -> bool:
    """Whether a contender has an entry with this budget, seed and kind of machine."""
    here = provenance(league.threads)
    key = (name, league.budget, seed, here["processor"], here["threads"])
    return any(
        (entry["contender"], entry["budget"], entry["seed"], entry["processor"], entry["threads"]) == key
        for entry in entries
    )


if __name__ == "__main__":
    try:
        main()
    except (UserError, RunError) as error:
        sys.exit(f"error: {error}")
