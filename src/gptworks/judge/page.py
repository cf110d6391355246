"""The page of a campaign: every try, the time and the error budget spent, and the final result."""

from pathlib import Path

from markupsafe import Markup

from gptworks.judge.evidence import level
from gptworks.judge.records import Records, shown_e
from gptworks.pages import parts as html
from gptworks.pages.chart import Chart, Series
from gptworks.pages.page import page, write_page
from gptworks.units import duration

PAGE = "judge.html"


def write_judge_page(folder: Path, found: Records) -> None:
    """Write the page `judge.html` into the campaign's folder, replacing an older page."""
    write_page(to_html(found), folder / PAGE, "--folder")


def to_html(found: Records) -> str:
    """Return the campaign as an HTML page, in which <data> elements hold the exact numbers."""
    rules, tries, champion = found.rules, found.tries, " ".join(found.champion_changes)
    at_level = level(rules.error, rules.control, len(tries) + 1, len(found.accepted))
    tiles: list[tuple[str, str | Markup, str]] = [
        ("tries", html.number(len(tries)), f"{len(found.accepted)} accepted"),
        ("machine time", duration(found.used_seconds), f"of {duration(rules.budget_seconds)}"),
        ("error", html.rounded(rules.error, ".3g"), _CONTROL[rules.control]),
        ("the next try needs", f"e ≥ {1 / at_level:,.0f}", f"a share of {at_level / rules.error:.2%} of the error"),
    ]
    if found.final is not None and found.final["gains"]:
        tiles.insert(0, ("final gain", html.rounded(found.final["gain"], "+.4f"), rules.loss_unit))
    parts = [
        html.key_figures(tiles),
        html.section("The end", html.paragraph(found.final["line"]) if found.final is not None else ""),
        html.section("Gain of each try", html.figures([_chart(found)]) if any(one.gains for one in tries) else ""),
        html.section("Tries", _table(found)),
        html.section("The champion", html.paragraph(f"The base recipe with: {champion}") if champion else ""),
    ]
    lines = (
        f"{rules.steps:,} steps without a change, at least {rules.worth:g} {rules.loss_unit} to matter",
        f"the recipe {rules.recipe}",
    )
    return page(f"{rules.recipe}: judge", lines, parts, _conventions(found))


_CONTROL = {"family": "probability of any false gain", "discoveries": "expected share of false gains"}


def _chart(found: Records) -> Markup:
    """Return a chart of each try's mean gain, with its confidence sequence in the tooltip."""
    drawn = []
    for accepted, kind, name in ((False, "series-0", ""), (True, "series-1", "accepted")):
        placed = [one for one in found.tries if one.gains and one.accepted == accepted]
        judgements = [(one, one.judgement(found.rules.worth)) for one in placed]
        points = [(float(one.number), each.gain) for one, each in judgements]
        titles = [
            f"try {one.number}: {each.gain:+.4f} ({each.low:+.4f} to {each.high:+.4f})" for one, each in judgements
        ]
        drawn.append(Series(points, name if points else "", kind, "dots", titles))
    x_range = (1, max(2, len(found.tries)))
    return Chart("gains", "Gain of each try", drawn, "try", found.rules.loss_unit, x_range=x_range).svg()


def _table(found: Records) -> Markup:
    worth, rows = found.rules.worth, list[list[html.Cell]]()
    for one in found.tries:
        each = one.judgement(worth)
        rows.append([
            f"{one.number:03d}",
            " ".join(one.changes),
            f"{one.champion:03d}" if one.champion else "base",
            html.number(each.pairs),
            html.rounded(each.gain if one.gains else None, "+.4f"),
            f"{each.low:+.4f} to {each.high:+.4f}" if each.pairs >= 3 else "",
            shown_e(each.log_e),
            html.number(1 / one.level, f"{1 / one.level:,.0f}"),
            html.rounded(one.step_time, ".2f", "×"),
            html.number(one.seconds, duration(one.seconds)),
            one.words(worth, found.rules.loss_unit).partition(":")[0] + (f": {one.problem}" if one.problem else ""),
        ])  # fmt: skip
    header = (
        "try", "change", "to", "pairs", "gain", "95%", "e", "needed", "time of the same tokens", "time", "verdict",
    )  # fmt: skip
    return html.table(header, "lnlrrrrrrrn", rows)


def _conventions(found: Records) -> str:
    rules = found.rules
    method = "alpha spending" if rules.control == "family" else "e-LOND, Xu and Ramdas, 2024"
    return (
        f"A gain is how much lower the last validation loss is with the change, in {rules.loss_unit}: the mean over "
        f"pairs of runs that share a secret seed, in equal time where the same tokens take longer or shorter. "
        f"The intervals hold the true mean after every pair with 95% probability, each for itself. e is the evidence "
        f"for a mean gain above 0, by an e-process of the t statistic that is valid at any stopping time (Pérez-Ortiz "
        f"et al., 2024). A change is accepted when e reaches what its try needs and the mean gain is at least "
        f"{rules.worth:g}. What is needed rises from try to try, so that the error of the whole campaign stays bounded "
        f"({method}). An accepted change becomes part of the recipe that later tries change. Written by gptworks judge."
    )
