"""The key/value cache of many texts.

Keys are stored after the rotary embedding. The model takes the result of `SlotCache.rows` as an explicit argument.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gptworks.config import ModelConfig
from gptworks.infer.backends.placement import rooms_in_large_pages
from gptworks.model.cache import SlotRows, on_device
from gptworks.planning.inference import kv_cache_bytes

_MOST_SLOT_BYTES = 1 << 19
"""Maximum bytes of a slot's keys (or values) in one layer for which large pages of 2 MiB are used."""


class Vectors:
    """Keys or values of one layer for many texts, [n_slots, G, capacity, D]; in int8, each vector has a scale.

    Indexed by slot, head and position, like a tensor. int8 vectors are read in the dtype in which they were written.

    If `unit` is 16, only the native kernels read and write the data, in the layout of cached_attention.h: blocks of 16
    positions, in words of four bytes (one fp32, two bf16 or four int8 numbers). Keys are in panels of 16
    (quantize/panels.py). A word of the values has element d of the vectors at consecutive positions.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, unit: int) -> None:
        self.unit = unit
        shape = (*shape[:2], self.room(shape[2]), shape[3])
        self.data = _memory(shape, dtype, device)
        self.dtype = torch.float32 if dtype == torch.int8 else dtype
        self.scale = _memory(shape[:3], torch.float32, device) if dtype == torch.int8 else None

    def room(self, n_tokens: int) -> int:
        """Return the number of positions to allocate for `n_tokens`: a multiple of `unit`."""
        return -(-n_tokens // self.unit) * self.unit

    def grown(self, n_slots: int, capacity: int, held: Sequence[int]) -> "Vectors":
        """Return a larger copy, with the first `held[i]` tokens of each old slot i."""
        groups, width = self.data.size(1), self.data.size(3)
        new = Vectors((n_slots, groups, capacity, width), self.data.dtype, self.data.device, self.unit)
        new.dtype = self.dtype
        for slot, n_tokens in enumerate(held):
            n = self.room(n_tokens)
            for mine, theirs in ((self.data, new.data), (self.scale, new.scale)):
                if mine is not None and theirs is not None:
                    theirs[slot, :, :n] = mine[slot, :, :n]
        return new

    def __setitem__(self, place: Any, x: Tensor) -> None:
        if self.scale is None:
            self.data[place] = x
            return
        self.dtype = x.dtype
        scale = x.float().abs().amax(-1) / 127
        self.data[place] = (x / scale.clamp(min=1e-30)[..., None]).round().to(torch.int8)
        self.scale[place] = scale

    def __getitem__(self, place: Any) -> Tensor:
        if self.scale is None:
            return self.data[place]
        data = self.data[place]
        return (data * self.scale[place][..., None]).to(self.dtype)

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the first `n_tokens` of slot `source` into slot `target`."""
        n = self.room(n_tokens)
        for tensor in (self.data, self.scale):
            if tensor is not None:
                tensor[target, :, :n] = tensor[source, :, :n]


def _memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for keys, values or scales: uninitialized on a CPU, zeros on other devices.

    Other devices multiply all positions and mask them afterwards, which does not remove a NaN. A CPU reads only
    positions that were written. Its slots of up to `_MOST_SLOT_BYTES` are in large pages. Longer slots are in normal
    pages, so that the system commits memory only for positions in use.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    if math.prod(shape[1:]) * dtype.itemsize > _MOST_SLOT_BYTES:
        return torch.empty(shape, dtype=dtype)
    (data,) = rooms_in_large_pages([(dtype, math.prod(shape))])
    return data.view(*shape)


class SlotCache:
    """Keys and values of many texts. Each text has a slot, [G, capacity, D] in each layer, and its own length.

    A block that a pass runs several times has keys and values for each run. Windowed layers keep all tokens and use
    masks, so that a text can be rolled back to any length. If embeddings depend on the previous token, token ids are
    cached too, in int32.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_slots: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        unit: int = 1,
    ) -> None:
        """Allocate `n_slots` slots of `capacity` tokens, or of the model's context if that is shorter.

        Args:
            dtype: floating point, or int8.
            unit: positions in a block, see `Vectors`; 1: no blocks.
        """
        self.config = config
        self.n_slots, self.capacity = n_slots, min(capacity, config.context_length)
        self.dtype, self.device = dtype, torch.device(device)
        shape = (n_slots, config.n_kv_heads, self.capacity, config.d_head)
        self.keys, self.values = (
            [Vectors(shape, dtype, self.device, unit) for _ in config.layer_uses] for _ in range(2)
        )
        self.tokens = self._make_tokens() if config.reads_previous_token else None

    def _make_tokens(self) -> Tensor:
        return torch.zeros(self.n_slots, self.capacity, dtype=torch.int32, device=self.device)

    def bytes_of(self, n_slots: int, capacity: int) -> int:
        """Return the bytes that this cache would take with `n_slots` slots of `capacity` tokens."""
        length = self.keys[0].room(min(capacity, self.config.context_length))
        scale_bytes = 4 if self.dtype == torch.int8 else 0
        return n_slots * kv_cache_bytes(self.config, length, self.dtype.itemsize, scale_bytes)

    def grow(self, n_slots: int, capacity: int, held: Sequence[int]) -> None:
        """Grow to `n_slots` slots of `capacity` tokens, and keep the first `held[i]` tokens of each old slot i.

        Only one layer's keys or values at a time are in memory twice.
        """
        assert n_slots >= self.n_slots and capacity >= self.capacity
        capacity = min(capacity, self.config.context_length)
        for layers in (self.keys, self.values):
            for i, vectors in enumerate(layers):
                layers[i] = vectors.grown(n_slots, capacity, held)
        self.n_slots, self.capacity = n_slots, capacity
        if (tokens := self.tokens) is not None:
            self.tokens = self._make_tokens()
            self.tokens[: len(tokens), : tokens.size(1)] = tokens

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the first `n_tokens` of slot `source` into slot `target`."""
        for vectors in (*self.keys, *self.values):
            vectors.copy(source, target, n_tokens)
        if self.tokens is not None:
            self.tokens[target, :n_tokens] = self.tokens[source, :n_tokens]

    def check(self, n_tokens: int) -> None:
        """Raise a ValueError if this many tokens do not fit into a slot."""
        if n_tokens > self.capacity:
            raise ValueError(f"{n_tokens} tokens do not fit in a slot of {self.capacity}")

    def rows(self, parts: Sequence[tuple[int, int, int]], room: int | None = None) -> "SlotRows":
        """Return the cache positions for the new tokens of several texts, which form one flat batch [1, N].

        Args:
            parts: (slot, number of cached tokens, number of new tokens) of each text, in the batch's order.
            room: the length, in tokens, that rotary scaling by length uses; None: the capacity.

        Raises:
            ValueError: a text has more tokens than a slot holds.
        """
        self.check(max(start + n_new for _, start, n_new in parts))
        flat = [(slot, start + i) for slot, start, n_new in parts for i in range(n_new)]
        slots, positions = on_device(list(zip(*flat, strict=True)), self.device)
        layers = zip(self.keys, self.values, strict=True)
        return SlotRows(parts, slots, positions, room or self.capacity, layers, self.tokens)

    def decoding_rows(self, slots: Tensor, positions: Tensor) -> SlotRows:
        """Return the cache positions for one new token of each of N texts, in tensors whose values may change.

        Args:
            slots, positions: each token's slot, and its position in its text, int64 [N] on the cache's device.
        """
        layers = zip(self.keys, self.values, strict=True)
        return SlotRows(None, slots, positions, self.capacity, layers, self.tokens)
