"""Measure training throughput, compared with the same model in other loops.

    python bench/train.py --text tinyshakespeare.txt            # all three workloads, about half an hour on 2 cores
    python bench/train.py --workload "char, 16 × 256" --precision fp32

Workloads: nanoGPT's character model (10.7M: 6 layers, 6 heads, width 384, context 256) in batches of 16 and 64, and
GPT-2 124M in batches of 4 × 512; no dropout. The other loops are:

- a textbook's (bench/textbook.py), in fp32 and under bf16 autocast, each also compiled;
- the textbook's with fused attention: nanoGPT's model and step, rewritten (nanoGPT itself uses bf16 only on GPUs);
- transformers' Trainer with its defaults, with bf16=True, and with bf16=True compiled;
- litGPT's (bench/litgpt_loop.py), by default compiled and in bf16.

gptworks runs its own training step on its own batches, in the precision it chooses. If the processor has no bf16
products, or with --precision fp32, only the fp32 loops run, so that one machine can emulate another
(`ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 GPTWORKS_NATIVE_MARCH=haswell`). Each loop runs in its own process,
one after the other, in several rounds; ratios are of medians. Tokens are the text's characters, also for GPT-2. The
character model's vocabulary is enlarged if the text has more characters than TinyShakespeare.

The processor limits how much faster than fp32 a loop can be, so rates of large matrix products are measured before each
loop and printed next to the loops. FLOPs count the model's products, with full attention.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import Tensor

from gptworks.config import Recipe
from gptworks.data.opened import open_prepared
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards
from gptworks.device import choose_device, choose_precision, device_name, keep_freed_memory, product_rate
from gptworks.planning.flops import forward_flops
from gptworks.recipe import parse_recipe
from gptworks.terminal import Console
from gptworks.training.loop import Run
from gptworks.training.objectives.next_token import next_token
from gptworks.training.record.display import Display
from gptworks.training.record.metrics import MetricsLog
from gptworks.training.setup import PreparedRun
from litgpt_loop import litgpt_seconds
from textbook import Shape, textbook_step

WORKLOADS = {
    "char, 16 × 256": Shape(6, 6, 384, 67, context=256, batch=16, bias=False),
    "char, 64 × 256": Shape(6, 6, 384, 67, context=256, batch=64, bias=False),
    "GPT-2 124M, 4 × 512": Shape(12, 12, 768, 50_257, context=512, batch=4, bias=True),
}
OURS = "gptworks"
FP32 = "textbook, fp32"
LOOPS = (
    FP32,
    "textbook, fp32, compiled",
    "textbook, bf16",
    "textbook, bf16, compiled",
    "nanoGPT's way, bf16, compiled",
    "Trainer, fp32",
    "Trainer, bf16",
    "Trainer, bf16, compiled",
    "litGPT, bf16, compiled",
    OURS,
)
WARM_UP_STEPS = 2


def available(precision: str, litgpt: Path | None) -> list[str]:
    """Return the loops that can run here, and print which cannot and why."""
    missing = {
        "bf16": None if precision == "bf16" else "the processor emulates it, or --precision says so",
        "litGPT": None if litgpt else "--litgpt names the interpreter of an environment that has it",
        "Trainer": None if find_spec("accelerate") else "pip install 'gptworks[bench]'",
        "compiled": None if which("g++") else "torch.compile needs a C++ compiler",
    }
    for word, reason in missing.items():
        if reason:
            print(f"without {word}: {reason}")
    return [name for name in LOOPS if not any(reason and word in name for word, reason in missing.items())]


def bench_recipe(shape: Shape, text: Path | None, folder: str, precision: str, **train: Any) -> Recipe:
    """Return the recipe of the model on the given text, or on the standard library's sources.

    Args:
        train: further settings of the section `train`.
    """
    return parse_recipe(
        {
            "name": "bench",
            "run_dir": f"{folder}/run",
            "model": {"context_length": shape.context, "n_layers": shape.n_layers, "d_model": shape.width,
                      "n_heads": shape.n_heads, "position": "learned", "norm": "layernorm", "mlp": "gelu_tanh",
                      "qk_norm": False, "attention_bias": shape.bias, "mlp_bias": shape.bias},
            "tokenizer": {"type": "char"},
            "data": {
                "sources": [{"type": "text", "path": str(text)} if text else {"type": "python-stdlib"}],
                "cache_dir": folder,
                "validation": {"fraction": 0.1, "by": "tail"},
            },
            "train": {"max_steps": 10_000, "optimizer": "adamw", "batch_size": shape.batch, "log_every": 10_000,
                      "precision": precision, **train},
        }
    )  # fmt: skip


def with_vocabulary(recipe: Recipe, vocab_size: int) -> Recipe:
    """Return the recipe with a larger vocabulary than its tokenizer's, which only a benchmark may have."""
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"vocab_size": vocab_size})})


def our_step(recipe: Recipe, folder: Path) -> Callable[[], None]:
    """Return gptworks' training step, set up as by `gptworks train`."""
    keep_freed_memory()
    prepared = open_prepared(folder)
    device = choose_device(recipe.train.device)
    setup = PreparedRun(recipe, prepared, device, choose_precision(recipe.train.precision, device))
    run = Run(setup, Display(Console(quiet=True)), next_token)
    run.reporter.log = MetricsLog(prepared.folder / "metrics.jsonl", 0)
    return run.training_step


def step_seconds(
    name: str, shape: Shape, recipe: Recipe, folder: Path, n_steps: int, litgpt: Path | None
) -> list[float]:
    """Return the seconds of each of a number of steps of a loop."""
    data = read_tokens(folder)
    bf16, compiled = "bf16" in name, "compiled" in name
    if name.startswith("Trainer"):
        from trainer import trainer_seconds

        return trainer_seconds(shape, data, n_steps, bf16=bf16, compiled=compiled)
    if litgpt and name.startswith("litGPT"):
        return litgpt_seconds(litgpt, shape, data, n_steps)
    if name == OURS:
        step = our_step(recipe, folder)
    else:
        step = textbook_step(shape, data, autocast=bf16, compiled=compiled, fused=name.startswith("nanoGPT"))
    return [seconds(step) for _ in range(n_steps)]


def read_tokens(folder: Path) -> Tensor:
    """Return up to a million tokens of the training split, int64 [N]."""
    shards = TokenShards(folder, "train")
    return torch.from_numpy(shards.read(0, min(shards.n_tokens, 10**6))).long()


def work(connection: Connection, *arguments: object) -> None:
    """Send the result of `step_seconds`; a new process runs this function."""
    connection.send(step_seconds(*arguments))  # type: ignore[arg-type]


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(
    shape: Shape, text: Path | None, rounds: int, n_steps: int, loops: list[str], precision: str, litgpt: Path | None
) -> tuple[dict[str, float], dict[str, float], int]:
    """Return tokens/s of each loop and FLOP/s of large products, as medians of all measurements, and the model's FLOPs
    per token."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    dtypes = {"fp32": torch.float32, precision: choose_precision(precision, torch.device("cpu")).dtype}
    rates: dict[str, list[float]] = {name: [] for name in dtypes}
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        recipe = bench_recipe(shape, text, folder, precision)
        prepared = prepare(recipe)
        shape = replace(shape, vocab_size=max(shape.vocab_size, prepared.manifest.vocab_size))
        recipe = with_vocabulary(recipe, shape.vocab_size)
        for name in list(times) * rounds:
            for rated, dtype in dtypes.items():
                rates[rated].append(product_rate(torch.device("cpu"), dtype))
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=work, args=(theirs, name, shape, recipe, prepared.folder, WARM_UP_STEPS + n_steps, litgpt)
            )
            process.start()
            theirs.close()
            times[name] += ours.recv()[WARM_UP_STEPS:]
            process.join()
    tokens = shape.batch * shape.context
    return (
        {name: tokens / statistics.median(taken) for name, taken in times.items()},
        {name: statistics.median(values) for name, values in rates.items()},
        forward_flops(recipe.model).training_per_token_dense,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a text file; default: the standard library's sources")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of each loop in a round")
    parser.add_argument("--precision", choices=["auto", "fp32"], default="auto", help="of the fastest loops")
    parser.add_argument(
        "--litgpt", type=Path, help="the Python of an environment with litGPT, see bench/litgpt_loop.py"
    )
    arguments = parser.parse_args()
    precision = choose_precision(arguments.precision, torch.device("cpu")).name
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}, {precision}")
    loops = available(precision, arguments.litgpt)
    for workload in arguments.workload or WORKLOADS:
        shape = WORKLOADS[workload]
        speed, rate, flops_per_token = measure(
            shape, arguments.text, arguments.rounds, arguments.steps, loops, precision, arguments.litgpt
        )
        print(
            f"\n{workload}: products {rate['fp32'] / 1e9:,.0f} GFLOP/s in fp32, {rate[precision] / 1e9:,.0f} in "
            f"{precision}, {rate[precision] / rate['fp32']:.2f} times as many"
        )
        for name, value in speed.items():
            limit = rate[precision if name == OURS or "bf16" in name else "fp32"]
            print(
                f"  {name:<29} {value:>7,.0f} tokens/s {value * flops_per_token / 1e9:>6,.0f} GFLOP/s, "
                f"{value * flops_per_token / limit:>4.0%} of its product rate; gptworks is {speed[OURS] / value:.2f} "
                "times as fast",
                flush=True,
            )
        best = max((name for name in speed if name != OURS), key=lambda name: speed[name])
        print(
            f"  {speed[OURS] / speed[FP32]:.2f} × the textbook in fp32 (the processor's limit is "
            f"{rate[precision] / (speed[FP32] * flops_per_token):.2f}), {speed[OURS] / speed[best]:.2f} × the best "
            f"peer ({best})"
        )


if __name__ == "__main__":
    main()
