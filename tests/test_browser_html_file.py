"""A model in one HTML file, opened in a browser without a network."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from browser import HOSTILE, WATCH, answer, axe, generate, screenshot, tokens
from gptworks.interop.html_file import export_html
from test_html_file import hostile, run  # noqa: F401 (fixtures)

pytestmark = pytest.mark.browser


@pytest.fixture
def opened(chromium: Any) -> Any:
    """Return a function that opens a file in a browser without a network, and the page's faults."""
    contexts = []

    def open_file(file: Path, **options: Any) -> tuple[Any, list[str]]:
        context = chromium.new_context(offline=True, **options)
        contexts.append(context)
        page, faults = context.new_page(), []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: faults.append(request.url) if request.url != file.as_uri() else None)
        page.add_init_script(WATCH)
        page.goto(file.as_uri())
        return page, faults

    yield open_file
    for context in contexts:
        context.close()


def test_one_continues_a_text_and_takes_another_branch(run: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    file = tmp_path / "model.html"
    export_html(run, file, verify=False)
    page, faults = opened(file)
    page.fill("#prompt", "line 1: the")
    page.click("text=Greedy")
    page.fill("#setting-max_tokens", "12")
    page.click("text=Generate")
    page.wait_for_selector(".facts >> text=12 tokens")
    tokens = page.locator(".text [data-part=answer]")
    assert tokens.count() == 12
    tokens.nth(3).click()
    page.locator(".token-card .row:not([disabled])").nth(0).click()
    page.wait_for_selector(".text [data-part=answer].chosen")
    last = page.locator(".legend .s5")
    assert last.evaluate("(element) => getComputedStyle(element).backgroundColor") != "rgba(0, 0, 0, 0)", "styled"
    assert "Copy as" not in page.inner_text("main"), "there is no server to copy requests for"
    page.click("nav >> text=About")
    assert "int8" in page.inner_text(".about-file")
    assert (faults, page.evaluate("violations")) == ([], [])


def test_one_reads_a_text_and_looks_into_a_token(run: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    file = tmp_path / "model.html"
    export_html(run, file, verify=False)
    page, faults = opened(file)
    page.click("nav >> text=Read")
    assert not page.locator(".read select, .read .steps").count(), "other checkpoints are not in the file"
    page.fill("[aria-label=Text]", "line 1: the quick brown fox\nline 2: the lazy dog")
    page.press("[aria-label=Text]", "Control+Enter")
    page.wait_for_selector(".read-text .facts >> text=nats per token")
    page.locator(".read-text .text .t").nth(9).click()
    token = page.locator("section.token")
    token.get_by_text("token 10 ·").wait_for()
    token.locator(".lens tbody tr").nth(2).wait_for()
    assert token.locator(".lens tbody tr").count() == 3, "two blocks and the embedding"
    token.locator(".map canvas").click(position={"x": 3, "y": 3})
    page.wait_for_selector(".toolbar >> text=Underlined: what block 0 head 0 looks at")
    token.locator("select").select_option(index=1)
    token.get_by_text("this difference of the logits").wait_for()
    assert "In the training data" not in token.inner_text()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for width in (360, 3840):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            screenshot(page, f"html-read-{scheme}-{width}", full_page=True)
            assert axe(page) == []
    assert (faults, page.evaluate("violations")) == ([], [])


def test_play_leads_to_the_causes_of_a_token(hostile: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    file = tmp_path / "model.html"
    export_html(hostile, file, verify=False)
    page, faults = opened(file)
    page.fill("#message", "line 1")
    page.click("text=Send")
    page.wait_for_selector(".facts >> text=tokens/s")
    page.locator(".text [data-part=answer]").nth(1).click()
    page.click("text=Why this token?")
    page.wait_for_selector("section.token .lens")
    assert page.locator("section.token h2").inner_text().startswith("Why")
    assert page.locator("img").count() == 0
    assert (faults, page.evaluate("violations")) == ([], [])


def test_nothing_of_a_hostile_run_is_executed(hostile: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    file, markup = tmp_path / "model.html", f"{HOSTILE} </script><script>alert(1)</script>"
    export_html(hostile, file, verify=False)
    page, faults = opened(file)
    page.fill("#message", markup)
    page.click("text=Send")
    page.wait_for_selector(".facts >> text=tokens/s")
    page.click("nav >> text=Read")
    page.get_by_label("Text", exact=True).fill(markup)
    page.get_by_role("button", name="Read").click()
    page.wait_for_selector(".read-text .t")
    page.click("nav >> text=Explain")
    page.fill(".ex-text textarea", markup)
    for step in page.locator(".ex-steps a").all():
        step.click()
        page.wait_for_selector(".ex-step[aria-busy=false] p >> nth=1")
    page.click("nav >> text=Model")
    page.wait_for_selector(".arch")
    page.click("nav >> text=About")
    assert page.inner_text(".about-file").count(HOSTILE) > 2
    assert page.locator("img, a[href^=javascript]").count() == 0
    page.evaluate("fetch('https://example.org/').catch(() => {})")
    assert page.evaluate("violations") == ["connect-src https://example.org/"], "the policy lets nothing out"
    assert [fault for fault in faults if "example.org" not in fault] == []


@pytest.fixture
def host(run: Path, tmp_path: Path) -> Iterator[tuple[Path, str]]:  # noqa: F811
    """A split page in a folder, and its address on a plain web server."""
    folder = tmp_path / "host"
    export_html(run, folder, split=True, verify=False)
    with served(folder) as address:
        yield folder, address


@contextmanager
def served(folder: Path, **headers: str) -> Iterator[str]:
    """Serve a folder with further headers (_ for -) inside the `with`; yield its address."""

    class Handler(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            super().end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


TRACED = """async () => {
  const model = await gptworks.model;
  const trace = await model.trace([...Array(40).keys()]);
  const layers = [0, 1].flatMap((layer) => [trace.stream(2 * layer + 1), trace.attention(layer), trace.neurons(layer)]);
  return [...layers, trace.lens(2, 7), trace.logits(39)].map((numbers) => Array.from(numbers));
}"""


def test_an_isolated_page_computes_the_same_text_on_several_threads(
    run: Path,  # noqa: F811
    tmp_path: Path,
    opened: Callable[..., Any],
    new_page: Callable[..., Any],
) -> None:
    file = tmp_path / "model.html"
    export_html(run, file, verify=False)
    alone, faults = opened(file)
    page = new_page(signs_in=False)
    logged: list[str] = []
    for one in (alone, page):
        one.on("console", lambda message: logged.append(message.text))
    with served(tmp_path, Cross_Origin_Opener_Policy="same-origin", Cross_Origin_Embedder_Policy="require-corp") as at:
        page.goto(f"{at}model.html")
        page.wait_for_function(
            "async () => (await gptworks.model).engine.threads === Math.min(navigator.hardwareConcurrency, 4)"
        )
        for one in (alone, page):
            generate(one, "line 1: the quick brown fox jumps over the lazy dog", max_tokens=60, seed=3)
    assert answer(page) == answer(alone)
    assert page.evaluate(TRACED) == alone.evaluate(TRACED)
    n_threads = page.evaluate("Math.min(navigator.hardwareConcurrency, 4)")
    for one, said in ((alone, "one thread"), (page, f"{n_threads} threads" if n_threads > 1 else "one thread")):
        one.click("nav >> text=About")
        one.wait_for_selector(f".about-file >> text={said}")
    assert (faults, logged) == ([], [])


def test_a_folder_is_served_from_a_plain_host(host: tuple[Path, str], new_page: Callable[..., Any]) -> None:
    folder, address = host
    yesterday = time.time() - 24 * 3600
    for file in folder.iterdir():  # for hours, a browser takes its copy of so old a file unless told to ask
        os.utime(file, (yesterday, yesterday))
    page = new_page(signs_in=False)
    page.goto(address)
    generate(page, "line 1: the", max_tokens=5)
    assert tokens(page).count() == 5
    page.goto((folder / "index.html").as_uri())
    assert "python -m http.server" in page.inner_text("#loading"), "a browser fetches nothing from file://"
    weights = next(folder.glob("weights-0*"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    page.goto(address)
    page.wait_for_selector("#loading:not([hidden]) >> text=is not the file that this page was exported with")


@pytest.mark.parametrize("width", [360, 1920])
def test_the_page_fits_its_screen(run: Path, tmp_path: Path, opened: Callable[..., Any], width: int) -> None:  # noqa: F811
    file = tmp_path / "model.html"
    export_html(run, file, verify=False)
    page, _ = opened(file, viewport={"width": width, "height": 800})
    for part in ("Play", "Model", "About"):
        page.click(f"nav >> text={part}")
        page.wait_for_selector(".part:not([hidden]) .card")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_file_that_was_cut_or_changed_says_so(run: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    file = tmp_path / "model.html"
    export_html(run, file, verify=False)
    whole = file.read_bytes()
    at = whole.index(b'id="weights-0"') + 1000
    kernels = whole.index(b'id="kernels"') + 1000
    for changed in (
        whole[:at], whole[: at - 2000], whole[: whole.index(b'id="about"') + 100], whole[:-200],
        whole[:at] + b"AB" + whole[at + 2 :], whole[:kernels] + b"A" + whole[kernels:],
    ):  # fmt: skip
        file.write_bytes(changed)
        page, _ = opened(file)
        page.locator("#loading", has_text="This file is not whole, or was changed on its way").wait_for()
    file.write_bytes(whole[: whole.index(b'id="page"') + 5000])  # its script is not whole
    opened(file)[0].get_by_text("This page has not started").wait_for()
    file.write_bytes(whole.replace(b"\n", b"\r\n"))
    page, faults = opened(file)
    generate(page, "line 1", max_tokens=3)
    assert faults == []


def test_files_opened_in_one_tab_do_not_show_each_other_s_texts(
    run: Path,  # noqa: F811
    tmp_path: Path,
    chromium: Any,
) -> None:
    files = [tmp_path / f"{weights}.html" for weights in ("int8", "int4")]
    for file in files:
        export_html(run, file, weights=file.stem, verify=False)
    context = chromium.new_context(offline=True)
    page = context.new_page()
    page.goto(files[0].as_uri())
    generate(page, "line 1", max_tokens=3)
    page.goto(files[1].as_uri())
    page.wait_for_selector("#prompt")
    assert page.locator(".text [data-part=answer]").count() == 0
    page.goto(files[0].as_uri())
    page.locator(".text [data-part=answer] >> nth=2").wait_for()
    context.close()


def test_a_page_works_in_a_frame_without_storage(run: Path, tmp_path: Path, opened: Callable[..., Any]) -> None:  # noqa: F811
    export_html(run, tmp_path / "model.html", verify=False)
    frame = tmp_path / "frame.html"
    frame.write_text('<iframe sandbox="allow-scripts" src="model.html"></iframe>', encoding="utf-8")
    page, faults = opened(frame)
    inner = page.frame_locator("iframe")
    inner.locator("#prompt").fill("line 1")
    inner.get_by_role("button", name="Generate").click()
    inner.locator(".facts", has_text="tokens/s").wait_for()
    inner.locator(".theme select").select_option("dark")
    inner.locator("html[data-theme=dark]").wait_for()
    assert [fault for fault in faults if not fault.endswith("model.html")] == []
