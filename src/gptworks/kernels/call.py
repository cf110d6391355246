"""Calls of the C++ with torch tensors, each passed as its address, dtype, sizes and strides."""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gptworks.kernels import entries
from gptworks.kernels.library import Library

NUMBERS = {getattr(torch, name): number for number, name in enumerate(entries.KINDS)}
"""Number of each dtype in calls of the C++."""

_REST = tuple((0,) * (entries.MOST_DIMENSIONS - n) for n in range(entries.MOST_DIMENSIONS + 1))
_INT64, _BYTES = NUMBERS[torch.int64], ctypes.sizeof(entries.Tensor)

Given: TypeAlias = "Tensor | Sequence[Tensor] | array[int] | None"


def call(library: Library, name: str, tensors: Sequence[Given], *numbers: float, model: Any = None) -> None:
    """Call a function of `entries.ENTRIES` on as many threads as torch uses.

    Args:
        tensors: arguments in the entry's order. Each is a tensor, an int64 array (type "q"), None for an optional
            tensor, or a sequence of tensors, whose length is passed before the other numbers.
        model: the model structure, if the entry has one.

    Raises:
        ValueError: a tensor is not on the CPU or has a dtype that the C++ does not know, sequences differ in length, or
            for a reason given in `entries.call`.
        IndexError, RunError, RuntimeError: see `entries.call`.
    """
    words: list[int] = []
    places: list[int | None] = []
    n_each: int | None = None
    for given in tensors:
        if given is None:
            places.append(None)
            continue
        places.append(len(words) * 8)
        if isinstance(given, Tensor):
            _describe(given, words)
        elif isinstance(given, array):
            words += (given.buffer_info()[0], _INT64, 1, len(given), *_REST[1], 1, *_REST[1])
        else:
            if n_each not in (None, len(given)):
                raise ValueError(f"{name}: {n_each} tensors and {len(given)}")
            n_each = len(given)
            for one in given:
                _describe(one, words)
    block = array("q", words)
    start = block.buffer_info()[0]
    addresses = [None if place is None else start + place for place in places]
    if model is not None:
        addresses.insert(0, ctypes.addressof(model))
    if n_each is not None:
        numbers = (n_each, *numbers)
    entries.call(library.functions, name, *addresses, *numbers, torch.get_num_threads())


def _describe(x: Tensor, words: list[int]) -> None:
    sizes, number = x.shape, NUMBERS.get(x.dtype)
    if number is None or not x.is_cpu:
        raise ValueError(f"the native kernels take no {x.dtype} {list(sizes)} on {x.device}")
    if len(sizes) > entries.MOST_DIMENSIONS:
        x = x.flatten(0, len(sizes) - entries.MOST_DIMENSIONS)
        sizes = x.shape
    rest = _REST[len(sizes)]
    words += (x.data_ptr(), number, len(sizes), *sizes, *rest, *x.stride(), *rest)
