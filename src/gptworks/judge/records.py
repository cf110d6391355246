"""A campaign's rules, tries and results, read from its ledger."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gptworks.judge.changes import together
from gptworks.judge.evidence import Control, Judgement, judged
from gptworks.judge.ledger import Ledger
from gptworks.runs.try_results import PLACES, Try
from gptworks.units import counted

State = Literal["running", "judged", "abandoned", "failed"]


@dataclass(frozen=True)
class CampaignRules:
    """The rules of a campaign, fixed before its first try."""

    recipe: str
    """The name of the base recipe."""
    budget_seconds: float
    """Machine time for everything: tries, failed tries and the final comparison."""
    error: float
    control: Control
    """The quantity that `error` bounds. `family`: the probability of any false gain. `discoveries`: the expected share
    of false gains."""
    worth: float
    """The minimum worthwhile gain, in the unit of the loss."""
    steps: int
    """Number of steps of each run, except runs in equal time."""
    step_seconds: float
    """Measured time of a step of the base recipe."""
    loss_unit: str


_FACTS = ("gains", "place", "step_time", "loss_before", "loss_after", "is_time_open")


@dataclass
class Tried:
    """A try, as entered in the ledger before it began and after it ended."""

    number: int
    changes: tuple[str, ...]
    champion: int
    """Number of the try that made the champion to which the change is applied; 0: the base recipe."""
    identity: str
    """A hash of the changed recipe and the champion. A later change with the same hash continues this try."""
    level: float
    least_deviation: float = 0.0
    """Result of `evidence.spread_floor` when the last pairs were trained."""
    state: State = "running"
    gains: list[float] = field(default_factory=list)
    place: str = PLACES["after"]
    """Where the losses are compared: at equal tokens or, if step times differ, in equal time."""
    step_time: float | None = None
    """Time of the same tokens with the change, divided by the time without it."""
    loss_before: float | None = None
    loss_after: float | None = None
    parameters: int | None = None
    seconds: float = 0.0
    accepted: bool = False
    is_open: bool = True
    """Whether more pairs may be trained."""
    is_time_open: bool = False
    """Whether step times seem to differ, but more pairs are needed to exclude noise as the reason."""
    problem: str = ""

    def take(self, facts: Mapping[str, Any]) -> None:
        """Set the facts that `facts_of` returns."""
        for name in _FACTS:
            setattr(self, name, facts[name])

    def decided(self, worth: float) -> bool:
        return not self.is_time_open and self.judgement(worth).answer != "open"

    def judgement(self, worth: float) -> Judgement:
        return judged(self.gains, self.level, worth, self.least_deviation)

    def words(self, worth: float, unit: str) -> str:
        """Return the verdict as text."""
        found = self.judgement(worth)
        if self.problem:
            return f"failed: {self.problem}"
        if self.state == "running":
            return f"running, {found.pairs} pairs so far"
        if not math.isfinite(found.low):
            return f"not decided: {counted(found.pairs, 'pair')}, and a verdict needs more"
        between = (
            f"{found.gain:+.4f} {unit} (95%: {found.low:+.4f} to {found.high:+.4f}), {found.pairs} pairs, {self.place}"
        )
        if self.accepted:
            return f"gain: {between}"
        if self.is_time_open:
            return f"not decided: {between}; whether the same tokens take longer with it is open"
        needed = f"the evidence is e = {shown_e(found.log_e)}, and a gain needs {1 / self.level:,.0f}"
        return {
            "tie": f"tie: any gain is below the {worth:g} that matters: {between}",
            "harm": f"harm: {between}",
        }.get(found.answer, f"not decided: {between}; {needed}")


def shown_e(log_e: float) -> str:
    return f"{math.exp(log_e):,.3g}" if log_e < 14 else f"10^{log_e / math.log(10):.1f}"


def facts_of(found: Try) -> dict[str, Any]:
    """Return the results of a try as facts for the ledger.

    The facts are those of the last arm, which compares runs in equal time if step times differ. Only step times choose
    the arm, so the choice does not depend on the gains.
    """
    arm = found.arms[-1]
    pairs = [pair for pair in found.pairs if arm in pair.loss]
    n = max(1, len(pairs))
    return {
        "gains": [-difference for difference in found.differences(arm)],
        "place": PLACES[arm],
        "step_time": None if found.step_time is None else found.step_time.ratio,
        "is_time_open": found.is_time_open,
        "loss_before": sum(pair.loss["before"] for pair in pairs) / n if pairs else None,
        "loss_after": sum(pair.loss[arm] for pair in pairs) / n if pairs else None,
    }


@dataclass
class Records:
    """The state of a campaign, computed from its ledger."""

    rules: CampaignRules
    tries: list[Tried]
    used_seconds: float
    closing: bool
    """Whether the final comparison has begun, so that no try may begin."""
    final: dict[str, Any] | None
    """The facts of the final comparison; None before it ended."""

    @property
    def accepted(self) -> list[Tried]:
        return [one for one in self.tries if one.accepted]

    @property
    def champion(self) -> int:
        return self.accepted[-1].number if self.accepted else 0

    @property
    def champion_changes(self) -> list[str]:
        """The accepted changes as overrides, which make the champion from the base recipe."""
        changes = list[str]()
        for one in self.accepted:
            changes = together(changes, one.changes)
        return changes


def read_records(ledger: Ledger) -> Records:
    """Return the state that the entries of a campaign's ledger describe."""
    [created] = ledger.of_kind("created")
    rules = CampaignRules(**created["rules"])
    tries: list[Tried] = []
    for entry in ledger.entries:
        if entry["kind"] == "begun":
            tries.append(
                Tried(
                    entry["tried"], tuple(entry["changes"]), entry["champion"], entry["identity"], entry["level"],
                    parameters=entry["parameters"],
                )
            )  # fmt: skip
        elif entry["kind"] == "pair" and entry["tried"]:
            tries[entry["tried"] - 1].seconds += entry["seconds"]
        elif entry["kind"] == "ended":
            one = tries[entry["tried"] - 1]
            one.take(entry)
            one.least_deviation = entry["least_deviation"]
            one.seconds += entry["seconds"]
            one.is_open, one.problem, one.accepted = entry["is_open"], entry["problem"], entry["answer"] == "gain"
            one.state = "failed" if one.problem else "judged"
    return Records(
        rules,
        tries,
        sum(entry.get("seconds", 0.0) for entry in ledger.entries),
        any(ledger.of_kind("closing")),
        next((entry["final"] for entry in ledger.of_kind("finished")), None),
    )
