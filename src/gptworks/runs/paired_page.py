"""A try as text and as a page."""

import math
from collections.abc import Iterator

from markupsafe import Markup

from gptworks.pages.chart import WIDE, Chart, Series
from gptworks.pages.page import page, write_page
from gptworks.pages.parts import Cell, figure, figures, key_figures, number, paragraph, rounded, section, table
from gptworks.pages.parts import settings as settings_list
from gptworks.runs.history import History, read_history
from gptworks.runs.paired import Try
from gptworks.runs.settings import differences, text_of
from gptworks.train.record.curves import points
from gptworks.train.record.display import clock

_PLACES = {"after": "at equal tokens", "in-time": "in equal time"}
_WORDS = {"lower": "helps", "higher": "hurts", "same": "makes no difference", "open": "not decided"}


def try_lines(found: Try) -> Iterator[str]:
    """What came out, as lines of text."""
    for arm in found.design.arms[1:]:
        place = _PLACES[arm]
        if len(found.design.arms) == 2:
            place = "at equal tokens, and in equal time: a step takes as long"
        yield f"{place}: {words(found, arm)}"
    step, same = found.step_time, found.to_same_loss
    if step is not None:
        yield f"a step takes {step:.2f} times as long"
        reached = "not in each pair" if same is None else f"after {same:.0%} of the time"
        yield f"the final loss of the runs without the change is reached: {reached}"
        before, after = (_run(found, 0, arm).parameters for arm in ("before", "after"))
        yield f"parameters: {before:,}" + ("" if before == after else f" without, {after:,} with the change")


def words(found: Try, arm: str) -> str:
    """A verdict in a sentence's words: helps: the loss is 0.0310 lower (0.0240 to 0.0380), 4 pairs."""
    verdict, n = found.verdict(arm), len(found.pairs)
    pairs = f"{n} pair{'s' * (n != 1)}"
    if not math.isfinite(verdict.low):
        return f"not decided: {pairs}, and a verdict needs more"
    if verdict.answer in ("lower", "higher"):
        low, high = sorted((abs(verdict.low), abs(verdict.high)))
        return (
            f"{_WORDS[verdict.answer]}: the loss is {abs(verdict.value):.4f} {verdict.answer} "
            f"({low:.4f} to {high:.4f}), {pairs}"
        )
    between = f"between {verdict.low:+.4f} and {verdict.high:+.4f}, {pairs}"
    worth = f" of {found.design.worth:g} or more" if verdict.answer == "same" else ""
    return f"{_WORDS[verdict.answer]}{worth}: the change of the loss is {between}"


def write_try_page(found: Try) -> None:
    """Write the page `try.html` into the try's folder, over an older one."""
    write_page(to_html(found), found.folder / "try.html", "--folder")


def to_html(found: Try) -> str:
    """The page. Numbers stand in <data> elements with their exact values."""
    design, unit = found.design, found.loss_unit
    tiles: list[tuple[str, str | Markup, str]] = []
    for arm in design.arms[1:]:
        verdict = found.verdict(arm)
        note = f"loss {verdict.value:+.4f} {unit}" if found.pairs else ""
        tiles.append((_PLACES[arm], _WORDS[verdict.answer], note))
    tiles.append(("pairs", number(len(found.pairs)), f"of {design.most_pairs} at most, {design.steps:,} steps each"))
    if found.step_time is not None:
        tiles.append(("time of a step", rounded(found.step_time, ".2f", "×"), "with the change"))
    parts = [
        key_figures(tiles),
        section("Verdict", *(paragraph(line) for line in try_lines(found))),
        section("Difference of each pair", figures(_dots(found, arm) for arm in design.arms[1:])),
        section("Validation loss by tokens", figure(_curves(found))),
        section("Pairs", _pairs(found)),
        section("The change", settings_list(_changes(found))),
    ]
    lines = (" ".join(design.changes), f"the recipe {found.recipe.name}")
    return page(f"{found.recipe.name}: try", lines, parts, _conventions(found))


def _changes(found: Try) -> dict[str, str]:
    """All settings that differ, also those that follow from the change."""
    differing = differences([found.recipe, found.changed])
    return {key: f"{text_of(before)} → {text_of(after)}" for key, (before, after) in differing.items()}


def _dots(found: Try, arm: str) -> Markup:
    """The difference of each pair, and the interval of their mean."""
    values, verdict = found.differences(arm), found.verdict(arm)
    drawn = []
    if values and math.isfinite(verdict.low):
        left, right, low, high = 1.0, float(max(2, len(values))), verdict.low, verdict.high
        corners = [(left, low), (right, low), (right, high), (left, high)]
        drawn.append(Series(corners, "", "series-0 faint", "area"))
    placed = [(float(i), value) for i, value in enumerate(values, 1)]
    titles = [
        f"pair {pair.number}, seed {pair.seed}: {value:+.4f}" for pair, value in zip(found.pairs, values, strict=True)
    ]
    drawn.append(Series(placed, "", "series-1", "dots", titles))
    return Chart(f"differences-{arm}", f"Difference {_PLACES[arm]}", drawn, "pair", found.loss_unit).svg()


def _curves(found: Try) -> Markup:
    drawn = []
    for arm, kind in (("before", "series-0"), ("after", "series-1")):
        for pair in found.pairs:
            run = _run(found, pair.number, arm)
            name = {"before": "without", "after": "with the change"}[arm] if pair is found.pairs[-1] else ""
            drawn.append(Series(points(run.validation, "loss"), name, kind))
    title = "Validation loss by tokens"
    return Chart("curves", title, drawn, "tokens", found.loss_unit, width=WIDE, height=360).svg()


def _run(found: Try, pair: int, arm: str) -> History:
    return read_history(found.folder / "pairs" / f"{pair:02d}-{arm}")


def _pairs(found: Try) -> Markup:
    arms = found.design.arms
    rows: list[list[Cell]] = [
        [
            f"{pair.number:02d}",
            str(pair.seed),
            *(rounded(pair.loss[arm]) for arm in arms),
            *(rounded(pair.loss[arm] - pair.loss["before"], "+.4f") for arm in arms[1:]),
            *(number(pair.seconds[arm], clock(pair.seconds[arm])) for arm in arms),
        ]
        for pair in found.pairs
    ]
    names = {"before": "without", "after": "with", "in-time": "with, in equal time"}
    header = ["pair", "seed", *(names[arm] for arm in arms), *(f"difference {_PLACES[arm]}" for arm in arms[1:])]
    header += [f"time {names[arm]}" for arm in arms]
    return table(tuple(header), "ll" + "r" * (len(header) - 2), rows)


def _conventions(found: Try) -> str:
    return (
        f"Both runs of a pair have one seed: the same first weights and the same samples in the same order. The loss "
        f"is the last validation loss, in {found.loss_unit}; a difference below 0 is a gain. The interval holds the "
        f"true mean difference with 95% probability at all looks together (Pocock's levels for Student's t, by "
        f"simulation), so that a change that does nothing is called one that does in at most 5% of tries. Runs shorter "
        f"than the recipe's say what helps short runs. Written by gptworks try."
    )
