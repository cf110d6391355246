"""Measure the memory that chunked cross-entropy and activation checkpointing save in GPT-2 124M's training step.

    python bench/saving.py

The script prints the peak memory of a step of 4 × 1,024 tokens: traced on fake tensors (nothing is allocated), and
measured as the growth of a process's resident memory. The loss is torch's cross-entropy of all logits at once, or our
chunked one, each with and without checkpointing. The plan's formula covers only our loss.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from gptworks.config import TrainConfig
from gptworks.device import device_name, peak_growth_bytes, reset_peak, return_freed_memory
from gptworks.model.loss import linear_cross_entropy_reference
from gptworks.planning.memory import training_peak
from gptworks.planning.setting import Setting
from gptworks.presets import preset
from gptworks.training.objectives import next_token as objectives
from gptworks.training.rehearsal.trace import Rehearsal, take, trace_step
from gptworks.units import readable

GPT2 = preset("gpt2")


def train_config(batch_size: int, checkpointing: str) -> TrainConfig:
    return TrainConfig(max_steps=1, optimizer="adamw", batch_size=batch_size, activation_checkpointing=checkpointing)


def traced_bytes(whole: bool, checkpointing: str, precision: str, batch_size: int) -> int:
    """Return the peak traced on fake tensors."""
    if whole:
        objectives.linear_cross_entropy = linear_cross_entropy_reference
    return trace_step(Rehearsal(GPT2, train_config(batch_size, checkpointing), precision=precision)).peak_bytes


def measured_bytes(whole: bool, checkpointing: str, precision: str, batch_size: int) -> int:
    """Return the growth of this process over two real steps."""
    if whole:
        objectives.linear_cross_entropy = linear_cross_entropy_reference
    return_freed_memory()
    device = torch.device("cpu")
    tokens = torch.randint(GPT2.vocab_size, (batch_size, GPT2.context_length))
    before = reset_peak(device)
    train = train_config(batch_size, checkpointing)
    step = Rehearsal(GPT2, train, precision=precision).new_step()
    for _ in range(2):
        take(step, train, (tokens, tokens))
    return peak_growth_bytes(device, before) or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4, help="sequences of 1,024 tokens in a step")
    batch_size = parser.parse_args().batch
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}; GPT-2 124M, {batch_size} × 1,024")
    print(f"{'precision':<11}{'loss':<14}{'checkpointing':<15}{'plan':>10}{'traced':>10}{'measured':>10}{'saved':>8}")
    for precision in ("fp32", "bf16"):
        first = 0
        for whole, checkpointing in ((True, "none"), (False, "none"), (True, "block"), (False, "block")):
            case = (whole, checkpointing, precision, batch_size)
            with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as process:
                traced = process.submit(traced_bytes, *case).result()
                measured = process.submit(measured_bytes, *case).result()
            first = first or measured
            setting = Setting.of(GPT2, train_config(batch_size, checkpointing), precision, on_cpu=True)
            plan = "" if whole else readable(training_peak(setting).total_bytes, "B")
            print(
                f"{precision:<11}{'whole logits' if whole else 'chunked':<14}{checkpointing:<15}{plan:>10}"
                f"{readable(traced, 'B'):>10}{readable(measured, 'B'):>10}{1 - measured / first:>8.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
