"""The key/value cache: what attention has already computed for the tokens seen, handed in explicitly.

A layer that sees everything keeps a buffer as long as the cache; a windowed layer keeps a ring of `window` tokens.
Keys are stored after the rotary embedding, so their order in a ring does not matter to a single query.
"""

import torch
from torch import Tensor

from gptworks.config import ModelConfig


class LayerCache:
    """Keys and values of one layer, [B, G, capacity, D] each."""

    def __init__(self, shape: tuple[int, int, int, int], window: int | None, dtype: torch.dtype, device: torch.device):
        self.window = window
        self.capacity = shape[2]
        self.length = 0  # tokens seen
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store T new keys and values [B, G, T, D]; return those the new queries may need, the new ones last.

        A single query over a full ring gets the ring in storage order: it sees all of it.
        """
        start, n_new = self.length, k.size(2)
        self.length += n_new
        if self.window is None:
            assert self.length <= self.capacity, f"cache of {self.capacity} tokens asked to hold {self.length}"
            self.keys[:, :, start : self.length] = k
            self.values[:, :, start : self.length] = v
            return self.keys[:, :, : self.length], self.values[:, :, : self.length]
        if n_new == 1:
            slot = start % self.capacity
            self.keys[:, :, slot : slot + 1] = k
            self.values[:, :, slot : slot + 1] = v
            held = min(self.length, self.capacity)
            return self.keys[:, :, :held], self.values[:, :, :held]
        n_before = min(start, self.window - 1)
        before = torch.arange(start - n_before, start, device=k.device) % self.capacity
        k = torch.cat((self.keys[:, :, before], k.to(self.keys.dtype)), dim=2)
        v = torch.cat((self.values[:, :, before], v.to(self.values.dtype)), dim=2)
        n_kept = min(n_new, self.capacity)
        kept = torch.arange(self.length - n_kept, self.length, device=k.device) % self.capacity
        self.keys[:, :, kept], self.values[:, :, kept] = k[:, :, -n_kept:], v[:, :, -n_kept:]
        return k, v


class KVCache:
    """The caches of all layers, for B sequences of equal length."""

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int = 1,
        length: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Room for `length` tokens (default: the context) of `batch_size` sequences."""
        self.config = config
        self.batch_size = batch_size
        self.capacity = min(length or config.context_length, config.context_length)
        self.layers = [
            LayerCache(
                (batch_size, config.n_kv_heads, min(window or self.capacity, self.capacity), config.d_head),
                window if window is not None and window < self.capacity else None,
                dtype,
                torch.device(device),
            )
            for window in config.layer_windows
        ]

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].length

    @property
    def n_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self.layers)

    def repeat(self, n: int) -> "KVCache":
        """A cache of n copies of this one's single sequence: prefill once, then sample n continuations."""
        assert self.batch_size == 1, f"only a cache of one sequence can be repeated, this one holds {self.batch_size}"
        keys = self.layers[0].keys
        copy = KVCache(self.config, n, self.capacity, dtype=keys.dtype, device=keys.device)
        for mine, theirs in zip(self.layers, copy.layers, strict=True):
            theirs.keys.copy_(mine.keys)
            theirs.values.copy_(mine.values)
            theirs.length = mine.length
        return copy
