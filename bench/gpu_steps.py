"""The parts of bench/gpu.py that take training steps: correctness next to the CPU, speed, and memory."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import train
from gptworks.config import ModelConfig, Recipe, TrainConfig
from gptworks.data.conversations.packing import laid_out, stack
from gptworks.data.prepare import prepare
from gptworks.data.samples import Batch
from gptworks.device import (
    choose_precision,
    memory_bytes,
    peak_growth_bytes,
    product_rate,
    reset_peak,
    synchronize,
)
from gptworks.infer.backends.backend import TorchBackend
from gptworks.kernels import dispatch
from gptworks.model.gpt import GPT
from gptworks.planning.flops import forward_flops
from gptworks.planning.memory import training_peak
from gptworks.planning.setting import Setting
from gptworks.training.distributed.parallel import compile_blocks
from gptworks.training.objectives.next_token import count_targets
from gptworks.training.rehearsal.measure import measure_step
from gptworks.training.rehearsal.trace import Rehearsal, take
from gptworks.units import readable
from gpu_runs import greedy
from gpu_setup import Setup, row, table
from textbook import textbook_step

KINDS: dict[str, dict[str, Any]] = {
    "GPT-2's": {"norm": "layernorm", "mlp": "gelu", "position": "learned", "attention_bias": True, "mlp_bias": True},
    "modern": {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "n_kv_heads": 2, "qk_norm": True},
    "windows": {"norm": "rmsnorm", "mlp": "relu2", "position": "rope", "window": 32},
    "experts": {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "n_experts": 4, "n_experts_per_token": 2},
}


def steps_of(model: ModelConfig, optimizer: str, precision: str, device: torch.device, n: int) -> tuple[list, list]:
    """Return the losses and gradient norms of `n` steps. Weights and tokens are the same on each device."""
    settings = TrainConfig(max_steps=n, batch_size=4, optimizer=optimizer, compile="none")  # type: ignore[arg-type]
    step = Rehearsal(model, settings, device=device.type, precision=precision).new_step()
    torch.manual_seed(0)
    whole = GPT(model)
    for parameter in whole.parameters():  # zero projections would hide the layers before them
        if parameter.ndim > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    step.model.load_state_dict(whole.state_dict())
    losses, norms = [], []
    for number in range(n):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(model.vocab_size, (4, model.context_length + 1), generator=generator).to(device)
        batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        losses.append(step.accumulate([batch], count_targets(batch)).loss)
        norms.append(step.gradient_norm())
        step.apply(norms[-1])
    return losses, norms


def decoded(model: ModelConfig, device: torch.device, n: int) -> list[int]:
    """Return `n` greedy tokens, computed in float32 by torch's backend."""
    torch.manual_seed(0)
    weights = GPT(model).eval().to(device)
    return greedy(TorchBackend(weights, 1, model.context_length), 1, n)[0]


def correctness(setup: Setup) -> None:
    losses, norms = "losses of 5 steps, at most off by", "first gradient's norm, off by"
    table(("model", "optimizer", "precision", losses, norms, "greedy tokens in fp32 equal"))
    cpu = torch.device("cpu")
    for kind, settings in KINDS.items():
        model = ModelConfig(vocab_size=512, context_length=128, n_layers=3, d_model=128, n_heads=4, **settings)
        one, other = (decoded(model, device, 48) for device in (cpu, setup.device))
        equal = next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
        for optimizer, precision in (("adamw", "fp32"), ("muon", "fp32"), ("adamw", setup.precision)):
            wanted = steps_of(model, optimizer, "fp32", cpu, 5)
            found = steps_of(model, optimizer, precision, setup.device, 5)
            loss = max(abs(a / b - 1) for a, b in zip(found[0], wanted[0], strict=True))
            norm = abs(found[1][0] / wanted[1][0] - 1)
            row(kind, optimizer, precision, f"{loss:.1e}", f"{norm:.1e}", f"{equal} of {len(one)}")


# ------------------------------------------------------------------------------------------------- training


def step_seconds(step: Callable[[], object], n_steps: int, device: torch.device) -> float:
    """Return the mean seconds of a step, after three warm-up steps."""
    for _ in range(3):
        step()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(n_steps):
        step()
    synchronize(device)
    return (time.perf_counter() - started) / n_steps


def our_step(recipe: Recipe, folder: Path, compiled: str) -> Callable[[], None]:
    """Return our training step, with `train.compile=compiled`."""
    settings = recipe.train.model_copy(update={"compile": compiled})
    return train.our_step(recipe.model_copy(update={"train": settings}), folder)


def training(setup: Setup) -> None:
    device, precision = setup.device, choose_precision("auto", setup.device)
    rate = product_rate(device, precision.dtype)
    print(f"Large products in {precision.name}: {rate / 1e12:,.3g} TFLOP/s.\n")
    table(("model", "batch", "loop", "tokens/s", "TFLOP/s", "of the product rate", "next to the best textbook"))
    for size, shape in setup.scale.trained.items():
        recipe = setup.recipe(shape, "steps")
        prepared = prepare(recipe)
        recipe = train.with_vocabulary(recipe, shape.vocab_size)
        data = train.read_tokens(prepared.folder)
        bf16 = precision.dtype == torch.bfloat16

        theirs = partial(textbook_step, shape, data, autocast=bf16, fused=True, device=device.type)
        ours = partial(our_step, recipe, prepared.folder)
        loops: dict[str, Callable[[], Callable[[], None]]] = {
            "textbook": partial(theirs, compiled=False),
            "textbook, blocks compiled": partial(theirs, compiled=True, blocks=True),
            "gptworks, not compiled": partial(ours, "none"),
            "gptworks, blocks compiled": partial(ours, "block"),
        }
        if size == next(iter(setup.scale.trained)):
            loops = {"textbook, compiled": partial(theirs, compiled=True)} | loops
        flops, tokens = forward_flops(recipe.model).training_per_token_dense, shape.batch * shape.context
        best = 0.0
        for name, make in loops.items():
            cells = [size, f"{shape.batch} × {shape.context}", name]
            try:
                speed = tokens / step_seconds(make(), setup.scale.n_steps, device)
            except torch.OutOfMemoryError:
                row(*cells, "out of memory", "", "", "")
                continue
            finally:
                torch._dynamo.reset()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            best = max(best, speed) if name.startswith("textbook") else best
            own = f"{speed / best:.2f} ×" if best and not name.startswith("textbook") else ""
            row(*cells, f"{speed:,.0f}", f"{speed * flops / 1e12:,.3g}", f"{speed * flops / rate:.0%}", own)


# -------------------------------------------------------------------------------------------------- packing


def packed_batch(n_rows: int, length: int, mean: int, vocab_size: int, device: torch.device) -> Batch:
    """Return rows of random texts, whose lengths are exponentially distributed."""
    draw, rows = np.random.default_rng(0), []
    for _ in range(n_rows):
        texts, left = [], length
        while left:
            n = min(left, 1 + int(draw.exponential(mean)))
            texts.append((draw.integers(0, vocab_size, n + 1), np.ones(n + 1, dtype=bool)))
            left -= n
        rows.append(texts)
    most = max(map(len, rows)) + 1
    return tuple(x.to(device) for x in stack([laid_out(texts, length, most) for texts in rows]))


def packing(setup: Setup) -> None:
    """Compare two ways to separate the texts of a row: a bias on the scores, and the texts' bounds."""
    device, precision = setup.device, choose_precision("auto", setup.device)
    table(("model", "batch", "texts", "separated by", "loss", "tokens/s", "peak memory"))
    size = next(iter(setup.scale.trained))
    for n_rows, length, mean in setup.scale.packed:
        model = setup.model(size).model_copy(update={"context_length": length})
        batch = packed_batch(n_rows, length, mean, model.vocab_size, device)
        settings = TrainConfig(max_steps=1, batch_size=n_rows, micro_batch_size=n_rows)
        within = "bounds" if dispatch.has_flash(device) else "a bias again"
        for name, given in (("a bias", batch[:3]), (within, batch)):
            torch.manual_seed(0)
            step = Rehearsal(model, settings, device.type, precision.name).new_step()
            compile_blocks(step.model, "block", device)
            with torch.no_grad(), precision.autocast():
                loss = step.loss(step.model, given).loss.item() / batch[1].numel()
            cells = [size, f"{n_rows} × {length}", str(int((batch[2] == 0).sum())), name, f"{loss:.5f}"]
            before = reset_peak(device)
            speed = batch[0].numel() / step_seconds(partial(take, step, settings, given), setup.scale.n_steps, device)
            row(*cells, f"{speed:,.0f}", readable(before + (peak_growth_bytes(device, before) or 0), "B"))
            del step
            torch._dynamo.reset()


# --------------------------------------------------------------------------------------------------- memory


def memory(setup: Setup) -> None:
    table(("model", "at a time", "checkpointing", "optimizer", "precision", "planned", "measured", "off by"))
    sizes = list(setup.scale.trained)
    for size in dict.fromkeys((sizes[0], sizes[-1])):
        model = setup.model(size)
        for batch, checkpointing, optimizer, precision in setup.scale.planned:
            settings = TrainConfig(max_steps=1, batch_size=batch, optimizer=optimizer, compile="none",
                                   activation_checkpointing=checkpointing)  # type: ignore[arg-type] # fmt: skip
            setting = Setting.of(model, settings, precision, on_cpu=setup.device.type == "cpu")
            planned = training_peak(replace(setting, has_flash=dispatch.has_flash(setup.device))).total_bytes
            cells = [size, f"{batch} × {model.context_length}", checkpointing, optimizer, precision]
            cells.append(readable(planned, "B"))
            if planned > 0.9 * memory_bytes(setup.device):
                row(*cells, "does not fit", "")
                continue
            found = measure_step(Rehearsal(model, settings, setup.device.type, precision)).peak_bytes or 0
            row(*cells, readable(found, "B"), f"{planned / found - 1:+.1%}" if found else "")
