"""Verdicts on the changes of bench/experiments.py, and the runs that would decide the open ones."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from statistics import median

from blocks import FEWEST_RUNS, MOST_RUNS, Comparison, compare
from changes import BASELINE, LONGER, SHORTER, WITHDRAWN
from gptworks.runs.try_results import StepTime, step_time
from rates import TUNING_SEED, factor_of, tuned_factor
from recorded import Place, Result, place_of

WORTH = 0.005
"""The smallest difference that matters, in nats per byte, so that it is the same for all tokenizers."""
CORES = 2
"""Number of runs that train side by side, each on a core, in an estimate of hours."""
START_SECONDS = 10.0
"""Seconds of a run outside training: starting, evaluating and writing."""


@dataclass(frozen=True)
class Further:
    """The runs that would decide an open comparison if its difference and scatter stayed as they are."""

    verdict: str
    """The verdict then; `open` if even `MOST_RUNS` pairs do not decide it."""
    seeds: tuple[int, ...]
    """Seeds of the further pairs, in the place of the regime's next runs."""
    hours: float
    """Hours with `CORES` runs side by side on an idle machine."""


@dataclass(frozen=True)
class InTime:
    """Interval of a change's loss minus the loss of a baseline that trains for as long, and its verdict."""

    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class Row:
    """The results of a change on a regime."""

    change: str
    settings: tuple[str, ...]
    source: str
    factor: float | None
    """Factor of the learning rates, see `rates`; None: rates are not tuned, or those of the recipes are compared."""
    parameters: int | None
    """Number of the model's parameters; None: no run finished."""
    comparison: Comparison | None
    """Last loss minus the baseline's, in nats per token, both at their own factors; None: the change and the baseline
    have no runs with the same seed in the same place."""
    step_time: StepTime | None
    """Step time relative to the baseline's, for equally many tokens; None: not measured."""
    verdict: str
    """better, worse, same, no gain, open, withdrawn or failed."""
    further: Further | None
    """The runs that would decide an open verdict; None: the verdict is not open, rates are not tuned, there is no
    comparison, no change has enough runs to estimate the noise, or this change has `MOST_RUNS`."""
    in_time: InTime | None = None
    """The comparison in equal time; None: the step time equals the baseline's, was not measured, or is beyond half or
    twice the baseline's, or a loss has no interval."""


@dataclass(frozen=True)
class Regime:
    """The results of all changes on a regime, with its latest recipe."""

    name: str
    baseline: tuple[Result, ...]
    """The finished runs of the baseline that are compared, oldest first."""
    factor: float | None
    """The baseline's factor; None: it is not known, or runs at the recipes' own rates are compared, because only these
    runs have intervals so far."""
    rows: tuple[Row, ...]
    """By loss, lowest first; then changes without a comparison, then failed ones."""
    runs: tuple[Result, ...]
    worth: float
    """The smallest difference that matters, in nats per token. Runs before 2026-11-27 do not record the bytes of a
    token; without later runs, a token counts as one byte."""


def verdict(value: float, margin: float, worth: float) -> str:
    """Return an interval's verdict: `better` or `worse` if it excludes 0; `same` if all of it is smaller than `worth`;
    `no gain` if only gains of `worth` or more are excluded; else `open`."""
    if abs(value) > margin:
        return "better" if value < 0 else "worse"
    if value - margin <= -worth:
        return "open"
    return "same" if value + margin < worth else "no gain"


def regimes_of(results: Sequence[Result], here: Mapping[str, Place] | None = None) -> list[Regime]:
    """Return each regime, in the order of the file. Lines with an earlier recipe of the regime or earlier settings of a
    change are ignored; of a repeated run, only the last line counts. `here` has the place of the next runs, by regime;
    by default, the place of the last run."""
    names = dict.fromkeys(line["regime"] for line in results if line["kind"] == "run")
    return [
        _regime(name, [line for line in results if line["regime"] == name], (here or {}).get(name)) for name in names
    ]


def _regime(name: str, lines: list[Result], here: Place | None) -> Regime:
    recipe = [line["recipe"] for line in lines if line["kind"] == "run"][-1]
    lines = [line for line in lines if line["recipe"] == recipe]
    last = {line["change"]: line["settings"] for line in lines}
    lines = [line for line in lines if line["settings"] == last[line["change"]]]
    runs = {
        (line["change"], factor_of(line), line["seed"], *place_of(line)): line
        for line in lines
        if line["kind"] == "run"
    }
    times = {line["change"]: line for line in lines if line["kind"] == "time"}
    factors = tuned_factors(runs.values())
    compared, found = _compared(runs.values(), factors)
    if not _has_intervals(found):
        at_own = _compared(runs.values(), {})
        if _has_intervals(at_own[1]):
            factors, (compared, found) = {}, at_own
    ended = [line for line in compared if "failed" not in line]
    baseline = [line for line in ended if line["change"] == BASELINE]
    worth = WORTH * max(line.get("token_bytes", 1.0) for line in runs.values())  # a constant of the text
    here = here or (place_of(ended[-1]) if ended else None)
    rows = [
        _row(change, factors, runs.values(), compared, times, found.get(change), worth, here)
        for change in last
        if change != BASELINE
    ]
    rows = [replace(row, in_time=_in_time(row, found.get(SHORTER), found.get(LONGER), worth)) for row in rows]
    rows.sort(
        key=lambda row: (row.verdict == "failed", row.comparison is None, row.comparison and row.comparison.value)
    )
    return Regime(name, tuple(baseline), factors.get(BASELINE), tuple(rows), tuple(runs.values()), worth)


def tuned_factors(runs: Iterable[Result]) -> dict[str, float]:
    """Return the tuned factor of the learning rates of each change whose search for it is over."""
    by_change: dict[str, list[Result]] = {}
    for run in runs:
        by_change.setdefault(run["change"], []).append(run)
    found = {change: tuned_factor(mine) for change, mine in by_change.items()}
    return {change: factor for change, factor in found.items() if factor is not None}


def _compared(runs: Iterable[Result], factors: Mapping[str, float]) -> tuple[list[Result], dict[str, Comparison]]:
    """Return the runs that are compared, failed ones too, and the comparisons of those that finished."""
    compared = compared_runs(runs, factors)
    ended = [line for line in compared if "failed" not in line]
    blocks = [(line["change"], (line["seed"], *place_of(line)), line["loss"]) for line in ended]
    return compared, compare(blocks, BASELINE)


def _has_intervals(found: Mapping[str, Comparison]) -> bool:
    return any(math.isfinite(comparison.spread) for comparison in found.values())


def compared_runs(runs: Iterable[Result], factors: Mapping[str, float]) -> list[Result]:
    """Return the runs that are compared: those at their change's factor, except those of the tuning seed. Without
    factors, return all runs at the rates of their recipes."""
    if not factors:
        return [run for run in runs if factor_of(run) == 1]
    return [run for run in runs if run["seed"] != TUNING_SEED and factor_of(run) == factors.get(run["change"])]


def _row(
    change: str, factors: Mapping[str, float], all_runs: Iterable[Result], compared: Sequence[Result],
    times: Mapping[str, Result], comparison: Comparison | None, worth: float, here: Place | None,
) -> Row:  # fmt: skip
    time = times.get(change)
    runs = [run for run in all_runs if run["change"] == change]
    described = next(iter(runs), time)
    assert described is not None
    found, further = "open", None
    if any(run["change"] == change and "failed" in run for run in compared):
        found = "failed"
    elif comparison is not None:
        found = verdict(comparison.value, comparison.margin(comparison.n), worth)
    if found == "open" and change in WITHDRAWN:
        found = "withdrawn"
    elif found == "open" and comparison is not None and here is not None and factors:
        further = _further(change, comparison, worth, compared, times, here)
    return Row(
        change,
        tuple(described["settings"]),
        described["source"],
        factors.get(change),
        next((run["parameters"] for run in runs if "failed" not in run), None),
        comparison,
        None if time is None else times_of(time),
        found,
        further,
    )


def _in_time(row: Row, shorter: Comparison | None, longer: Comparison | None, worth: float) -> InTime | None:
    """Compare a change with the baseline's loss after as much time, from the baseline's runs of other lengths."""
    if row.comparison is None or (time := row.step_time) is None or not math.isfinite(time.high) or time.is_same:
        return None
    ends = []
    for ratio in (time.low, time.ratio, time.high):
        doublings = math.log2(ratio)
        other = longer if doublings > 0 else shorter
        if other is None or abs(doublings) > 1:
            return None
        gained = abs(doublings) * other.value
        margin = row.comparison.margin(row.comparison.n) + abs(doublings) * other.margin(other.n)
        ends += [row.comparison.value - gained - margin, row.comparison.value - gained + margin]
    low, high = min(ends), max(ends)
    return InTime(low, high, verdict((low + high) / 2, (high - low) / 2, worth)) if math.isfinite(low) else None


def times_of(time: Result) -> StepTime:
    """Return the step time on record."""
    ratios = [after / before for before, after in zip(time["baseline_seconds"], time["seconds"], strict=True)]
    return step_time(ratios, len(ratios), 0.05)


def _further(
    change: str, now: Comparison, worth: float, runs: Sequence[Result], times: Mapping[str, Result], here: Place
) -> Further | None:
    if math.isinf(now.spread) or now.n >= MOST_RUNS:
        return None
    for n in range(max(now.n + 1, FEWEST_RUNS), MOST_RUNS + 1):
        if (found := verdict(now.value, now.margin(n), worth)) != "open":
            break
    seeds = next_seeds(change, runs, here, n - now.n)
    ended = [run for run in runs if "failed" not in run]
    seconds = sum(
        len(set(seeds) - seeds_of(name, runs, here)) * _run_seconds(name, ended, times) for name in (change, BASELINE)
    )
    return Further(found, seeds, seconds / CORES / 3600)


def seeds_of(change: str, runs: Sequence[Result], here: Place) -> set[int]:
    """Return the seeds of a change's compared runs in a place."""
    return {run["seed"] for run in runs if run["change"] == change and place_of(run) == here}


def n_tried(change: str, runs: Sequence[Result]) -> int:
    """Return the number of a change's pairs among the compared runs, plus the number of its failed runs."""
    ended = {
        name: {(run["seed"], place_of(run)) for run in runs if run["change"] == name and "failed" not in run}
        for name in (change, BASELINE)
    }
    failed = sum(run["change"] == change and "failed" in run for run in runs)
    return len(ended[change] & ended[BASELINE]) + failed


def next_seeds(change: str, runs: Sequence[Result], here: Place, n: int) -> tuple[int, ...]:
    """Return the seeds of a change's next `n` pairs in a place; one run of a pair may exist already."""
    failed = [run for run in runs if "failed" in run and run["change"] in (change, BASELINE)]
    used = seeds_of(change, runs, here) & seeds_of(BASELINE, runs, here)
    used |= {run["seed"] for run in failed if place_of(run) == here}
    return tuple(islice((seed for seed in count(TUNING_SEED + 1) if seed not in used), n))


def _run_seconds(change: str, runs: Sequence[Result], times: Mapping[str, Result]) -> float:
    """Estimate the seconds of a change's run on an idle machine, from the regime's fastest training on record, since
    other load only adds time, and from the change's step time, if it was measured."""
    ratios = {name: times_of(time).ratio for name, time in times.items()}
    of_baseline = next(run for run in runs if run["change"] == BASELINE)
    step_tokens = of_baseline["tokens"] / of_baseline["steps"]
    per_token = min(
        *(run["seconds"] / run["tokens"] / ratios.get(run["change"], 1.0) for run in runs),
        *(median(time["baseline_seconds"]) / step_tokens for time in times.values()),
        math.inf,
    )
    tokens = next(run["tokens"] for run in runs if run["change"] == change)
    return START_SECONDS + tokens * per_token * ratios.get(change, 1.0)
