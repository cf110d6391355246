"""Keys and values as the native kernels multiply them (cached_attention.h): in blocks of 16 positions.

A word of four bytes has one number in fp32, two in bf16, four in int8. Keys: of a block the first words of its 16 keys,
then the second ones, and so on. Values: for each element a word of as many positions as it has numbers.
"""

from typing import Any

from torch import Tensor

from gptworks.model.cache import SlotCache, Vectors

BLOCK = 16
"""Positions of a block."""


class Blocks(Vectors):
    """Keys or values of one layer, [n_slots, G, positions, D]; those of a block lie in an order of their own."""

    @staticmethod
    def room(n_tokens: int) -> int:
        return -(-n_tokens // BLOCK) * BLOCK

    def _by_position(self, blocks: Tensor) -> Tensor:
        """Blocks [G, blocks, 16, D] as vectors [G, positions, D]."""
        raise NotImplementedError

    def __setitem__(self, place: Any, x: Tensor) -> None:
        raise TypeError("the kernels write keys and values")

    def __getitem__(self, place: Any) -> Tensor:
        """Of one slot, by head and position."""
        slot, *places = place
        groups, _, width = self.data[slot].shape
        vectors = self._by_position(self.data[slot].view(groups, -1, BLOCK, width))
        if self.scale is not None:
            vectors = (vectors * self.scale[slot, ..., None]).to(self.dtype)
        return vectors[tuple(places)]


class KeyBlocks(Blocks):
    def _by_position(self, blocks: Tensor) -> Tensor:
        groups, n, _, width = blocks.shape
        words = blocks.view(groups, n, -1, BLOCK, 4 // blocks.element_size())
        return words.transpose(2, 3).reshape(groups, n * BLOCK, width)


class ValueBlocks(Blocks):
    def _by_position(self, blocks: Tensor) -> Tensor:
        groups, n, _, width = blocks.shape
        words = blocks.view(groups, -1, width, 4 // blocks.element_size())
        return words.transpose(2, 3).reshape(groups, n * BLOCK, width)


class BlockCache(SlotCache):
    """A cache that only the kernels write."""

    of_keys, of_values = KeyBlocks, ValueBlocks
