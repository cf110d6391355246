"""Which backend computes a model: on a CPU the native kernels, unless torch is faster there; measured once, and kept.

The kernels are fast where the compiler had wide vectors to build them with. Elsewhere torch's own products, which come
with code for many processors, can be faster. No list of processors would stay right, so both compute the same small
model: a prompt and some tokens more.
"""

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable

import torch

from gptworks.choices import BackendName
from gptworks.config import ModelConfig
from gptworks.errors import RunError, UserError
from gptworks.files import read_regular, write_whole
from gptworks.infer.backends import native
from gptworks.infer.backends.backend import Backend, Chunk, TorchBackend
from gptworks.infer.backends.native import NativeBackend
from gptworks.infer.backends.placement import matrices
from gptworks.kernels.library import Unavailable, library
from gptworks.model import GPT
from gptworks.quantize.formats import KINDS
from gptworks.quantize.linear import QuantizedGPT, packed_matrices

PROMPT_TOKENS, NEW_TOKENS = 128, 32
"""A request that stands for all: prefill is bound by products, decoding by memory."""

TRIES = 3
MARGIN = 1.1
"""torch is preferred where the kernels take longer by more than this factor: less may be noise."""

_SHAPE = {"vocab_size": 1024, "context_length": 256, "n_layers": 2, "d_model": 512, "n_heads": 8}


def choose_backend(
    model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None, name: BackendName = "auto"
) -> Backend:
    """The fastest backend for a model where it is: on a CPU the native one, unless torch is measured to be faster.

    A model that is being trained is computed by torch. Warns (UserWarning), once, where the native one cannot be had
    or is slower. `description` of what is returned says what computes and why.

    Args:
        n_slots, capacity: texts at once, and the tokens of each.
        dtype: of the caches; None: as the backend likes it.
        name: native: it, or an error. torch: the model's own forward pass.

    Raises:
        UserError: name="native" and it cannot be had.
    """
    if name == "torch" or (name == "auto" and (model.device.type != "cpu" or model.training)):
        return TorchBackend(model, n_slots, capacity, dtype=dtype)
    try:
        backend, slower = _native_backend(model, n_slots, capacity, dtype, name == "native")
    except Unavailable as error:
        if name == "native":
            raise UserError(f"backend=native cannot compute this model here: {error} Take auto or torch.") from None
        _say_once(f"the native engine is not used: {error} torch computes instead, slower.")
        return TorchBackend(model, n_slots, capacity, dtype=dtype)
    if isinstance(backend, TorchBackend):
        _say_once(f"the native engine is not used: it is slower here ({slower}). --backend native takes it.")
        backend.description += f", because it is faster here ({slower})"
    return backend


def _native_backend(
    model: GPT, n_slots: int, capacity: int, dtype: torch.dtype | None, asked: bool
) -> tuple[Backend, str]:
    """The native backend, or where it was not asked for and is slower than torch, torch's; and their times in words.

    Raises:
        Unavailable: the native one cannot serve.
    """

    if reason := native.refusal(model):
        raise Unavailable(reason)
    if asked or os.environ.get("GPTWORKS_NATIVE") == "1":  # without a measurement
        return native.NativeBackend(model, n_slots, capacity, dtype=dtype), ""
    ours, theirs = seconds_of_both(next(matrices(model)).weight.dtype)
    figures = f"a request takes {1e3 * ours:.0f} ms natively and {1e3 * theirs:.0f} ms with torch"
    if ours > MARGIN * theirs:
        return TorchBackend(model, n_slots, capacity, dtype=dtype), figures
    backend = native.NativeBackend(model, n_slots, capacity, dtype=dtype)
    backend.description += f", because {figures}"
    return backend, figures


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=3)


def seconds_of_both(kind: torch.dtype) -> tuple[float, float]:
    """The seconds that the kernels and torch take for the request with weights of a kind, as measured on this machine.

    Measured once for a build of the kernels, the instructions it uses, a release of torch, a number of threads and a
    kind, in about a second; the figures are kept beside the library.
    """
    kernels = library()
    build = f"{kernels.sha256[:16]} {kernels.instructions}"
    key = f"{build} torch {torch.__version__} threads {torch.get_num_threads()} {kind}"
    file = kernels.folder / "choice.json"
    known: dict[str, list[float]] = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        read = json.loads(read_regular(file, 1 << 20))
        known = read if isinstance(read, dict) else {}
    found = known.get(key)
    if isinstance(found, list) and len(found) == 2 and all(isinstance(x, float) and x > 0 for x in found):
        return found[0], found[1]
    measured = measure(kind)
    with contextlib.suppress(RunError):
        write_whole(file, json.dumps({**known, key: measured}, indent=2))
    return measured


def measure(kind: torch.dtype) -> tuple[float, float]:
    """The best of some tries of each, in turns. Draws nothing from torch's global generator."""
    backends: list[Backend] = [NativeBackend(_model(kind), 1, 256), TorchBackend(_model(kind), 1, 256)]
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
        names = [name for name, module in GPT(config).named_modules() if hasattr(module, "weight")]
        packed = [name for name in names if "norm" not in name and name != "position_embedding"]
        model = QuantizedGPT(config, dict.fromkeys(packed, KINDS[kind]))
        for _, matrix in packed_matrices(model):
            if matrix.scale is None:
                matrix.weight.normal_(std=0.02)
            else:
                matrix.weight.random_()
                matrix.scale.fill_(0.001)
    return model.eval()
