"""Every part of the studio and each kind of page, on a phone, a laptop and a 4K screen, in light and dark: nothing
overflows, is cut without a sign, overlaps, or is too faint to read. GPTWORKS_SCREENSHOTS keeps a picture of each."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import AXE, Studio, axe, choose, finish, generate, open_studio, say, screenshot, tokens
from gptworks.runs.history import read_history
from gptworks.runs.report import write_report

pytestmark = pytest.mark.browser

SIZES = {"phone": (390, 844), "laptop": (1280, 800), "4k": (3840, 2160)}
SCHEMES = ("light", "dark")
TEXT = "line 7: the quick brown fox jumps over the lazy dog, 49 times.\n" * 2

FAULTS = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
"""Returns the faults of the page's layout as texts."""


@pytest.fixture(scope="module")
def opened(chromium: Any, studio: Studio) -> Iterator[Any]:
    """Open one page on the studio for all parts."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.goto(studio.link())
    page.get_by_label("Model of column 1").wait_for()
    yield page
    context.close()


@pytest.fixture
def quiet(opened: Any) -> Iterator[Any]:
    """The open page at laptop size; fails if it throws or writes an error into its console."""
    problems: list[str] = []

    def said(message: Any) -> None:
        if message.type == "error":
            problems.append(message.text)

    def threw(error: Any) -> None:
        problems.append(str(error))

    opened.on("console", said)
    opened.on("pageerror", threw)
    opened.emulate_media(color_scheme="light")
    opened.set_viewport_size({"width": 1280, "height": 800})
    yield opened
    opened.remove_listener("console", said)
    opened.remove_listener("pageerror", threw)
    assert not problems, problems


def at(page: Any, route: str, shows: str) -> None:
    """Open a part and wait for what it shows."""
    page.evaluate("(route) => (location.hash = route)", f"#/{route}")
    page.locator(shows).first.wait_for()


def held(page: Any, name: str, rules: tuple[str, ...] = ("color-contrast",)) -> None:
    """Assert that the page's layout holds at each size and scheme, and take its pictures."""
    page.evaluate("() => document.activeElement?.blur()")
    page.mouse.move(0, 0)
    faults: list[str] = []
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate("() => (scrollTo(0, 0), new Promise((done) => setTimeout(done, 150)))")  # charts are drawn anew
        found = page.evaluate(FAULTS)
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            if AXE is not None:
                found += [f"{scheme}: {one}" for one in axe(page, rules)]
            screenshot(page, f"layout-{name}-{size}-{scheme}", full_page=size != "4k")
        faults += [f"{size}: {one}" for one in found]
    assert not faults, "\n".join(faults)


def test_home(quiet: Any) -> None:
    at(quiet, "home", ".home-make")
    held(quiet, "home")


def test_home_before_the_first_run(
    new_page: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_studio() as empty:
        page = new_page()
        page.goto(f"{empty.url}/#/home")
        page.get_by_text("There is no model here yet").first.wait_for()
        held(page, "empty-home")
        for part in ("play", "runs", "read", "time", "data", "model", "start"):
            at(page, part, f".part:not([hidden]) {'.start-part' if part == 'start' else '.no-run'}")
            held(page, f"empty-{part}")


def test_play(quiet: Any) -> None:
    at(quiet, "play/base", ".play")
    choose(quiet, "base")
    generate(quiet, TEXT.splitlines()[0], seed=5, max_tokens=60, temperature=0.6)
    held(quiet, "play")
    tokens(quiet).nth(9).click()
    quiet.locator(".token-card").wait_for()
    held(quiet, "play-card")
    quiet.keyboard.press("Escape")
    quiet.get_by_role("button", name="Side by side").click()
    quiet.get_by_role("button", name="Generate", exact=True).click()
    finish(quiet)
    held(quiet, "play-two")
    quiet.get_by_role("button", name="Close column 2").click()


def test_play_as_a_chat(quiet: Any) -> None:
    at(quiet, "play/group/tuned", ".play")
    choose(quiet, "group/tuned")
    quiet.locator("#setting-max_tokens").fill("25")
    say(quiet, "what of brown 1?")
    say(quiet, "what of lazy 2?")
    held(quiet, "play-chat")


def test_runs(quiet: Any) -> None:
    at(quiet, "runs", ".chart canvas")
    quiet.get_by_role("button", name="All shown").click()
    quiet.wait_for_function("() => !document.body.innerText.includes('reading…')")
    quiet.locator("section[aria-label=Comparison] table").first.wait_for()
    quiet.locator("figure.chart").filter(has_text="Training loss").locator(".u-over").click()
    quiet.locator("dl.record").first.wait_for()
    held(quiet, "runs")


def test_read(quiet: Any) -> None:
    at(quiet, "read/base", ".read .composer")
    quiet.locator(".examples button").first.wait_for()
    held(quiet, "read-empty")
    quiet.locator(".read").get_by_label("Text", exact=True).fill(TEXT)
    quiet.keyboard.press("Control+Enter")
    quiet.locator(".read .text .t").nth(12).click()
    quiet.locator(".panels").get_by_role("button", name="Search for the same tokens").click()
    quiet.locator(".ngrams").wait_for()
    quiet.get_by_role("button", name="Read the text at each checkpoint").click()
    quiet.get_by_text("its probability").wait_for()
    held(quiet, "read")


def test_through_time(quiet: Any) -> None:
    at(quiet, "time/base", ".time")
    part = quiet.locator(".time")
    part.get_by_label("Text", exact=True).fill(TEXT)
    quiet.keyboard.press("Control+Enter")
    part.get_by_role("heading", name="What it learned between").wait_for()
    quiet.wait_for_function("() => !/of \\d+ checkpoints/.test(document.querySelector('.time .steps').innerText)")
    quiet.locator(".written[aria-busy=false]").wait_for()
    held(quiet, "time")


def test_data(quiet: Any) -> None:
    at(quiet, "data/base", ".data")
    for view in ("Documents", "Windows", "A step", "Two tokenizers", "Search", "Figures"):
        quiet.get_by_role("button", name=view, exact=True).click()
        if view == "Search":
            quiet.get_by_label("Phrase").fill("dog")
            quiet.get_by_label("Phrase").press("Enter")
        quiet.locator(".data :is(.tokens .t, .hit, table)").first.wait_for()
        quiet.wait_for_function("() => !document.querySelector('.data [aria-busy=true]')")
        held(quiet, f"data-{view.lower().replace(' ', '-')}")


def test_model(quiet: Any) -> None:
    at(quiet, "model/base", ".model-summary bdi")
    held(quiet, "model")
    quiet.locator(".arch-step", has_text="Query").first.click()
    quiet.locator("#model-chosen", has_text="Query").wait_for()
    quiet.locator(".model-part").get_by_label("Compare with").check()
    quiet.wait_for_function("() => document.querySelectorAll('.plot-bars').length === 2")
    held(quiet, "model-weights")


def test_start(quiet: Any) -> None:
    at(quiet, "start", ".start-plan[aria-busy=false] table")
    held(quiet, "start")
    quiet.locator("[id='setting-of-train.max_steps']").fill("-1")
    quiet.locator(".start-field .problem").wait_for()
    quiet.get_by_label("All settings").check()
    held(quiet, "start-all")


def test_sign_in(new_page: Callable[..., Any], studio: Studio) -> None:
    page = new_page(signs_in=False)
    page.goto(studio.url)
    page.get_by_label("Key").fill("wrong")
    page.get_by_role("button", name="Open").click()
    page.locator(".ask-key .problem").wait_for()
    held(page, "sign-in")


def test_an_error(new_page: Callable[..., Any], studio: Studio) -> None:
    page = new_page()
    with open_studio(studio.runs) as short:
        page.goto(short.url)
        page.wait_for_selector(".play")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.locator(".notice.problem").wait_for()
    held(page, "no-server")


def test_a_report(new_page: Callable[..., Any], studio: Studio, tmp_path: Path) -> None:
    write_report(read_history(studio.runs / "base"), tmp_path / "report.html")
    page = new_page(bypass_csp=True)
    page.goto((tmp_path / "report.html").as_uri())
    held(page, "report")
