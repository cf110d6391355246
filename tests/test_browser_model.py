"""The page's part Model in a real browser: each feature is clicked, and each number is compared with the server's."""

from collections.abc import Callable
from typing import Any

import pytest

from browser import HOSTILE, Studio, axe, screenshot

pytestmark = pytest.mark.browser

QUERY = "blocks.0.attention.query.weight"


def asked(studio: Studio, what: str, **body: Any) -> Any:
    """Return the server's answer to a request."""
    return studio.asked(f"/studio/model/{what}", **({"model": "base"} | body))


def opened(page: Any, model: str = "base") -> Any:
    """Open the part, choose a run, and return the element of its architecture."""
    page.get_by_role("link", name="Model").click()
    page.locator(".model-part").get_by_label("Model", exact=True).select_option(model)
    page.locator(".model-summary bdi").get_by_text(model if model == "base" else "").first.wait_for()
    return page.locator(".arch")


def choose(page: Any, name: str) -> None:
    page.locator(".arch-step", has_text=name).first.click()
    page.locator("#model-chosen", has_text=name).wait_for()


def settled(page: Any) -> None:
    """Wait for the weights and the singular values."""
    page.wait_for_function(
        "() => document.querySelector('.model-plot') && !document.querySelector('.model-details [aria-busy=true]')"
        " && !/Computing|Reading/.test(document.querySelector('.model-details').innerText)"
    )


def cells(page: Any, region: str) -> dict[str, list[str]]:
    """Return the rows of a table by their names."""
    rows = page.get_by_role("region", name=region).locator("tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def test_a_part_is_clicked_and_shows_what_it_takes(page: Any, studio: Studio) -> None:
    architecture, sheet = opened(page), asked(studio, "sheet")
    names = [part["name"] for part in sheet["parts"]]
    assert architecture.locator(".arch-step > span:first-child").all_inner_texts() == names
    choose(page, "Query")
    part = next(part for part in sheet["parts"] if part["key"] == "query")
    found = cells(page, "What the part takes")
    assert list(found) == [row["name"] for row in part["figures"]]
    for row in part["figures"]:
        assert found[row["name"]][:2] == [row["layer_text"], row["all_text"]]
    assert part["words"] in page.locator(".model-details").inner_text()
    assert page.locator(".model-tensors button").all_inner_texts() == [QUERY]
    assert "32 × 32 · fp32, 4.096 kB · 1,024 parameters" in page.locator(".model-tensors").inner_text()
    facts = dict(zip(*(page.locator(f".model-facts {tag}").all_text_contents() for tag in ("dt", "dd")), strict=True))
    assert [facts[fact["name"]] for fact in sheet["facts"]] == [fact["text"] for fact in sheet["facts"]]
    assert facts["model.d_model"] == "32" and facts["model.mlp"] == "swiglu"
    given, default = (page.locator(".model-facts dt", has_text=name) for name in ("model.d_model", "model.mlp_bias"))
    assert given.is_visible() and not default.is_visible(), "what is as by default is folded"
    page.get_by_text("settings with their defaults").click()
    assert default.is_visible()
    choose(page, "SiLU")
    page.get_by_text("It has no weights.").wait_for()
    architecture.get_by_label("Layer").select_option("1")
    page.locator("#model-chosen", has_text="of layer 1").wait_for()
    choose(page, "Query")
    assert page.locator(".model-tensors button").all_inner_texts() == [QUERY.replace("0", "1")]
    architecture.locator("summary").click()
    assert not architecture.locator(".arch-step", has_text="Query").is_visible()
    screenshot(page, "model-folded")


def test_weights_of_two_checkpoints_are_drawn_on_top_of_each_other(page: Any, studio: Studio) -> None:
    opened(page)
    choose(page, "Query")
    settled(page)
    alone = asked(studio, "weights", tensor=QUERY)
    assert float(cells(page, "Moments")["mean"][0]) == pytest.approx(
        alone["checkpoints"][0]["moments"]["mean"], rel=1e-3
    )
    assert page.locator(".plot-bars").count() == 1
    page.get_by_label("Compare with").check()
    page.get_by_label("Compared checkpoint").select_option(index=1)
    step = int(page.get_by_label("Compared checkpoint").input_value())
    page.wait_for_function("() => document.querySelectorAll('.plot-bars').length === 2")
    settled(page)
    found = asked(studio, "weights", tensor=QUERY, against=step)
    rows = cells(page, "Moments")
    assert [float(x) for x in rows["standard deviation"]] == pytest.approx(
        [one["moments"]["std"] for one in found["checkpoints"]], rel=1e-3
    )
    assert f"{found['relative_change']:.4g} times the norm at step {step}" in page.locator(".model-change").inner_text()
    page.get_by_role("group", name="Histogram").press("Home")
    first = [f"{one['counts'][0]:,} at step {one['step']:,}" for one in found["checkpoints"]]
    read = page.locator(".model-plot", has_text="Histogram").get_by_role("status")
    assert read.inner_text().endswith(": " + ", ".join(first))
    spectrum = asked(studio, "spectrum", tensor=QUERY, against=step)["checkpoints"]
    assert cells(page, "Ranks")["stable rank"] == [f"{one['stable_rank']:.4g}" for one in spectrum]
    page.get_by_role("group", name="Singular values").press("Home")
    assert "singular value 1: 1 of the largest" in page.locator(".model-plot", has_text="Singular").inner_text()
    before = page.locator(".plot-bars").first.get_attribute("d")
    page.get_by_label("Logarithmic histogram").check()
    assert page.locator(".plot-bars").first.get_attribute("d") != before
    screenshot(page, "model-weights")
    choose(page, "Final RMSNorm")
    page.get_by_role("group", name="Values by channel").press("Home")
    values = asked(studio, "weights", tensor="norm.weight")["checkpoints"][0]["values"]
    assert f"element 0: {values[0]:.4g}" in page.locator(".model-plot", has_text="Values").inner_text()


def test_the_keyboard_reaches_everything_and_nothing_hostile_runs(page: Any) -> None:
    architecture = opened(page, HOSTILE)
    architecture.locator(".arch-step").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("() => document.activeElement.textContent").startswith("Query")
    page.keyboard.press("Enter")
    page.locator("#model-chosen", has_text="Query").wait_for()
    page.keyboard.press("End")
    page.keyboard.press(" ")
    page.locator("#model-chosen", has_text="Head (tied)").wait_for()
    settled(page)
    assert page.get_by_text("counted with the token embedding").is_visible()
    assert page.locator("img, script:not([src])").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(new_page: Callable[..., Any], studio: Studio, scheme: str, width: int) -> None:
    page = new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.goto(studio.url)
    page.get_by_label("Model of column 1").wait_for()
    opened(page)
    choose(page, "Query")
    page.get_by_label("Compare with").check()
    page.wait_for_function("() => document.querySelectorAll('.plot-bars').length === 2")
    settled(page)
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("() => scrollTo(0, 0)")
    screenshot(page, f"model-{scheme}-{width}")
    page.get_by_role("group", name="Histogram").press("Home")
    screenshot(page, f"model-{scheme}-{width}-weights")
    assert axe(page) == []
