"""The memory and the speed of a training step, measured: two real steps of a new model in a process of its own.

python -m gptworks.train.rehearsal.measure < order.json
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace

import torch
from pydantic import BaseModel

from gptworks.config import FreezeConfig, LoRAConfig, ModelConfig, ObjectiveConfig, TrainConfig
from gptworks.device import (
    choose_precision,
    keep_freed_memory,
    peak_growth_bytes,
    reset_peak,
    return_freed_memory,
    synchronize,
)
from gptworks.errors import RunError
from gptworks.plan.run import Measured
from gptworks.train.objectives.next_token import Batch
from gptworks.train.rehearsal.trace import NEXT_TOKEN, new_step, take

N_STEPS = 2
"""The first makes the optimizer's state, the second is what all others are like."""


def measure_step(
    model: ModelConfig,
    train: TrainConfig,
    device: str = "cpu",
    precision: str = "fp32",
    adapter: LoRAConfig | None = None,
    freeze: FreezeConfig | None = None,
    objective: ObjectiveConfig = NEXT_TOKEN,
    several_texts: bool = False,
) -> Measured:
    """Measure in new processes, so that nothing else's memory is counted.

    On a CPU there are two: one gives freed memory back at once, so that what it has resident is what is in use; the
    other keeps it as `gptworks train` does, and has the speed.

    Raises:
        RunError: a process failed; where memory did not suffice, the system may have ended it.
    """
    order = _Order(
        model=model, train=train, device=device, precision=precision, adapter=adapter, freeze=freeze,
        objective=objective, several_texts=several_texts,
    )  # fmt: skip
    as_trained = _in_new_process(order)
    if device != "cpu":
        return as_trained
    return replace(as_trained, peak_bytes=_in_new_process(order.model_copy(update={"keep": False})).peak_bytes)


class _Order(BaseModel):
    """What a new process measures."""

    model: ModelConfig
    train: TrainConfig
    device: str
    precision: str
    adapter: LoRAConfig | None
    freeze: FreezeConfig | None
    objective: ObjectiveConfig
    several_texts: bool
    keep: bool = True
    """Whether the allocator keeps freed memory."""


def _in_new_process(order: _Order) -> Measured:
    command = [sys.executable, "-m", "gptworks.train.rehearsal.measure"]
    result = subprocess.run(command, input=order.model_dump_json(), capture_output=True, text=True, check=False)
    if result.returncode:
        why = (result.stderr.strip().splitlines() or [f"ended by signal {-result.returncode}"])[-1]
        raise RunError(f"the measured step failed: {why}. It may be that memory did not suffice.")
    return Measured(**json.loads(result.stdout))


def _measure(order: _Order) -> Measured:
    if order.keep:
        keep_freed_memory()
    else:
        return_freed_memory()
    model, device = order.model, torch.device(order.device)
    small = {"vocab_size": 64, "context_length": 64, "n_layers": 1, "d_model": 64, "n_heads": 2, "n_kv_heads": 2}
    small |= {"d_head": 32, "d_ff": 64, "d_ff_shared": 64 if model.d_ff_shared else 0}
    warm = model.model_copy(update=small | {"window": None, "window_pattern": ("full",), "rope_scaling": None})
    plain = {"model": warm, "adapter": None, "freeze": None, "objective": NEXT_TOKEN, "several_texts": False}
    _last_step_seconds(order.model_copy(update=plain))  # what torch loads at its first step belongs to no step
    before = reset_peak(device)
    seconds = _last_step_seconds(order)
    peak = peak_growth_bytes(device, before) or 0
    kept = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak
    return Measured(peak, kept, order.train.batch_size * model.context_length / seconds)


def _last_step_seconds(order: _Order) -> float:
    model, train, device = order.model, order.train, torch.device(order.device)
    precision = choose_precision(order.precision, device)
    step = new_step(model, train, device, precision, order.adapter, order.freeze, order.objective)
    tokens = torch.randint(model.vocab_size, (train.batch_size, model.context_length), device=device)
    batch: Batch = (tokens, tokens)
    if order.several_texts:
        batch = (*batch, torch.arange(model.context_length, device=device).expand_as(tokens))
    seconds = 0.0
    synchronize(device)
    for _ in range(N_STEPS):
        started = time.perf_counter()
        take(step, train, batch)
        synchronize(device)
        seconds = time.perf_counter() - started
    return seconds


if __name__ == "__main__":
    json.dump(asdict(_measure(_Order.model_validate_json(sys.stdin.read()))), sys.stdout)
