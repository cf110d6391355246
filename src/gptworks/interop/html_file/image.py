"""A model as a memory image for the WebAssembly kernels: its tensors, and the structures of step.cpp.

The page copies the image to an address in its memory and adds that address to each pointer.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptworks.infer.backends.structure import ModelStructure
from gptworks.kernels import entries
from gptworks.kernels.wasm import WIDEST_PANEL
from gptworks.model.gpt import GPT
from gptworks.quantize.panels import size_in_panels

_LINE = 64
"""Tensors begin at multiples of this many bytes."""


@dataclass(frozen=True)
class Image:
    """A model's memory image, and the positions of its pointers, to which the page adds the image's address."""

    parts: tuple[tuple[int, memoryview], ...]
    """Position and content of each part, in order; bytes between parts are zero."""
    model: int
    """Position of the `Model` structure."""
    pointers: tuple[int, ...]
    """Positions of the 32-bit pointers that are not null; the value of each is a position in the image or the cache."""
    n_bytes: int
    """Size of the image."""
    n_room: int
    """Bytes of memory that the page allocates for the image and for the cache after it."""

    def content(self) -> Iterator[bytes | memoryview]:
        """Yield the image in pieces."""
        at = 0
        for position, part in self.parts:
            yield bytes(position - at)
            yield part
            at = position + len(part)
        yield bytes(self.n_bytes - at)


def make_image(model: GPT, capacity: int, cache: torch.dtype) -> Image:
    """Return the image of a model, packed or fp32, with room for one text. The C++ kernels must support the model (see
    `native.refusal`).

    Args:
        capacity: maximum length of the text in tokens.
        cache: dtype of the cached keys and values, fp32 or bf16.
    """
    return _ForImage(model, capacity, cache).image()


class _ForImage(ModelStructure):
    types = entries.Short

    def __init__(self, model: GPT, capacity: int, cache: torch.dtype) -> None:
        widest = dict.fromkeys((torch.bfloat16, torch.int8, torch.uint8), WIDEST_PANEL)
        super().__init__(model, 1, capacity, cache, widest, 1)
        self.parts: list[tuple[int, memoryview]] = []
        self.pointers: list[int] = []
        self.end = _LINE  # a pointer to position 0 would be null
        self.n_cached = 0

    def image(self) -> Image:
        n_layers, config = self.model.config.n_layers, self.model.config
        self.cache_bytes = config.n_kv_heads * size_in_panels(self.capacity) * config.d_head * self.cache_dtype.itemsize
        root = self.build()
        model = self._put_structure(root)
        start = -(-self.end // _LINE) * _LINE
        layers = self._layers
        for layer in layers:  # the caches follow the image
            for name in ("keys", "values"):
                setattr(layer, name, start + getattr(layer, name) - 1)
        end = start + 2 * n_layers * self._each
        if root.history:
            root.history = end
            end += -(-root.history_bytes // _LINE) * _LINE
        return Image(tuple(self.parts), model, tuple(self.pointers), start, end)

    @property
    def _each(self) -> int:
        return -(-self.cache_bytes // _LINE) * _LINE

    def place(self, tensor: Tensor) -> int:
        content: Any = tensor.detach().contiguous().view(torch.uint8).numpy().reshape(-1)
        return self._put(memoryview(content))

    def place_layers(self, layers: Any) -> int:
        self._layers = layers
        return self._put_structure(layers)

    def place_history(self) -> tuple[int, int]:
        return 1, 4 * self.capacity

    def place_cache(self, i: int) -> tuple[int, int, int, int, int, int]:
        return 1 + 2 * i * self._each, 0, 1 + (2 * i + 1) * self._each, 0, self.cache_bytes, 0

    def _put(self, content: memoryview) -> int:
        at = -(-self.end // _LINE) * _LINE
        self.parts.append((at, content))
        self.end = at + len(content)
        return at

    def _put_structure(self, structure: Any) -> int:
        """Place a structure, note its pointers, and return its position. Its memory is read only when the image is
        written."""
        at = self._put(memoryview(structure).cast("B"))
        self.pointers += [at + offset for offset in _pointers(structure)]
        return at


def _pointers(structure: Any, at: int = 0) -> Iterator[int]:
    """Yield the offsets of the pointers that are not null in a structure or an array of structures."""
    if isinstance(structure, ctypes.Array):
        for i, one in enumerate(structure):
            yield from _pointers(one, at + i * ctypes.sizeof(one))
        return
    for name, kind in structure._fields_:
        value, offset = getattr(structure, name), at + getattr(type(structure), name).offset
        if kind is ctypes.c_uint32:
            yield from (offset,) if value else ()
        elif isinstance(value, ctypes.Structure):
            yield from _pointers(value, offset)
