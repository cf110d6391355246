"""Writes the page of bench/experiments.py from its file of results."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blocks import FEWEST_RUNS, Comparison, compare
from changes import BASELINE
from gptworks.files import write_whole
from gptworks.runs.step_time import StepTime, step_time
from recorded import Result

N_SEEDS = FEWEST_RUNS
"""Default number of a change's runs, one per seed."""
ROUNDS = 3
"""Number of times that a step is measured without and with a change."""
WORTH = 0.005
"""The smallest difference that matters, in nats per token; the default of `gptworks try`."""


@dataclass(frozen=True)
class Row:
    """The results of a change on a regime."""

    change: str
    settings: tuple[str, ...]
    source: str
    parameters: int | None
    """Number of the model's parameters; None: no run finished."""
    comparison: Comparison | None
    """Last loss minus the baseline's, in nats per token; None: no seed, text and processor has runs of both."""
    failures: dict[int, str]
    """Why a run failed, by seed."""
    step_time: StepTime | None
    """Step time relative to the baseline's, for equally many tokens; None: not measured."""

    @property
    def verdict(self) -> str:
        if self.failures:
            return "failed"
        if (found := self.comparison) is None:
            return "open"
        if found.high < 0 or found.low > 0:
            return "better" if found.high < 0 else "worse"
        return "same" if found.low > -WORTH and found.high < WORTH else "open"


@dataclass(frozen=True)
class Regime:
    """The results of all changes on a regime, with its latest recipe."""

    name: str
    baseline: tuple[Result, ...]
    """The lines of the finished runs of the baseline, by seed."""
    rows: tuple[Row, ...]
    """By loss, lowest first; then changes without a comparison, then failed ones."""
    runs: tuple[Result, ...]


def regimes_of(results: Sequence[Result]) -> list[Regime]:
    """Return each regime, in the order of the file. Lines with an earlier recipe of the regime or earlier settings of a
    change are ignored; of a repeated run, only the last line counts."""
    names = dict.fromkeys(line["regime"] for line in results if line["kind"] == "run")
    return [_regime(name, [line for line in results if line["regime"] == name]) for name in names]


def _regime(name: str, lines: list[Result]) -> Regime:
    recipe = [line["recipe"] for line in lines if line["kind"] == "run"][-1]
    lines = [line for line in lines if line["recipe"] == recipe]
    last = {line["change"]: line["settings"] for line in lines}
    lines = [line for line in lines if line["settings"] == last[line["change"]]]
    runs = {(line["change"], line["seed"], line["processor"]): line for line in lines if line["kind"] == "run"}
    times = {line["change"]: line for line in lines if line["kind"] == "time"}
    ended = [((line["seed"], line["processor"], line["data"]), line) for line in runs.values() if "failed" not in line]
    found = compare([(line["change"], block, line["loss"]) for block, line in ended], BASELINE)
    rows = [
        _row(change, [run for run in runs.values() if run["change"] == change], times.get(change), found.get(change))
        for change in last
        if change != BASELINE
    ]
    rows.sort(key=lambda row: (bool(row.failures), row.comparison is None, row.comparison and row.comparison.value))
    baseline = {seed: run for (change, seed, _), run in runs.items() if change == BASELINE and "failed" not in run}
    return Regime(name, tuple(baseline[seed] for seed in sorted(baseline)), tuple(rows), tuple(runs.values()))


def _row(change: str, runs: list[Result], time: Result | None, comparison: Comparison | None) -> Row:
    described = next(iter(runs), time)
    assert described is not None
    ratios = [] if time is None else [
        after / before for before, after in zip(time["baseline_seconds"], time["seconds"], strict=True)
    ]  # fmt: skip
    return Row(
        change,
        tuple(described["settings"]),
        described["source"],
        next((run["parameters"] for run in runs if "failed" not in run), None),
        comparison,
        {run["seed"]: run["failed"] for run in runs if "failed" in run},
        step_time(ratios, ROUNDS, 0.05) if ratios else None,
    )


def write_page(results: Sequence[Result], path: Path) -> None:
    """Write the page."""
    write_whole(path, page(results))


def page(results: Sequence[Result]) -> str:
    """Return the page as Markdown."""
    regimes = regimes_of(results)
    return "\n".join([*_heading(regimes, results), *_summary(regimes), *_baselines(regimes), *_tables(regimes)]) + "\n"


def _heading(regimes: list[Regime], results: Sequence[Result]) -> Iterator[str]:
    yield "# Experiments"
    yield ""
    yield "`python bench/experiments.py --page` writes this page from `docs/experiments.jsonl`; edit neither by hand."
    yield ""
    yield (
        "Each change of `bench/changes.py` is trained beside the defaults of gptworks, the baseline, on each regime of "
        "`bench/regimes/`: small recipes of a minute or two on two cores. A difference is the validation loss after "
        "the last step, in nats per token, less the baseline's after as many tokens of the same text: below zero is "
        "better. What a seed does to all runs is taken out (`bench/blocks.py`), and all intervals of a regime "
        f"together hold their true differences with 95%; one needs {FEWEST_RUNS} seeds. **better**, **worse**: the "
        f"interval lies on one side of zero. **same**: within ±{WORTH:g}. **open**: neither, or too few seeds. "
        "**failed**: a run did not end. †: the change's runs scatter more than those of the others, so its interval "
        "comes from its own pairs, with 95% by itself. A step's time is measured in turns with the baseline's on one "
        "machine, for as many tokens."
    )
    yield ""
    yield (
        f"{sum(len(regime.runs) for regime in regimes):,} runs. Rates and schedules are the baseline's or the change's "
        "defaults, not tuned for the change; and what holds at these sizes may not hold at others."
    )
    yield ""
    dates = sorted({line["date"] for line in results})
    facts = [f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else dates[0]] if dates else []
    for key, noun in (("processor", ""), ("precision", ""), ("torch", "torch "), ("gptworks", "gptworks ")):
        facts.append(noun + ", ".join(dict.fromkeys(str(line[key]) for line in results)))
    commits = dict.fromkeys(line["commit"] or "a state of the source that has no commit" for line in results)
    yield f"Trained: {'; '.join(facts)} at {', '.join(commits)}." if results else "No runs yet."


def _summary(regimes: list[Regime]) -> Iterator[str]:
    rows = {regime.name: {row.change: row for row in regime.rows} for regime in regimes}
    changes = {row.change: row for regime in regimes for row in regime.rows}
    if not changes:
        return
    yield from ("", "## Verdicts", "")
    yield f"| change | settings | source | {' | '.join(rows)} |"
    yield "|---" * (3 + len(rows)) + "|"
    for name, row in changes.items():
        words = (found[name].verdict if name in found else "" for found in rows.values())
        yield f"| {name} | {' '.join(f'`{one}`' for one in row.settings)} | {row.source} | {' | '.join(words)} |"


def _baselines(regimes: list[Regime]) -> Iterator[str]:
    if not regimes:
        return
    yield from ("", "## Baselines", "", "| regime | parameters | steps | tokens read | loss, by seed |")
    yield "|---|---:|---:|---:|---|"
    for regime in regimes:
        losses = ", ".join(f"{run['loss']:.4f} ({run['seed']})" for run in regime.baseline)
        if regime.baseline:
            run = regime.baseline[-1]
            yield f"| {regime.name} | {run['parameters']:,} | {run['steps']:,} | {run['tokens']:,} | {losses} |"
        else:
            yield f"| {regime.name} | | | | none ended |"


def _tables(regimes: list[Regime]) -> Iterator[str]:
    for regime in regimes:
        yield from ("", f"## {regime.name}", "")
        if not regime.rows:
            yield "The baseline alone."
            continue
        yield "| change | verdict | difference | interval | seeds | parameters | time of a step |"
        yield "|---|---|---:|---|---:|---:|---:|"
        for row in regime.rows:
            yield _line(row)
        for row in regime.rows:
            for seed, why in row.failures.items():
                yield from ("", f"**{row.change}**, seed {seed}, failed: {why}")


def _line(row: Row) -> str:
    difference = interval = n = ""
    if found := row.comparison:
        difference, n = f"{found.value:+.4f}{' †' if found.apart else ''}", str(found.n)
        interval = f"{found.low:+.4f} to {found.high:+.4f}" if math.isfinite(found.low) else ""
    time = "" if row.step_time is None else f"{row.step_time.ratio:.2f} × ({row.step_time.interval})"
    parameters = "" if row.parameters is None else f"{row.parameters:,}"
    cells = (row.change, row.verdict, difference, interval, n, parameters, time)
    return f"| {' | '.join(cells)} |"
