"""Measure the studio in Chromium: its first token, and its curves while a person scrolls and zooms through many long
runs.

    python bench/studio.py --play runs/demo    # first paint, and the first token after the first click
    python bench/studio.py                     # 200 runs of 100,000 records: some 5 GB in a temporary folder
    python bench/studio.py --runs 20 --records 10000

For the curves, the script prints the time to read the logs, the time of an answer with the points of all runs, and the
frames per second of scrolling and of zooming by key with all runs drawn. It needs the dev extra and Chromium.
"""

import argparse
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from gptworks.device import device_name
from gptworks.recipe import parse_recipe, save_recipe
from gptworks.serve.server import make_server
from gptworks.serve.settings import ServerSettings
from gptworks.studio.app import create_studio

FRAMES = """
(seconds) => new Promise((done) => {
  const times = [];
  const end = performance.now() + 1000 * seconds;
  const frame = (now) => (times.push(now), now < end ? requestAnimationFrame(frame) : done(times));
  requestAnimationFrame(frame);
})
"""
SECONDS = 5
KEY = "bench"
"""The API key of the measured studio."""
FIRST_TOKEN = """() => {
  new MutationObserver(() => {
    if (window.seen || !document.querySelector(".t[data-part=answer]")) return;
    requestAnimationFrame(() => (window.seen = performance.now()));
  }).observe(document.body, {childList: true, subtree: true});
  document.querySelector(".button.primary").addEventListener("click", () => (window.clicked = performance.now()), true);
}"""
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
ROUNDS = 7


def write_runs(folder: Path, n_runs: int, n_records: int) -> None:
    """Write runs with falling, jittery losses. Most records are formatted without `json`, which is faster."""
    draw = random.Random(0)
    for n in range(n_runs):
        run = folder / f"run-{n:03}"
        run.mkdir()
        sources = [{"type": "text", "path": "none.txt"}]
        tree: dict[str, Any] = {"name": run.name, "run_dir": str(run), "seed": n, "model": {"preset": "gpt2"}}
        tree |= {"tokenizer": {"type": "char"}, "data": {"sources": sources}, "train": {"max_steps": n_records}}
        save_recipe(parse_recipe(tree), run / "recipe.yaml")
        with (run / "metrics.jsonl").open("w", encoding="utf-8") as log:
            for i in range(1, n_records + 1):
                loss = 2 + n / n_runs + 8 / math.sqrt(i) + 0.1 * draw.random()
                head = f'{{"kind": "train", "step": {i}, "tokens": {i * 16384}, "loss": {loss!r}, "seconds": {i / 8}'
                rest = f'"grad_norm": {loss / 3!r}, "learning_rate": {1 - i / n_records!r}, "tokens_per_second": 1e5'
                log.write(f"{head}, {rest}}}\n")
                if i % 1000 == 0:
                    record = {"kind": "validation", "step": i, "tokens": i * 16384, "loss": loss + 0.1}
                    log.write(json.dumps(record) + "\n")


def serve(folder: Path) -> tuple[Any, str, str]:
    """Start a studio of a folder; return its server, its address, and the link that signs a browser in once."""
    listens, found = threading.Event(), []
    app = create_studio([folder], ServerSettings(api_keys=(KEY,)), device="cpu")

    def started(port: int) -> None:
        found.append(port)
        listens.set()

    server = make_server(app, "127.0.0.1", 0, started)
    threading.Thread(target=server.run, daemon=True).start()
    listens.wait(60)
    url = f"http://127.0.0.1:{found[0]}"
    return server, url, f"{url}/#code={app.state.service.sign_in.code()}&"


def get(address: str) -> Any:
    request = urllib.request.Request(address, headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def launched(playwright: Any) -> Any:
    return playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])


def rate(times: list[float]) -> str:
    gaps = [after - before for before, after in pairwise(times)]
    worst = sorted(gaps)[int(0.99 * len(gaps))]
    return f"{1000 / statistics.fmean(gaps):.0f} frames a second, 99% of frames within {worst:.0f} ms"


def play(browser: Any, run: Path) -> None:
    """Print when the page is painted and when its first token appears, each time with a newly started server."""
    paints, loads, tokens = [], [], []
    for _ in range(ROUNDS):
        server, _, link = serve(run)
        page = browser.new_page()
        with page.expect_response(lambda answer: answer.url.endswith("/studio/load")) as loaded:
            page.goto(f"{link}/play")
        loads.append(loaded.value.finished() or loaded.value.request.timing["responseEnd"])
        paints.append(page.evaluate(PAINT))
        page.get_by_label("Prompt", exact=True).fill("Once upon a time")
        page.wait_for_timeout(1000)
        page.evaluate(FIRST_TOKEN)
        page.get_by_role("button", name="Generate", exact=True).click()
        page.wait_for_function("() => window.seen")
        tokens.append(page.evaluate("() => window.seen - window.clicked"))
        page.close()
        server.should_exit = True
    for name, times in (("first paint", paints), ("engine loaded", loads), ("first token after the click", tokens)):
        print(f"{name}: median {statistics.median(times):.0f} ms, at most {max(times):.0f} ms of {ROUNDS}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--play", type=Path, metavar="RUN", help="measure the first token of this run alone")
    asked = parser.parse_args()
    from playwright.sync_api import sync_playwright

    if asked.play is not None:
        with sync_playwright() as playwright:
            print(device_name(torch.device("cpu")), flush=True)
            play(launched(playwright), asked.play)
        return
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        write_runs(folder, asked.runs, asked.records)
        print(f"{device_name(torch.device('cpu'))}, {asked.runs} runs of {asked.records:,} records", flush=True)
        server, url, link = serve(folder)
        began = time.monotonic()
        names = [row["id"] for row in get(f"{url}/studio/runs")["runs"]]
        print(f"list: {1000 * (time.monotonic() - began):.0f} ms", flush=True)
        query = {"run": names, "key": "train.loss", "points": min(40_000 // asked.runs, 10_000)}
        found = get(f"{url}/studio/runs/curves?{urllib.parse.urlencode(query, doseq=True)}")["curves"]
        print(
            f"first curves: {1000 * (time.monotonic() - began):.0f} ms, of {sum(bool(one['x']) for one in found)} runs"
        )
        rows = get(f"{url}/studio/runs")["runs"]
        while not all(row["whole"] for row in rows):
            time.sleep(0.5)
            rows = get(f"{url}/studio/runs")["runs"]
        print(f"read in {time.monotonic() - began:.1f} s; {sum(row['thinned'] for row in rows)} runs thinned out")
        for name, more in (("all", {}), ("a tenth", {"from": 0.4 * asked.records, "to": 0.5 * asked.records})):
            began = time.monotonic()
            get(f"{url}/studio/runs/curves?{urllib.parse.urlencode(query | more, doseq=True)}")
            print(f"points of {name}: {1000 * (time.monotonic() - began):.0f} ms", flush=True)
        browser = launched(playwright)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(300_000)
        page.goto(f"{link}/runs")
        page.get_by_role("button", name="All shown").click()
        page.wait_for_function(f"() => document.body.innerText.includes('{asked.runs} drawn')")
        page.wait_for_timeout(20_000)
        page.evaluate(f"window.frames_ = ({FRAMES})({SECONDS})")
        for _ in range(20 * SECONDS):
            page.mouse.move(900, 500)
            page.mouse.wheel(0, 60)
            page.wait_for_timeout(50)
        print("scrolling:", rate(page.evaluate("window.frames_")))
        page.evaluate("scrollTo(0, 0)")
        chart = page.get_by_role("group", name="Training loss")
        chart.focus()
        page.wait_for_timeout(5000)
        page.evaluate(f"window.frames_ = ({FRAMES})({SECONDS})")
        for i in range(4 * SECONDS):
            page.keyboard.press("+" if i % 8 < 4 else "-")
            page.wait_for_timeout(250)
        print("zooming:", rate(page.evaluate("window.frames_")))
        browser.close()
        server.should_exit = True


if __name__ == "__main__":
    sys.exit(main())
