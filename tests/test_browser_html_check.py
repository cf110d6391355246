"""An export opens its page in a browser, compares what it computes, and leaves nothing behind."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptworks.errors import RunError
from gptworks.interop.html_file import browser, export_html, page
from test_html_file import run  # noqa: F401 (a fixture)

pytestmark = pytest.mark.browser


@pytest.fixture(autouse=True)
def _there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A browser is there, and at the end neither a process nor a profile of it is."""
    try:
        browser.find_browser()
    except browser.Unavailable as reason:
        pytest.skip(str(reason))
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(browser.tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []
    running = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if os.access(file, os.R_OK)]
    assert not [one for one in running if os.fsencode(folder) in one]


def written(folder: Path, body: str) -> Path:
    file = folder / "page.html"
    policy = "default-src 'none'; script-src 'unsafe-inline'"
    file.write_text(f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">{body}')
    return file


@pytest.mark.parametrize("split", [False, True], ids=["file", "folder"])
def test_a_browser_computes_what_the_engine_computes(run: Path, tmp_path: Path, split: bool) -> None:  # noqa: F811
    found = export_html(run, tmp_path / "model.html", split=split).check
    assert found is not None
    assert found.no_browser is None
    assert found.greedy_tokens == 64
    assert found.loss_difference < 1e-3
    assert found.tokens_per_second is not None


def test_a_page_that_reports_an_error_is_not_kept(
    run: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = page.script() + "console.error('the page is odd');"
    monkeypatch.setattr(page, "script", lambda: script)
    with pytest.raises(RunError, match="the page reports: the page is odd"):
        export_html(run, tmp_path / "model.html")
    assert not (tmp_path / "model.html").exists()


def test_what_a_page_reports_and_what_its_policy_stops_are_faults(tmp_path: Path) -> None:
    bodies = {
        "<script>console.error('no', 1)</script>": "no 1",
        "<script>throw new Error('thrown')</script>": "Error: thrown",
        "<script>setTimeout(() => Promise.reject(new Error('late')))</script>": "Error: late",
        "<script>fetch('https://example.org/').catch(() => {})</script>": "connect",
        "<img src=x>": "img-src",
        "<style>b { color: red }</style>": "style-src",
    }
    with browser.opened(written(tmp_path, "".join(bodies)), 60) as opened:
        opened.evaluate("new Promise((resolve) => setTimeout(resolve, 50))")
        found = opened.faults()
    missing = [fault for fault in bodies.values() if not any(fault in one for one in found)]
    assert not missing, found


def test_an_interrupt_and_a_long_work_end_the_browser(tmp_path: Path) -> None:
    file = written(tmp_path, "<script>console.log('quiet')</script>")
    with pytest.raises(KeyboardInterrupt), browser.opened(file, 60) as opened:
        assert opened.faults() == []
        raise KeyboardInterrupt
    with pytest.raises(RunError, match="took more than 1 s"), browser.opened(file, 1) as opened:
        opened.evaluate("new Promise(() => {})")


def test_nothing_outside_is_reached(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("<script>answer = fetch('http://localhost:9').then(String, String)</script>")
    with browser.opened(file, 60) as opened:
        assert "TypeError" in opened.evaluate("answer")


def test_a_browser_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "google-chrome"
    there.symlink_to(shutil.which("true") or "/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(browser.BROWSER, raising=False)
    assert browser.find_browser() == str(there)
