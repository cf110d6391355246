"""The page's part Home in a browser: a folder becomes a run by clicks, and the other choices lead to the parts."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kinds_of_files
from browser import AXE, HOSTILE, Studio, axe, open_studio, screenshot
from gptworks.recipe import load_recipe
from test_draft import prose

pytestmark = pytest.mark.browser

SIZES = {"phone": (390, 844), "laptop": (1280, 800), "4k": (3840, 2160)}


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Studio]:
    """A studio without a run, next to a folder of texts."""
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "letters"
    texts.mkdir()
    (texts / "a.txt").write_text(prose(60_000), encoding="utf-8")
    (texts / "b.txt").write_bytes("Der Fluß führt im Frühling überall mehr Wasser, sagte sie.\n".encode("cp1252") * 9)
    (texts / "c.pdf").write_bytes(b"broken")
    with open_studio() as opened:
        yield opened


def test_a_folder_is_chosen_with_the_keys_alone(new_page: Callable[..., Any], begun: Studio, tmp_path: Path) -> None:
    (tmp_path / HOSTILE / "b").mkdir(parents=True)
    page = new_page()
    page.goto(f"{begun.url}/#/home")
    page.get_by_text("The first run makes the folder runs.").wait_for()
    page.get_by_label("Folder", exact=True).fill("no such folder")
    page.get_by_role("button", name="Browse…").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Choose a folder")
    dialog.get_by_role("status").get_by_text("2 folders, 0 files").wait_for()

    def focused(name: str) -> None:
        page.wait_for_function("(name) => document.activeElement.dataset.name === name", arg=name)

    focused(HOSTILE)
    page.keyboard.press("ArrowRight")
    focused("b")
    page.keyboard.press("Backspace")
    focused(HOSTILE)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    dialog.get_by_role("status").get_by_text("0 folders, 3 files").wait_for()
    focused("a.txt")
    if AXE is not None:
        assert axe(page) == []
    for name, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        inside = "(one) => one.getBoundingClientRect().right <= innerWidth && one.scrollWidth <= one.clientWidth"
        assert dialog.evaluate(inside)
        screenshot(page, f"home-picker-{name}")
    dialog.get_by_label("Only names with").fill("C.P")
    dialog.get_by_role("status").get_by_text("0 folders, 1 file with").wait_for()
    page.keyboard.press("Tab")
    focused("c.pdf")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    dialog.wait_for(state="detached")
    assert page.get_by_label("Folder", exact=True).input_value() == str(tmp_path / "letters")
    assert page.get_by_label("Name", exact=True).input_value() == "letters"
    page.keyboard.press("Enter")
    focused("a.txt")
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert page.get_by_label("Folder", exact=True).input_value() == str(tmp_path / "letters")
    assert page.evaluate("() => document.activeElement.textContent") == "Browse…"


def test_the_folders_open_again_right_after_they_are_closed(new_page: Callable[..., Any], begun: Studio) -> None:
    page = new_page()
    page.goto(f"{begun.url}/#/home")
    browse = page.get_by_role("button", name="Browse…")
    browse.click()
    cancel = page.get_by_role("dialog", name="Choose a folder").get_by_role("button", name="Cancel")
    again = """async ([cancel, browse]) => {
      cancel.click();
      for (let i = 0; i < 10; i++) await null;  // the page renders; the dialog's close event is still to come
      browse.click();
      await new Promise((done) => setTimeout(done, 300));
      return document.querySelectorAll("dialog[open]").length;
    }"""
    assert page.evaluate(again, [cancel.element_handle(), browse.element_handle()]) == 1


def test_the_table_names_every_file_that_is_left_out(
    new_page: Callable[..., Any], begun: Studio, tmp_path: Path
) -> None:
    pytest.importorskip("all2md")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "good.txt").write_text(prose(40_000), encoding="utf-8")
    (mixed / "good.docx").write_bytes(kinds_of_files.docx(kinds_of_files.PARAGRAPHS))
    (mixed / f"{HOSTILE.replace('/', '')}.docx").write_bytes(b"no docx")
    (mixed / "also broken.docx").write_bytes(b"no docx")
    (mixed / "empty.csv").write_bytes(b"")
    (mixed / "picture.png").write_bytes(b"\x89PNG")
    (mixed / "nowhere.md").symlink_to("nowhere")
    os.mkfifo(mixed / "waits.html")
    page = new_page()
    page.goto(f"{begun.url}/#/home")
    page.get_by_label("Folder", exact=True).fill("mixed")
    page.get_by_role("button", name="Look at it").click()
    found = page.get_by_role("region", name="What was found")
    found.get_by_text("2 of 8 files in mixed are read").wait_for(timeout=240_000)
    rows = {row.locator("th").inner_text(): row.inner_text() for row in found.locator("tbody tr").all()}
    for kind, why in ((".docx", "and 1 more: a broken DOCX"), (".csv", "it is empty"), (".html", "a FIFO"),
                      (".md", "a link that leads nowhere"), (".png", "not a kind")):  # fmt: skip
        assert why in rows[kind], rows
    found.get_by_text("Left out, in whole or in part: 6").click()
    left_out = found.get_by_role("list", name="What is left out").inner_text()
    assert {line.partition(": ")[0] for line in left_out.splitlines()} == {
        path.name for path in mixed.iterdir() if not path.name.startswith("good")
    }  # fmt: skip
    screenshot(page, "home-left-out")


def test_a_folder_becomes_a_run_whose_samples_are_shown(new_page: Callable[..., Any], begun: Studio) -> None:
    Path("letters/a.txt").write_text(prose(1_000_000), encoding="utf-8")  # a longer run, so that the page sees it train
    page = new_page()
    page.goto(f"{begun.url}/#/home")
    page.get_by_text("There is no model here yet").first.wait_for()
    page.get_by_label("Folder", exact=True).fill("/etc")
    assert page.get_by_label("Name", exact=True).input_value() == "etc"
    page.get_by_role("button", name="Look at it").click()
    page.get_by_role("alert").get_by_text("folder=/etc lies outside of").wait_for()
    page.get_by_label("Folder", exact=True).fill("letters")
    page.get_by_label("Minutes", exact=True).fill("0.4")
    page.get_by_role("button", name="Look at it").click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled.").wait_for()
    page.get_by_role("button", name="Look at it").click()
    found = page.get_by_role("region", name="What was found")
    found.get_by_text("2 of 3 files in letters are read").wait_for(timeout=240_000)
    assert "cp1252 (guessed)" in found.inner_text() and "c.pdf: " in found.inner_text()
    assert page.locator(".home-passages pre").count() == 6
    page.reload()
    cost = page.get_by_role("region", name="What it will cost")
    cost.wait_for(timeout=240_000)
    assert "parameters" in cost.inner_text() and "at most" in cost.inner_text()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for name, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), name
            if AXE is not None:
                assert axe(page) == []
            screenshot(page, f"home-{name}-{scheme}")
    cost.get_by_role("button", name="Start training letters").click()
    live = page.get_by_role("region", name="Training of letters")
    live.get_by_text(re.compile("It trains: .* of .* steps, .*% done, about .* left")).wait_for(timeout=240_000)
    live.get_by_text("it hesitates as if between").wait_for()
    live.get_by_label("Sample 1 of letters").wait_for(timeout=240_000)
    screenshot(page, "home-live")
    assert cost.get_by_role("button").count() == 0, "started once"
    live.get_by_text("It has ended, after").wait_for(timeout=240_000)
    if AXE is not None:
        assert axe(page) == []
    screenshot(page, "home-ended")
    live.get_by_role("link", name="Talk to it", exact=True).click()
    page.get_by_label("Model of column 1").wait_for()
    assert page.get_by_label("Model of column 1").input_value() == "letters"
    assert load_recipe("runs/letters").data.sources[0].type == "files"
    page.goto(f"{begun.url}/#/home")
    page.get_by_role("region", name="Talk to a model").get_by_role("link", name="Play").click()
    page.get_by_label("Model of column 1").wait_for()
