"""Times litGPT's own pretraining loop step by step, on the same model and batch, in an environment of its own.

    python -m venv litgpt && litgpt/bin/pip install litgpt==0.5.13
    python bench/train.py --litgpt litgpt/bin/python

litGPT needs an older huggingface_hub than transformers 5, so bench/train.py runs this script with the interpreter of
that environment: it reads the tokens [N], int64, from standard input and writes the seconds of each step as JSON to
standard output. litGPT compiles the model and uses bf16 with fp32 weights by itself. Its models have rotary positions,
here over a quarter of each head (its default), while the other loops' models learn their positions.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from textbook import Shape


class EnoughSteps(Exception):
    """Raised to end litGPT's loop before it writes a checkpoint."""


def litgpt_seconds(python: Path, shape: Shape, data: Tensor, n_steps: int) -> list[float]:
    """Train for a number of steps with litGPT's interpreter; return the seconds of each."""
    order = json.dumps({"shape": asdict(shape), "n_steps": n_steps})
    done = subprocess.run([python, __file__, order], input=data.numpy().tobytes(), capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"litGPT's loop failed:\n{done.stderr.decode()[-4000:]}")
    return [float(seconds) for seconds in json.loads(done.stdout)]


def train(shape: Shape, data: Tensor, n_steps: int) -> list[float]:
    """Train for a number of steps in this process; return the seconds from each batch to the next."""
    from litgpt import Config
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule
    from litgpt.pretrain import setup
    from torch.utils.data import DataLoader, IterableDataset

    fetched: list[float] = []

    class Windows(IterableDataset[Tensor]):
        """Random windows of the tokens; records when the first window of each batch is read."""

        def __iter__(self) -> Iterator[Tensor]:
            while len(fetched) <= n_steps:
                fetched.append(time.perf_counter())
                for start in torch.randint(len(data) - shape.context - 1, (shape.batch,)).tolist():
                    yield data[start : start + shape.context + 1]
            raise EnoughSteps

    class Data(DataModule):  # type: ignore[misc]
        def connect(self, *_: object, **__: object) -> None:
            """Do nothing: litGPT calls this to pass settings that are already known."""

        def train_dataloader(self) -> DataLoader[Tensor]:
            return DataLoader(Windows(), batch_size=shape.batch)

        def val_dataloader(self) -> DataLoader[Tensor]:
            return DataLoader([data[: shape.context + 1]], batch_size=1)

    config = Config(
        name="bench", block_size=shape.context, n_layer=shape.n_layers, n_head=shape.n_heads, n_embd=shape.width,
        padded_vocab_size=shape.vocab_size, vocab_size=shape.vocab_size, bias=shape.bias, parallel_residual=False,
        gelu_approximate="tanh",
    )  # fmt: skip
    steps = TrainArgs(
        save_interval=None, log_interval=10**6, global_batch_size=shape.batch, micro_batch_size=shape.batch,
        max_tokens=10**12, max_norm=1.0, lr_warmup_steps=100, tie_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, suppress(EnoughSteps):
        setup("bench", config, Path(folder), data=Data(), train=steps, eval=EvalArgs(interval=10**6), devices=1,
              logger_name="csv")  # fmt: skip
    return [after - before for before, after in pairwise(fetched)]


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    tokens = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.int64)
    with redirect_stdout(sys.stderr):
        taken = train(Shape(**order["shape"]), tokens, order["n_steps"])
    print(json.dumps(taken))
