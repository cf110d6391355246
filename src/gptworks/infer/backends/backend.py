"""What computes a model for the engine: tokens of many texts in, logits out. Each text has a slot that keeps its cache.

    chunks ─┬─► long ones (prefill), each by itself ────────────────────┬─► logits wanted
            └─► short ones (decode, speculation), as one flat batch ────┘

`TorchBackend` runs the model itself, on any device, also during training. The native backend (native.py) computes the
same in C++ on a CPU; `choose_backend` (choice.py) uses it where it can.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.infer.backends.cache import SlotCache
from gptworks.model.gpt import GPT, eval_mode

SHORT_TOKENS = 16
"""Chunks of up to so many tokens are computed together: they decode, or check draft tokens."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of one text to compute: positions start … start + len(tokens) of its slot."""

    slot: int
    start: int
    """Tokens already in the slot before these; what lies beyond is forgotten (a rollback)."""
    tokens: Sequence[int]
    n_logits: int = 1
    """Logits wanted for the last n tokens; 0: none."""
    room: int | None = None
    """Tokens that the text may come to. It matters to rotary scaling by length alone; None: the slot's capacity."""


class Backend(ABC):
    """A model, and room for the caches of `n_slots` texts.

    A slot appears at most once in a call. What is computed for a token depends on its own text alone.
    """

    description: str
    """What computes, and with what, for people to read."""
    model: GPT
    cache: SlotCache
    invariant: bool
    """Whether a token's numbers are the same, bit for bit, however its text was cut into chunks and whatever was
    computed beside it. Then any common beginning of two texts can be shared; else whole prefill chunks alone."""

    features: dict[int, tuple[int, Tensor]] | None = None
    """A dictionary is given, by slot, what the last logits were made from: the position of the first, and the features
    [n_logits, C] of all. See `gptworks.infer.speculate.HeadsDraft`."""

    @abstractmethod
    def compute(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Compute the chunks and extend their slots; for each, float32 logits [n_logits, V], on the CPU."""

    def logits(self, features: Tensor) -> Tensor:
        """The logits of features [..., C], such as those kept: float32 [..., V], on the CPU."""
        with torch.inference_mode():
            return self.model.logits(features.to(self.model.dtype)).float().cpu()

    def read(self, tokens: Sequence[int]) -> Tensor:
        """The features [T, C] of a text's tokens, float32, on the CPU. What slot 0 held counts no more."""
        with eval_mode(self.model), torch.inference_mode():
            return self.model.features(torch.tensor([tokens], device=self.model.device))[0].float().cpu()

    @property
    def n_slots(self) -> int:
        return self.cache.n_slots

    @property
    def capacity(self) -> int:
        """Tokens that a slot holds."""
        return self.cache.capacity

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the first n tokens' keys and values into another slot, where texts begin alike."""
        with torch.inference_mode():
            self.cache.copy(source, target, n_tokens)
        if self.features is not None:
            self.features.pop(target, None)

    def _keep(self, chunks: Sequence[Chunk], features: Tensor) -> None:
        """Keep the features [n, C] of the logits that the chunks wanted."""
        parts = torch.split(features, [chunk.n_logits for chunk in chunks])
        for chunk, part in zip(chunks, parts, strict=True):
            if self.features is not None and chunk.n_logits:
                self.features[chunk.slot] = chunk.start + len(chunk.tokens) - chunk.n_logits, part

    def grow(self, n_slots: int, capacity: int, held: Sequence[int]) -> None:
        """Have more and longer slots. The first `held[i]` tokens of each slot i that there is stay.

        Where it fails, the backend is of no use any more.
        """
        with torch.inference_mode():
            self.cache.grow(n_slots, capacity, held)


class TorchBackend(Backend):
    """The model's own forward pass, on its device and in its dtype. Reads the weights as they are at each call."""

    invariant = False

    def __init__(self, model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        """Room for `n_slots` texts of `capacity` tokens, kept in `dtype` (default: the model's)."""
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
        """Chunks that are computed together: short ones, of equal room where rotary tables depend on it."""
        together: dict[int | None, list[Chunk]] = {}
        alone = []
        for chunk in chunks:
            if len(chunk.tokens) > SHORT_TOKENS:
                alone.append([chunk])
            else:
                together.setdefault(chunk.room if self._by_room else None, []).append(chunk)
        return [*together.values(), *alone]

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
