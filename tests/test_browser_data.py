"""The page's part Data in a real browser: each feature is clicked, and each number is compared with the server's."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from browser import HOSTILE, Studio, axe, screenshot

pytestmark = pytest.mark.browser

TUNED = "group/tuned"


def asked(studio: Studio, what: str, **body: Any) -> Any:
    """Return the server's answer to a request."""
    return studio.asked(f"/studio/data/{what}", **body)


def opened(page: Any, view: str, run: str | None = "base") -> Any:
    """Show a view of a run, and return its tokens."""
    page.get_by_role("link", name="Data").click()
    page.get_by_role("button", name=view, exact=True).click()
    if run is not None:
        page.get_by_label("Run", exact=True).select_option(run)
    return settled(page)


def settled(page: Any) -> Any:
    """Wait for the server's answer, and return the tokens."""
    page.wait_for_timeout(200)  # longer than the page waits for a number to be typed whole
    page.wait_for_function(
        "() => document.querySelector('.data .tokens .t') && !document.querySelector('.data [aria-busy=true]')"
    )
    return page.locator(".data .tokens .t")


def shown(page: Any) -> list[str]:
    return list(page.locator(".data .tokens .t").all_text_contents())


def written(token: dict[str, Any]) -> str:
    return str(token["text"] or token["spelling"])


def test_documents_are_paged_and_each_token_has_its_id(page: Any, studio: Studio) -> None:
    tokens = opened(page, "Documents")
    found = asked(studio, "document", model="base", document=0)
    assert shown(page) == [written(token) for token in found["tokens"]]
    facts = page.get_by_label("Documents", exact=True).locator(".facts").first.inner_text()
    assert facts == f"{found['n_tokens']:,} tokens · {found['n_bytes']:,} bytes"
    tokens.nth(3).hover()
    assert f"id {found['tokens'][3]['id']}" in page.locator(".detail").inner_text()
    page.locator(".data .rows").focus()
    page.keyboard.press("ArrowRight")
    assert f"Token 5: {found['tokens'][4]['spelling'].replace(' ', '␣')}" in page.locator(".detail").inner_text()
    page.get_by_label("Split").select_option("validation")
    settled(page)
    held_out = asked(studio, "document", model="base", split="validation")
    assert shown(page) == [written(token) for token in held_out["tokens"]]
    page.get_by_label("First token", exact=True).fill("1031")
    settled(page)
    later = asked(studio, "document", model="base", split="validation", first=1030)
    assert shown(page) == [written(token) for token in later["tokens"]]
    page.get_by_role("button", name="Previous first token").click()
    settled(page)
    assert page.get_by_label("First token", exact=True).input_value() == "7"
    page.get_by_label("Document", exact=True).fill("999")
    n = asked(studio, "about", model="base")["splits"]["validation"]["n_documents"]
    assert page.get_by_label("Document", exact=True).input_value() == str(n), "no further than the last"


def test_windows_show_documents_and_losses(page: Any, studio: Studio) -> None:
    opened(page, "Windows", TUNED)
    page.get_by_role("button", name="Next window").click()
    settled(page)
    [row] = asked(studio, "window", model=TUNED, window=1)["rows"]
    assert shown(page) == [written(token) for token in row["tokens"]]
    begins = [token["begins"] for token in row["tokens"] if token["begins"]]
    assert page.locator(".data .begins").all_text_contents() == [f"document {one['document'] + 1}" for one in begins]
    classes = [str(one) for one in page.locator(".data .tokens .t").evaluate_all("all => all.map((t) => t.className)")]
    assert ["learned" in one.split() for one in classes] == [token["learned"] for token in row["tokens"]]
    page.get_by_role("button", name="Colour by loss").click()
    page.get_by_text("nats for each learned token").wait_for()
    settled(page)
    found = asked(studio, "window", model=TUNED, window=1, loss=True)
    assert f"{found['loss']:.4g} nats" in page.get_by_text("nats for each learned token").inner_text()
    bounds = [0.7, 1.6, 3, 4.6, 6.9, math.inf]
    for i, token in enumerate(found["rows"][0]["tokens"]):
        if token["nats"] is not None:
            shade = next(n for n, bound in enumerate(bounds) if token["nats"] <= bound)
            assert f"s{shade}" in page.locator(".data .tokens .t").nth(i).get_attribute("class").split()


def test_a_step_shows_its_batch(page: Any, studio: Studio) -> None:
    opened(page, "A step")
    page.get_by_label("Step", exact=True).fill("7")
    settled(page)
    found = asked(studio, "step", model="base", step=7)
    assert shown(page) == [written(token) for row in found["rows"] for token in row["tokens"]]
    titles = page.locator(".data h2").all_text_contents()
    assert len(titles) == len(found["rows"]) and titles[1].startswith(
        f"Sample 2 · window {found['rows'][1]['window'] + 1} of epoch {found['rows'][1]['epoch'] + 1} · "
    )
    page.get_by_role("button", name="Colour by loss").click()
    page.get_by_text("nats for each learned token").wait_for()
    screenshot(page, "data-step")


def test_a_step_shows_masks_and_packing_borders(page: Any, studio: Studio) -> None:
    opened(page, "A step", TUNED)
    page.get_by_label("Step", exact=True).fill("3")
    settled(page)
    found = [token for row in asked(studio, "step", model=TUNED, step=3)["rows"] for token in row["tokens"]]
    assert {token["learned"] for token in found} == {True, False}
    classes = page.locator(".data .tokens .t").evaluate_all("all => all.map((t) => [...t.classList])")
    assert ["learned" in one for one in classes] == [token["learned"] for token in found]
    assert ["masked" in one for one in classes] == [not token["learned"] for token in found]
    borders = [token["begins"]["document"] for token in found if token["begins"]]
    shown = page.locator(".data .begins").all_text_contents()
    assert [one.split(",")[0] for one in shown] == [f"document {document + 1:,}" for document in borders] and len(
        shown
    ) > 1


def test_two_tokenizers_side_by_side(page: Any, studio: Studio) -> None:
    opened(page, "Two tokenizers", None)
    names = ["base", "long"]
    for i, name in enumerate(names, 1):
        page.get_by_label(f"Run of tokenizer {i}").select_option(name)
    text = f"the lazy dog, é {HOSTILE}"
    page.get_by_label("Text to cut").fill(text)
    settled(page)
    page.wait_for_function("() => document.querySelectorAll('.tokenizers .facts').length === 2")
    for i, found in enumerate(asked(studio, "tokenize", models=names, text=text)["found"]):
        pane = page.locator(".tokenizers section").nth(i)
        assert pane.locator(".tokens .t").all_text_contents() == [written(token) for token in found["tokens"]]
        assert f"{found['n_tokens']} tokens · {found['bytes_per_token']:.4g}" in pane.locator(".facts").inner_text()
    assert page.locator("img, script:not([src])").count() == 0


def test_a_hostile_document_is_text(page: Any) -> None:
    opened(page, "A step", HOSTILE)
    assert page.locator("img, script:not([src])").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(new_page: Callable[..., Any], studio: Studio, scheme: str, width: int) -> None:
    page = new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.goto(studio.url)
    page.get_by_label("Model of column 1").wait_for()
    for view in ("Documents", "A step", "Two tokenizers", "Windows"):
        opened(page, view, None if view == "Two tokenizers" else "base" if view == "Documents" else TUNED)
        if view == "Windows":
            page.get_by_role("button", name="Colour by loss").click()
            page.get_by_text("nats for each learned token").wait_for()
        page.locator(".data .rows").first.focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        screenshot(page, f"data-{view.split()[-1].lower()}-{scheme}-{width}")
        assert axe(page) == []
    for view, shown in (("Search", " places in "), ("Figures", "tokens a document")):
        page.get_by_role("button", name=view, exact=True).click()
        if view == "Search":
            page.get_by_label("Phrase").fill("dog")
            page.get_by_label("Phrase").press("Enter")
        page.get_by_text(shown).first.wait_for()
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        screenshot(page, f"data-{view.lower()}-{scheme}-{width}")
        assert axe(page) == []


def test_a_phrase_is_searched_and_its_place_opened(page: Any, studio: Studio) -> None:
    opened(page, "Documents")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_label("Phrase").fill("lazy dog, 1")
    page.get_by_label("Phrase").press("Enter")
    page.get_by_text(" places in ").wait_for()
    found = asked(studio, "search", model="base", phrase="lazy dog, 1")
    status = page.get_by_label("Search", exact=True).get_by_role("status").inner_text()
    assert status.startswith(f"{found['n']:,} places in {found['n_tokens']:,} tokens") and found["n"] > 20
    shown = page.locator(".hit").all_text_contents()
    assert shown == [hit["before"] + hit["text"] + hit["after"] for hit in found["hits"]]
    assert set(page.locator(".hit mark").all_text_contents()) == {"lazy dog, 1"}
    hit = found["hits"][3]
    page.get_by_role("button", name=f"Document {hit['document'] + 1:,}, token {hit['first'] + 1:,}").click()
    settled(page)
    assert page.get_by_label("First token", exact=True).input_value() == str(hit["first"] - 31)
    text = "".join(page.locator(".data .tokens .t").all_text_contents())
    assert "lazy dog, 1" in text[: text.index("lazy dog, 1") + 200]


def test_a_picker_is_shown_where_it_chooses_something(page: Any) -> None:
    opened(page, "Documents")
    point = page.locator(".data").get_by_label("Checkpoint of run")
    for view in ("Documents", "Windows", "A step", "Search", "Figures", "Two tokenizers"):
        page.get_by_role("button", name=view, exact=True).click()
        assert point.count() == 0, "no view shows a checkpoint's work yet"
    page.get_by_role("button", name="Windows", exact=True).click()
    page.get_by_role("button", name="Colour by loss").click()
    point.select_option("20")
    page.get_by_text("at step 20").wait_for()
    assert page.get_by_label("Window", exact=True).input_value() == "1"


def test_what_cannot_be_searched_is_said(page: Any) -> None:
    opened(page, "Documents")
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_label("Phrase").fill(HOSTILE)
    page.get_by_label("Phrase").press("Enter")
    page.get_by_text("0 places in ").wait_for()
    assert page.locator("img, script:not([src])").count() == 0


def test_the_figures_are_those_of_the_command(page: Any, studio: Studio) -> None:
    opened(page, "Documents", TUNED)
    page.get_by_role("button", name="Figures", exact=True).click()
    page.get_by_text("tokens a document").first.wait_for()
    found = asked(studio, "info", model=TUNED)
    rows = page.locator("table").first.locator("tbody tr").all_inner_texts()
    for row, one in zip(rows, found["amounts"], strict=True):
        figures = (one["split"], f"{one['documents']:,}", f"{one['tokens']:,}", f"{one['text_bytes']:,}")
        assert row.split("\t")[:4] == list(figures)
    bars = page.locator(".lengths").first.locator(".length-bar span").evaluate_all(
        "(all) => all.map((bar) => bar.getBoundingClientRect().width)")  # fmt: skip
    counts = [one["documents"] for one in found["lengths"]["train"]["histogram"]]
    assert max(bars) > 200
    assert [bar / max(bars) for bar in bars] == pytest.approx([n / max(counts) for n in counts], abs=0.02)
    lengths = found["lengths"]["train"]
    assert f"{lengths['shortest']:,} to {lengths['longest']:,} tokens a document" in page.locator(".data").inner_text()
