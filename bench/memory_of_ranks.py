"""Compare the planned and the measured memory of a run's ranks, by model, layout and number of ranks.

    python bench/memory_of_ranks.py                    # cases of up to 20 GB together
    python bench/memory_of_ranks.py --only fsdp        # cases with this word in their name

Every rank trains three steps with the real loop; a checkpoint is written during the third. The ranks return freed
memory immediately, so that all their resident memory is in use. The plan is for rank 0, which needs the most memory: it
copies the replicated tensors for a checkpoint.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from gptworks.config import CharTokenizer
from gptworks.device import device_name, peak_growth_bytes, reset_peak, return_freed_memory
from gptworks.errors import RunError
from gptworks.planning.arrange import rank_setting
from gptworks.planning.host import PROCESS_BYTES, copied_bytes
from gptworks.planning.layout import Layout
from gptworks.planning.memory import training_peak
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.tokenizer import save_tokenizer, train_tokenizer
from gptworks.training import loop, session, setup
from gptworks.training.checkpoint_files import CheckpointWriter
from gptworks.training.distributed.ranks import join
from gptworks.units import readable

CPU = torch.device("cpu")
STEPS, CHECKPOINT_EVERY = 3, 2
NARROW = ("model.d_model=64", "model.n_heads=8")
SIZES = {
    "124M": {"n_layers": 12, "d_model": 768, "n_heads": 12},
    "354M": {"n_layers": 24, "d_model": 1024, "n_heads": 16},
}
LAYOUTS = {
    (name, n_ranks): layout
    for n_ranks in (2, 4)
    for name, layout in (
        ("ddp", Layout("none", n_ranks)),
        ("fsdp", Layout("fsdp", n_ranks)),
        ("tensor", Layout("none", 1, n_ranks)),
        *([("fsdp and tensor", Layout("fsdp", 2, 2))] if n_ranks == 4 else []),
    )
}


def watched_rank(out: Path, recipe: Path, overrides: list[str]) -> None:
    """Train as a rank of a run, and write the bytes by which the model and its training grew this process to the file
    `out`.RANK.

    Before, train a narrow model, which the overrides describe, in the same way, so that code and threads' stacks are
    already in memory. The first checkpoint is written while the next step is taken.
    """
    torch.set_num_threads(1)
    return_freed_memory()
    setup.choose_allocation = lambda *_, **__: return_freed_memory()  # type: ignore[assignment]
    before_bytes, stepped = 0, threading.Event()
    make, step = session.trainable_model, loop.Run.training_step
    save, wait, write = CheckpointWriter.save, CheckpointWriter.wait, CheckpointWriter._write

    def building(*arguments: Any) -> Any:
        nonlocal before_bytes
        before_bytes = reset_peak(CPU)
        return make(*arguments)

    def watched_step(run: loop.Run) -> None:
        step(run)
        stepped.set()

    def watched_write(writer: CheckpointWriter, *arguments: Any) -> None:
        stepped.wait(600)
        write(writer, *arguments)

    def watched_wait(writer: CheckpointWriter) -> None:
        stepped.set()
        wait(writer)

    def watched_save(writer: CheckpointWriter, at: int, *arguments: Any) -> None:
        writer.wait()
        if at < STEPS:
            stepped.clear()
        writer.wait = lambda: None  # type: ignore[method-assign]
        save(writer, at, *arguments)
        del writer.wait

    session.trainable_model, loop.Run.training_step = building, watched_step  # type: ignore[assignment,method-assign]
    CheckpointWriter._write, CheckpointWriter.wait = watched_write, watched_wait  # type: ignore[method-assign]
    CheckpointWriter.save = watched_save  # type: ignore[method-assign]
    with join(600, CPU) as ranks:
        loop.train(load_recipe(recipe, overrides), ranks=ranks)
        gc.collect()
        loop.train(load_recipe(recipe), ranks=ranks)
        out.with_suffix(f".{ranks.rank}").write_text(str(peak_growth_bytes(CPU, before_bytes)))


def recipe_tree(folder: Path, model: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Write a text and a tokenizer, and return a recipe of three steps in float32. In each step, each rank has two
    micro-batches of 128 tokens."""
    parallel = {"strategy": "fsdp" if layout.sharding == "fsdp" else "ddp", "tensor_parallel": layout.tensor_parallel}
    text = "".join(f"line {i}: {i * i} times.\n" for i in range(2000))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    save_tokenizer(train_tokenizer(CharTokenizer(type="char"), [text]), folder / "tokenizer")
    common = {"context_length": 128, "vocab_size": 50_257, "dropout_residual": 0, "dropout_attention": 0,
              "dropout_embedding": 0, "norm": "layernorm", "mlp": "gelu"}  # fmt: skip
    return {
        "name": "ranks",
        "run_dir": str(folder / "run"),
        "model": common | model,
        "tokenizer": {"type": "file", "path": str(folder / "tokenizer")},
        "data": {"sources": [{"type": "text", "path": str(folder / "text.txt")}], "cache_dir": str(folder / "data"),
                 "validation": {"fraction": 0.1, "by": "tail"}},
        "train": {"max_steps": STEPS, "batch_size": 2 * layout.data_parallel, "micro_batch_size": 1,
                  "optimizer": "adamw", "precision": "fp32", "evaluate_every": STEPS, "evaluate_sequences": 2,
                  "checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 1, "sample_every": 0, "device": "cpu",
                  "parallel": parallel},
    }  # fmt: skip


def grown_bytes(folder: Path, n_ranks: int, tree: dict[str, Any]) -> list[int]:
    """Return the bytes by which each rank's process grows.

    Raises:
        RunError: a rank failed, for example because the machine has too little memory now.
    """
    (folder / "recipe.yaml").write_text(json.dumps(tree), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}", __file__,
               "rank", folder / "grown", folder / "recipe.yaml", *NARROW, f"run_dir={folder / 'narrow'}"]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        raise RunError(errors[0] if errors else f"exit code {done.returncode}")
    return [int((folder / f"grown.{rank}").read_text()) for rank in range(n_ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=float, default=20, help="GB of all ranks above which a case is left out")
    parser.add_argument("--only", default="", help="only cases with this word in their name")
    arguments = parser.parse_args()
    print(f"{device_name(CPU)}, torch {torch.__version__}")
    print(f"{'model':<8}{'layout':<18}{'ranks':>6}{'planned':>12}{'rank 0':>12}{'off by':>9}{'other ranks':>24}")
    for size, model in SIZES.items():
        for (name, n_ranks), layout in LAYOUTS.items():
            with tempfile.TemporaryDirectory() as home:
                tree = recipe_tree(Path(home), model, layout)
                setting = rank_setting(parse_recipe(tree), "fp32", on_cpu=True, layout=layout)
                planned = training_peak(setting).total_bytes
                own_bytes = planned + PROCESS_BYTES - copied_bytes(setting, 1)
                all_bytes = n_ranks * own_bytes + copied_bytes(setting, n_ranks)
                if all_bytes > arguments.largest * 1e9 or arguments.only not in f"{size} {name} {n_ranks}":
                    continue
                try:
                    first, *others = grown_bytes(Path(home), n_ranks, tree)
                except RunError as error:
                    print(f"{size:<8}{name:<18}{n_ranks:>6}{readable(planned, 'B'):>12}  not measured: {error}")
                    continue
            found = " ".join(readable(n, "B") for n in sorted({min(others), max(others)}))
            print(
                f"{size:<8}{name:<18}{n_ranks:>6}{readable(planned, 'B'):>12}{readable(first, 'B'):>12}"
                f"{planned / first - 1:>+9.1%}{found:>24}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        watched_rank(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
