"""Measure the server's tokens per second, against transformers' and llama.cpp's servers and our engine without one.

    python bench/serve.py --llama-server /path/to/llama-server

The model is GPT-2 124M with random weights and a tokenizer trained on the standard library's sources. 1, 8, 32 and 128
clients send one prompt after another to /v1/completions (about 64 tokens of the standard library each, all different,
greedy) and wait for 64 more tokens. `engine` is gptworks without a server: the same requests, as many at once, in one
process. The servers and the engine run in turns, each with all threads; figures are medians over rounds. With
`--stream`, clients read a stream of events, in which each token is sent separately.

Without --llama-server, the script looks for llama-server on PATH. A missing peer is left out, with a message. All
clients share one process. The script also prints its CPU share, and each server's CPU share without requests.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gptworks.data.sources.choose import iter_documents
from gptworks.device import device_name
from gptworks.infer.batch import run_many
from gptworks.infer.engine import load
from gptworks.infer.request import Request
from gptworks.infer.sampling import SamplingSettings
from gptworks.interop.gguf import export_gguf
from gptworks.interop.huggingface import export_huggingface
from gptworks.model.gpt import GPT
from gptworks.quantize.convert import quantize_model
from gptworks.quantize.formats import Weights
from gptworks.recipe import parse_recipe, save_recipe
from gptworks.tokenizer import save_tokenizer, train_tokenizer
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.progress import Progress

PRESET, PROMPT_CHARACTERS, NEW_TOKENS = "gpt2", 220, 64
CONCURRENCY = (1, 8, 32, 128)
REQUESTS_A_CLIENT = {1: 3, 8: 6, 32: 3, 128: 2}
KINDS: tuple[Weights, ...] = ("bf16", "int8")
PATIENCE_SECONDS = 600
IDLE_SECONDS = 4

Measure = Callable[[list[str], int], float]
"""A function from prompts, and the number of them that run at once, to tokens per second."""


@dataclass(frozen=True)
class Server:
    """The command that starts a server, and its name for the model."""

    command: list[str]
    model: str


def make_model(folder: Path) -> list[str]:
    """Write the run and its exports to `folder`; return the prompts."""
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
    return list(dict.fromkeys(text[PROMPT_CHARACTERS : 2 * PROMPT_CHARACTERS] for text in long))


def servers(folder: Path, port: int, llama_server: str | None) -> dict[str, Server]:
    """Return the servers that can run here."""
    python = [sys.executable, "-m", "gptworks", "serve", "--port", str(port)]
    slots, context = str(max(CONCURRENCY)), str(max(CONCURRENCY) * 256)
    found = {
        f"gptworks {kind}": Server(
            [*python, f"--model=bench={folder / kind}", "--slots", slots, "--client-share", "1"], "bench"
        )
        for kind in KINDS
    }
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if transformers := shutil.which("transformers", path=beside):
        serve = [transformers, "serve", str(folder / "hf"), "--dtype", "bfloat16", "--device", "cpu"]
        found["transformers bf16"] = Server([*serve, "--port", str(port)], str(folder / "hf"))
    else:
        print("without transformers: pip install 'transformers[serving]'")
    if llama_server:
        for kind in ("bf16", "q8_0"):
            own = [llama_server, "-m", str(folder / f"{kind}.gguf"), "--parallel", slots, "-c", context]
            own += ["-t", str(torch.get_num_threads()), "--port", str(port), "--no-webui"]
            found[f"llama.cpp {kind}"] = Server(own, "bench")
    else:
        print("without llama.cpp: give --llama-server")
    return found


@contextmanager
def running(server: Server, port: int, log: Path) -> Iterator[int]:
    """Start a server; yield its process id once it answers."""
    with log.open("w") as out:
        process = subprocess.Popen(server.command, stdout=out, stderr=out)
        try:
            for _ in range(PATIENCE_SECONDS):
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(server.command)} ended at once:\n{log.read_text()[-2000:]}")
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(1)
            else:
                raise SystemExit(f"{' '.join(server.command)} did not answer in {PATIENCE_SECONDS} seconds.")
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


class Exchange(asyncio.Protocol):
    """One request on its own connection, and all bytes received."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
        self.request = head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content
        self.received = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)

    @property
    def n_tokens(self) -> int:
        """Number of generated tokens, from the answer's `usage`."""
        counts = re.findall(rb'"completion_tokens": ?(\d+)', self.received)
        if not self.received.startswith(b"HTTP/1.1 200") or not counts:
            raise SystemExit(f"not an answer: {bytes(self.received[:1000])!r}")
        return int(counts[-1])


def served(port: int, body: dict[str, Any], shares: list[float], prompts: list[str], n_clients: int) -> float:
    """Return a server's tokens per second; append the CPU share of the clients to `shares`."""

    async def client(own: list[str]) -> int:
        n_tokens = 0
        for prompt in own:
            exchange = Exchange("/v1/completions", {**body, "prompt": prompt})
            await asyncio.get_running_loop().create_connection(lambda made=exchange: made, "127.0.0.1", port)  # type: ignore[misc]
            await asyncio.wait_for(exchange.ended, PATIENCE_SECONDS)
            n_tokens += exchange.n_tokens
        return n_tokens

    async def clients() -> int:
        return sum(await asyncio.gather(*(client(prompts[i::n_clients]) for i in range(n_clients))))

    began, busy = time.perf_counter(), time.process_time()
    n_tokens = asyncio.run(clients())
    seconds = time.perf_counter() - began
    shares.append((time.process_time() - busy) / seconds)
    return n_tokens / seconds


def work_alone(run: Path, orders: Connection) -> None:
    """Answer each order (prompts, and the number of them that run at once) with the engine's tokens per second; None
    ends the process."""
    engine = load(run, n_slots=max(CONCURRENCY))
    engine.warm_up()
    settings = SamplingSettings(temperature=0, max_tokens=NEW_TOKENS)

    def submit(prompt: str) -> Request:
        return engine.submit(prompt, settings)

    orders.send(None)
    while order := orders.recv():
        prompts, n_at_once = order
        left, n_before, began = iter(prompts), engine.statistics().generated_tokens, time.perf_counter()
        for _, ended in run_many(engine, lambda n, left=left: itertools.islice(left, n), submit, n_at_once):  # type: ignore[misc]
            assert isinstance(ended, Request), ended
        orders.send((engine.statistics().generated_tokens - n_before) / (time.perf_counter() - began))


@contextmanager
def alone(run: Path) -> Iterator[Measure]:
    """Run the engine in a new process; yield a function that measures it."""
    orders, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=work_alone, args=(run, theirs), daemon=True)
    process.start()
    orders.recv()

    def measure(prompts: list[str], n_at_once: int) -> float:
        orders.send((prompts, n_at_once))
        rate: float = orders.recv()
        return rate

    yield measure
    orders.send(None)
    process.join()


def idle_share(process: int) -> float:
    """Return the CPU share of a process without requests; NaN if the system does not report it."""

    def seconds() -> float:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return float("nan")
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(1)
    before = seconds()
    time.sleep(IDLE_SECONDS)
    return (seconds() - before) / IDLE_SECONDS


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream", action="store_true", help="clients read a stream of events")
    parser.add_argument("--llama-server", default=shutil.which("llama-server"), help="the program of llama.cpp")
    parser.add_argument("--only", default="", help="run those whose name begins so, and the engine")
    arguments = parser.parse_args()
    rates: dict[tuple[str, int], list[float]] = {}
    shares: list[float] = []
    idle: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, port = Path(temporary), free_port()
        prompts = itertools.cycle(make_model(folder))
        found = servers(folder, port, arguments.llama_server)
        found = {name: server for name, server in found.items() if name.startswith(arguments.only)}

        def take(name: str, measure: Measure) -> None:
            measure([next(prompts)], 1)  # a warm-up
            for n in CONCURRENCY:
                own = [next(prompts) for _ in range(n * REQUESTS_A_CLIENT[n])]
                rates.setdefault((name, n), []).append(measure(own, n))

        for _ in range(arguments.rounds):
            for kind in KINDS:
                with alone(folder / kind) as measure:
                    take(f"engine {kind}", measure)
            for name, server in found.items():
                body: dict[str, Any] = {"model": server.model, "max_tokens": NEW_TOKENS, "temperature": 0}
                if arguments.stream:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                with running(server, port, folder / "log") as process:
                    take(name, partial(served, port, body, shares))
                    idle.setdefault(name, []).append(idle_share(process))
    names = [*(f"engine {kind}" for kind in KINDS), *found]
    report({key: statistics.median(values) for key, values in rates.items()}, names)
    print("of a core when nobody asks: " + ", ".join(f"{name} {max(each):.1%}" for name, each in idle.items()))
    print(f"the clients took at most {max(shares):.0%} of a core")


def report(rate: dict[tuple[str, int], float], names: list[str]) -> None:
    """Print the table, and our server's rate divided by the best peer's and by the engine's."""
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}; GPT-2 124M, {NEW_TOKENS} tokens a request")
    print(f"{'tokens/s':<20}" + "".join(f"{n:>8}" for n in CONCURRENCY) + "   requests at once")
    for name in names:
        print(f"{name:<20}" + "".join(f"{rate[name, n]:>8,.0f}" for n in CONCURRENCY))
    peers = [name for name in names if not name.startswith(("gptworks", "engine"))]
    best = {n: max((rate[name, n] for name in peers), default=float("nan")) for n in CONCURRENCY}
    for ours in (name for name in names if name.startswith("gptworks")):
        engine = ours.replace("gptworks", "engine")
        print(f"{ours} / the best peer: " + ", ".join(f"{rate[ours, n] / best[n]:.2f}" for n in CONCURRENCY))
        print(f"{ours} / the engine alone: " + ", ".join(f"{rate[ours, n] / rate[engine, n]:.0%}" for n in CONCURRENCY))


if __name__ == "__main__":
    main()
