"""Show the results of a try as text and as an HTML page."""

import math
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from gptworks.pages import parts as html
from gptworks.pages.chart import Chart, Series
from gptworks.pages.page import page, write_page
from gptworks.planning.params import count_parameters
from gptworks.recipe import load_recipe
from gptworks.runs.comparable import differences, text_of
from gptworks.runs.history import read_history
from gptworks.runs.try_results import LOSS_ERROR, PLACES, SAME_SPEED, SPEED_ERROR, Try
from gptworks.training.record.curves import points, validation_chart
from gptworks.training.record.display import clock

TRY_PAGE = "try.html"

_WORDS = {"lower": "helps", "higher": "hurts", "same": "makes no difference", "open": "not decided"}


def try_lines(found: Try) -> Iterator[str]:
    """Yield the results as lines of text."""
    step, same = found.step_time, found.to_same_loss
    for arm in found.arms[1:]:
        place = PLACES[arm]
        if step is not None and step.is_same and len(found.arms) == 2:
            place = "at equal tokens, and in equal time (they take as long)"
        yield f"{place}: {words(found, arm)}"
    if step is not None:
        yield f"{step}{_third_runs(found)}"
        reached = "not in each pair" if same is None else f"after {same:.0%} of the time"
        yield f"the final loss of the runs without the change is reached: {reached}"
        before, after = (
            count_parameters(load_recipe(_folder(found, 0, arm)).model).total for arm in ("before", "after")
        )
        yield f"parameters: {before:,}" + ("" if before == after else f" without, {after:,} with the change")
    if found.open_questions:
        yield f"still open: {'; '.join(found.open_questions)}"


def _third_runs(found: Try) -> str:
    """Return a note on whether there are runs in equal time, and why; empty if step times are equal or unknown."""
    step = found.step_time
    if found.steps_in_time is not None:
        return f"; in equal time: runs of {found.steps_in_time:,} steps"
    if step is None or step.is_same:
        return ""
    if found.is_time_open:
        return "; noise may be the reason, so in equal time there is no verdict yet"
    return "; no difference was found, so there are no runs in equal time"


def words(found: Try, arm: str) -> str:
    """Return a verdict as text, such as `helps: the loss is 0.0310 lower (0.0240 to 0.0380), 4 pairs`."""
    verdict, n = found.verdict(arm), len(found.differences(arm))
    pairs = f"{n} pair{'s' * (n != 1)}"
    if not math.isfinite(verdict.low):
        return f"not decided: {pairs}, and a verdict needs more"
    if verdict.answer in ("lower", "higher"):
        low, high = sorted((abs(verdict.low), abs(verdict.high)))
        return (
            f"{_WORDS[verdict.answer]}: the loss is {abs(verdict.value):.4f} {verdict.answer} "
            f"({low:.4f} to {high:.4f}), {pairs}{_of_worth(low, high, found.design.worth)}"
        )
    between = f"between {verdict.low:+.4f} and {verdict.high:+.4f}, {pairs}"
    worth = f" of {found.design.worth:g} or more" if verdict.answer == "same" else ""
    return f"{_WORDS[verdict.answer]}{worth}: the change of the loss is {between}"


def _of_worth(low: float, high: float, worth: float) -> str:
    """Return a note if a difference is or may be smaller than `worth`; else an empty text.

    low, high: the interval of the difference's absolute value.
    """
    if low >= worth:
        return ""
    if high < worth:
        return f"; that is less than the {worth:g} that matters"
    return f"; the direction is clear, whether it is the {worth:g} that matters is open"


def write_try_page(found: Try) -> None:
    """Write the page into the try's folder, replacing an older page."""
    write_page(to_html(found), found.folder / TRY_PAGE, "--folder")


def to_html(found: Try) -> str:
    """Return the try as an HTML page, in which <data> elements hold the exact numbers."""
    design, unit = found.design, found.loss_unit
    differing = differences([found.recipe, found.changed])  # includes settings that follow from the change
    changes = {key: f"{text_of(before)} → {text_of(after)}" for key, (before, after) in differing.items()}
    tiles: list[tuple[str, str | Markup, str]] = []
    for arm in found.arms[1:]:
        verdict = found.verdict(arm)
        note = f"loss {verdict.value:+.4f} {unit}" if found.pairs else ""
        tiles.append((PLACES[arm], _WORDS[verdict.answer], note))
    pairs = f"of {design.most_pairs} at most, {design.steps:,} steps without the change"
    tiles.append(("pairs", html.number(len(found.pairs)), pairs))
    if (step := found.step_time) is not None:
        tiles.append(
            ("time of the same tokens", html.rounded(step.ratio, ".2f", "×"), step.interval or "with the change")
        )
    parts = [
        html.key_figures(tiles),
        html.section("Verdict", *(html.paragraph(line) for line in try_lines(found))),
        html.section("Difference of each pair", html.figures(_dots(found, arm) for arm in found.arms[1:])),
        html.section("Validation loss by tokens", html.figure(_curves(found))),
        html.section("Pairs", _pairs(found)),
        html.section("The change", html.settings(changes)),
    ]
    lines = (" ".join(design.changes), f"the recipe {found.recipe.name}")
    return page(f"{found.recipe.name}: try", lines, parts, _conventions(found))


def _dots(found: Try, arm: str) -> Markup:
    """Return a chart of the difference in each pair, and of the interval of the mean difference."""
    values, verdict = found.differences(arm), found.verdict(arm)
    drawn = []
    if values and math.isfinite(verdict.low):
        left, right, low, high = 0.0, float(len(values) - 1), verdict.low, verdict.high
        corners = [(left, low), (right, low), (right, high), (left, high)]
        drawn.append(Series(corners, "", "series-0 faint", "area"))
    placed = [(float(i), value) for i, value in enumerate(values)]
    with_arm = [pair for pair in found.pairs if arm in pair.loss]
    titles = [
        f"pair {pair.number}, seed {pair.seed}: {value:+.4f}" for pair, value in zip(with_arm, values, strict=True)
    ]
    drawn.append(Series(placed, "", "series-1", "dots", titles))
    title, of_pairs = f"Difference {PLACES[arm]}", (0, max(1, len(values) - 1))
    return Chart(f"differences-{arm}", title, drawn, "pair", found.loss_unit, x_range=of_pairs).svg()


def _curves(found: Try) -> Markup:
    drawn = []
    for arm, kind in (("before", "series-0"), ("after", "series-1")):
        for pair in found.pairs:
            run = read_history(_folder(found, pair.number, arm))
            name = {"before": "without", "after": "with the change"}[arm] if pair is found.pairs[-1] else ""
            drawn.append(Series(points(run.validation, "loss"), name, kind))
    return validation_chart(drawn, found.loss_unit).svg()


def _folder(found: Try, pair: int, arm: str) -> Path:
    return found.folder / "pairs" / f"{pair:02d}-{arm}"


def _pairs(found: Try) -> Markup:
    arms = found.arms
    rows: list[list[html.Cell]] = [
        [
            f"{pair.number:02d}",
            str(pair.seed),
            *(html.rounded(pair.loss.get(arm)) for arm in arms),
            *(
                html.rounded(pair.loss[arm] - pair.loss["before"], "+.4f") if arm in pair.loss else ""
                for arm in arms[1:]
            ),
            *(html.number(pair.seconds[arm], clock(pair.seconds[arm])) if arm in pair.loss else "" for arm in arms),
            html.rounded(found.time_of(pair), ".2f", "×"),
        ]
        for pair in found.pairs
    ]
    names = {"before": "without", "after": "with", "in-time": "with, in equal time"}
    header = ["pair", "seed", *(names[arm] for arm in arms), *(f"difference {PLACES[arm]}" for arm in arms[1:])]
    header += [*(f"time {names[arm]}" for arm in arms), "time of the same tokens"]
    return html.table(tuple(header), "ll" + "r" * (len(header) - 2), rows)


def _conventions(found: Try) -> str:
    return (
        f"All runs of a pair have one seed: the same first weights and the same samples in the same order. The loss "
        f"is the last validation loss, in {found.loss_unit}; a difference below 0 is a gain. The interval holds the "
        f"true mean difference with {1 - LOSS_ERROR:.0%} probability at all looks together (Pocock's levels for "
        "Student's t, by simulation). The time of the same tokens comes from steps that take turns after each pair; on "
        "a GPU, and where steps differ by design, from the runs. Its ratio has such an interval of "
        f"{1 - SPEED_ERROR:.0%}. Where that leaves out 1, and the ratio is {SAME_SPEED:.0%} from 1 or more, runs in "
        "equal time are added. A change that does nothing is called effective in at most "
        f"{LOSS_ERROR + SPEED_ERROR:.0%} of tries. Runs shorter than the recipe's say what helps short runs. Written "
        "by gptworks try."
    )
