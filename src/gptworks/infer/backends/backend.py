"""Backends compute a model for the engine: tokens of many texts in, logits out. Each text has a slot with its cache.

    chunks ─┬─► long ones (prefill), one at a time ─────────────────────┬─► logits wanted
            └─► short ones (decode, speculation), as one flat batch ────┘

`TorchBackend` runs the model itself, on any device, also during training. The native backend (native.py) computes the
same in C++ on a CPU; `choose_backend` (there too) uses it where it can.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.infer.backends.cache import SlotCache
from gptworks.model.gpt import GPT, eval_mode

SHORT_TOKENS = 16
"""Chunks of up to this many tokens, which decode or check draft tokens, are computed together."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of one text to compute, at the positions start … start + len(tokens) - 1 of its slot."""

    slot: int
    start: int
    """Number of tokens that the slot keeps; later ones are overwritten (a rollback)."""
    tokens: Sequence[int]
    n_logits: int = 1
    """Number of last tokens whose logits are wanted."""
    room: int | None = None
    """Number of tokens that the text may reach; only rotary scaling by length uses it. None: the slot's capacity."""


class Backend(ABC):
    """A model and the caches of `n_slots` texts.

    A slot appears at most once in a call. The result for a token depends only on its own text.
    """

    description: str
    """The backend's name, for people to read."""
    model: GPT
    cache: SlotCache
    invariant: bool
    """Whether a token's numbers are the same, bit for bit, however its text is cut into chunks and whatever else is
    computed. If so, any common prefix of two texts can be shared, otherwise only complete prefill chunks."""

    features: dict[int, tuple[int, Tensor]] | None = None
    """If a dictionary, `compute` stores in it, for each slot, the position of the first of its latest logits, and the
    features [n_logits, C] of all of them. See `gptworks.infer.speculate.HeadsDraft`."""

    @abstractmethod
    def compute(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Compute the chunks and extend their slots; returns each chunk's logits, float32 [n_logits, V], on the CPU."""

    def logits(self, features: Tensor) -> Tensor:
        """The logits of features [..., C]: float32 [..., V], on the CPU."""
        with torch.inference_mode():
            return self.model.logits(features.to(self.model.dtype)).float().cpu()

    def read(self, tokens: Sequence[int]) -> Tensor:
        """The features [T, C] of a text's tokens, float32, on the CPU. Overwrites slot 0."""
        with eval_mode(self.model), torch.inference_mode():
            return self.model.features(torch.tensor([tokens], device=self.model.device))[0].float().cpu()

    @property
    def n_slots(self) -> int:
        return self.cache.n_slots

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot."""
        return self.cache.capacity

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the keys and values of a slot's first n tokens into another slot."""
        with torch.inference_mode():
            self.cache.copy(source, target, n_tokens)
        if self.features is not None:
            self.features.pop(target, None)

    def _keep(self, chunks: Sequence[Chunk], features: Tensor) -> None:
        """Keep the features [n, C] of the chunks' logits."""
        parts = torch.split(features, [chunk.n_logits for chunk in chunks])
        for chunk, part in zip(chunks, parts, strict=True):
            if self.features is not None and chunk.n_logits:
                self.features[chunk.slot] = chunk.start + len(chunk.tokens) - chunk.n_logits, part

    def grow(self, n_slots: int, capacity: int, held: Sequence[int]) -> None:
        """Make more and longer slots, and keep the first `held[i]` tokens of each old slot i.

        If this fails, the backend is unusable.
        """
        with torch.inference_mode():
            self.cache.grow(n_slots, capacity, held)


class TorchBackend(Backend):
    """The model's own forward pass, on its device and in its dtype. Uses the current weights at each call."""

    invariant = False

    def __init__(self, model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        """Slots for `n_slots` texts of `capacity` tokens, in `dtype` (default: the model's)."""
        self.model = model
        self.description = f"torch on {model.device}"
        self.cache = SlotCache(model.config, n_slots, capacity, dtype=dtype or model.dtype, device=model.device)
        scaling = model.config.rope_scaling
        self._by_room = scaling is not None and scaling.by_length

    def compute(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        for together in self._batches(chunks):
            results |= zip((chunk.slot for chunk in together), self._compute(together), strict=True)
        return [results[chunk.slot] for chunk in chunks]

    def _batches(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Groups of chunks to compute together: long ones singly, short ones by `room` if rotary tables need that."""
        together: dict[int | None, list[Chunk]] = {}
        long = []
        for chunk in chunks:
            if len(chunk.tokens) > SHORT_TOKENS:
                long.append([chunk])
            else:
                together.setdefault(chunk.room if self._by_room else None, []).append(chunk)
        return [*together.values(), *long]

    def _compute(self, chunks: list[Chunk]) -> list[Tensor]:
        tokens = torch.tensor([[token for chunk in chunks for token in chunk.tokens]], device=self.model.device)  # 1 N
        parts = [(chunk.slot, chunk.start, len(chunk.tokens)) for chunk in chunks]
        wanted: list[int] = []
        end = 0
        for chunk in chunks:
            end += len(chunk.tokens)
            wanted += range(end - chunk.n_logits, end)
        with eval_mode(self.model), torch.inference_mode():
            features = self.model.features(tokens, self.cache.rows(parts, chunks[0].room if self._by_room else None))
            rows = features[0] if len(wanted) == end else features[0, wanted]
            logits = self.model.logits(rows).float().cpu()
        if self.features is not None:
            self._keep(chunks, rows)
        return list(torch.split(logits, [chunk.n_logits for chunk in chunks]))
