"""The page's part Through time in a real browser: each number and text is compared with the server's for that
checkpoint."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from browser import HOSTILE, Studio, axe, screenshot

pytestmark = pytest.mark.browser

TEXT = "line 7: the quick brown fox jumps over the lazy dog, 49 times.\n"
BOUNDS = [-2, -0.7, -0.1, 0.1, 0.7, 2, math.inf]


def steps_of(studio: Studio, run: str) -> list[int]:
    with studio.http() as http:
        models = http.get("/studio/state").json()["models"]
    return sorted(one["step"] for one in next(model for model in models if model["id"] == run)["checkpoints"])


def at(studio: Studio, step: int, text: str = TEXT) -> Any:
    """Return the server's answer for one checkpoint."""
    return studio.asked("/studio/read/text", model="base", checkpoint=step, text=text)


def read(page: Any, text: str = TEXT, run: str = "base") -> Any:
    """Open the part, read a text at each checkpoint, and return the slider."""
    page.get_by_role("link", name="Through time").click()
    part = page.locator(".time")
    part.get_by_label("Run", exact=True).select_option(run)
    part.get_by_label("Text", exact=True).fill(text)
    page.keyboard.press("Control+Enter")
    part.get_by_role("heading", name="What it learned between").wait_for()
    page.wait_for_function("() => !/of \\d+ checkpoints/.test(document.querySelector('.time .steps').innerText)")
    return part.get_by_label("Checkpoint", exact=True)


def test_the_same_text_and_the_same_seed_at_each_checkpoint(page: Any, studio: Studio) -> None:
    slider, part, steps = read(page), page.locator(".time"), steps_of(studio, "base")
    assert steps == [0, 20, 40, 60] and slider.get_attribute("max") == "3", "from before training to the end"
    part.locator(".writes").get_by_label("Seed").fill("7")
    slider.press("Home")
    ids = [token["id"] for token in at(studio, steps[0])["tokens"]]
    for step in steps:
        said = part.locator(".steps p[role=status]").inner_text()
        assert said.startswith(f"Step {step}: {at(studio, step)['loss']:.4g} nats per token")
        body = {"model": "base", "checkpoint": step, "tokens": ids, "settings": {"seed": 7, "max_tokens": 40}}
        with studio.http() as http:
            answer = http.post("/studio/generate", json=body).text
        events = [json.loads(one[6:]) for one in answer.split("\n\n") if one]
        written = "".join(event["text"] for event in events if event["type"] in ("token", "end"))
        page.wait_for_function("(text) => document.querySelector('.time .written').textContent === text", arg=written)
        assert f"What step {step} writes after the text" in part.locator(".writes").inner_text()
        slider.press("ArrowRight")


def test_what_a_run_learned_between_two_checkpoints(page: Any, studio: Studio) -> None:
    slider, part, steps = read(page), page.locator(".time"), steps_of(studio, "base")
    part.get_by_label("From step").select_option(str(steps[2]))
    slider.press("End")
    before, after = at(studio, steps[2]), at(studio, steps[-1])
    assert f"{before['loss']:.4g} → {after['loss']:.4g} nats per token" in part.inner_text()
    tokens, changes = part.locator(".text .t[data-i]"), []
    for i, (one, other) in enumerate(zip(before["tokens"], after["tokens"], strict=True)):
        if one["nats"] is not None:
            changes.append((one["nats"] - other["nats"], i))
            shade = next(n for n, bound in enumerate(BOUNDS) if other["nats"] - one["nats"] < bound)
            assert f"d{shade}" in tokens.nth(i).get_attribute("class").split()
    most = max(changes)[1]
    row = part.get_by_role("region", name="Learned most").locator("tbody tr").first
    assert f"token {most + 1}" in row.locator("th").inner_text()
    shown = [float(one.removesuffix(" %")) for one in row.locator("td").all_inner_texts() if "9.9" not in one]
    wanted = [100 * math.exp(-found["tokens"][most]["nats"]) for found in (before, after)]
    assert shown == pytest.approx(wanted[: len(shown)], abs=0.051)
    row.get_by_role("button").click()
    curve = part.get_by_role("img", name="Probability of")
    assert curve.count() == 1 and tokens.nth(most).evaluate("(token) => token.classList.contains('picked')")
    assert f"step {steps[-1]}" in curve.get_attribute("aria-label")
    part.get_by_text("Learned at step").or_(part.get_by_text("it is not learned")).wait_for()


def test_a_document_and_a_hostile_run(page: Any, studio: Studio) -> None:
    read(page, f"<script>alert(1)</script>{HOSTILE}", HOSTILE)
    assert page.locator("img, script:not([src])").count() == 0
    part = page.locator(".time")
    part.get_by_label("Run", exact=True).select_option("base")
    part.get_by_role("button", name="A validation document").click()
    part.locator(".document").get_by_text("of ").wait_for()
    part.get_by_role("button", name="Read at each checkpoint").click()
    found = studio.asked("/studio/read/text", model="base", checkpoint="last", document=0)
    text = "".join(token["text"] for token in found["tokens"])
    page.wait_for_function("(text) => document.querySelector('.time .text[tabindex]')?.textContent === text", arg=text)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(new_page: Callable[..., Any], studio: Studio, scheme: str, width: int) -> None:
    page = new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.goto(studio.url)
    page.get_by_label("Model of column 1").wait_for()
    read(page).press("ArrowLeft")
    page.locator(".time .changes button").first.click()
    page.locator(".written[aria-busy=false]").wait_for()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("() => scrollTo(0, 0)")
    screenshot(page, f"time-{scheme}-{width}")
    assert axe(page) == []
