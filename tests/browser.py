"""Fixtures: a studio in a thread over tiny runs, and a real browser that opens its page.

A browser is looked for as GPTWORKS_BROWSER and `chromium`. GPTWORKS_AXE names axe-core's script (make test-browser sets
it); screenshots are kept in the folder GPTWORKS_SCREENSHOTS, where it is set. conftest.py offers the fixtures.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

HOSTILE = "<img src=x onerror=alert(1)>"
"""A run's folder, and what its model writes."""
LONG = "long"
"""A run whose texts do not end soon: a random model with a context of 3,000 tokens and a chat template."""

AXE, SCREENSHOTS = (
    Path(given).absolute() if (given := os.environ.get(name)) else None
    for name in ("GPTWORKS_AXE", "GPTWORKS_SCREENSHOTS")
)
"""As given where the tests begin: some change the folder."""

WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) =>
  violations.push(`${violatedDirective} ${blockedURI}`));
window.alert = () => violations.push("alert");
let drawn = 0;
crypto.getRandomValues = (array) => array.map(() => (drawn += 7919));
"""
"""Watches what the page may not do; the seeds that it draws are the same in each test."""


def make_runs(folder: Path) -> Path:
    """Make the folder `runs`: a base run with several checkpoints, a tuned one, one that writes markup, and a long
    one."""
    import chats
    import serving
    from gptworks.recipe import parse_recipe
    from gptworks.training.loop import train

    runs, texts = folder / "runs", folder / "texts"
    texts.mkdir()
    learns = {"max_steps": 60, "evaluate_every": 20, "checkpoint_every": 20, "keep_checkpoints": 5}
    learns |= {"learning_rate": 0.01, "sample_prompts": ["line 7:", "line 8: the quick"]}
    base = chats.base_tree(texts, **learns, keep_every=20) | {"run_dir": str(runs / "base")}
    tuned = chats.tune_tree(texts, **learns | {"max_steps": 40}) | {
        "run_dir": str(runs / "group" / "tuned"), "initialize_from": str(runs / "base"),
    }  # fmt: skip
    tuned["tokenizer"] |= {"path": str(runs / "base" / "tokenizer")}
    markup = folder / "markup"
    markup.mkdir()
    (markup / "text.txt").write_text(f"<script>alert(1)</script> {HOSTILE} & more\n" * 800, encoding="utf-8")
    hostile = chats.base_tree(markup, **learns) | {"run_dir": str(runs / HOSTILE)}
    hostile["tokenizer"] |= {"vocab_size": 280}
    for tree in (base, tuned, hostile):
        train(parse_recipe(tree))
    serving.write_run(runs / LONG)
    return runs


class Studio:
    """A running studio: its address, its folder of runs, and an HTTP client."""

    def __init__(self, url: str, runs: Path, key: str | None, app: Any) -> None:
        self.url, self.runs, self.key, self.app = url, runs, key, app

    def http(self) -> Any:
        """Return an HTTP client."""
        import httpx2 as httpx

        sign_in = self.app.state.service.sign_in
        session = sign_in.exchange(sign_in.code())
        headers = {"authorization": f"Bearer {self.key or session.key}"}
        cookies = {f"gptworks-{self.url.rpartition(':')[2]}": session.cookie}
        return httpx.Client(base_url=self.url, headers=headers, cookies=cookies, timeout=120)

    def link(self, url: str | None = None) -> str:
        """Return an address of the studio that signs a browser in; it works once."""
        base, _, rest = (url or self.url).partition("#")
        rest = rest or "/play"
        code = self.app.state.service.sign_in.code()
        return f"{base.rstrip('/')}/#code={code}&{rest}"

    def asked(self, path: str, /, **body: Any) -> Any:
        """Return the server's answer to a request."""
        import serving

        with self.http() as http:
            return serving.posted(http, path, **body)


@contextmanager
def open_studio(runs: Path | None = None, key: str | None = None, read_only: bool = False) -> Iterator[Studio]:
    """Run a studio inside the `with`; None: of the folder `runs` here, which its first run makes."""
    from gptworks.serve.settings import ServerSettings
    from gptworks.studio.app import create_studio

    settings = ServerSettings(api_keys=() if key is None else (key,))
    app = create_studio([] if runs is None else [runs], settings, device="cpu", read_only=read_only)
    with listening(app) as url:
        OPEN[url] = Studio(url, app.state.studio.library.roots[0], key, app)
        yield OPEN[url]
        del OPEN[url]


OPEN: dict[str, Studio] = {}
"""The studios that are open, by address."""


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serve an app inside the `with`; yield its address."""
    import serving

    with serving.listening(app) as (_, _, url):
        yield url


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    with open_studio(make_runs(tmp_path_factory.mktemp("studio")), key="sk-test") as opened:
        yield opened


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Start a browser without pages."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")
    path = os.environ.get("GPTWORKS_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium, or name one with GPTWORKS_BROWSER")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def new_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function that opens a page in a new context and signs it in to a studio. Fails if a page breaks the
    content policy, runs text that it shows, or throws an error."""
    contexts, problems = [], []

    def opened(signs_in: bool = True, **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(WATCH)
        page.on("pageerror", lambda error: problems.append(str(error)))
        if signs_in:
            goto = page.goto

            def signed_in(url: str, **how: Any) -> Any:
                found = next((one for base, one in OPEN.items() if url == base or url.startswith(f"{base}/")), None)
                return goto(url if found is None else found.link(url), **how)

            page.goto = signed_in
        return page

    yield opened
    for context in contexts:
        for page in context.pages:
            problems += page.evaluate("() => window.violations ?? []")
        context.close()
    assert not problems, problems


@pytest.fixture
def page(new_page: Callable[..., Any], studio: Studio) -> Any:
    """Open the studio's page."""
    opened = new_page()
    opened.goto(studio.url)
    opened.wait_for_selector(".play")
    return opened


def axe(page: Any, rules: Sequence[str] = ()) -> list[str]:
    """Return the problems that axe-core finds on the page in its present state, by all rules or by those named."""
    if AXE is None:
        pytest.skip("needs axe-core: make test-browser fetches it and names it with GPTWORKS_AXE")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    options = {"resultTypes": ["violations"]} | ({"runOnly": list(rules)} if rules else {})
    found = page.evaluate("(options) => axe.run(document, options)", options)["violations"]
    return [f"{one['id']}: {node['html'][:200]} {node['failureSummary']}" for one in found for node in one["nodes"]]


def screenshot(page: Any, name: str, full_page: bool = False) -> None:
    """Save a screenshot of the page if a folder for them is set."""
    if SCREENSHOTS is not None:
        page.screenshot(path=str(SCREENSHOTS / f"{name}.png"), full_page=full_page)


# --------------------------------------------------------------------------------------------- what a person does


def finish(page: Any) -> None:
    """Wait until no text is being generated."""
    page.wait_for_function(
        "() => document.querySelectorAll('.facts').length && !document.querySelector('[aria-busy=true]')"
    )


def choose(page: Any, model: str, column: int = 1) -> None:
    page.get_by_label(f"Model of column {column}").select_option(model)


def setting(page: Any, name: str, value: object) -> None:
    page.locator(f"#setting-{name}").fill(str(value))


def generate(page: Any, prompt: str, **settings: object) -> None:
    for name, value in settings.items():
        setting(page, name, value)
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Generate", exact=True).click()
    finish(page)


def answer(page: Any, column: int = 0) -> str:
    """Return the last text that the model of a column wrote."""
    return page.locator(".column").nth(column).locator(".text").last.evaluate(
        "(pane) => [...pane.querySelectorAll('.t[data-part=answer]')].map((token) => token.textContent).join('')"
    )  # fmt: skip


def shown_prompt(page: Any) -> str:
    return page.locator(".column .text").last.evaluate(
        "(pane) => [...pane.querySelectorAll('.t[data-part=prompt]')].map((token) => token.textContent).join('')"
    )


def tokens(page: Any) -> Any:
    return page.locator(".column .text").last.locator(".t[data-part=answer]")


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()
    finish(page)
