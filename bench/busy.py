"""Measure training while another program keeps one core busy, compared with the idle machine: `python bench/busy.py`.

Each arrangement of threads runs the same steps of a small model in its own process. The processes alternate; figures
are medians over the rounds. Run it on an otherwise idle machine.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gptworks.training.record.metrics import read_metrics

TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog, {i * i} times.\n" for i in range(20_000))
STEPS, WARM_UP = 16, 4

ARRANGEMENTS = {
    "idle, all threads": (False, 0, {}),
    "idle, all threads, OMP_WAIT_POLICY=active": (False, 0, {"OMP_WAIT_POLICY": "active"}),
    "one busy core, all threads": (True, 0, {}),
    "one busy core, all threads, OMP_WAIT_POLICY=active": (True, 0, {"OMP_WAIT_POLICY": "active"}),
    "one busy core, one thread less, as a new run chooses": (True, 1, {}),
}
"""By name: whether a core is kept busy, how many threads fewer are used, and the environment variables."""


def recipe(folder: Path) -> Path:
    """Write a text and the recipe of a model of about 2 million parameters; return the recipe's path."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    tree = {
        "model": {
            "context_length": 256, "n_layers": 5, "d_model": 192, "n_heads": 6, "mlp": "relu2", "norm": "rmsnorm",
        },
        "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "text", "path": str(folder / "text.txt")}], "cache_dir": str(folder / "data")},
        "train": {"max_steps": STEPS, "batch_size": 16, "log_every": 1, "evaluate_every": 1000, "sample_every": 0,
                  "device": "cpu"},
    }  # fmt: skip
    (folder / "busy.yaml").write_text(json.dumps(tree), encoding="utf-8")
    return folder / "busy.yaml"


@contextlib.contextmanager
def busy_core(wanted: bool) -> Iterator[None]:
    """Return a context in which another process, if `wanted`, computes without a pause."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def tokens_per_second(file: Path, run_dir: Path, n_threads: int, environment: dict[str, str]) -> float:
    """Train, and return the tokens per second of the steps after the first WARM_UP."""
    command = [sys.executable, "-m", "gptworks", "train", str(file), f"run_dir={run_dir}", f"train.threads={n_threads}"]
    subprocess.run(command, check=True, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
    steps = [record for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "train"][WARM_UP - 1 :]
    return (steps[-1]["tokens"] - steps[0]["tokens"]) / (steps[-1]["seconds"] - steps[0]["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    n_cores, rates = os.cpu_count() or 1, {name: list[float]() for name in ARRANGEMENTS}
    with tempfile.TemporaryDirectory() as place:
        file = recipe(Path(place))
        for i in range(rounds):
            for n, (name, (busy, fewer, environment)) in enumerate(ARRANGEMENTS.items()):
                with busy_core(busy):
                    rate = tokens_per_second(file, Path(place) / f"{i}-{n}", max(1, n_cores - fewer), environment)
                rates[name].append(rate)
                print(f"round {i + 1}  {rate:8,.0f} tokens/s  {name}", flush=True)
    idle = statistics.median(rates["idle, all threads"])
    for name, found in rates.items():
        print(f"{statistics.median(found):8,.0f} tokens/s  {statistics.median(found) / idle:4.0%} of idle  {name}")


if __name__ == "__main__":
    main()
