"""The interface of a key/value cache (gptworks.infer.backends.cache) for a forward pass: where a batch's tokens lie."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gptworks.model.lab.embeddings import NO_TOKEN


class Vectors(Protocol):
    """Keys or values of one layer and many texts, [n_slots, G, capacity, D], indexed like a tensor."""

    def __getitem__(self, place: Any) -> Tensor: ...

    def __setitem__(self, place: Any, x: Tensor) -> None: ...


class SlotRows:
    """The places in a cache of a flat batch's N tokens."""

    def __init__(
        self,
        parts: Sequence[tuple[int, int, int]],
        capacity: int,
        layers: Iterable[tuple[Vectors, Vectors]],
        tokens: Tensor | None,
        device: torch.device,
    ) -> None:
        """
        Args:
            parts: (slot, number of cached tokens, number of new tokens) of each text, in the batch's order.
            capacity: largest length that the texts may reach; rotary scaling by length depends on it.
            layers: keys and values of each layer.
            tokens: token ids in the slots, int32 [n_slots, capacity], if the model reads the previous token.
            device: the cache's device.
        """
        self.parts, self.capacity = parts, capacity
        self.positions = torch.tensor([start + i for _, start, n_new in parts for i in range(n_new)], device=device)
        self.slots = torch.tensor([slot for slot, _, _ in parts], device=device)
        self.layers = [SlotLayer(self, keys, values) for keys, values in layers]
        self._tokens = tokens

    def previous_tokens(self, tokens: Tensor) -> Tensor:
        """Store the batch's ids, int64 [1, N]; returns the ids before them in their texts, else NO_TOKEN."""
        assert self._tokens is not None, "the model reads the previous token"
        n_new = torch.tensor([n for _, _, n in self.parts], device=self.slots.device)
        slots = self.slots.repeat_interleave(n_new)
        self._tokens[slots, self.positions] = tokens[0].to(self._tokens.dtype)
        before = self._tokens[slots, (self.positions - 1).clamp(min=0)].long()
        return before.masked_fill(self.positions == 0, NO_TOKEN)[None]


class SlotLayer:
    """One layer's keys and values, and the places of a flat batch in them."""

    def __init__(self, rows: SlotRows, keys: Vectors, values: Vectors) -> None:
        self.rows, self.keys, self.values = rows, keys, values
