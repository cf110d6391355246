"""Links between the page's parts in a real browser: an address describes what is shown, and parts link to each
other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser import Studio, choose, generate, open_studio, tokens
from histories import training, write_run

pytestmark = pytest.mark.browser


def first_step(studio: Studio) -> int:
    """Return the step of the first checkpoint of the run `base`."""
    with studio.http() as http:
        models = http.get("/studio/state").json()["models"]
    return int(next(model for model in models if model["id"] == "base")["checkpoints"][0]["step"])


def visit(page: Any, address: str) -> None:
    page.evaluate("(address) => (location.hash = address)", address)


def test_an_address_is_the_shown_parts_alone(page: Any, studio: Studio) -> None:
    visit(page, "#/start/base")
    page.get_by_label("Name", exact=True).fill("mine")
    visit(page, "#/runs/group/tuned")
    page.locator(".run.chosen").filter(has_text="group/tuned").wait_for()
    page.get_by_role("link", name="Start", exact=True).click()
    assert page.get_by_label("Name", exact=True).input_value() == "mine"
    assert page.get_by_label("Begin from").input_value() == "run base"


def test_before_a_run_was_chosen_the_newest_one_leads_to_the_other_parts(
    new_page: Callable[..., Any], studio: Studio
) -> None:
    page = new_page()
    page.goto(f"{studio.url}/#/read")
    newest = page.get_by_label("Model", exact=True).input_value()
    visit(page, "#/runs")
    page.get_by_label(f"Other parts with {newest}").get_by_role("link", name="Fork or resume").click()
    page.get_by_role("button", name="Fork it").wait_for()


def test_a_run_that_is_not_there_yet_is_drawn_once_it_is(new_page: Callable[..., Any], tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "early", [training(10, 2.5)])
    with open_studio(tmp_path / "runs") as studio:
        page = new_page()
        page.goto(f"{studio.url}/#/runs")
        page.locator(".run.chosen").filter(has_text="early").wait_for()
        visit(page, "#/runs/late")
        write_run(tmp_path / "runs" / "late", [training(10, 2.25)])
        page.locator(".run.chosen").filter(has_text="late").wait_for()
        assert page.locator(".run.chosen").count() == 1


def test_a_written_token_is_explained_by_the_checkpoint_that_wrote_it(page: Any, studio: Studio) -> None:
    choose(page, "base")
    generate(page, "line 7:", max_tokens=12, seed=3)
    written, index = tokens(page), 5
    word, n_prompt = written.nth(index).text_content(), page.locator(".column .t[data-part=prompt]").count()
    written.nth(index).click()
    card = page.locator(".token-card")
    share = card.locator(".figures b").first.inner_text()
    with page.expect_request("**/studio/read/token") as asked:
        card.get_by_role("button", name="Why this token?").click()
    assert asked.value.post_data_json["index"] == n_prompt + index
    assert page.url.endswith("#/read/base")
    page.locator(".panels").wait_for()
    picked = page.locator(".read .t.picked")
    assert picked.text_content() == word
    title = page.get_by_role("heading", name=share)
    assert title.count() == 1, "the probability is the one that Play showed"
    page.get_by_label("Compare with").check()
    assert int(page.get_by_label("Checkpoint of compared model").input_value()) == first_step(studio)


def test_a_run_chosen_in_one_part_is_chosen_in_all(page: Any, studio: Studio) -> None:
    labels = {"Play": "Model of column 1", "Read": "Model", "Through time": "Run", "Data": "Run", "Model": "Model"}
    with studio.http() as http:
        models = http.get("/studio/state").json()["models"]
    assert [model["id"] for model in models] == [one["id"] for one in sorted(models, key=lambda one: -one["started"])]
    shown = page.locator(".part:not([hidden])")
    assert shown.get_by_label(labels["Play"], exact=True).input_value() == models[0]["id"], "the newest, to begin with"
    for part, run in zip(labels, ("base", "group/tuned", "long", "base", "group/tuned"), strict=True):
        link = page.locator(".shell").get_by_role("link", name=part, exact=True)
        link.click()
        link.and_(page.locator("[aria-current=page]")).wait_for()  # the part before may have a list of the same name
        shown.get_by_label(labels[part], exact=True).select_option(run)
        key = "time" if part == "Through time" else part.lower()
        page.wait_for_url(f"**#/{key}/{run}")  # a link to what is shown
        for other, label in labels.items():
            page.locator(".shell").get_by_role("link", name=other, exact=True).click()
            box = shown.get_by_label(label, exact=True)
            box.wait_for()
            assert box.input_value() == run, f"chosen in {part}, shown in {other}"
    shown.get_by_label("Checkpoint of model", exact=True).select_option("40")
    page.reload()
    shown.get_by_label("Checkpoint of model", exact=True).wait_for()
    page.locator(".shell").get_by_role("link", name="Play", exact=True).click()
    assert page.get_by_label("Model of column 1").input_value() == "group/tuned"
    assert page.get_by_label("Checkpoint of column 1").input_value() == "40"


CHOSEN_IN_FRAMES = """(label) => void (window.chosen = new Promise((settle) => {
  const values = [];
  const look = () => {
    const named = (box) => (box.getAttribute("aria-label") ?? box.labels[0]?.textContent ?? "").startsWith(label);
    const box = [...document.querySelectorAll(".part:not([hidden]) select")].find(named);
    if (box) values.push(box.value);
    if (values.length < 9) requestAnimationFrame(look);
    else settle(values);
  };
  requestAnimationFrame(look);
}))"""
"""Promises, as `chosen`, what the box with this label shows in the first frames that have it."""


def test_a_run_leads_to_the_other_parts(page: Any, studio: Studio) -> None:
    for name, label in {
        "Play": "Model of column 1",
        "Read": "Model",
        "Through time": "Run",
        "Data": "Run",
        "Model": "Model",
    }.items():
        visit(page, "#/runs/group/tuned")
        page.locator(".run.chosen").filter(has_text="group/tuned").wait_for()
        page.evaluate(CHOSEN_IN_FRAMES, label)
        page.get_by_label("Other parts with group/tuned").get_by_role("link", name=name, exact=True).click()
        assert set(page.evaluate("chosen")) == {"group/tuned"}, "not even for one frame is there another run"
    visit(page, "#/runs/group/tuned")
    page.get_by_role("link", name="Fork or resume").click()
    page.get_by_role("button", name="Fork it").wait_for()
    assert page.get_by_role("button", name="Fork it").get_attribute("aria-pressed") == "true"
    assert page.get_by_label("Begin from").input_value() == "run group/tuned"
