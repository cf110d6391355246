"""The first hour: train models on four folders of texts with three commands each, and compare them with other recipes.

    python bench/first_hour.py                                # all four folders, 10 minutes a run: over two hours
    python bench/first_hour.py --folder english --minutes 1   # a quick check: about 5 minutes

The folders are `small` (1 MB of English: --text FILE, such as TinyShakespeare, or the machine's documentation),
`english` (up to 20 MB of the machine's documentation), `code` (Python's standard library) and `mixed` (texts, programs,
records and a table, with a PDF and images next to them). For each:

    gptworks init FOLDER --minutes M,  gptworks train,  gptworks evaluate --compressors

and two more runs with the same width, depth, context, tokenizer, text, split, batch and minutes of training: one with
gptworks' old defaults, one with nanoGPT's recipe (settings below). Then one of the models is fine-tuned, with a recipe
from `gptworks tune`, on --instructions or on questions about the standard library, and answers a question. If --minutes
is at least 10, the exit code is 1 unless each model of gptworks' recipe has fewer bits per byte than `xz -9e` on the
same held-out text.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import stdlib_instructions
from first_hour_texts import make_folder
from gptworks.device import choose_device, device_name
from gptworks.recipe import read_recipe

FOLDERS = ("small", "english", "code", "mixed")
MINUTES_TO_BEAT_XZ = 10
N_INSTRUCTIONS = 1000
"""Approximate number of questions, evenly spaced over all that the standard library gives."""

Tree = dict[str, Any]

OLD: dict[str, Tree] = {
    "model": {
        "position": "rope", "norm": "layernorm", "norm_bias": True, "norm_eps": 1e-5, "mlp": "gelu", "mlp_bias": False,
        "attention_bias": False, "qk_norm": False, "tie_embeddings": True, "init": "normal", "init_std": 0.02,
        "zero_init_projections": False,
    },
    "train": {
        "optimizer": "adamw", "learning_rate": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
        "grad_clip": 1.0, "schedule": "cosine", "warmup_steps": 0, "final_rate_fraction": 0.1, "ema_decay": 0.0,
    },
}  # fmt: skip
"""gptworks' old defaults, from before the present ones were chosen by measurement."""

NANOGPT: dict[str, Tree] = {
    "model": {
        "position": "learned", "norm": "layernorm", "norm_bias": False, "norm_eps": 1e-5, "mlp": "gelu",
        "mlp_bias": False, "attention_bias": False, "qk_norm": False, "tie_embeddings": True, "init": "gpt2",
        "init_std": 0.02, "zero_init_projections": False, "dropout_embedding": 0.0, "dropout_attention": 0.0,
        "dropout_residual": 0.0,
    },
    "train": {
        "optimizer": "adamw", "learning_rate": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1,
        "grad_clip": 1.0, "schedule": "cosine", "warmup_steps": 100, "final_rate_fraction": 0.1, "ema_decay": 0.0,
    },
}  # fmt: skip
"""nanoGPT's config/train_shakespeare_char.py, train.py and model.py (github.com/karpathy/nanoGPT); dropout is 0, as in
its README for a CPU, since no text is read here often enough for 0.2 to help."""

OTHERS = {"old defaults": OLD, "nanoGPT's recipe": NANOGPT}
SHAPE = ("context_length", "n_layers", "d_model", "n_heads")
KEPT = (
    "batch_size", "micro_batch_size", "evaluate_every", "evaluate_sequences", "checkpoint_every", "sample_every",
    "sample_prompts",
)  # fmt: skip


def other_recipe(drafted: Tree, settings: Mapping[str, Tree], name: str, minutes: float) -> Tree:
    """Return a recipe with other settings for the drafted recipe's model shape and text, to be trained for
    `minutes`."""
    model = {key: drafted["model"][key] for key in SHAPE} | settings["model"]
    train = {key: drafted["train"][key] for key in KEPT if key in drafted["train"]}
    return {
        "name": name,
        "model": model,
        "tokenizer": drafted["tokenizer"],
        "data": drafted["data"],
        "train": {"max_minutes": minutes, **train, **settings["train"]},
    }


def gptworks(*arguments: object, shown: bool = False) -> str:
    """Run a command and return its output, or show the output and return an empty text."""
    command = [sys.executable, "-m", "gptworks", *map(str, arguments)]
    print(f"\n$ gptworks {' '.join(command[3:])}", file=sys.stderr, flush=True)
    return subprocess.run(command, check=True, stdout=None if shown else subprocess.PIPE, text=True).stdout or ""


def train(recipe: Path) -> dict[str, Any]:
    """Train a recipe and evaluate it on its held-out text; return the figures."""
    gptworks("train", recipe, shown=True)
    run = Path("runs") / recipe.stem
    outcome = json.loads((run / "outcome.json").read_text(encoding="utf-8"))
    found = json.loads(gptworks("evaluate", run, "--compressors", "--json"))
    kept = {key: found[key] for key in ("bits_per_byte", "loss", "tokens", "text_bytes", "compressors")}
    return {**kept, "steps": outcome["step"], "seconds": outcome["seconds"], "tokens_trained": outcome["tokens"]}


def first_hour(name: str, minutes: float, small: Path | None) -> dict[str, Any]:
    """Run the three commands on a folder, then the other recipes for the same time; return all figures."""
    about = make_folder(name, Path(name), small)
    print(f"\n{name}: {about}", file=sys.stderr)
    recipe = Path(f"{name}.yaml")
    drafted = json.loads(gptworks("init", name, "--minutes", minutes, "-o", recipe, "--json"))
    tree = read_recipe(recipe)[1]
    runs = {"gptworks": train(recipe)}
    for number, (words, settings) in enumerate(OTHERS.items(), 1):
        other = Path(f"{name}-{number}.yaml")
        of_time = other_recipe(tree, settings, other.stem, runs["gptworks"]["seconds"] / 60)
        other.write_text(json.dumps(of_time, indent=2), encoding="utf-8")  # JSON is valid YAML
        runs[words] = train(other)
    plan = drafted.pop("plan")
    return {"about": about, "parameters": plan["parameters"], "drafted": drafted, "recipe": tree, "runs": runs}


def tune(name: str, instructions: Path | None) -> dict[str, str]:
    """Fine-tune a folder's model and ask it a question; return the question and the answer."""
    if instructions is None:
        instructions = Path("instructions.jsonl")
        rows = list(stdlib_instructions.records())
        stdlib_instructions.write(instructions, rows[:: max(1, len(rows) // N_INSTRUCTIONS)])
        asked = next(iter(stdlib_instructions.FORMS)) + "\n\ndef read_lines(path, encoding):"
    else:
        asked = "Which month follows May?"
    recipe = Path(f"{name}-tuned.yaml")
    gptworks("tune", f"runs/{name}", instructions, "-o", recipe, shown=True)
    gptworks("train", recipe, shown=True)
    answer = gptworks("generate", f"runs/{recipe.stem}", asked, "--chat", "--temperature", 0, "--max-tokens", 60)
    return {"folder": name, "question": asked, "answer": answer.strip()}


def table(results: Mapping[str, Any]) -> str:
    """Return a table of bits per byte, one row per folder."""
    columns = ["gptworks", "xz -9e", *OTHERS]
    lines = [f"{'bits per byte':<10}" + "".join(f"{column:>20}" for column in columns) + f"{'parameters':>14}"]
    for name, result in results.items():
        figures = {key: run["bits_per_byte"] for key, run in result["runs"].items()} | {"xz -9e": xz(result)}
        cells = "".join(f"{figures[column]:>20.3f}" for column in columns)
        lines.append(f"{name:<13}{cells}{result['parameters']['total']:>14,}")
    return "\n".join(lines)


def write(figures: Mapping[str, Any]) -> None:
    """Write the figures so far to results.json."""
    Path("results.json").write_text(json.dumps(figures, indent=2, ensure_ascii=False), encoding="utf-8")


def xz(result: Mapping[str, Any]) -> float:
    """Return the bits per byte of `xz -9e` on a folder's held-out text."""
    return float(result["runs"]["gptworks"]["compressors"]["xz_9e"])


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of each run (default: 10; all of it: over two hours)"
    )
    parser.add_argument("--folder", action="append", choices=FOLDERS, help="this one alone; repeatable")
    text = os.environ.get("FIRST_HOUR_TEXT")
    parser.add_argument(
        "--text", type=Path, default=text and Path(text), help="English for `small`; or $FIRST_HOUR_TEXT"
    )
    parser.add_argument("--instructions", type=Path, help="records to tune on: .jsonl, .json or .parquet")
    parser.add_argument(
        "--work", type=Path, default=Path("first-hour"), help="folder of all files (default: first-hour)"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    text, instructions = (path and path.resolve() for path in (options.text, options.instructions))
    if (options.work / "runs").exists():
        sys.exit(f"{options.work / 'runs'} exists: move it away, or give another --work.")
    options.work.mkdir(parents=True, exist_ok=True)
    os.chdir(options.work)
    device = choose_device()
    machine = {"device": device_name(device), "torch": torch.__version__, "cores": os.cpu_count()}
    results: dict[str, Any] = {}
    names = options.folder or list(FOLDERS)
    figures = {"machine": machine, "minutes": options.minutes, "settings": OTHERS, "folders": results}
    for name in names:
        results[name] = first_hour(name, options.minutes, text)
        write(figures)
    tuned = tune("code" if "code" in names else names[0], instructions)
    write(figures | {"tuned": tuned})
    print(f"\n{options.minutes:g} minutes a run on {machine['device']}\n{table(results)}")
    print(f"\n{tuned['question']}\n→ {tuned['answer']}\n\nall figures: {Path('results.json').resolve()}")
    lost = [name for name, result in results.items() if result["runs"]["gptworks"]["bits_per_byte"] >= xz(result)]
    if lost and options.minutes >= MINUTES_TO_BEAT_XZ:
        sys.exit(f"not below xz -9e: {', '.join(lost)}")


if __name__ == "__main__":
    main()
