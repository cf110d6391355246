"""Compare what the default recipe learns in a given time with the earlier defaults, and sweep its learning rates.

    python bench/defaults.py rates                                # a sweep of the rates at four widths
    python bench/defaults.py table --english FOLDER --shakespeare FILE --minutes 2

`--step-seconds` has the step times of an idle machine, which are turned into numbers of steps: a busy machine takes
longer but gives the same losses. Each finished run is a line of `--results` and is not repeated.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptworks.config import EARLIER_DEFAULTS
from gptworks.config.defaults import EPOCHS

EARLIER: dict[str, dict[str, Any]] = {
    "model": EARLIER_DEFAULTS,
    "train": {"optimizer": "adamw", "learning_rate": 3e-4, "weight_decay": 0.1, "schedule": "cosine",
              "warmup_steps": 0, "final_rate_fraction": 0.1},
}  # fmt: skip
"""The earlier defaults; the learning rate of AdamW was 3e-4 for every model."""

CORPORA = ("stdlib", "english", "shakespeare")
SHAPES = {64: 2, 128: 2, 256: 4, 512: 4}
"""Number of layers by width."""
BATCH, CONTEXT = 16, 256
SWEEP_STEPS = 150
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors of both learning rates."""


def recipe(corpus: str, folder: Path, paths: dict[str, Path | None], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of a corpus with only sizes and the given settings."""
    source = {"type": "python-stdlib"} if corpus == "stdlib" else {"type": "text", "path": str(paths[corpus])}
    by = "tail" if corpus == "shakespeare" else "document"
    return {
        "name": "one",
        "run_dir": str(folder / "run"),
        "seed": sections.pop("seed", 1337),
        "model": {"context_length": CONTEXT, **sections.get("model", {})},
        "tokenizer": {"type": "bpe", "vocab_size": 1024 if corpus == "shakespeare" else 4096},
        "data": {
            "sources": [source],
            "validation": {"fraction": 0.1 if corpus == "shakespeare" else 0.05, "by": by},
            "cache_dir": str(Path(tempfile.gettempdir()) / "gptworks-defaults"),
        },
        "train": {"batch_size": BATCH, "checkpoint_every": 10**6, "sample_every": 0, **sections.get("train", {})},
    }


def shape(width: int) -> dict[str, int]:
    """Return the sizes of a model of this width."""
    return {"n_layers": SHAPES[width], "d_model": width, "n_heads": max(1, width // 64)}


def run_one(tree: dict[str, Any]) -> dict[str, float]:
    """Train a recipe; return the best validation loss in nats and in bits per byte, and the seconds per step."""
    from rich.console import Console

    from gptworks.recipe import parse_recipe
    from gptworks.training.loop import train
    from gptworks.training.record.display import Display
    from gptworks.training.record.metrics import read_metrics

    settings = parse_recipe(tree)
    shutil.rmtree(settings.run_dir, ignore_errors=True)  # left by an interrupted run
    outcome = train(settings, display=Display(Console(quiet=True)), force=True)
    records = read_metrics(settings.run_dir / "metrics.jsonl")
    best = min((one for one in records if one["kind"] == "validation"), key=lambda record: record["loss"])
    return {
        "nats": best["loss"],
        "bits_per_byte": best["bits_per_byte"],
        "seconds_a_step": outcome.seconds / outcome.step,
    }


def in_process(tree: dict[str, Any], threads: int) -> dict[str, float]:
    """Call `run_one` in a new process."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, __file__, "one"],
        check=False,
        input=json.dumps(tree),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def jobs(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and recipe of each run."""
    paths = {"english": arguments.english, "shakespeare": arguments.shakespeare, "stdlib": None}
    folder = Path(arguments.runs)
    if arguments.what == "rates":
        for width in arguments.widths:
            for factor in arguments.factors:
                name = f"rates {arguments.optimizer} {width} × {factor:g}, {arguments.steps} steps"
                rate, muon = arguments.rate, arguments.muon_rate
                if arguments.optimizer == "adamw":
                    rate = min(0.003, 0.5 / width)
                train = {
                    "optimizer": arguments.optimizer, "max_steps": arguments.steps, "learning_rate": rate * factor,
                    "muon_learning_rate": muon * factor, "evaluate_every": arguments.steps,
                }  # fmt: skip
                if arguments.warmup is not None:
                    train["warmup_steps"] = arguments.warmup
                    name += f", warmup {arguments.warmup}"
                if arguments.rate != 0.003:
                    name += f", AdamW's rate {arguments.rate}"
                if arguments.muon_rate != 0.02:
                    name += f", Muon's rate {arguments.muon_rate}"
                yield name, recipe("stdlib", folder / name.replace(" ", "-"), paths, model=shape(width), train=train)
        return
    for seed in arguments.seeds:
        for corpus in arguments.corpora:
            for defaults in ("new", "earlier"):
                name = f"table {corpus} {arguments.minutes:g} minutes {defaults} seed {seed}"
                given = EARLIER if defaults == "earlier" else {"model": {}, "train": {}}
                steps = round(60 * arguments.minutes / arguments.step_seconds[defaults])
                model = shape(arguments.width) | given["model"]
                train = {"max_steps": steps, **given["train"]}
                if defaults == "new":
                    train["epochs"] = EPOCHS  # the default length of a run
                train["evaluate_every"] = max(1, steps // 5)
                yield name, recipe(corpus, folder / name.replace(" ", "-"), paths, seed=seed, model=model, train=train)


def main() -> None:
    """Train the runs that the arguments ask for and that have no result yet; print their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "table", "one"])
    parser.add_argument("--english", type=Path)
    parser.add_argument("--shakespeare", type=Path)
    parser.add_argument("--results", type=Path, default=Path("defaults.jsonl"))
    parser.add_argument("--runs", default=tempfile.gettempdir() + "/gptworks-defaults-runs")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--widths", type=int, nargs="+", default=[*SHAPES])
    parser.add_argument("--factors", type=float, nargs="+", default=[*FACTORS])
    parser.add_argument("--steps", type=int, default=SWEEP_STEPS)
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--corpora", nargs="+", default=[*CORPORA])
    parser.add_argument("--step-seconds", type=json.loads, default={"new": 0.3, "earlier": 0.3})
    arguments = parser.parse_args()
    if arguments.what == "one":
        print(json.dumps(run_one(json.load(sys.stdin))))
        return
    done = {}
    if arguments.results.exists():
        done = {one["name"]: one for one in map(json.loads, arguments.results.read_text().splitlines())}
    for name, tree in jobs(arguments):
        if name not in done:
            started = time.perf_counter()
            done[name] = {"name": name, **in_process(tree, arguments.threads)}
            with arguments.results.open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
            print(f"{name}: {done[name]}  ({time.perf_counter() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
