"""Times transformers' Trainer step by step on the same model and batch."""

import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from textbook import Shape


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """All windows of the tokens [N], at multiples of the context length."""

    def __init__(self, data: Tensor, context: int) -> None:
        self.windows = data[: len(data) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Measures the seconds of each step, from its batch to the updated weights; ends training after enough steps."""

    def __init__(self, n_steps: int) -> None:
        self.n_steps = n_steps
        self.seconds: list[float] = []
        self.started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        control.should_training_stop = len(self.seconds) >= self.n_steps


def trainer_seconds(shape: Shape, data: Tensor, n_steps: int, *, bf16: bool, compiled: bool) -> list[float]:
    """Train for a number of steps; return the seconds of each."""
    config = GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.context, n_embd=shape.width, n_layer=shape.n_layers,
        n_head=shape.n_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    stopwatch = Stopwatch(n_steps)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, use_cpu=True, bf16=bf16, torch_compile=compiled, per_device_train_batch_size=shape.batch,
            max_steps=10**6, logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        Trainer(
            GPT2LMHeadModel(config), settings, train_dataset=Windows(data, shape.context), callbacks=[stopwatch]
        ).train()
    return stopwatch.seconds
