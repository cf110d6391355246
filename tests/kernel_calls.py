"""Makes a valid call of every function that the kernels export; tests change one thing in it."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from gptworks.infer.backends import native
from gptworks.kernels import entries
from gptworks.kernels.call import NUMBERS
from gptworks.kernels.library import library
from test_native import KINDS, pack, variant


@dataclass(frozen=True)
class Call:
    """The arguments of a function: tensors by their names in `entries.ENTRIES`, without question marks."""

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
    """Return the structure that describes a tensor, or an array of structures for several; structures and None stay."""
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
    lambda: native.NativeBackend(pack(variant("gemma3", bigram_vocab_size=101), "int4"), 3, 64, dtype=torch.float32),
]
"""Between them they have every part of a model: positions of both kinds, gates, biases, norms of heads, scales."""


def step(backend: native.NativeBackend, *texts: tuple[int, int, int]) -> Call:
    """Return a step over texts (slot, first position and tokens of each) that computes logits for each text's last
    token."""
    texts = texts or ((2, 0, 3), (0, 0, 1), (1, 0, 33))
    rows = [(slot, start + i) for slot, start, n in texts for i in range(n)]
    slots, positions = (integers(*column) for column in zip(*rows, strict=True))
    wanted, width = integers(*accumulate(n for _, _, n in texts)) - 1, backend.model.config.d_model
    tensors = {
        "tokens": positions % 7, "slots": slots, "positions": positions, "wanted": wanted,
        "logits": floats(len(texts), backend.vocab_size), "features": floats(len(texts), width),
    }  # fmt: skip
    return Call("step", tensors, model=backend._structure.root)


def logits(backend: native.NativeBackend, n: int = 40) -> Call:
    tensors = {"features": floats(n, backend.model.config.d_model), "logits": floats(n, backend.vocab_size)}
    return Call("logits", tensors, model=backend._structure.root)


def of_models() -> list[tuple[native.NativeBackend, Call]]:
    """Return calls that need a model, and the backend that owns the model, which must be kept alive."""
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


# ----------------------------------------------------------------------------------------------- sizes at boundaries

EDGES = (1, 2, 3, 5, 8, 15, 16, 17, 18, 24, 31, 32, 33, 47, 49, 63, 64, 65, 95, 97, 127, 128, 129)
"""Before, at and behind what registers, tiles, panels and lines of a cache hold."""

SOME_EDGES = (1, 4, 15, 16, 17, 33, 63, 65, 129)


def spread(*shape: int, gap: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows that are `gap` elements apart, in memory that ends with the last row."""
    *rows, width = shape
    strides, apart = [1], width + gap
    for size in reversed(rows):
        strides.insert(0, apart)
        apart *= size
    n = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return floats(n, dtype=dtype).as_strided(shape, strides)


def exchanged(batch: int, heads: int, length: int, width: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """Return [batch, heads, length, width] stored as [batch, length, heads, width], the layout of a projection."""
    return spread(batch, length, heads, width, gap=gap, dtype=dtype).transpose(1, 2)


def at_boundaries() -> Iterator[Call]:
    """Yield valid calls of every function without a model, with tensors that end where their memory does."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from _passes_at_boundaries(dtype)
        yield from _attention_at_boundaries(dtype)
    for m, n, k in product(SOME_EDGES, (*SOME_EDGES, 385), (1, 7, 16, 33, 769)):
        if m * n * k > 1 << 19:
            continue
        bias = None if m % 2 else floats(n)
        for a, b in (
            (floats(m, k), floats(k, n)), (floats(k, m).T, floats(n, k).T),
            (spread(m, k, gap=3), spread(n, k, gap=5).T), (spread(k, m, gap=1).T, spread(k, n, gap=2)),
        ):  # fmt: skip
            yield Call("gemm", {"a": a, "b": b, "bias": bias, "out": spread(m, n, gap=m % 3)})
    for rows, columns in product(SOME_EDGES, SOME_EDGES):
        several = [[floats(rows, columns) + i for i in range(2)] for _ in range(2)]
        muon = {
            "gradients": several[0], "momenta": several[1], "updates": floats(2, rows, columns, dtype=torch.bfloat16),
            "polynomials": torch.tensor([[3.4445, -4.775, 2.0315]] * 2),
        }  # fmt: skip
        yield Call("muon_updates", muon, {"n": 2, "momentum": 0.95, "eps": 1e-7})


def _passes_at_boundaries(dtype: torch.dtype) -> Iterator[Call]:
    for rows, n in product((1, 3), EDGES):
        x, y, weight, row = floats(rows, n, dtype=dtype), floats(rows, n, dtype=dtype), floats(n), floats(rows)
        out, more = torch.empty_like(x), torch.empty_like(x)
        for function, up in product(range(len(entries.FUNCTIONS)), (None, y)):
            yield Call("activate", {"x": x, "up": up, "out": out}, {"function": function})
            gradients = {"d_out": y, "x": x, "up": up, "d_x": out, "d_up": None if up is None else more}
            yield Call("activate_backward", gradients, {"function": function})
        yield Call("add", {"x": x, "branch": y, "out": out}, {"alpha": 0.5})
        for mean, branch in product((None, row), (None, y)):
            stream = None if branch is None else more
            norm = {"x": x, "branch": branch, "weight": weight, "bias": weight.clone(), "stream": stream, "out": out}
            norm |= {"mean": mean, "scale": row + 2}
            yield Call("norm", norm, {"eps": 1e-5, "alpha": 0.5})
            backward = {"d_out": y, "d_stream": branch, "x": x, "weight": weight, "mean": mean, "scale": row + 2}
            backward |= {"d_x": out, "d_branch": stream, "d_weight": weight.clone(), "d_bias": weight.clone()}
            yield Call("norm_backward", backward, {"alpha": 0.5})
        for gradient, factors in product((0, 1), (None, row)):
            targets = (torch.arange(rows) * 7 + n - 1) % n
            entropy = {"logits": x.clone(), "targets": targets, "factors": factors, "nats": row.clone()}
            yield Call("cross_entropy", entropy, {"gradient": gradient})
    for length, half, rest in product((1, 3, 17), (1, 2, 7, 8, 15, 16, 17, 32, 33), (0, 1, 6)):
        width = 2 * half + rest
        for x in (floats(2, 3, length, width, dtype=dtype), exchanged(2, 3, length, width, dtype)):
            for cos in (floats(length, half, dtype=dtype), floats(2, 1, length, half, dtype=dtype)):
                turned = {"x": x, "cos": cos, "sin": cos.clone(), "out": torch.empty_like(x)}
                yield Call("rotate", turned, {"direction": 1.0})


def _attention_at_boundaries(dtype: torch.dtype) -> Iterator[Call]:
    batch, groups = 2, 2
    for length, more, width in product(SOME_EDGES, (0, 1, 16, 23), (1, 7, 16, 24, 33, 64)):
        n_keys, heads, gap = length + more, groups * (1 + length % 2), width % 2
        if (width > 33) + (length > 33) + (more == 1) > 1:
            continue
        q = exchanged(batch, heads, length, width, dtype, gap)
        k, v = (exchanged(batch, groups, n_keys, width, dtype, gap) for _ in range(2))
        bias = spread(batch, 1, length, n_keys, gap=more % 2, dtype=dtype) if length % 3 else None
        shapes: Any = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "bias": bias, "seed": integers(5)}
        shapes |= {"sums": floats(batch, heads, length)}
        settings = {"window": n_keys if more else 1 + length // 2, "scale": 0.2, "softcap": 5.0 * (length % 2)}
        settings |= {"dropout": 0.1 * (width % 2)}
        yield Call("attention", shapes, settings)
        d_q, d_k, d_v = (torch.empty(x.shape, dtype=dtype) for x in (q, k, v))
        yield Call("attention_backward", shapes | {"d_out": q.clone(), "d_q": d_q, "d_k": d_k, "d_v": d_v}, settings)


def steps_at_boundaries() -> Iterator[Call]:
    """Yield steps and logits of models with each kind of weights and cache, up to the end of a slot."""
    caches = (torch.float32, torch.bfloat16, torch.int8)
    capacity = 37  # ends within a block of the cache
    for i, (name, kind) in enumerate(product(("qwen3", "narrow", "gpt2", "one key head, multipliers"), KINDS)):
        model = variant(name) if kind == "fp32" else pack(variant(name), kind)
        backend = native.NativeBackend(model, 3, capacity, dtype=caches[i % 3])
        for n in (1, 2, 3, 4, 7, 8, 9, 12, 13, 15, 16, 17, 31, 32, 33, 36, 37):
            yield step(backend, (1, 0, n))
            yield step(backend, (2, capacity - n, n), (0, 0, 1), (1, 0, min(n, 5)))
            yield logits(backend, n)
        yield step(backend, *((slot, capacity - 1, 1) for slot in (2, 0, 1)))
