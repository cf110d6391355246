"""The answers of the judge's tools. No answer contains a seed, sealed text or an infinite number."""

import math
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_jsonable_python

from gptworks.judge.campaign import Campaign
from gptworks.judge.changes import allowed_settings, overrides_from
from gptworks.judge.records import Tried
from gptworks.planning.params import count_parameters
from gptworks.runs.comparable import differences


@dataclass(frozen=True)
class TryAnswer:
    """A try and its verdict."""

    number: int
    changes: list[str]
    verdict: str
    """gain (accepted), tie, harm, open, or failed."""
    words: str
    accepted: bool
    may_continue: bool
    """Whether another call with the same change can train more pairs."""
    pairs: int
    gain: float
    """Mean decrease of the loss with the change."""
    low: float | None
    high: float | None
    """`low` to `high` is the 95% confidence sequence of the gain, valid after every pair. An infinite bound is None."""
    log_e: float
    """Natural logarithm of the e-value, the evidence for a gain."""
    needed_log_e: float
    place: str
    """Where the losses are compared, in words. This field and the fields below are copied from `Tried`."""
    step_time: float | None
    parameters: int | None
    champion: int
    seconds: float


def answer_of(campaign: Campaign, one: Tried) -> TryAnswer:
    """Return the answer about a try."""
    rules = campaign.records.rules
    found = one.judgement(rules.worth)
    verdict = (
        "failed" if one.problem else "gain" if one.accepted else found.answer if one.decided(rules.worth) else "open"
    )
    return TryAnswer(
        one.number, list(one.changes), verdict, one.words(rules.worth, rules.loss_unit), one.accepted, one.is_open,
        found.pairs, found.gain, _finite(found.low), _finite(found.high), found.log_e, -math.log(one.level), one.place,
        one.step_time, one.parameters, one.champion, one.seconds,
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Status:
    """The state of a campaign."""

    running: str
    """The try or comparison that trains now, as text; empty if nothing trains."""
    tries: int
    accepted: int
    champion: int
    used_seconds: float
    budget_seconds: float
    left_seconds: float
    """Time left for tries, without the time set aside for the final comparison."""
    pair_seconds: float
    """Estimated time of a pair of runs."""
    next_needed_log_e: float
    """Natural logarithm of the e-value that the next new change needs."""
    last: TryAnswer | None
    """The try of this call, else the newest try; None if there is no try."""
    last_error: str
    finished: bool
    final: str
    """The result of the final comparison, as text; empty before it has ended."""


def status(campaign: Campaign, about: Tried | None = None, last_error: str = "") -> Status:
    found, now = campaign.records, campaign.running
    running = "" if now is None else f"try {now[0]}, {now[1]} pairs so far" if now[0] else "the final comparison"
    last = about or (found.tries[-1] if found.tries else None)
    return Status(
        running, len(found.tries), len(found.accepted), found.champion, found.used_seconds, found.rules.budget_seconds,
        campaign.left_seconds(found), campaign.pair_seconds(found), -math.log(campaign.next_level(found)),
        None if last is None else answer_of(campaign, last), last_error, found.final is not None,
        "" if found.final is None else str(found.final["line"]),
    )  # fmt: skip


@dataclass(frozen=True)
class Start:
    """The rules of a campaign, and the settings that may be changed."""

    rules: str
    champion_changes: list[str]
    parameters: int
    settings: dict[str, Any]
    """The champion's value of each setting that may be changed."""
    fixed: dict[str, Any]
    """Some settings that no change may touch, for information."""


def start(campaign: Campaign) -> Start:
    found, recipe = campaign.records, campaign.champion()
    rules = found.rules
    kind = "the probability of any false gain" if rules.control == "family" else "the expected share of false gains"
    words = (
        f"{rules.budget_seconds:g} s of machine time; {kind} is at most {rules.error:g}; {rules.steps:,} steps "
        f"without a change; the smallest gain that counts is {rules.worth:g} {rules.loss_unit}, in equal time where "
        f"the same tokens take longer or shorter"
    )
    fixed = {
        "vocab_size": recipe.model.vocab_size, "objective": recipe.objective.type, "tokenizer": recipe.tokenizer.type,
        "max_steps": rules.steps,
    }  # fmt: skip
    settings = to_jsonable_python(allowed_settings(recipe))
    return Start(words, found.champion_changes, count_parameters(recipe.model).total, settings, fixed)


@dataclass(frozen=True)
class Planned:
    """A change's settings, model size and cost."""

    differing: dict[str, Any]
    """The settings that differ, including those that follow from the change: [champion's value, changed value]."""
    parameters_before: int
    parameters: int
    work: float
    """FLOPs of a token with the change, divided by the FLOPs without it."""
    pair_seconds: float
    """Estimated time of a pair of runs."""
    affordable_pairs: int


def planned(campaign: Campaign, changes: dict[str, Any] | None, patch: str | None) -> Planned:
    recipe, changed, work = campaign.plan(overrides_from(changes, patch))
    found = campaign.records
    seconds = campaign.pair_seconds(found) * (1 + work) / 2
    return Planned(
        to_jsonable_python(differences([recipe, changed])), count_parameters(recipe.model).total,
        count_parameters(changed.model).total, work, seconds, int(campaign.left_seconds(found) / seconds),
    )  # fmt: skip


@dataclass(frozen=True)
class Evaluated:
    """The losses of a try's runs on the evaluation text, and the gain of each pair."""

    number: int
    loss_unit: str
    loss_champion: float | None
    loss_changed: float | None
    perplexity_changed: float | None
    gains: list[float]
    """Gain of each pair."""
    deviation: float
    step_time: float | None
    words: str


def evaluated(campaign: Campaign, one: Tried) -> Evaluated:
    rules = campaign.records.rules
    perplexity = None if one.loss_after is None or one.loss_after > 700 else math.exp(one.loss_after)
    return Evaluated(
        one.number, rules.loss_unit, one.loss_before, one.loss_after, perplexity, list(one.gains),
        one.judgement(rules.worth).deviation, one.step_time, one.words(rules.worth, rules.loss_unit),
    )  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """Two tries next to each other."""

    first: TryAnswer
    second: TryAnswer
    note: str


def compared(campaign: Campaign, first: Tried, second: Tried) -> Compared:
    if first.champion != second.champion:
        note = "their gains are over different champions, so they do not compare"
    else:
        apart = first.judgement(0).gain - second.judgement(0).gain
        note = (
            f"the mean gain of try {first.number} less that of try {second.number} is {apart:+.4f}; seeds differ, and "
            f"this difference is not tested: fork one of them to test it"
        )
    return Compared(answer_of(campaign, first), answer_of(campaign, second), note)


@dataclass(frozen=True)
class League:
    """All tries: first the accepted tries, then the others, both by descending mean gain."""

    rows: list[TryAnswer]


def league(campaign: Campaign) -> League:
    ranked = sorted(campaign.records.tries, key=lambda one: (not one.accepted, -one.judgement(0).gain))
    return League([answer_of(campaign, one) for one in ranked])
