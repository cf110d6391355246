"""Writes the page of bench/experiments.py from its file of results."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from blocks import FEWEST_RUNS, MOST_RUNS
from gptworks.files import write_whole
from rates import MOST_FACTORS, TUNING_SEED, factor_of
from recorded import Result
from verdicts import CORES, WORTH, Regime, Row, regimes_of


def write_page(results: Sequence[Result], path: Path) -> None:
    """Write the results as a Markdown page."""
    write_whole(path, page(results))


def page(results: Sequence[Result]) -> str:
    """Return the text of the Markdown page."""
    regimes = regimes_of(results)
    return "\n".join([*_heading(regimes, results), *_summary(regimes), *_baselines(regimes), *_tables(regimes)]) + "\n"


def _heading(regimes: list[Regime], results: Sequence[Result]) -> Iterator[str]:
    yield "# Experiments"
    yield ""
    yield "`python bench/experiments.py --page` writes this page from `docs/experiments.jsonl`; edit neither by hand."
    yield ""
    yield (
        "Each change of `bench/changes.py` is trained beside the defaults of gptworks, the baseline, on each regime of "
        "`bench/regimes/`: small recipes of a minute or two on a core. A difference is the validation loss after the "
        "last step, in nats per token, less the baseline's after as many tokens of the same text: below zero is "
        "better. What a seed does to both cancels, and all intervals of a regime together hold their true differences "
        f"with 95%, however often they are looked at and whatever decides which change gets more seeds, up to "
        f"{MOST_RUNS} (`bench/blocks.py`). The first interval needs {FEWEST_RUNS} seeds. †: the change's runs scatter "
        "more than those of the others, so its interval comes from its own pairs, with 95% by itself."
    )
    yield ""
    yield (
        f"**better**, **worse**: the interval lies on one side of zero. **same**: it lies within ±{WORTH:g} nats per "
        "byte, so all tokenizers have one standard. **no gain**: only a gain of that much or more is excluded. "
        "**open**: none of these yet; the seeds and hours are those that decide it if difference and scatter stay as "
        f"they are, with {CORES} runs side by side on an idle machine like this one, and `bench/experiments.py "
        "--decide HOURS` trains them. **withdrawn**: open or not tuned, and gptworks no longer has the settings. "
        "**failed**: a run did not end."
    )
    yield ""
    yield (
        "A step's time is its thread's, measured in turns with the baseline's, for as many tokens. *In equal time*, a "
        "change that takes r times as long is compared with the baseline after r times as many tokens, interpolated "
        "in the logarithm between the baseline's own runs of half, once and twice the length. Such an interval adds "
        "the uncertainties of both losses and of the step's time, which has 95% by itself. Beyond half or twice the "
        "time there is no verdict."
    )
    yield ""
    yield (
        "Learning rates are tuned for the baseline and for each change on each regime: a factor of all rates is the "
        f"best of up to {MOST_FACTORS} powers of two for seed {TUNING_SEED}, which takes no part in the comparison "
        "(`bench/rates.py`). One seed finds rates near the best; a difference is that of the rates found. A regime "
        "*without tuned rates* has no intervals with them yet: its runs have the rates of their recipes, and seed "
        f"{TUNING_SEED} counts."
    )
    yield ""
    yield (
        f"{sum(len(regime.runs) for regime in regimes):,} runs. Schedules and all else are the baseline's or the "
        "change's defaults; and what holds at these sizes may not hold at others."
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
    titles = (f"{regime.name}{'' if regime.factor else ', without tuned rates'}" for regime in regimes)
    yield f"| change | settings | source | {' | '.join(titles)} |"
    yield "|---" * (3 + len(rows)) + "|"
    for name, row in changes.items():
        words = (_verdict(found[name]) if name in found else "" for found in rows.values())
        yield f"| {name} | {' '.join(f'`{one}`' for one in row.settings)} | {row.source} | {' | '.join(words)} |"


def _baselines(regimes: list[Regime]) -> Iterator[str]:
    if not regimes:
        return
    yield from ("", "## Baselines", "", "| regime | parameters | steps | tokens read | rates | loss, by seed |")
    yield "|---|---:|---:|---:|---:|---|"
    for regime in regimes:
        losses = ", ".join(f"{run['loss']:.4f} ({run['seed']})" for run in regime.baseline)
        if regime.baseline:
            run = regime.baseline[-1]
            cells = (
                f"{run['parameters']:,}",
                f"{run['steps']:,}",
                f"{run['tokens']:,}",
                _factor(regime.factor),
                losses,
            )
            yield f"| {regime.name} | {' | '.join(cells)} |"
        else:
            yield f"| {regime.name} | | | | | none ended |"


def _tables(regimes: list[Regime]) -> Iterator[str]:
    for regime in regimes:
        yield from ("", f"## {regime.name}", "")
        if not regime.rows:
            yield "The baseline alone."
            continue
        tuned = "" if regime.factor else " Rates are not tuned."
        yield f"Differences below {regime.worth:.4f} nats per token do not matter here.{tuned}"
        yield ""
        yield "| change | verdict | difference | interval | seeds | rates | parameters | step time | in equal time |"
        yield "|---|---|---:|---|---:|---:|---:|---:|---|"
        for row in regime.rows:
            yield _line(row)
        for run in (run for run in regime.runs if "failed" in run):
            yield from (
                "",
                f"**{run['change']}**, rates {_factor(factor_of(run))}, seed {run['seed']}, failed: {run['failed']}",
            )


def _verdict(row: Row) -> str:
    if row.verdict != "open":
        return row.verdict
    if row.factor is None:
        return "open: rates not tuned"
    if row.comparison is not None and row.comparison.n >= MOST_RUNS:
        return "open"
    if (further := row.further) is None:
        return "open: too few seeds"
    cost = f"{len(further.seeds)} seed{'s' if len(further.seeds) > 1 else ''}, {further.hours:.2g} h"
    return f"open: over {cost}" if further.verdict == "open" else f"open: {cost} ({further.verdict})"


def _line(row: Row) -> str:
    difference = interval = n = ""
    if found := row.comparison:
        difference, n = f"{found.value:+.4f}{' †' if found.apart else ''}", str(found.n)
        interval = _interval(found.low, found.high)
    time = "" if row.step_time is None else f"{row.step_time.ratio:.2f} × ({row.step_time.interval})"
    parameters = "" if row.parameters is None else f"{row.parameters:,}"
    in_time = "" if row.in_time is None else f"{row.in_time.verdict}: {_interval(row.in_time.low, row.in_time.high)}"
    cells = (row.change, _verdict(row), difference, interval, n, _factor(row.factor), parameters, time, in_time)
    return f"| {' | '.join(cells)} |"


def _factor(factor: float | None) -> str:
    return "" if factor is None else f"{factor:g} ×"


def _interval(low: float, high: float) -> str:
    return f"{low:+.4f} to {high:+.4f}" if math.isfinite(low) else ""
