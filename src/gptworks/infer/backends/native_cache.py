"""Keys and values in the layout of the native kernels (cached_attention.h): blocks of 16 positions.

A word of four bytes has one number in fp32, two in bf16, four in int8. Keys are in panels of 16 (quantize/panels.py).
A word of the values holds one element at as many positions as it has numbers.
"""

from typing import Any

import torch
from torch import Tensor

from gptworks.infer.backends.cache import SlotCache, Vectors
from gptworks.quantize.panels import UNIT, from_panels, size_in_panels


class Blocks(Vectors):
    """Keys or values of one layer, [n_slots, G, positions, D], which are reordered within each block."""

    @staticmethod
    def room(n_tokens: int) -> int:
        return size_in_panels(n_tokens)

    def _by_position(self, blocks: Tensor) -> Tensor:
        """The vectors [G, positions, D] in the order of their positions."""
        raise NotImplementedError

    def __setitem__(self, place: Any, x: Tensor) -> None:
        raise TypeError("the kernels write keys and values")

    def __getitem__(self, place: Any) -> Tensor:
        """Read one slot, by head and position."""
        slot, *places = place
        vectors = self._by_position(self.data[slot])
        if self.scale is not None:
            vectors = (vectors * self.scale[slot, ..., None]).to(self.dtype)
        return vectors[tuple(places)]


class KeyBlocks(Blocks):
    def _by_position(self, blocks: Tensor) -> Tensor:
        return torch.stack([from_panels(head.flatten(), len(head), UNIT) for head in blocks])


class ValueBlocks(Blocks):
    def _by_position(self, blocks: Tensor) -> Tensor:
        groups, _, width = blocks.shape
        words = blocks.view(groups, -1, width, 4 // blocks.element_size())
        return words.transpose(2, 3).reshape(blocks.shape)


class BlockCache(SlotCache):
    """A cache that only the native kernels write."""

    of_keys, of_values = KeyBlocks, ValueBlocks
