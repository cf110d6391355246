"""Training throughput beside the same model in a textbook loop, from one run.

    python bench/train.py --text tinyshakespeare.txt

The model is nanoGPT's character model: 6 layers, 6 heads, width 384, context 256, batch 16, no dropout. The textbook
loops are eager, attention written out, AdamW as it comes: with a module for each head, as first chapters have it; with
the heads as one batch, in fp32 and under bf16 autocast. gptworks runs its own training step, its own batches, in the
precision it chooses. Each loop has a process of its own, as its user would run it; they take turns, and the ratios are
of medians. How far a ratio to fp32 can go is set by the processor: beside it stand the rates of large matrix products.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from gptworks.config import Recipe
from gptworks.data.prepare import Prepared, open_prepared, prepare
from gptworks.data.shards import TokenShards
from gptworks.device import choose_device, choose_precision, device_name, keep_freed_memory
from gptworks.plan.flops import forward_flops
from gptworks.recipe import parse_recipe, with_vocab_size
from gptworks.train.display import Display
from gptworks.train.loop import Run
from gptworks.train.metrics import MetricsLog
from gptworks.train.objectives import next_token
from textbook import BATCH, CONTEXT, HEADS, LAYERS, WIDTH, BatchedHeads, HeadByHead, textbook_step

OURS = "gptworks, bf16 where native"
LOOPS = ("textbook, head by head, fp32", "textbook, fp32", "textbook, bf16 autocast", OURS)


def build_step(name: str, recipe: Recipe, prepared: Prepared) -> Callable[[], None]:
    """The training step of one of the loops."""
    if name == OURS:
        keep_freed_memory()  # as gptworks.train.loop.train does
        device = choose_device("cpu")
        precision = choose_precision("auto", device)
        run = Run(recipe, prepared.folder, prepared.tokenizer, device, precision, next_token, Display())
        run.log = MetricsLog(prepared.folder / "metrics.jsonl", 0)
        return run.training_step
    shards = TokenShards(prepared.folder, "train")
    data = torch.from_numpy(shards.read(0, min(shards.n_tokens, 10**6)))
    attention = HeadByHead if "head by head" in name else BatchedHeads
    return textbook_step(recipe.model.vocab_size, data, attention, autocast="autocast" in name)


def work(name: str, recipe: Recipe, folder: Path, orders: Connection) -> None:
    """Do as many steps as each order says, and answer with their seconds; 0 ends."""
    step = build_step(name, recipe, open_prepared(folder))
    orders.send([])
    while n_steps := orders.recv():
        orders.send([seconds(step) for _ in range(n_steps)])


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product here, the best of several."""
    a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    a @ b
    return 2 * 2048**3 / min(seconds(lambda: a @ b) for _ in range(5))


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bench_recipe(text: Path | None, folder: str) -> Recipe:
    """The character model on the text given, or on the standard library's sources."""
    return parse_recipe(
        {
            "name": "bench",
            "run_dir": f"{folder}/run",
            "model": {"context_length": CONTEXT, "n_layers": LAYERS, "d_model": WIDTH, "n_heads": HEADS,
                      "position": "learned", "norm": "layernorm", "mlp": "gelu"},
            "tokenizer": {"type": "char"},
            "data": {
                "sources": [{"type": "text", "path": str(text)} if text else {"type": "python-stdlib"}],
                "cache_dir": folder,
                "validation": {"fraction": 0.1, "by": "tail"},
            },
            "train": {"max_steps": 10_000, "batch_size": BATCH, "log_every": 10_000},
        }
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a text file; default: the standard library's sources")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of each loop in a round")
    arguments = parser.parse_args()

    spawn = get_context("spawn")
    times: dict[str, list[float]] = {name: [] for name in LOOPS}
    rates: dict[str, list[float]] = {"fp32": [], "bf16": []}
    with tempfile.TemporaryDirectory() as folder:
        recipe = bench_recipe(arguments.text, folder)
        prepared = prepare(recipe)
        recipe = with_vocab_size(recipe, prepared.manifest.vocab_size)
        orders = {}
        for name in LOOPS:
            orders[name], theirs = spawn.Pipe()
            spawn.Process(target=work, args=(name, recipe, prepared.folder, theirs), daemon=True).start()
            orders[name].recv()
        for turn in range(arguments.rounds + 1):
            rates["fp32"].append(product_rate(torch.float32))
            rates["bf16"].append(product_rate(torch.bfloat16))
            for name, connection in orders.items():
                connection.send(arguments.steps)
                taken = connection.recv()
                times[name] += taken if turn else []  # the first turn warms up
        for connection in orders.values():
            connection.send(0)

    rate = {name: statistics.median(values) for name, values in rates.items()}
    flops_per_token = forward_flops(recipe.model).training_per_token_dense
    speed = {name: BATCH * CONTEXT / statistics.median(values) for name, values in times.items()}
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}")
    products = f"fp32 {rate['fp32'] / 1e9:,.0f}, bf16 {rate['bf16'] / 1e9:,.0f} GFLOP/s"
    print(f"matrix products: {products}, ratio {rate['bf16'] / rate['fp32']:.2f}")
    for name, value in speed.items():
        used, limit = value * flops_per_token, rate["fp32" if name.endswith("fp32") else "bf16"]
        print(
            f"{name:<29} {value:>7,.0f} tokens/s {used / 1e9:>5,.0f} GFLOP/s, {used / limit:>4.0%} of its product rate;"
            f" gptworks is {speed[OURS] / value:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
