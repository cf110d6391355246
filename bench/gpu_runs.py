"""The parts of bench/gpu.py that generate text or run the whole loop: decoding, serving, layouts, and resuming."""

import itertools
import statistics
import subprocess
import sys
import time
from dataclasses import asdict

import torch

import infer
import serve
from gptworks.checkpoint import checkpoints, remove_checkpoint
from gptworks.config import CharTokenizer, ModelConfig
from gptworks.device import synchronize, this_device
from gptworks.infer.backends.backend import TorchBackend
from gptworks.model.gpt import GPT
from gptworks.planning.arrange import device_setting
from gptworks.planning.layout import Layout
from gptworks.planning.memory import training_peak
from gptworks.planning.params import count_parameters
from gptworks.quantize.convert import quantize_model
from gptworks.recipe import load_recipe, parse_recipe, save_recipe
from gptworks.terminal import Console
from gptworks.tokenizer import save_tokenizer, train_tokenizer
from gptworks.training import loop
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.progress import Progress
from gptworks.training.record.display import Display
from gptworks.training.record.metrics import read_metrics
from gptworks.units import readable
from gpu_setup import Setup, row, table

PROMPT = 64


def greedy(backend: TorchBackend, n_texts: int, n_new: int, times: list[float] | None = None) -> list[list[int]]:
    """Return the most probable tokens after random prompts, and add the seconds of each step to `times`."""
    engine = OnDevice(backend)
    tokens = engine.start([prompt(backend.model.config, seed) for seed in range(n_texts)])
    texts = [[token] for token in tokens]
    for _ in range(n_new - 1):
        started = time.perf_counter()
        tokens = engine.step(tokens)
        if times is not None:
            times.append(time.perf_counter() - started)
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
    return texts


class OnDevice(infer.Ours):
    """Our engine's backend on any device."""

    def __init__(self, backend: TorchBackend) -> None:
        self.backend = backend


def prompt(model: ModelConfig, seed: int) -> list[int]:
    """Return random tokens: 64, or half of the context if that is less."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(model.vocab_size, (prompt_tokens(model),), generator=generator).tolist()
    return tokens


def prompt_tokens(model: ModelConfig) -> int:
    return min(PROMPT, model.context_length // 2)


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a large sum reads."""
    block = torch.ones(2**26, device=device)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        block.sum()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return block.nbytes / min(times)


def decoding(setup: Setup) -> None:
    bandwidth = read_bandwidth(setup.device)
    print(f"Memory is read at {bandwidth / 1e9:,.0f} GB/s.\n")
    table(("model", "texts", "ms a step", "tokens/s", "of the rate at which the weights are read"))
    for size in setup.scale.trained:
        model = setup.model(size)
        weights = quantize_model(GPT(model).eval().to(setup.device), "bf16")
        n_bytes = 2 * count_parameters(model).total
        for n in setup.scale.texts:
            times: list[float] = []
            greedy(TorchBackend(weights, n, model.context_length), n, min(32, prompt_tokens(model)), times)
            seconds = statistics.median(times)
            row(size, str(n), f"{1e3 * seconds:.2f}", f"{n / seconds:,.0f}", f"{n_bytes / bandwidth / seconds:.0%}")


def serving(setup: Setup) -> None:
    size = next(iter(setup.scale.trained))
    model = setup.model(size)
    home, text = setup.folder / "served", "".join(map(chr, range(32, 127)))
    tree = {
        "name": "served", "run_dir": str(home), "model": model.model_dump(mode="json"),
        "tokenizer": {"type": "file", "path": str(setup.folder / "tokenizer")},
        "data": {"sources": [{"type": "python-stdlib"}]}, "train": {"max_steps": 1},
    }  # fmt: skip
    tokenizer = train_tokenizer(CharTokenizer(type="char"), [text])
    save_tokenizer(tokenizer, setup.folder / "tokenizer")
    home.mkdir()
    save_recipe(parse_recipe(tree), home / "recipe.yaml")
    save_tokenizer(tokenizer, home / "tokenizer")
    weights = quantize_model(GPT(model).eval(), "bf16")
    save_checkpoint(home, 1, weights.state_dict(), {}, asdict(Progress(step=1, best_step=1)))
    port, most = serve.free_port(), max(setup.scale.texts)
    command = [sys.executable, "-m", "gptworks", "serve", f"--model=bench={home}", f"--port={port}", f"--slots={most}",
               "--client-share=1", f"--device={setup.device.type}"]  # fmt: skip
    prompts = itertools.cycle([text[i:] + text[:i] for i in range(0, 90, 3)])
    length = prompt_tokens(model)
    body = {"model": "bench", "max_tokens": setup.scale.new_tokens, "temperature": 0}
    table(("model", "clients", "tokens/s", "the clients' share of a core"))
    with serve.running(serve.Server(command, "bench"), port, setup.folder / "log"):
        serve.served(port, body, [], [next(prompts)[:length]], 1)  # warms up
        for n in setup.scale.texts:
            shares: list[float] = []
            rate = serve.served(port, body, shares, [next(prompts)[:length] for _ in range(2 * n)], n)
            row(size, str(n), f"{rate:,.0f}", f"{max(shares):.0%}")


# --------------------------------------------------------------------------------------- layouts and resuming

LAYOUTS = {
    "one device": [],
    "ddp": ["train.parallel.strategy=ddp"],
    "fsdp": ["train.parallel.strategy=fsdp"],
    "tensor": ["train.parallel.strategy=ddp"],
}


RUN = {"log_every": 1, "evaluate_every": 10**6, "evaluate_sequences": 8, "checkpoint_every": 10**6, "sample_every": 0}
"""Settings of runs that only train."""


def layouts(setup: Setup) -> None:
    n = 2 if setup.device.type == "cpu" else torch.cuda.device_count()
    if n == 1:
        print("One GPU: there are no ranks to share a model.")
        return
    size, shape = list(setup.scale.trained.items())[-1]
    table(("model", "layout", "ranks", "tokens/s", "next to one rank", "planned", "measured on rank 0"))
    alone = 0.0
    for name, overrides in LAYOUTS.items():
        n_ranks = 1 if name == "one device" else n
        n_data = 1 if name == "tensor" else n_ranks
        settings = {"batch_size": n_data * shape.batch, "micro_batch_size": shape.batch}
        recipe = setup.recipe(shape, f"layout-{name}", max_steps=setup.scale.n_steps + 3, **RUN | settings)
        file = setup.folder / f"{name}.yaml"
        save_recipe(recipe, file)
        command = [sys.executable, "-m", "gptworks", "launch", f"--nproc={n_ranks}", str(file), *overrides]
        command += [f"train.parallel.tensor_parallel={n}"] if name == "tensor" else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        cells = [size, name, str(n_ranks)]
        if done.returncode:
            row(*cells, f"failed: {done.stderr.strip().splitlines()[-1][:200]}", "", "", "")
            continue
        records = [r for r in read_metrics(recipe.run_dir / "metrics.jsonl") if r["kind"] == "train"][3:]
        speed = statistics.median(record["tokens_per_second"] for record in records)
        alone = alone or speed
        ran = load_recipe(recipe.run_dir)
        layout = Layout("fsdp" if name == "fsdp" else "none", n_data, n_ranks // n_data, setup.precision)
        planned = training_peak(device_setting(ran, this_device(setup.device), layout, setup.precision)).total_bytes
        found = max(record.get("peak_allocated_bytes", 0) for record in records)
        row(*cells, f"{speed:,.0f}", f"{speed / alone:.2f} ×", readable(planned, "B"),
            readable(found, "B") if found else "")  # fmt: skip


def resuming(setup: Setup) -> None:
    """Compare a compiled run with an uncompiled one, and with one that lost its last checkpoint and was resumed."""
    shape = next(iter(setup.scale.trained.values()))

    def losses(name: str, compiled: str, resume: bool = False) -> list[float]:
        recipe = setup.recipe(shape, name, max_steps=12, compile=compiled, **RUN | {"checkpoint_every": 3})
        loop.train(recipe, resume=resume, display=Display(Console(quiet=True)))
        records = read_metrics(recipe.run_dir / "metrics.jsonl")
        return [record["loss"] for record in records if record["kind"] == "train"]

    eager, compiled, _ = losses("eager", "none"), losses("compiled", "block"), losses("broken", "block")
    remove_checkpoint(checkpoints(setup.folder / "broken")[0])
    resumed = losses("broken", "block", resume=True)
    one, other = (checkpoints(setup.folder / name)[0].model_tensors() for name in ("compiled", "broken"))
    same = resumed == compiled and all(torch.equal(one[name], other[name]) for name in one)
    table(
        ("what", "found"),
        ("compiled and uncompiled losses of 12 steps, at most off by",
         f"{max(abs(a / b - 1) for a, b in zip(compiled, eager, strict=True)):.1e}"),
        ("a resumed and an unbroken run", "equal bit for bit" if same else "DIFFERENT"),
    )  # fmt: skip
