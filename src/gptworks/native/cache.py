"""Keys and values as the native kernels multiply them (cached_attention.h): in blocks of 16 positions.

A word of four bytes has one number in fp32, two in bf16, four in int8. Keys: of a block the first words of its 16 keys,
then the second ones, and so on. Values: for each element a word of as many positions as it has numbers.
"""

from abc import abstractmethod
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

    @abstractmethod
    def _by_position(self, blocks: Tensor, of_word: int) -> Tensor:
        """Blocks [..., blocks, 16 · D], of words of so many numbers, as vectors [..., positions, D]."""

    def __setitem__(self, place: Any, x: Tensor) -> None:
        raise TypeError("the kernels write keys and values")

    def __getitem__(self, place: Any) -> Tensor:
        """Of one slot, by head and position."""
        slot, *places = place
        vectors = self._by_position(self.data[slot].unflatten(1, (-1, BLOCK)).flatten(2), 4 // self.data.element_size())
        if self.scale is not None:
            vectors = (vectors * self.scale[slot, ..., None]).to(self.dtype)
        return vectors[tuple(places)]


class KeyBlocks(Blocks):
    def _by_position(self, blocks: Tensor, of_word: int) -> Tensor:
        return blocks.unflatten(-1, (-1, BLOCK, of_word)).transpose(-3, -2).flatten(-2).flatten(-3, -2)


class ValueBlocks(Blocks):
    def _by_position(self, blocks: Tensor, of_word: int) -> Tensor:
        return blocks.unflatten(-1, (BLOCK // of_word, -1, of_word)).transpose(-2, -1).flatten(-4, -2)


class BlockCache(SlotCache):
    """A cache that only the kernels write."""

    of_keys, of_values = KeyBlocks, ValueBlocks
