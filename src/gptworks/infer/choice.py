"""Whether the native kernels are faster than torch on this machine: measured once, and remembered.

The kernels are fast where the compiler had wide vectors to build them with. Elsewhere torch's own products, which come
with code for many processors, can be faster. No list of processors would stay right, so both compute the same small
model: a prompt and some tokens more.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable

import torch

from gptworks.config import ModelConfig
from gptworks.errors import RunError
from gptworks.files import write_whole
from gptworks.model import GPT
from gptworks.model.backend import Backend, Chunk, TorchBackend
from gptworks.native.backend import NativeBackend
from gptworks.native.library import cache_folder, library
from gptworks.quantize.formats import KINDS
from gptworks.quantize.linear import QuantizedGPT, packed_matrices

PROMPT_TOKENS, NEW_TOKENS = 128, 32
"""A request that stands for all: prefill is bound by products, decoding by memory."""

TRIES = 3
MARGIN = 1.1
"""torch is preferred where the kernels take longer by more than this factor: less may be noise."""

_SHAPE = {"vocab_size": 1024, "context_length": 256, "n_layers": 2, "d_model": 512, "n_heads": 8}


def seconds_of_both(kind: torch.dtype) -> tuple[float, float]:
    """The seconds that the kernels and torch take for the request with weights of a kind, as measured on this machine.

    Measured once for a build of the kernels, a release of torch, a number of threads and a kind, in about a second; the
    figures are kept beside the library.
    """
    key = f"{library().sha256[:16]} torch {torch.__version__} threads {torch.get_num_threads()} {kind}"
    folder = cache_folder()
    file = None if folder is None else folder / "choice.json"
    known: dict[str, list[float]] = {}
    if file is not None:
        with contextlib.suppress(OSError, ValueError):
            read = json.loads(file.read_bytes())
            known = read if isinstance(read, dict) else {}
    found = known.get(key)
    if isinstance(found, list) and len(found) == 2 and all(isinstance(x, float) and x > 0 for x in found):
        return found[0], found[1]
    measured = measure(kind)
    if file is not None:
        with contextlib.suppress(RunError):
            write_whole(file, json.dumps({**known, key: measured}, indent=2))
    return measured


def measure(kind: torch.dtype) -> tuple[float, float]:
    """The best of some tries of each, in turns. Draws nothing from torch's global generator."""
    model = _model(kind)
    backends: list[Backend] = [NativeBackend(model, 1, 256), TorchBackend(model, 1, 256)]
    best = [float("inf")] * 2
    for _ in range(TRIES):
        for i, backend in enumerate(backends):
            best[i] = min(best[i], _request_seconds(backend))
    return best[0], best[1]


def _request_seconds(backend: Backend) -> float:
    prompt = _seconds(lambda: backend.compute([Chunk(0, 0, range(PROMPT_TOKENS))]))
    steps = [_seconds(lambda i=i: backend.compute([Chunk(0, PROMPT_TOKENS + i, [i])])) for i in range(4)]  # type: ignore[misc]
    return prompt + NEW_TOKENS * min(steps)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _model(kind: torch.dtype) -> GPT:
    """A model with matrices of this kind and random weights."""
    config = ModelConfig(**_SHAPE)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if kind not in KINDS:
            return GPT(config).eval()
        matrices = [name for name, module in GPT(config).named_modules() if hasattr(module, "weight")]
        packed = [name for name in matrices if "norm" not in name and name != "position_embedding"]
        model = QuantizedGPT(config, dict.fromkeys(packed, KINDS[kind]))
        for _, matrix in packed_matrices(model):
            if matrix.scale is None:
                matrix.weight.normal_(std=0.02)
            else:
                matrix.weight.random_()
                matrix.scale.fill_(0.001)
    return model.eval()


def is_forced() -> bool:
    """Whether GPTWORKS_NATIVE=1 asks for the kernels without a measurement."""
    return os.environ.get("GPTWORKS_NATIVE") == "1"
