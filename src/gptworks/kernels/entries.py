"""Declarations of the functions that the C++ exports: arguments, structures, and the numbers of dtypes and activations.

The C++ has the same declarations (entry.h, functions.h, matrix.h, step.h). When a library is loaded, `declare` compares
the structures' sizes and the lists of dtypes and activations. Every function checks its arguments before it reads or
writes tensors, and returns a code. This module does not import torch.
"""

import ctypes
from ctypes import Structure
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from gptworks.errors import RunError

POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

KINDS = ("float32", "bfloat16", "float16", "int8", "uint8", "int64")
"""Dtypes in the order of their numbers. uint8 holds int4 weights, two per byte."""

FUNCTIONS = ("gelu", "gelu_tanh", "relu2", "silu")
"""Activations in the order of their numbers."""

FUNCTION_OF_MLP = {
    name: FUNCTIONS.index(function)
    for name, function in (
        ("gelu", "gelu"), ("gelu_tanh", "gelu_tanh"), ("relu2", "relu2"),
        ("swiglu", "silu"), ("geglu", "gelu"), ("geglu_tanh", "gelu_tanh"),
    )
}  # fmt: skip
"""Number of the activation for each value of `model.mlp`; a gated MLP applies the activation to its gates."""

MOST_DIMENSIONS = 5


class Tensor(Structure):
    _fields_ = (
        ("data", POINTER), ("kind", INTEGER), ("n_dimensions", INTEGER),
        ("sizes", INTEGER * MOST_DIMENSIONS), ("strides", INTEGER * MOST_DIMENSIONS),
    )  # fmt: skip


class Matrix(Structure):
    _fields_ = (
        ("weight", POINTER), ("scale", POINTER), ("bias", POINTER),
        *((name, INTEGER) for name in ("n", "k", "kind", "panel", "weight_bytes", "scale_bytes", "bias_bytes")),
    )  # fmt: skip


class Norm(Structure):
    _fields_ = (("weight", POINTER), ("bias", POINTER), ("width", INTEGER))


class Layer(Structure):
    _fields_ = (
        *((name, Norm) for name in ("norm1", "norm2", "query_norm", "key_norm", "norm1_after", "norm2_after")),
        *((name, Matrix) for name in ("query", "key", "value", "out", "gate", "up", "down")),
        *((name, POINTER) for name in ("keys", "key_scales", "values", "value_scales")),
        *((name, INTEGER) for name in ("cache_bytes", "scale_bytes", "window", "rotates")),
    )


class Model(Structure):
    _fields_ = (
        *((name, INTEGER) for name in (
            "d_model", "n_heads", "n_groups", "d_head", "d_ff", "d_rotary", "n_slots", "capacity", "n_layers",
            "activation", "layer_norm", "parallel", "cache_kind",
        )),
        *((name, REAL) for name in ("eps", "scale", "embedding_scale", "residual_scale", "logit_scale", "pairs_scale")),
        *((name, Matrix) for name in ("embedding", "head", "pairs")),
        *((name, POINTER) for name in ("history", "position", "cos", "sin", "window_cos", "window_sin")),
        *((name, INTEGER) for name in ("position_bytes", "rotary_bytes", "history_bytes")),
        ("norm", Norm), ("layers", POINTER),
    )  # fmt: skip


@cache
def _with_short_pointers(structure: Any) -> Any:
    """Return a copy of a structure class that has 32-bit pointers, as WebAssembly does."""

    def short(kind: Any) -> Any:
        if kind is POINTER:
            return ctypes.c_uint32
        return _with_short_pointers(kind) if issubclass(kind, Structure) else kind

    fields = [(name, short(kind)) for name, kind in structure._fields_]
    return type(structure.__name__, (Structure,), {"_fields_": fields})


class Short:
    """The structures of a model in WebAssembly, with 32-bit pointers."""

    Matrix, Norm, Layer, Model = map(_with_short_pointers, (Matrix, Norm, Layer, Model))


@dataclass(frozen=True)
class Entry:
    """Arguments of a C++ function, in order: the model if `has_model`, tensors, numbers, and the number of threads."""

    tensors: tuple[str, ...]
    """Names of the tensors; an optional tensor's name ends with a question mark."""
    numbers: tuple[tuple[str, Any], ...]
    has_model: bool

    @property
    def types(self) -> list[Any]:
        return [POINTER] * (self.has_model + len(self.tensors)) + [kind for _, kind in self.numbers]


def _entry(tensors: str, /, *, has_model: bool = False, **numbers: Any) -> Entry:
    return Entry(tuple(tensors.split()), (*numbers.items(), ("n_threads", INTEGER)), has_model)


_ATTENTION: dict[str, Any] = {"window": INTEGER, "scale": REAL, "softcap": REAL, "dropout": REAL}

ENTRIES = MappingProxyType({
    "step": _entry("tokens slots positions wanted logits? features?", has_model=True),
    "logits": _entry("features logits", has_model=True),
    "attention": _entry("q k v out bias? sums seed", **_ATTENTION),
    "attention_backward": _entry("q k v out bias? sums seed d_out d_q d_k d_v", **_ATTENTION),
    "activate": _entry("x up? out", function=INTEGER),
    "activate_backward": _entry("d_out x up? d_x d_up?", function=INTEGER),
    "norm": _entry("x branch? weight bias? stream? out mean? scale", eps=REAL, alpha=REAL),
    "norm_backward": _entry("d_out d_stream? x weight mean? scale d_x d_branch? d_weight d_bias?", alpha=REAL),
    "add": _entry("x branch out", alpha=REAL),
    "rotate": _entry("x cos sin out", direction=REAL),
    "cross_entropy": _entry("logits targets factors? nats", gradient=INTEGER),
    "gemm": _entry("a b bias? out"),
    "muon_updates": _entry("gradients momenta updates polynomials", n=INTEGER, momentum=REAL, eps=REAL),
})  # fmt: skip
"""The C++ functions by name. The library exports them as `gptworks_NAME`. Muon's `gradients` and `momenta` are n
tensors each."""

_ERRORS = (ValueError, IndexError, RunError, RuntimeError)
"""Exceptions for return codes 1 to 4: invalid argument, index out of range, out of memory, any other error."""


class Mismatch(Exception):
    """The library's declarations differ from this module's: it was built from another package version."""


def declare(functions: ctypes.CDLL) -> None:
    """Set the argument and return types of a library's functions for ctypes.

    Raises:
        Mismatch: a function is missing, or the result of `layout` differs from the library's.
    """
    try:
        for name in ("layout", "error"):
            function = getattr(functions, f"gptworks_{name}")
            function.argtypes, function.restype = [], ctypes.c_char_p
        for name in ("built_with", "take_amx"):
            function = getattr(functions, f"gptworks_{name}")
            function.argtypes, function.restype = [], ctypes.c_int
        functions.gptworks_widest_panel.argtypes = [INTEGER]
        functions.gptworks_widest_panel.restype = INTEGER
        for name, entry in ENTRIES.items():
            function = getattr(functions, f"gptworks_{name}")
            function.argtypes, function.restype = entry.types, ctypes.c_int
    except AttributeError as error:
        raise Mismatch(str(error)) from None
    if (found := functions.gptworks_layout().decode()) != layout():
        raise Mismatch(f"it has {found}, and {layout()} is needed")


def layout() -> str:
    """Return the structures' sizes and the names of dtypes and activations as one line, like `layout` in the C++."""
    sizes = ", ".join(f"{one.__name__} {ctypes.sizeof(one)}" for one in (Tensor, Matrix, Norm, Layer, Model))
    return f"{sizes}; kinds {' '.join(KINDS)}; functions {' '.join(FUNCTIONS)}"


def call(functions: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Call a library function with the addresses and numbers that its entry declares. All calls go through here.

    Raises:
        ValueError: an argument has a wrong dtype, shape or layout, or a number is out of bounds.
        IndexError: a token, target or position is out of range.
        RunError: the function cannot allocate memory.
        RuntimeError: the function failed in another way.
    """
    if code := getattr(functions, f"gptworks_{name}")(*arguments):
        said = functions.gptworks_error().decode(errors="replace")
        if (error := _ERRORS[code - 1]) is RunError:
            said = f"there is not enough memory. Take fewer or shorter sequences at once, or fewer threads. {said}"
        raise error(f"{name.replace('_', ' ')}: {said.strip()}")
