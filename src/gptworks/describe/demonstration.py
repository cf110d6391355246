"""Runs a model with random weights on random tokens, to show its shapes, its loss and its speed on this machine."""

import math
import time
from dataclasses import dataclass
from statistics import median

import torch

from gptworks.config import ModelConfig
from gptworks.errors import UserError
from gptworks.machine import available_memory_bytes
from gptworks.model.gpt import GPT
from gptworks.planning.params import count_parameters, require_vocab_size
from gptworks.units import counted, readable

DEFAULT_LENGTH = 16
"""Default number of tokens, the same as in reference document 002 (published.py)."""
REPEATS = 5


@dataclass(frozen=True)
class Demonstration:
    """Shapes, loss and time of a forward pass with random weights."""

    input_shape: tuple[int, int]
    """Shape of the token ids: (B, T)."""
    output_shape: tuple[int, ...]
    """Shape of the logits: (B, T, V)."""
    parameters: int
    loss: float
    """Mean cross-entropy of the random tokens, in nats; about log(V), because the model is untrained."""
    seconds: float
    """Median duration of the timed forward passes, in seconds."""
    threads: int

    def lines(self) -> list[str]:
        batch, length = self.input_shape
        return [
            f"input   {batch} × {length} token ids, drawn at random",
            f"output  {' × '.join(f'{n:,}' for n in self.output_shape)} logits (B × T × V)",
            f"weights {self.parameters:,} parameters, random, fp32",
            f"loss    {self.loss:.3f} nats per token; equal chances for each token give "
            f"{math.log(self.output_shape[-1]):.3f}",
            f"time    {1000 * self.seconds:.3f} ms (measured here: the median of {REPEATS} passes, CPU, "
            f"{counted(self.threads, 'thread')})",
        ]


def demonstrate(config: ModelConfig, length: int = DEFAULT_LENGTH) -> Demonstration:
    """Return the shapes, loss and time of a forward pass with random weights on `length` random tokens, on the CPU in
    fp32. Raise a UserError if `length` is not between 1 and the context, the vocabulary size is unknown, or this
    machine has too little memory for the model."""
    if not 1 <= length <= config.context_length:
        raise UserError(f"--length {length}: the model reads 1 to {config.context_length:,} tokens.")
    vocab_size = require_vocab_size(config)
    n_parameters = count_parameters(config).total
    needed, free = 4 * n_parameters + 4 * 2 * length * vocab_size, available_memory_bytes()
    if needed > 0.8 * free:
        raise UserError(
            f"--run needs {readable(needed, 'B')} for fp32 weights and logits, and {readable(free, 'B')} of memory are "
            f"free: take a smaller model, or leave --run out."
        )
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        model = GPT(config).eval()
        tokens = torch.randint(vocab_size, (1, length + 1))
        seconds = []
        for _ in range(1 + REPEATS):  # the first pass is a warmup
            start = time.perf_counter()
            logits = model(tokens[:, :-1])
            seconds.append(time.perf_counter() - start)
        loss = torch.nn.functional.cross_entropy(logits[0].float(), tokens[0, 1:])
    return Demonstration(
        (1, length), tuple(logits.shape), sum(p.numel() for p in model.parameters()), float(loss),
        median(seconds[1:]), torch.get_num_threads(),
    )  # fmt: skip
