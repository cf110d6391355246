"""A right call of every function that the kernels export, for tests that make one thing of it wrong."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gptworks.native import backend as native
from gptworks.native import entries
from gptworks.native.call import NUMBERS
from gptworks.native.library import library
from test_native import pack, variant


@dataclass(frozen=True)
class Call:
    """What a function is given. Tensors by their names in `entries.ENTRIES`, without question marks."""

    name: str
    tensors: dict[str, Any]
    numbers: dict[str, float] = field(default_factory=dict)
    model: Any = None
    n_threads: int = 2

    def with_tensor(self, name: str, x: Any) -> "Call":
        return replace(self, tensors=self.tensors | {name: x})

    def with_number(self, name: str, x: float) -> "Call":
        return replace(self, n_threads=x) if name == "n_threads" else replace(self, numbers=self.numbers | {name: x})

    def __call__(self) -> None:
        """
        Raises:
            ValueError, IndexError, RunError, RuntimeError: see `entries.call`.
        """
        entry = entries.ENTRIES[self.name]
        kept = [descriptors(self.tensors.get(name.rstrip("?"))) for name in entry.tensors]
        addresses = [None if one is None else ctypes.addressof(one) for one in kept]
        if entry.has_model:
            addresses.insert(0, None if self.model is None else ctypes.addressof(self.model))
        numbers = [self.n_threads if name == "n_threads" else self.numbers[name] for name, _ in entry.numbers]
        entries.call(library().functions, self.name, *addresses, *numbers)


def descriptors(x: Any) -> Any:
    """The structure of a tensor, or an array of those of several; structures and None stay."""
    if isinstance(x, Tensor):
        padded = [(*values, *[0] * (entries.MOST_DIMENSIONS - x.dim())) for values in (x.shape, x.stride())]
        return entries.Tensor(x.data_ptr(), NUMBERS[x.dtype], x.dim(), *padded)
    if isinstance(x, list):
        return (entries.Tensor * len(x))(*map(descriptors, x))
    return x


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(dtype)


def integers(*values: int) -> Tensor:
    return torch.tensor(values)


BACKENDS: list[Callable[[], native.NativeBackend]] = [
    lambda: native.NativeBackend(variant("gpt2"), 3, 64, dtype=torch.int8),
    lambda: native.NativeBackend(pack(variant("llama", mlp_bias=True), "int8"), 3, 64, dtype=torch.bfloat16),
    lambda: native.NativeBackend(pack(variant("qwen3"), "int4"), 3, 64, dtype=torch.float32),
]
"""Between them they have every part of a model: positions of both kinds, gates, biases, norms of heads, scales."""


def step(backend: native.NativeBackend) -> Call:
    rows = [(slot, i) for slot, n in ((2, 3), (0, 1), (1, 33)) for i in range(n)]
    slots, positions = (integers(*column) for column in zip(*rows, strict=True))
    wanted, width = integers(2, 3, 36), backend.model.config.d_model
    tensors = {
        "tokens": positions % 7, "slots": slots, "positions": positions, "wanted": wanted,
        "logits": floats(3, backend.vocab_size), "features": floats(3, width),
    }  # fmt: skip
    return Call("step", tensors, model=backend._model)


def logits(backend: native.NativeBackend) -> Call:
    tensors = {"features": floats(40, backend.model.config.d_model), "logits": floats(40, backend.vocab_size)}
    return Call("logits", tensors, model=backend._model)


def of_models() -> list[tuple[native.NativeBackend, Call]]:
    """Calls with a model, and the backend that it belongs to, which is to be kept."""
    return [(backend, make(backend)) for backend in (make() for make in BACKENDS) for make in (step, logits)]


def without_models() -> list[Call]:
    batch, heads, groups, length, n_keys, width = 2, 4, 2, 21, 40, 24
    calls = []
    for dtype in (torch.float32, torch.bfloat16):
        x, d_x = floats(9, 4099, dtype=dtype), torch.empty(9, 4099, dtype=dtype)
        function = {"function": entries.FUNCTION_OF_MLP["swiglu"]}
        calls.append(Call("activate", {"x": x, "up": x.clone(), "out": x.clone()}, function))
        backward = {"d_out": x.clone(), "x": x, "up": x.clone(), "d_x": d_x, "d_up": d_x.clone()}
        calls.append(Call("activate_backward", backward, function))
        weight, row = floats(4099), floats(9)
        norm = {
            "x": x, "branch": x.clone(), "weight": weight, "bias": weight.clone(), "stream": x.clone(),
            "out": x.clone(), "mean": row, "scale": row + 2,
        }  # fmt: skip
        calls.append(Call("norm", norm, {"eps": 1e-5, "alpha": 0.5}))
        backward = {
            "d_out": x.clone(), "d_stream": x.clone(), "x": x, "weight": weight, "mean": row, "scale": row + 2,
            "d_x": d_x, "d_branch": d_x.clone(), "d_weight": weight.clone(), "d_bias": weight.clone(),
        }  # fmt: skip
        calls.append(Call("norm_backward", backward, {"alpha": 0.5}))
        calls.append(Call("add", {"x": x, "branch": x.clone(), "out": x.clone()}, {"alpha": 0.5}))
        heads_first = floats(batch, heads, length, width, dtype=dtype)
        for cos in (floats(length, 10, dtype=dtype), floats(batch, 1, length, 10, dtype=dtype)):
            turned = {"x": heads_first, "cos": cos, "sin": cos.clone(), "out": heads_first.clone()}
            calls.append(Call("rotate", turned, {"direction": -1.0}))
        targets = integers(0, 6, -100, 3, 4098, 5, 6, 7, 8)
        entropy = {"logits": x.clone(), "targets": targets, "factors": row.clone(), "nats": row.clone()}
        calls.append(Call("cross_entropy", entropy, {"gradient": 1}))
        q, k = floats(batch, heads, length, width, dtype=dtype), floats(batch, groups, n_keys, width, dtype=dtype)
        attention = {
            "q": q, "k": k, "v": k.clone(), "out": q.clone(), "bias": floats(batch, 1, length, n_keys, dtype=dtype),
            "sums": floats(batch, heads, length), "seed": integers(5),
        }  # fmt: skip
        settings = {"window": 30, "scale": 0.2, "softcap": 5.0, "dropout": 0.1}
        calls.append(Call("attention", attention, settings))
        gradients = {"d_out": q.clone(), "d_q": q.clone(), "d_k": k.clone(), "d_v": k.clone()}
        calls.append(Call("attention_backward", attention | gradients, settings))
    product = {"a": floats(50, 70), "b": floats(33, 70).T, "bias": floats(33), "out": floats(50, 33)}
    calls.append(Call("gemm", product))
    matrices: Sequence[list[Tensor]] = [[floats(40, 24) + i for i in range(3)] for _ in range(2)]
    muon = {
        "gradients": matrices[0], "momenta": matrices[1], "updates": floats(3, 40, 24, dtype=torch.bfloat16),
        "polynomials": torch.tensor([[3.4445, -4.775, 2.0315]] * 2),
    }  # fmt: skip
    calls.append(Call("muon_updates", muon, {"n": 3, "momentum": 0.95, "eps": 1e-7}))
    return calls
