"""Pages written by commands, in a real browser: only tables and drawings may scroll sideways, at any width."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser import Studio
from gptworks.runs.history import read_history
from gptworks.runs.report import write_report
from gptworks.runs.try_page import write_try_page
from gptworks.runs.try_run import plan_try, run_try
from test_try import recipe  # noqa: F401 (a fixture)

pytestmark = pytest.mark.browser

WIDTHS = (1280, 1000, 580, 360)


@pytest.fixture
def fits(new_page: Callable[..., Any]) -> Callable[[Path], None]:
    """Return a check that a page is no wider than the window, even with a wide font."""

    def held(file: Path) -> None:
        for width in WIDTHS:
            page = new_page(viewport={"width": width, "height": 800}, bypass_csp=True)
            page.goto(file.as_uri())
            page.add_style_tag(content=":root { font-family: 'DejaVu Sans', Verdana, sans-serif }")
            wide = page.evaluate("() => document.documentElement.scrollWidth")
            assert wide <= width, f"{file.name} is {wide} pixels wide in a window of {width}"
            tiles = page.locator(".figures > div")
            cut = "(tiles) => tiles.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
            assert tiles.count() > 2
            assert tiles.evaluate_all(cut) == [], f"figures run into each other in a window of {width}"

    return held


def test_a_report_on_a_phone_shows_whole_charts_and_folds_its_settings(
    studio: Studio, tmp_path: Path, new_page: Callable[..., Any]
) -> None:
    write_report(read_history(studio.runs / "base"), tmp_path / "report.html")
    page = new_page(signs_in=False, viewport={"width": 390, "height": 844})
    page.goto((tmp_path / "report.html").as_uri())
    figures = page.locator("figure:visible")
    assert figures.count() > 3
    assert figures.evaluate_all("(all) => all.every((one) => one.scrollWidth <= one.clientWidth + 1)")
    words = page.locator("figure:visible text").first.evaluate("(one) => one.getBoundingClientRect().height")
    assert words > 7, "words that can be read"
    default = page.get_by_text("model.mlp_bias", exact=True)
    assert page.get_by_text("model.d_model", exact=True).first.is_visible() and not default.last.is_visible()
    page.get_by_text("All settings").click()
    assert default.last.is_visible()


def test_a_report_fits_its_window(studio: Studio, tmp_path: Path, fits: Callable[[Path], None]) -> None:
    write_report(read_history(studio.runs / "base"), tmp_path / "report.html")
    fits(tmp_path / "report.html")


def test_a_try_fits_its_window(recipe: Path, tmp_path: Path, fits: Callable[[Path], None]) -> None:  # noqa: F811
    found = run_try(plan_try(recipe, ["train.micro_batch_size=2"], tmp_path / "try", 20, 0.005), recipe)
    assert {"after", "in-time"} <= set(found.arms), "the widest table"
    write_try_page(found)
    fits(tmp_path / "try" / "try.html")
