"""The server beside transformers' and llama.cpp's: tokens per second at 1, 8 and 32 requests at once, from one run.

    python bench/serve.py --llama-server /path/to/llama-server

The model is GPT-2 124M with random weights and a tokenizer made of the standard library's sources. Each client sends
one prompt after another to /v1/completions (some 64 tokens of the standard library each, no two alike, greedy) and
waits for 64 tokens more. Servers run one at a time, take turns, and have all threads; figures are medians over rounds.
Without --llama-server it is looked for on PATH; a peer that is not there is left out, and said.
"""

import argparse
import asyncio
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import torch

from gptworks.checkpoint import save_checkpoint
from gptworks.data.sources.choose import iter_documents
from gptworks.device import device_name
from gptworks.interop.gguf import export_gguf
from gptworks.interop.huggingface import export_huggingface
from gptworks.model import GPT
from gptworks.quantize.convert import quantize_model
from gptworks.quantize.formats import Weights
from gptworks.recipe import parse_recipe, save_recipe
from gptworks.tokenizer import save_tokenizer, train_tokenizer
from gptworks.train.progress import Progress

PRESET, PROMPT_CHARACTERS, NEW_TOKENS = "gpt2", 220, 64
CONCURRENCY = (1, 8, 32)
REQUESTS_A_CLIENT = 2
KINDS: tuple[Weights, ...] = ("bf16", "int8")
PATIENCE_SECONDS = 600


@dataclass(frozen=True)
class Server:
    """How a server is started, and what it calls the model."""

    command: list[str]
    model: str


def make_model(folder: Path) -> list[str]:
    """The run and its exports, in `folder`; the prompts."""
    torch.manual_seed(0)
    tree: dict[str, Any] = {
        "name": "bench",
        "run_dir": str(folder / "run"),
        "model": {"preset": PRESET},
        "tokenizer": {"type": "bpe", "vocab_size": 50_257},
        "data": {"sources": [{"type": "python-stdlib"}], "cache_dir": str(folder)},
        "train": {"max_steps": 1},
    }
    recipe = parse_recipe(tree)
    texts = [piece.text for piece in iter_documents(recipe.data.sources)]
    tokenizer = train_tokenizer(recipe.tokenizer, texts)
    model = GPT(recipe.model)
    for name, weights in (("run", model), *((kind, quantize_model(model, kind)) for kind in KINDS)):
        (folder / name).mkdir()
        save_recipe(recipe, folder / name / "recipe.yaml")
        save_tokenizer(tokenizer, folder / name / "tokenizer")
        save_checkpoint(folder / name, 1, weights.state_dict(), {}, asdict(Progress(step=1, best_step=1)))
    export_huggingface(folder / "run", folder / "hf", precision="bf16", verify=False)
    for kind in ("bf16", "q8_0"):
        export_gguf(folder / "run", folder / f"{kind}.gguf", quantization=kind)  # type: ignore[arg-type]
    long = [text for text in texts if len(text) > 4 * PROMPT_CHARACTERS]
    return [text[PROMPT_CHARACTERS : 2 * PROMPT_CHARACTERS] for text in long]


def servers(folder: Path, port: int, llama_server: str | None) -> dict[str, Server]:
    """Those that can run here."""
    python = [sys.executable, "-m", "gptworks", "serve"]
    slots, context = max(CONCURRENCY), max(CONCURRENCY) * 256
    found = {
        f"gptworks {kind}": Server([*python, f"--model=bench={folder / kind}", "--port", str(port)], "bench")
        for kind in KINDS
    }
    if find_spec("transformers") and shutil.which("transformers"):
        serve = ["transformers", "serve", str(folder / "hf"), "--dtype", "bfloat16", "--device", "cpu"]
        found["transformers bf16"] = Server([*serve, "--port", str(port)], str(folder / "hf"))
    else:
        print("without transformers: pip install 'transformers[serving]'")
    if llama_server:
        for kind in ("bf16", "q8_0"):
            own = [llama_server, "-m", str(folder / f"{kind}.gguf"), "--parallel", str(slots), "-c", str(context)]
            own += ["-t", str(torch.get_num_threads()), "--port", str(port), "--no-webui"]
            found[f"llama.cpp {kind}"] = Server(own, "bench")
    else:
        print("without llama.cpp: give --llama-server")
    return found


@contextmanager
def running(server: Server, port: int, log: Path) -> Iterator[str]:
    """Its address, once it is up."""
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(server.command, stdout=out, stderr=out)
        try:
            for _ in range(PATIENCE_SECONDS):
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(server.command)} ended at once:\n{log.read_text()[-2000:]}")
                try:
                    if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(1)
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


async def throughput(address: str, model: str, prompts: list[str], n_clients: int) -> float:
    """Generated tokens per second over all clients, as the server's `usage` counts them."""

    async def client(own: list[str]) -> int:
        tokens = 0
        for prompt in own:
            body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
            response = await session.post(f"{address}/v1/completions", json=body)
            if response.status_code != 200:
                raise SystemExit(f"{address}: {response.status_code} {response.text[:500]}")
            tokens += response.json()["usage"]["completion_tokens"]
        return tokens

    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as session:
        started = time.perf_counter()
        counts = await asyncio.gather(*(client(prompts[i::n_clients]) for i in range(n_clients)))
        return sum(counts) / (time.perf_counter() - started)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-server", default=shutil.which("llama-server"), help="the program of llama.cpp")
    arguments = parser.parse_args()
    rates: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, port = Path(temporary), free_port()
        prompts = iter(make_model(folder))
        found = servers(folder, port, arguments.llama_server)
        for name in list(found) * arguments.rounds:
            server = found[name]
            with running(server, port, folder / "log") as address:
                asyncio.run(throughput(address, server.model, [next(prompts)], 1))  # warms up
                for n_clients in CONCURRENCY:
                    own = [next(prompts) for _ in range(n_clients * REQUESTS_A_CLIENT)]
                    rate = asyncio.run(throughput(address, server.model, own, n_clients))
                    rates.setdefault((name, n_clients), []).append(rate)
    report({key: statistics.median(values) for key, values in rates.items()}, list(found))


def report(rate: dict[tuple[str, int], float], names: list[str]) -> None:
    """The table, and our standing at each number of clients."""
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}; GPT-2 124M, {NEW_TOKENS} tokens a request")
    print(f"{'tokens/s':<20}" + "".join(f"{n:>8}" for n in CONCURRENCY) + "   requests at once")
    for name in names:
        print(f"{name:<20}" + "".join(f"{rate[name, n]:>8,.0f}" for n in CONCURRENCY))
    for ours in (name for name in names if name.startswith("gptworks")):
        peers = [name for name in names if not name.startswith("gptworks")]
        best = {n: max((rate[name, n] for name in peers), default=float("nan")) for n in CONCURRENCY}
        print(f"{ours} / the best peer: " + ", ".join(f"{rate[ours, n] / best[n]:.2f}" for n in CONCURRENCY))


if __name__ == "__main__":
    main()
