"""The end of a campaign: compare the champion with the base recipe, with fresh seeds, on text that no try has seen."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gptworks.errors import RunError
from gptworks.evaluation.evaluated_run import EvaluatedRun
from gptworks.evaluation.text import evaluate_text
from gptworks.files import open_regular
from gptworks.judge.begin import BASE, FINAL_PAIRS, SEALED, SECRET
from gptworks.judge.records import Records
from gptworks.runs.statistics import t_quantile
from gptworks.runs.trials import Report
from gptworks.runs.try_page import write_try_page
from gptworks.runs.try_results import PLACES, TRY_FILE, Try
from gptworks.runs.try_run import Rules, plan_try, run_try

FINAL = "final"
NO_LIMIT_MINUTES = 1e6
"""Time limit of the final comparison, too long to matter: only the number of pairs ends the comparison."""

MOST_SEALED_CHARACTERS = 1 << 20
"""Maximum number of sealed characters on which `sealed_loss` evaluates a run."""


def final_gains(
    folder: Path, found: Records, rules: Rules, report: Report, after_pair: Callable[[Try], None]
) -> tuple[list[float], str]:
    """Train the missing pairs of the final comparison. Return each pair's gain on the sealed text, and words for where
    the gains are measured: at equal tokens or in equal time. Raise a RunError if a run failed or was stopped; another
    call continues the comparison."""
    base, place = folder / BASE, folder / FINAL
    begun = plan_try(
        base, found.champion_changes, place, NO_LIMIT_MINUTES, found.rules.worth, found.rules.steps,
        resume=(place / TRY_FILE).is_file(), report=report,
    )  # fmt: skip
    begun = replace(begun, design=replace(begun.design, most_pairs=FINAL_PAIRS))
    ended = run_try(begun, base, report, after_pair, rules)
    if ended.due(ended=False) is not None:
        raise RunError("the final comparison was stopped: call finish again to continue it.")
    write_try_page(ended)
    arm, gains = ended.arms[-1], []
    for pair in ended.pairs:
        before, after = (
            sealed_loss(place / "pairs" / f"{pair.number:02d}-{name}", folder / SECRET) for name in ("before", arm)
        )
        gains.append(before - after)
    where = PLACES[arm]
    return gains, f"{where} ({ended.step_time})" if ended.is_time_open else where


def sealed_loss(run_dir: Path, secret: Path) -> float:
    """Return the loss of a run's last checkpoint on at most the first `MOST_SEALED_CHARACTERS` of the sealed text, in
    nats per token."""
    run, nats, n_tokens, left = EvaluatedRun(run_dir, "last"), 0.0, 0, MOST_SEALED_CHARACTERS
    with open_regular(secret / SEALED, inside=secret) as file:
        for line in file:
            text = str(json.loads(line)["text"])[:left]
            left -= len(text)
            if text:
                with run.precision.autocast():
                    report = evaluate_text(run.model, run.tokenizer, text).report
                nats, n_tokens = nats + report.loss * report.n_tokens, n_tokens + report.n_tokens
    return nats / n_tokens


def final_facts(gains: list[float], place: str, found: Records) -> dict[str, Any]:
    """Return the facts of the final comparison; `line` states them in words.

    `low` to `high` is the 95% Student's t interval of the mean gain; None without gains.
    """
    n_tries = len(found.tries)
    tries = f"{n_tries} {'try' if n_tries == 1 else 'tries'}, {len(found.accepted)} accepted"
    if not gains:
        return {"gains": [], "gain": 0.0, "low": None, "high": None, "line": f"no gain survived ({tries})"}
    n, gain, unit = len(gains), fmean(gains), found.rules.loss_unit
    margin = t_quantile(0.975, n - 1) * stdev(gains) / n**0.5
    line = (
        f"{gain:+.4f} {unit} (95%: {gain - margin:+.4f} to {gain + margin:+.4f}) over {n} fresh seeds on text that no "
        f"try has seen, {place} ({tries})"
    )
    facts = {"gains": gains, "gain": gain, "low": gain - margin, "high": gain + margin}
    return {**facts, "line": line if gain > margin else f"no gain survived: {line}"}
