"""The page's part Read in a real browser: each feature is clicked, and each number is compared with the server's."""

import base64
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest

from browser import HOSTILE, Studio, axe, screenshot

pytestmark = pytest.mark.browser

TEXT = "line 7: the quick brown fox jumps over the lazy dog, 49 times.\n"


def asked(studio: Studio, what: str, **body: Any) -> Any:
    """Return the server's answer to a request."""
    return studio.asked(f"/studio/read/{what}", **({"model": "base"} | body))


def first_step(studio: Studio) -> int:
    """Return the step of the first checkpoint of the run `base`."""
    with studio.http() as http:
        models = http.get("/studio/state").json()["models"]
    return int(next(model for model in models if model["id"] == "base")["checkpoints"][0]["step"])


def read(page: Any, text: str = TEXT, model: str = "base") -> Any:
    """Open the part, read a text, and return its tokens."""
    page.get_by_role("link", name="Read").click()
    page.get_by_label("Model", exact=True).select_option(model)
    page.get_by_label("Text", exact=True).fill(text)
    page.keyboard.press("Control+Enter")
    tokens = page.locator(".read .text .t")
    page.wait_for_function(
        "() => document.querySelector('.read .text .t') && !document.querySelector('.read form [disabled]')"
    )
    return tokens


def token_panels(page: Any, tokens: Any, index: int) -> Any:
    tokens.nth(index).click()
    panels = page.locator(".panels")
    panels.wait_for()
    return panels


def test_a_text_is_coloured_by_what_its_tokens_cost(page: Any, studio: Studio) -> None:
    tokens, found = read(page), asked(studio, "text", text=TEXT)
    assert "".join(tokens.all_text_contents()) == TEXT
    assert tokens.count() == len(found["tokens"])
    bounds = [0.7, 1.6, 3, 4.6, 6.9, math.inf]
    for i, token in enumerate(found["tokens"]):
        shade = 0 if token["nats"] is None else next(n for n, bound in enumerate(bounds) if token["nats"] <= bound)
        assert f"s{shade}" in tokens.nth(i).get_attribute("class").split()
    facts = page.locator(".read .facts").inner_text()
    assert f"{found['loss']:.4g} nats per token" in facts and f"{found['bits_per_byte']:.4g} bits per byte" in facts
    page.get_by_text("Bits per byte along the text").click()
    assert page.locator(".along > span").count() == len(found["along"])


def test_two_checkpoints_are_compared(page: Any, studio: Studio) -> None:
    page.get_by_role("link", name="Read").click()
    page.get_by_label("Compare with").check()
    page.get_by_label("Compared model", exact=True).select_option("base")
    page.get_by_label("Checkpoint of compared model").select_option(str(first_step(studio)))
    tokens = read(page)
    found = asked(studio, "text", text=TEXT, against={"model": "base", "checkpoint": first_step(studio)})
    bounds = [-2, -0.7, -0.1, 0.1, 0.7, 2, math.inf]
    for i, part in enumerate(found["segments"]):
        shade = 3
        if part["nats"] is not None and part["other_nats"] is not None:
            shade = next(n for n, bound in enumerate(bounds) if part["other_nats"] - part["nats"] < bound)
        assert f"d{shade}" in tokens.nth(i).get_attribute("class").split()
    assert page.locator(".read .facts").count() == 2
    page.get_by_role("button", name="Loss", exact=True).click()
    assert "s" in tokens.nth(5).get_attribute("class")
    screenshot(page, "read-difference")


def test_two_runs_are_compared_between_shared_borders(page: Any, studio: Studio) -> None:
    page.get_by_role("link", name="Read").click()
    page.get_by_label("Compare with").check()
    page.get_by_label("Compared model", exact=True).select_option(HOSTILE)
    parts = read(page)
    found = asked(studio, "text", text=TEXT, against={"model": HOSTILE})
    assert parts.all_text_contents() == [part["text"] for part in found["segments"]]
    assert parts.count() < len(found["tokens"]) or parts.count() < len(found["other"]["tokens"])
    facts = page.locator(".read .facts").all_inner_texts()
    assert [f"{one['bits_per_byte']:.4g} bits per byte" in said for one, said in
            zip((found, found["other"]), facts, strict=True)] == [True, True]  # fmt: skip
    page.get_by_text("Bits per byte along the text").click()
    bars = page.locator(".along")
    for one, along in zip(bars.all(), (found["along"], found["other"]["along"]), strict=True):
        assert one.locator("span").count() == len(along)
        values = ", ".join(f"{part['bits_per_byte']:.4g}" for part in along)
        assert one.get_attribute("aria-label") == f"Bits per byte along the text: {values}"


def test_one_token_is_explained(page: Any, studio: Studio) -> None:
    tokens = read(page)
    index = tokens.count() - 4
    panels, found = token_panels(page, tokens, index), asked(studio, "token", text=TEXT, index=index)
    titles = ["What each part adds", "Logit lens", "Where each head looks", "In the training data"]
    assert panels.locator("h3").all_inner_texts() == titles, "the answer to why comes first"
    last = found["lens"]["layers"][-1][found["lens"]["tokens"].index(index)]
    best = panels.locator(".lens tbody tr").first.locator("td").nth(found["lens"]["tokens"].index(index))
    assert best.locator(".spelling").inner_text() == last["top"][0]["spelling"].replace(" ", "␣").replace("\n", "⏎")
    assert f"rank {last['rank']}" in best.get_attribute("title")
    assert panels.locator(".lens tbody tr").count() == len(found["lens"]["layers"])
    largest = max(found["attribution"]["parts"], key=lambda part: abs(part["value"]))
    shown = panels.locator(".bars li").first.locator(".value").inner_text()
    assert float(shown.replace("−", "-")) == pytest.approx(largest["value"], rel=1e-3)
    words = page.get_by_label("The chosen token").locator("p.number").first.inner_text()
    raises = max(found["attribution"]["parts"], key=lambda part: part["value"])
    assert ("no token is likelier" if last["rank"] == 1 else f"rank {last['rank']}.") in words
    assert f"(+{raises['value']:.4g})" in words.split(" lowers ")[0]
    check_head(page, panels, found)
    other = panels.get_by_label("To the logit of")
    other.select_option(index=1)
    page.wait_for_function("(was) => document.querySelector('.bars .value').innerText !== was", arg=shown)
    panels.locator("canvas").scroll_into_view_if_needed()
    box = panels.locator("canvas").bounding_box()
    attention = panels.get_by_role("region", name="Where each head looks").get_by_role("status")
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    assert "block 0 head 0" in attention.inner_text()
    page.mouse.click(box["x"] + 5, box["y"] + 5)
    page.locator(".t.weighed").first.wait_for()
    panels.locator(".map").focus()
    page.keyboard.press("ArrowDown")
    assert "block 0 head 1" in attention.inner_text()
    screenshot(page, "read-token")


def check_head(page: Any, panels: Any, found: Any) -> None:
    """Check that a head's name among the parts shows, in words and in the text, where the head looks."""
    _, n_heads, n_keys = found["attention"]["shape"]
    data = base64.b64decode(found["attention"]["data"])
    values = struct.unpack_from(f"<{n_heads * n_keys}f", data)
    weights = values[n_keys : 2 * n_keys]
    panels.get_by_role("button", name="block 0 head 1", exact=True).click()
    said = panels.locator("section").first.get_by_role("status").inner_text()
    place = found["first_read"] + weights.index(max(weights))
    assert said.startswith("block 0 head 1 looks at ") and f"(token {place + 1:,})" in said.split(", ")[0]
    assert page.locator(".t.weighed").count() > 0


def test_a_token_of_a_long_text_answers_next_to_it(new_page: Callable[..., Any], studio: Studio) -> None:
    for width, height in ((1280, 900), (390, 844)):
        page = new_page(viewport={"width": width, "height": height})
        page.goto(f"{studio.url}/#/read/base")
        page.get_by_label("Text", exact=True).fill(TEXT * 3)
        page.keyboard.press("Control+Enter")
        why = page.get_by_role("region", name="The chosen token")
        why.locator(".panels").wait_for()
        losses = [token["nats"] or 0 for token in asked(studio, "text", text=TEXT * 3)["tokens"]]
        worst = losses.index(max(losses))
        assert page.locator(".read .t.picked").get_attribute("data-i") == str(worst), "no empty half: one is chosen"
        tokens = page.locator(".read .text .t")
        tokens.nth(40).scroll_into_view_if_needed()
        tokens.nth(40).click()
        why.get_by_role("heading", name="token 41").wait_for()
        why.locator(".panels").wait_for()
        page.wait_for_timeout(300)
        box = why.get_by_role("heading", name="token 41").bounding_box()
        assert 0 <= box["y"] < height - 100, f"the answer is in sight at {width} pixels"
        lens = why.locator(".scrolls-frame").filter(has=page.locator(".lens"))
        cut = lens.locator(".scrolls").evaluate("(box) => box.scrollWidth > box.clientWidth")
        assert ("right" in lens.get_attribute("data-more")) == cut and (cut or width > 390)
        lens.locator(".scrolls").evaluate("(box) => box.scrollTo(box.scrollWidth, 0)")
        if cut:
            page.wait_for_function("() => document.querySelector('.scrolls-frame:has(.lens)').dataset.more === 'left'")
        screenshot(page, f"read-panel-{width}")


def test_an_example_is_read_with_a_click(page: Any, studio: Studio) -> None:
    page.evaluate("() => (location.hash = '#/read/base')")
    example = page.locator(".examples button").first
    example.wait_for()
    text = "".join(token["text"] for token in asked(studio, "text", document=0)["tokens"])
    assert text.startswith(example.locator("bdi").text_content()[:100])
    screenshot(page, "read-examples")
    example.click()
    page.locator(".read .text .t").first.wait_for()
    assert "".join(page.locator(".read .text .t").all_text_contents()) == text
    page.evaluate("() => scrollTo(0, 0)")


def test_the_training_data_and_the_checkpoints(page: Any, studio: Studio) -> None:
    tokens = read(page)
    index = 12
    panels = token_panels(page, tokens, index)
    panels.get_by_role("button", name="Search for the same tokens").click()
    found = asked(studio, "ngrams", text=TEXT, index=index)
    panels.locator(".ngrams").wait_for()
    rows = panels.locator(".ngrams tbody tr")
    assert rows.count() == len(found["by_length"])
    assert rows.nth(1).locator("td").nth(1).inner_text() == f"{found['by_length'][1]['followed']:,}"
    assert panels.locator("mark").first.text_content() == found["places"][0]["found"]
    page.get_by_role("button", name="Read the text at each checkpoint").click()
    slider = page.get_by_label("Checkpoint", exact=True)
    page.locator(".steps").get_by_text("its probability").wait_for()  # said once all checkpoints are read
    loss = asked(studio, "text", text=TEXT, checkpoint=first_step(studio))["loss"]
    slider.press("Home")
    status = page.locator(".steps p[role=status]")
    assert f"{loss:.4g} nats per token" in status.inner_text()
    check_learned(page, studio, index)
    check_writing(page, studio, index, first_step(studio))
    screenshot(page, "read-steps")
    page.get_by_role("button", name="again").click()
    assert f"{loss:.4g} nats per token" not in status.inner_text()
    read(page)  # the same text once more: what was computed stays
    slider.press("Home")
    assert f"{loss:.4g} nats per token" in status.inner_text()
    read(page, TEXT[:30])
    page.get_by_role("button", name="Read the text at each checkpoint").wait_for()


def check_learned(page: Any, studio: Studio, index: int) -> None:
    """Check that the named checkpoint is the first after which the token's probability stays at least one half."""
    with studio.http() as http:
        answer = http.post("/studio/read/checkpoints", json={"model": "base", "text": TEXT}).text
    learned = json.loads(answer.strip().split("\n\n")[-1][6:])["learned"]
    for i in (index, next(n for n, step in enumerate(learned) if step is not None)):
        page.locator(".read .text .t").nth(i).click()
        said = f"Learned at step {learned[i]}:" if learned[i] is not None else "it is not learned."
        page.locator(".steps").get_by_text(said).wait_for()
    page.locator(".read .text .t").nth(index).click()


def check_writing(page: Any, studio: Studio, index: int, step: int) -> None:
    """Check that a checkpoint's continuation from a token equals the server's generation with the same seed."""
    page.get_by_role("button", name="Write from before").click()
    page.locator(".writes").get_by_label("Seed").fill("5")
    page.locator(".written[aria-busy=false]").wait_for()
    ids = [token["id"] for token in asked(studio, "text", text=TEXT)["tokens"][:index]]
    body = {"model": "base", "checkpoint": step, "tokens": ids, "settings": {"seed": 5, "max_tokens": 40}}
    with studio.http() as http:
        events = [json.loads(line[6:]) for line in http.post("/studio/generate", json=body).text.split("\n\n") if line]
    written = "".join(event["text"] for event in events if event["type"] in ("token", "end"))
    page.wait_for_function("(text) => document.querySelector('.written').textContent === text", arg=written)


def test_a_validation_document_is_read(page: Any, studio: Studio) -> None:
    page.get_by_role("link", name="Read").click()
    page.get_by_label("Model", exact=True).select_option("base")
    page.get_by_role("button", name="A validation document").click()
    page.locator(".document").get_by_text(f"of {asked(studio, 'documents')['n_documents']:,}").wait_for()
    assert page.locator(".document input").input_value() == "1"
    page.get_by_role("button", name="Read", exact=False).last.click()
    found = asked(studio, "text", document=0)
    page.locator(".read .text .t").first.wait_for()
    assert "".join(page.locator(".read .text .t").all_text_contents()) == "".join(t["text"] for t in found["tokens"])


def test_the_keyboard_reaches_everything_and_nothing_hostile_runs(page: Any) -> None:
    tokens = read(page, f"<script>alert(1)</script>{HOSTILE}", model=HOSTILE)
    page.locator(".read .text").focus()
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator(".panels").wait_for()
    assert tokens.nth(5).evaluate("(token) => token.classList.contains('picked')")
    assert page.locator("img, script:not([src])").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(new_page: Callable[..., Any], studio: Studio, scheme: str, width: int) -> None:
    page = new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.goto(studio.url)
    page.get_by_label("Model of column 1").wait_for()
    page.get_by_role("link", name="Read").click()
    page.get_by_label("Compare with").check()
    tokens = read(page)
    token_panels(page, tokens, 12).get_by_role("button", name="Search for the same tokens").click()
    page.locator(".ngrams").wait_for()
    page.get_by_role("button", name="Read the text at each checkpoint").click()
    page.locator(".steps").get_by_text("its probability").wait_for()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("() => scrollTo(0, 0)")
    screenshot(page, f"read-{scheme}-{width}")
    assert axe(page) == []
