"""Compare the memory of training steps: predicted by formula, traced on fake tensors, and measured.

python bench/memory.py

Each step is traced and measured in new processes.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from gptworks.config import TrainConfig
from gptworks.device import device_name
from gptworks.planning.memory import training_peak
from gptworks.planning.params import count_parameters
from gptworks.planning.setting import Setting
from gptworks.presets import preset
from gptworks.training.rehearsal.measure import measure_step
from gptworks.training.rehearsal.trace import Rehearsal, trace_step
from gptworks.units import readable

CASES = (
    ("gpt2-midi", 16, "fp32", "none", "adamw"),
    ("gpt2-midi", 16, "bf16", "none", "muon"),
    ("modern-24m", 4, "bf16", "none", "adamw"),
    ("gpt2", 2, "fp32", "none", "adamw"),
    ("gpt2", 4, "bf16", "block", "adamw"),
    ("moe-115m", 2, "bf16", "none", "adamw"),
    ("custom-300m", 1, "bf16", "none", "adamw"),
    ("modern-336m", 1, "fp32", "block", "muon"),
)
"""Preset, micro-batch size, precision, checkpointing, optimizer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--largest", type=float, default=12, help="GB above which a case is left out")
    arguments = parser.parse_args()
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}")
    header = ("predicted", "traced", "measured", "off by", "kept", "kept / measured")
    print(f"{'step':<44}" + "".join(f"{title:>17}" for title in header))
    for name, batch_size, precision, checkpointing, optimizer in CASES:
        model = preset(name)
        train = TrainConfig(
            max_steps=1, batch_size=batch_size, activation_checkpointing=checkpointing, optimizer=optimizer
        )
        predicted = training_peak(Setting.of(model, train, precision, on_cpu=True)).total_bytes
        if predicted > arguments.largest * 1e9:
            continue
        rehearsal = Rehearsal(model, train, precision=precision)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            traced = process.submit(trace_step, rehearsal).result().peak_bytes
        measured = measure_step(rehearsal)
        words = f"{name} {count_parameters(model).total / 1e6:.0f}M, {batch_size} × {model.context_length}, {precision}"
        words += (", checkpointing" if checkpointing == "block" else "") + (", muon" if optimizer == "muon" else "")
        cells = [readable(n, "B") for n in (predicted, traced, measured.peak_bytes)]
        cells += [f"{predicted / measured.peak_bytes - 1:+.1%}", readable(measured.kept_bytes, "B")]
        cells += [f"{measured.kept_bytes / measured.peak_bytes:.2f}"]
        print(f"{words:<44}" + "".join(f"{cell:>17}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
