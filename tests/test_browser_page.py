"""The studio's page as a whole, in a real browser: hostile text, access, accessibility (axe), widths, and loading
times."""

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import filelock
import pytest

import chats
import serving
from browser import (
    HOSTILE,
    LONG,
    Studio,
    answer,
    axe,
    choose,
    finish,
    generate,
    listening,
    open_studio,
    say,
    screenshot,
    tokens,
)
from gptworks.studio.app import create_served

pytestmark = pytest.mark.browser

FIRST_TOKEN = """() => {
  new MutationObserver(() => {
    if (!window.seen && document.querySelector(".t[data-part=answer]")) window.seen = performance.now();
  }).observe(document.body, {childList: true, subtree: true});
  document.querySelector(".button.primary").addEventListener("click", () => (window.clicked = performance.now()), true);
}"""
SIZES = {360: (360, 800), 1280: (1280, 900), 3840: (3840, 2160)}


def test_checkpoints_appear_while_a_run_trains(new_page: Callable[..., Any], studio: Studio) -> None:
    folder = studio.runs / "training"
    shutil.copytree(studio.runs / "base", folder)
    (folder / "outcome.json").unlink(missing_ok=True)
    newest = folder / "checkpoints" / "step-000060"
    aside = studio.runs.parent / newest.name
    newest.rename(aside)
    try:
        with filelock.FileLock(folder / ".lock"):
            page = new_page()
            page.goto(studio.url)
            choose(page, "training")
            steps = page.get_by_label("Checkpoint of column 1")
            assert "training (training)" in page.get_by_label("Model of column 1").inner_text()
            before = steps.inner_text()
            generate(page, "line 7:", max_tokens=4, temperature=0)
            aside.rename(newest)
            page.wait_for_function(
                "(before) => document.querySelectorAll('.choice select')[1].innerText !== before", arg=before
            )
            assert "step 60" in steps.inner_text() and "step 60" not in before
            assert tokens(page).count() == 4
    finally:
        shutil.rmtree(folder)


def test_a_text_is_written_while_a_run_trains(new_page: Callable[..., Any], studio: Studio, tmp_path: Path) -> None:
    folder, texts = studio.runs / "live", tmp_path / "texts"
    texts.mkdir()
    many = {"max_steps": 100_000, "checkpoint_every": 50, "evaluate_every": 50, "keep_checkpoints": 40}
    recipe = tmp_path / "live.yaml"
    recipe.write_text(json.dumps(chats.base_tree(texts, **many) | {"run_dir": str(folder)}), encoding="utf-8")
    log = (tmp_path / "log").open("w", encoding="utf-8")
    trains = subprocess.Popen([sys.executable, "-m", "gptworks", "train", str(recipe)], stdout=log, stderr=log)
    try:
        serving.until(lambda: any(folder.glob("checkpoints/*/manifest.json")) or trains.poll() is not None, 120)
        page = new_page()
        page.goto(studio.url)
        choose(page, "live")
        assert "live (training)" in page.get_by_label("Model of column 1").inner_text()
        generate(page, "line 7:", max_tokens=8, temperature=0)
        assert tokens(page).count() == 8 and trains.poll() is None, (tmp_path / "log").read_text(encoding="utf-8")
    finally:
        trains.kill()
        trains.wait()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_served_model_answers_on_the_same_page(new_page: Callable[..., Any]) -> None:
    engines = {"talk": serving.tiny_engine(chat=True), "plain": serving.tiny_engine()}
    with listening(create_served(engines)) as url:
        page = new_page()
        page.goto(url)
        choose(page, "plain")
        assert page.get_by_label("Checkpoint of column 1").count() == 0
        generate(page, "abc", max_tokens=6, temperature=0)
        tokens(page).nth(2).click()
        page.locator(".token-card .row:not(:disabled)").first.click()
        page.wait_for_function("() => document.querySelectorAll('.branch').length === 2")
        finish(page)
        assert tokens(page).count() == 9
        choose(page, "talk")
        say(page, "hello")
        assert tokens(page).count() == 6


def test_hostile_names_prompts_and_texts_are_shown_as_texts(page: Any) -> None:
    choose(page, HOSTILE)
    generate(page, f"<script>alert(1)</script> {HOSTILE}", max_tokens=60, temperature=0)
    assert re.search(r"<script>alert|<img src", answer(page)), "the model writes markup"
    tokens(page).nth(10).click()
    page.locator(".token-card").wait_for()
    assert page.locator("img, script:not([src])").count() == 0
    assert page.evaluate("() => window.violations") == []


def test_a_link_signs_one_browser_in_and_a_typed_key_one_tab(new_page: Callable[..., Any], studio: Studio) -> None:
    with open_studio(studio.runs, key="sk-0-key") as guarded:
        page, other = new_page(signs_in=False), new_page(signs_in=False)
        link = guarded.link(f"{guarded.url}/#/model")
        page.goto(link)
        page.get_by_role("link", name="Model", exact=True).wait_for()
        assert page.url == f"{guarded.url}/#/model" and "code" not in page.url
        page.reload()
        page.get_by_role("link", name="Model", exact=True).wait_for()
        tab = page.context.new_page()  # of the same browser
        tab.goto(f"{guarded.url}/#/play")
        tab.wait_for_selector(".play")
        other.goto(link)
        other.get_by_role("heading", name="This server asks for a key").wait_for()
        assert other.locator(".connection").inner_text() == "Not signed in"
        other.locator(".ask-key .problem:has-text('used already')").wait_for()
        for typed, said in (("ключ", "ASCII only"), ("wrong", "does not take this key")):
            other.get_by_label("Key").fill(typed)
            other.get_by_role("button", name="Open").click()
            other.locator(f".ask-key .problem:has-text('{said}')").wait_for()
        other.get_by_label("Key").fill("sk-0-key")
        other.get_by_role("button", name="Open").click()
        other.wait_for_selector("nav")
        assert page.evaluate("document.cookie") == "", "scripts cannot read the session"
        late = new_page(signs_in=False)
        late.goto(guarded.url)
        late.get_by_role("heading", name="This server asks for a key").wait_for()
        late.goto(guarded.link())  # in the same tab: its address alone changes
        late.wait_for_selector(".play")


def test_a_session_that_has_ended_costs_nothing_that_was_written(new_page: Callable[..., Any], studio: Studio) -> None:
    page = new_page()
    with open_studio(studio.runs) as short:
        page.goto(short.url)
        choose(page, "base")
        generate(page, "line 7:", max_tokens=4)
        written = answer(page)
        short.app.state.service.sign_in._sessions.clear()  # as a studio that starts again has none
        page.get_by_label("Prompt", exact=True).fill("half a thought")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.locator(".ask-key .problem:has-text('session has ended')").wait_for()
        assert page.get_by_label("Prompt", exact=True).input_value() == "half a thought" and answer(page) == written
        page.goto(short.link())  # in the same tab: its address alone changes
        page.locator(".connection:has-text('Connected')").wait_for()
        assert page.locator(".ask-key").count() == 0
        assert page.get_by_label("Prompt", exact=True).input_value() == "half a thought" and answer(page) == written


def test_the_page_says_when_the_server_is_gone(new_page: Callable[..., Any], studio: Studio) -> None:
    page = new_page()
    with open_studio(studio.runs) as short:
        page.goto(short.url)
        page.wait_for_selector(".play")
        assert page.locator(".connection").inner_text() == "Connected"
    choose(page, "base")
    page.get_by_label("Prompt", exact=True).fill("a")
    page.get_by_role("button", name="Generate", exact=True).click()
    page.locator(".column .problem:has-text('does not answer')").wait_for()


def test_a_page_of_another_origin_cannot_call_the_server(new_page: Callable[..., Any], studio: Studio) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title>")

        def log_message(self, *_: object) -> None:
            pass

    other = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        page = new_page()
        page.goto(f"http://127.0.0.1:{other.server_port}/")
        tried = page.evaluate("""async (url) => {
          const seen = [];
          for (const options of [{}, {mode: "no-cors"}, {method: "POST", headers: {"content-type": "application/json"},
              body: JSON.stringify({model: "base", prompt: "a"})}, {method: "POST", mode: "no-cors", body: "{}"}]) {
            for (const path of ["/studio/state", "/studio/generate"]) {
              try {
                const got = await fetch(url + path, options);
                seen.push(`${got.status} ${(await got.text()).length}`);
              }
              catch (error) { seen.push("refused"); }
            }
          }
          return seen;
        }""", studio.url)  # fmt: skip
        assert {answer for answer in tried if answer != "refused"} <= {"0 0"}, tried  # opaque: nothing can be read
    finally:
        other.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_every_width_fits(new_page: Callable[..., Any], studio: Studio, scheme: str) -> None:
    for width, (wide, high) in SIZES.items():
        page = new_page(color_scheme=scheme, viewport={"width": wide, "height": high}, has_touch=width == 360)
        page.goto(studio.url)
        choose(page, "base")
        if width == 360:
            page.locator("summary", has_text="Settings").click()
        generate(page, "line 7: the quick brown fox", seed=5, max_tokens=60, temperature=0.6)
        if width == 360:
            page.locator("summary", has_text="Settings").click()
        screenshot(page, f"play-text-{width}-{scheme}")
        tap = tokens(page).nth(9)
        tap.tap() if width == 360 else tap.click()
        page.locator(".token-card").wait_for()
        found = axe(page)
        assert found == [], "\n".join(found)
        screenshot(page, f"play-card-{width}-{scheme}")
        page.locator(".token-card .row:not(:disabled)").nth(1).click()
        finish(page)
        page.get_by_role("button", name="Side by side").click()
        page.get_by_role("button", name="Generate", exact=True).click()
        finish(page)
        page.get_by_role("button", name="Copy as curl").first.click()
        assert axe(page) == []
        screenshot(page, f"play-two-{width}-{scheme}")
        page.get_by_role("button", name="Close column 2").click()
        choose(page, "group/tuned")
        page.get_by_role("button", name="New conversation").click()
        page.evaluate("""() => {
          const box = document.querySelector("#setting-max_tokens");
          box.value = "25";
          box.dispatchEvent(new Event("input", { bubbles: true }));
        }""")
        say(page, "what of brown 1?")
        say(page, "what of lazy 2?")
        assert axe(page) == []
        screenshot(page, f"play-chat-{width}-{scheme}")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), (
            f"{width} is too narrow for it"
        )
        page.get_by_label("Colours").select_option("light" if scheme == "dark" else "dark")
        light = page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert light == (scheme == "dark")
        page.context.close()


def test_a_thumb_steps_from_token_to_token(new_page: Callable[..., Any], studio: Studio) -> None:
    page = new_page(viewport={"width": 360, "height": 780}, has_touch=True)
    page.goto(studio.url)
    choose(page, "base")
    generate(page, "line 7:")
    tokens(page).nth(3).tap()
    card = page.get_by_role("dialog", name="Token")
    for name, at in (("Token after", 4), ("Token after", 5), ("Token before", 4)):
        card.get_by_role("button", name=name).tap()
        page.wait_for_function(f"() => document.querySelector('.text .t.at')?.dataset.i === '{at}'")
        word = visible(tokens(page).nth(at).text_content())
        page.wait_for_function(
            "(word) => document.querySelector('.token-card .spelling').textContent === word", arg=word
        )
    box = tokens(page).nth(4).bounding_box()
    assert box["y"] + box["height"] <= card.bounding_box()["y"], "the card covers its token"
    for link in page.get_by_role("navigation", name="Parts").get_by_role("link").all():
        place = link.bounding_box()
        assert place["x"] >= 0 and place["x"] + place["width"] <= 360, "a tab is out of sight"


def visible(text: str) -> str:
    return text.replace(" ", "␣").replace("\n", "⏎")


def test_the_colours_hold_before_anything_is_painted(new_page: Callable[..., Any], studio: Studio) -> None:
    page = new_page(color_scheme="dark")
    page.add_init_script("""new MutationObserver((_, self) => {
      if (document.body) (window.first = document.documentElement.dataset.theme, self.disconnect());
    }).observe(document, {childList: true, subtree: true});""")
    page.goto(studio.url)
    shown = "() => [window.first, document.documentElement.dataset.theme]"
    assert page.evaluate(shown) == ["dark", "dark"]
    page.emulate_media(color_scheme="light")  # the system's choice is followed
    page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")
    page.get_by_label("Colours").select_option("dark")
    page.reload()
    assert page.evaluate(shown) == ["dark", "dark"]
    page.get_by_label("Colours").select_option("system")
    assert page.evaluate(shown) == ["dark", "light"]


def test_motion_is_reduced_where_it_is_asked_for(new_page: Callable[..., Any], studio: Studio) -> None:
    page = new_page(reduced_motion="reduce")
    page.goto(studio.url)
    page.wait_for_selector(".play")
    moving = page.evaluate("""() => { const caret = document.createElement("span"); caret.className = "caret";
      document.body.append(caret); return getComputedStyle(caret).animationName; }""")  # fmt: skip
    assert moving == "none"


def loads_when(page: Any, act: Callable[[], Any], model: str | None = None) -> dict[str, Any]:
    """Do `act`; return the body of the request with which the page then loads a model (`model`, or any)."""

    def is_it(answer: Any) -> bool:
        return answer.url.endswith("/studio/load") and model in (None, answer.request.post_data_json["model"])

    with page.expect_response(is_it) as caught:
        act()
    assert caught.value.json() == {"loaded": True}
    asked: dict[str, Any] = caught.value.request.post_data_json
    return asked


def test_a_chosen_model_is_loaded_without_a_click(new_page: Callable[..., Any], studio: Studio) -> None:
    with open_studio(studio.runs) as fresh:
        page = new_page()
        first = loads_when(page, lambda: page.goto(fresh.url))
        assert first == {"model": page.get_by_label("Model of column 1").input_value(), "checkpoint": None}
        assert loads_when(page, lambda: choose(page, "base")) == {"model": "base", "checkpoint": None}
        sent: list[Any] = []
        page.on("request", lambda one: one.url.endswith("/studio/load") and sent.append(one.post_data_json))
        steps = page.get_by_label("Checkpoint of column 1")

        def walk() -> None:
            for step in ("20", "40", "60", "20"):
                steps.select_option(step)

        assert loads_when(page, walk) == {"model": "base", "checkpoint": 20}
        assert sent == [{"model": "base", "checkpoint": 20}], "only the checkpoint at which one stays"
        page.get_by_role("button", name="Side by side").click()
        assert loads_when(page, lambda: choose(page, LONG, 2), LONG) == {"model": LONG, "checkpoint": None}
        assert {"model": "base", "checkpoint": 20} in sent[1:], "each column's, one after the other"
        with page.expect_response(lambda answer: answer.url.endswith("/studio/generate")) as caught:
            generate(page, "line 7:", max_tokens=3)
        assert '"loading"' not in caught.value.text()
        with fresh.http() as http:
            there = {model["id"] for model in http.get("/v1/models").json()["data"]}
        assert {"base@20", "base@60", f"{LONG}@1"} <= there


def test_first_paint_and_first_token_are_measured(new_page: Callable[..., Any], studio: Studio) -> None:
    with open_studio(studio.runs) as fresh:
        page = new_page()
        page.goto(fresh.url)
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
        paint = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
        loads_when(page, lambda: choose(page, "base"))
        page.get_by_label("Prompt", exact=True).fill("line 7:")
        page.evaluate(FIRST_TOKEN)
        page.get_by_role("button", name="Generate", exact=True).click()
        finish(page)
        token = page.evaluate("() => window.seen - window.clicked")
        print(f"first contentful paint {paint:.0f} ms, first token {token:.0f} ms after the first click")
        assert paint > 0 and token > 0
