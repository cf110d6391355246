"""Measure gptworks on a GPU, all in one call, and print tables for docs/benchmarks.md.

The parts are: correctness compared with the CPU, training at several sizes compared with a textbook's compiled loop,
packed rows, memory compared with the plan, decoding, serving, layouts, and a resumed run.

    python bench/gpu.py                             # on CUDA, at most nine minutes
    python bench/gpu.py --device cpu --tiny         # every part on tiny models, to see that it works
    python bench/gpu.py --only training --only memory

Each part has a process of its own, so that a failure ends only that part. The exit code is 1 if a part fails or no time
is left for it. The text is the standard library's sources.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gptworks.device import choose_precision, device_name
from gpu_runs import decoding, layouts, resuming, serving
from gpu_setup import FULL, TINY, Setup
from gpu_steps import correctness, memory, packing, training

PARTS: dict[str, tuple[Callable[[Setup], None], float]] = {
    "correctness": (correctness, 90),
    "training": (training, 270),
    "packing": (packing, 90),
    "memory": (memory, 120),
    "decoding": (decoding, 60),
    "serving": (serving, 90),
    "layouts": (layouts, 120),
    "resuming": (resuming, 90),
}
"""The function of each part, in the order of measuring, and the seconds after which the part is ended; with --tiny,
only --minutes ends it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that every part works")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeatable; default: all")
    parser.add_argument("--minutes", type=float, default=8.5, help="time for all parts")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    device, scale = torch.device(arguments.device), TINY if arguments.tiny else FULL
    if arguments.part:
        PARTS[arguments.part][0](Setup(device, scale, arguments.folder))
        return
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device here: --device cpu --tiny shows that the parts work.")
    deadline, failed = time.monotonic() + 60 * arguments.minutes, []
    print(f"{device_name(device)}, torch {torch.__version__}, {choose_precision('auto', device).name}")
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.only or PARTS:
            left = deadline - time.monotonic()
            print(f"\n### {part}\n", flush=True)
            if left < 20:
                print(f"Not measured: the {arguments.minutes:g} minutes are over.")
                failed.append(part)
                continue
            command = [sys.executable, __file__, f"--part={part}", f"--folder={folder}", f"--device={device.type}"]
            command += ["--tiny"] if arguments.tiny else []
            began = time.monotonic()
            process = subprocess.Popen(command, start_new_session=True)
            ended = None
            try:
                ended = process.wait(left if arguments.tiny else min(left, PARTS[part][1]))
            except subprocess.TimeoutExpired:
                pass
            finally:  # also if this process is asked to end
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ends all processes of the part, such as servers
            if ended != 0:
                print(f"\nFAILED: {'out of time' if ended is None else f'exit code {ended}'}", flush=True)
                failed.append(part)
            print(f"\n({time.monotonic() - began:.0f} s)", flush=True)
    if failed:
        raise SystemExit(f"not complete: {', '.join(failed)}")


if __name__ == "__main__":
    main()
