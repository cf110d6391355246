"""Measure a model in one HTML file: its size, first paint and speed, compared with transformers.js and our engine.

    python bench/html_file.py [RUN] [--modules FOLDER] [--converter PYTHON]

RUN is a run that Hugging Face's formats can express. Without RUN, two steps of the recipe `demo` are trained, since
weights do not matter here. All engines decode the same prompt at temperature 0.8, one text at a time, and count the
tokens after the first. They alternate, and figures are medians of the rounds. The engines are:

- the page, used as by a person, from the click to the drawn text, in Chromium: from a file (one thread), and from a
  local server with the headers that allow threads;
- transformers.js in the same browser, from the same server, with the same model in q8 and fp32, converted by
  `export --format hf` and ONNX;
- our engine in int8, timed like `gptworks chat`.

transformers.js is left out, and the reason printed, without a folder of node_modules and a Python for the conversion:

    npm install --prefix FOLDER --ignore-scripts @huggingface/transformers
    python -m venv VENV && VENV/bin/pip install optimum-onnx onnxruntime

The script needs Playwright, Chromium and an idle machine with at least two cores; it takes some five minutes.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROMPT, TEMPERATURE = "def read(path):\n    ", 0.8
THREADS = (1, 2)
GOALS = (
    ("page, 1 thread", "transformers.js q8, 1 thread", 3.0),
    ("page, 2 threads", "transformers.js q8, 2 threads", 3.0),
    ("page, 1 thread", "transformers.js fp32, 1 thread", 3.0),
    ("page, 2 threads", "transformers.js fp32, 2 threads", 3.0),
    ("page, 1 thread", "engine, 1 thread", 0.4),
    ("page, 2 threads", "engine, 2 threads", 0.4),
)
"""Names of two engines, and the ratio of their speeds to reach."""

QUANTIZE = """
import sys
from onnxruntime.quantization import QuantType, quantize_dynamic
quantize_dynamic(sys.argv[1], sys.argv[2], weight_type=QuantType.QInt8)
"""

THEIRS = """<!DOCTYPE html><script type="module">
import { AutoTokenizer, AutoModelForCausalLM, env } from "/modules/node_modules/@huggingface/transformers/dist/FILE";
const [kind, n_threads] = location.hash.slice(1).split(",");
env.allowRemoteModels = false;
env.allowLocalModels = true;
env.localModelPath = "/models/";
Object.assign(env.backends.onnx.wasm, { numThreads: Number(n_threads), proxy: false,
  wasmPaths: "/modules/node_modules/onnxruntime-web/dist/" });
const tokenizer = await AutoTokenizer.from_pretrained("model");
const model = await AutoModelForCausalLM.from_pretrained("model", { dtype: kind, device: "wasm" });
globalThis.measure = async (prompt, n, temperature) => {
  const times = [];
  const streamer = { put: () => times.push(performance.now()), end() {} };
  await model.generate({ ...tokenizer(prompt), max_new_tokens: n, min_new_tokens: n, do_sample: true, top_k: 0,
    temperature, streamer });
  times.shift(); // the prompt
  return (1000 * (times.length - 1)) / (times.at(-1) - times[0]);
};
globalThis.used = [crossOriginIsolated, env.backends.onnx.wasm.numThreads];
</script>"""

FIRST_PAINT = """() => new Promise((resolve) => new PerformanceObserver((list) => {
  const found = list.getEntriesByName("first-contentful-paint");
  if (found.length) resolve(found[0].startTime);
}).observe({ type: "paint", buffered: true }))"""

NEW_FACTS = """(before) => {
  const said = [...document.querySelectorAll("p.facts")].at(-1)?.innerText ?? "";
  return said !== before && said.includes("tokens/s");
}"""
"""JavaScript function that returns whether a new text is complete: its facts, with a new seed, differ from `before`."""


# ------------------------------------------------------------------------------------------------------ what is made


def make_run(folder: Path) -> Path:
    """Train two steps of the recipe `demo`, and return the run folder."""
    run = folder / "demo"
    changes = [f"train.{name}=2" for name in ("max_steps", "evaluate_every", "checkpoint_every", "keep_every")]
    settings = [f"run_dir={run}", "train.sample_every=0", *changes]
    subprocess.run([sys.executable, "-m", "gptworks", "train", "demo", *settings], check=True, capture_output=True)
    return run


def converted(run: Path, folder: Path, converter: Path) -> None:
    """Write the model for transformers.js to `folder`/models/model, in fp32 and q8."""
    exported, models = folder / "hf", folder / "models" / "model"
    subprocess.run(
        [sys.executable, "-m", "gptworks", "export", str(run), str(exported), "--no-verify"],
        check=True, capture_output=True,
    )  # fmt: skip
    (models / "onnx").mkdir(parents=True)
    task = ["--model", str(exported), "--task", "text-generation-with-past", str(folder / "onnx")]
    command = [str(converter), "-m", "optimum.commands.optimum_cli", "export", "onnx", *task]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"optimum-onnx does not convert the model: {done.stderr[-800:]}")
    for file in (folder / "onnx").glob("*.json"):
        shutil.copy(file, models)
    shutil.copy(folder / "onnx" / "model.onnx", models / "onnx" / "model.onnx")
    quantized = models / "onnx" / "model_quantized.onnx"
    subprocess.run([str(converter), "-c", QUANTIZE, str(models / "onnx" / "model.onnx"), str(quantized)], check=True)


def why_left_out(modules: Path | None, converter: Path | None) -> str | None:
    """Return why transformers.js cannot be measured; None if it can."""
    if modules is None or not (modules / "node_modules" / "@huggingface" / "transformers").is_dir():
        return "--modules names no folder with node_modules/@huggingface/transformers (npm makes it)"
    if converter is None or subprocess.run([converter, "-c", "import optimum.onnxruntime"], check=False).returncode:
        return "--converter names no Python with optimum-onnx and onnxruntime"
    return None


@contextmanager
def served(folder: Path, modules: Path | None) -> Iterator[str]:
    """Serve a folder, and `modules` below it, with the headers that isolate a page; yield the address."""
    if modules is not None:
        (folder / "modules").symlink_to(modules.resolve(), target_is_directory=True)

    class Handler(SimpleHTTPRequestHandler):
        extensions_map = SimpleHTTPRequestHandler.extensions_map | {".mjs": "text/javascript"}

        def end_headers(self) -> None:
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
            super().end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


# -------------------------------------------------------------------------------------------------- what is measured


class Page:
    """The exported page in a tab, used as by a person."""

    def __init__(self, tab: Any, address: str, n_threads: int, n_tokens: int) -> None:
        self.tab = tab
        tab.goto(address)
        tab.wait_for_function("async (n) => (await gptworks.model).engine.threads === n", arg=n_threads)
        tab.fill("#prompt", PROMPT)
        tab.fill("#setting-max_tokens", str(n_tokens))
        tab.fill("#setting-temperature", str(TEMPERATURE))

    def tokens_per_second(self) -> float:
        facts = self.tab.locator("p.facts").last
        before = facts.inner_text() if facts.count() else ""
        self.tab.click("text=Generate")
        self.tab.wait_for_function(NEW_FACTS, arg=before)
        found = re.search(r"([\d.,]+) tokens/s", facts.inner_text())
        assert found
        return float(found[1].replace(",", ""))


class Theirs:
    """transformers.js in a tab."""

    def __init__(self, tab: Any, address: str, kind: str, n_threads: int, n_tokens: int) -> None:
        self.tab, self.n_tokens = tab, n_tokens
        tab.goto(f"{address}/theirs.html#{kind},{n_threads}")
        tab.wait_for_function("() => globalThis.used")
        assert tab.evaluate("used") == [True, n_threads]

    def tokens_per_second(self) -> float:
        asked = [PROMPT, self.n_tokens, TEMPERATURE]
        return float(self.tab.evaluate("([prompt, n, temperature]) => measure(prompt, n, temperature)", asked))


class Ours:
    """Our engine in a process of its own."""

    def __init__(self, run: Path, n_threads: int, n_tokens: int) -> None:
        spawn = get_context("spawn")
        self.orders, theirs = spawn.Pipe()
        spawn.Process(target=work, args=(run, n_threads, n_tokens, theirs), daemon=True).start()
        self.orders.recv()

    def tokens_per_second(self) -> float:
        self.orders.send(True)
        return float(self.orders.recv())


def work(run: Path, n_threads: int, n_tokens: int, orders: Connection) -> None:
    """Answer each order with the tokens per second of one text."""
    import torch

    from gptworks.infer import load
    from gptworks.infer.text import Pace

    torch.set_num_threads(n_threads)
    engine = load(run, weights="int8")
    orders.send(0.0)
    while orders.recv():
        pace = Pace()
        for piece in engine.pieces(PROMPT, max_tokens=n_tokens, temperature=TEMPERATURE, ignore_eos=True):
            pace.push(piece)
        orders.send(pace.tokens_per_second)


# --------------------------------------------------------------------------------------------------------------- all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--modules", type=Path, help="folder with node_modules/@huggingface/transformers")
    parser.add_argument("--converter", type=Path, help="a Python with optimum-onnx and onnxruntime")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(arguments, Path(temporary))


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    from gptworks.interop.html_file import export_html

    run = arguments.run or make_run(folder)
    file = folder / "model.html"
    export = export_html(run, file, verify=False)
    left_out = why_left_out(arguments.modules, arguments.converter)
    if left_out is None:
        converted(run, folder, arguments.converter)
        dist = arguments.modules / "node_modules" / "@huggingface" / "transformers" / "dist"
        name = next(name for name in ("transformers.min.js", "transformers.js") if (dist / name).exists())
        (folder / "theirs.html").write_text(THEIRS.replace("FILE", name), encoding="utf-8")
    with served(folder, arguments.modules) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        browser_name = f"Chromium {browser.version}"
        n = arguments.tokens
        engines: dict[str, Any] = {}
        for n_threads, words in zip(THREADS, ("1 thread", "2 threads"), strict=True):
            place = file.as_uri() if n_threads == 1 else f"{address}/model.html"
            engines[f"page, {words}"] = Page(browser.new_page(), place, n_threads, n)
            for kind in ("q8", "fp32") if left_out is None else ():
                tab = browser.new_page()
                engines[f"transformers.js {kind}, {words}"] = Theirs(tab, address, kind, n_threads, n)
            engines[f"engine, {words}"] = Ours(run, n_threads, n)
        rates: dict[str, list[float]] = {name: [] for name in engines}
        paints: list[float] = []
        for turn in range(arguments.rounds + 1):
            tab = browser.new_page()
            tab.goto(file.as_uri())
            paint = tab.evaluate(FIRST_PAINT)
            tab.close()
            for name, engine in engines.items():
                rate = engine.tokens_per_second()
                if turn:  # the first round is a warm-up
                    rates[name].append(rate)
            paints += [paint] if turn else []
        browser.close()
    report(export, paints, {name: statistics.median(all_) for name, all_ in rates.items()}, browser_name, left_out)


def report(export: Any, paints: list[float], rates: dict[str, float], browser: str, left_out: str | None) -> None:
    import torch

    from gptworks.device import device_name

    print(f"{device_name(torch.device('cpu'))}, {browser}; {export.parameters:,} parameters in {export.weights}")
    print(f"size {export.bytes / 1e6:.2f} MB; first contentful paint {statistics.median(paints):.0f} ms")
    if left_out:
        print(f"transformers.js is left out: {left_out}")
    print(f"{'':<32}{'tokens/s':>10}")
    for name, rate in rates.items():
        print(f"{name:<32}{rate:>10,.0f}")
    for ours, theirs, goal in GOALS:
        if theirs in rates:
            print(f"{ours} / {theirs}: {rates[ours] / rates[theirs]:.2f} (goal {goal})")


if __name__ == "__main__":
    main()
