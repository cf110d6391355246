"""The interface between a forward pass and the KV cache (gptworks.infer.backends.cache): slots and positions."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gptworks.model.lab.embeddings import NO_TOKEN


def on_device(numbers: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor of numbers, given as lists, on a device. The host does not wait for a copy to CUDA. It waits on
    MPS, where the copy would otherwise read memory that is already freed."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=device.type == "cuda")


class Vectors(Protocol):
    """Cached keys or values of one layer, [n_slots, G key/value heads, capacity, D head width], indexed like a tensor.
    A slot holds one text."""

    def __getitem__(self, place: Any) -> Tensor: ...

    def __setitem__(self, place: Any, x: Tensor) -> None: ...


class SlotRows:
    """Slot and position in the cache for each of the N tokens of a flat batch."""

    def __init__(
        self,
        parts: Sequence[tuple[int, int, int]] | None,
        slots: Tensor,
        positions: Tensor,
        capacity: int,
        layers: Iterable[tuple[Vectors, Vectors]],
        tokens: Tensor | None,
    ) -> None:
        """
        Args:
            parts: (slot, number of cached tokens, number of new tokens) of each text, in the batch's order; None if
                the host does not know them. Each text then has one new token.
            slots, positions: the slot of each token, and its position in its text, int64 [N], on the cache's device.
            capacity: the text length, in tokens, for rotary scaling that depends on the length.
            layers: each layer's cached keys and values.
            tokens: token ids in the slots, int32 [n_slots, capacity]; None unless the model reads previous tokens.
        """
        self.parts, self.slots, self.positions, self.capacity = parts, slots, positions, capacity
        self._layers, self._tokens = list(layers), tokens

    def layer(self, use: int) -> "SlotLayer":
        """Return the cached keys and values for `use`, an index in `ModelConfig.layer_uses`. The result is not stored
        here: a reference cycle would hold the cache's memory until Python's garbage collector runs."""
        return SlotLayer(self, *self._layers[use])

    def previous_tokens(self, tokens: Tensor) -> Tensor:
        """Store the batch's token ids, int64 [1, N]; return each token's predecessor in its text, or NO_TOKEN."""
        assert self._tokens is not None, "the model reads the previous token"
        self._tokens[self.slots, self.positions] = tokens[0].to(self._tokens.dtype)
        before = self._tokens[self.slots, (self.positions - 1).clamp(min=0)].long()
        return before.masked_fill(self.positions == 0, NO_TOKEN)[None]


class SlotLayer:
    """One layer's cached keys and values, and the slot and position of each of the batch's tokens (`rows`)."""

    def __init__(self, rows: SlotRows, keys: Vectors, values: Vectors) -> None:
        self.rows, self.keys, self.values = rows, keys, values
