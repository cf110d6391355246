"""Backends compute a model for the engine: tokens of many texts in, logits out. Each text has a slot with its cache.

`TorchBackend` runs the model itself, on any device, also during training:

    chunks ─┬─► long ones (prefill), one at a time ─────────────────────┬─► wanted logits
            └─► short ones (decode, speculation), as one flat batch ────┘

`NativeBackend` (native.py) computes the same in C++ on a CPU, all chunks together. Outside training, `choose_backend`
(native.py) prefers `NativeBackend` for each model that it can compute.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.infer.backends.cache import SlotCache
from gptworks.infer.backends.graphs import DecodingGraphs, captures_graphs
from gptworks.model.cache import on_device
from gptworks.model.gpt import GPT, eval_mode

SHORT_TOKENS = 16
"""Maximum tokens of a short chunk (decoding, checking draft tokens). Short chunks are computed together."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of one text to compute, at the positions start … start + len(tokens) - 1 of its slot."""

    slot: int
    start: int
    """Number of cached tokens that the slot keeps; later tokens in the slot are overwritten (a rollback)."""
    tokens: Sequence[int]
    n_logits: int = 1
    """Number of last tokens of the chunk whose logits are returned."""
    room: int | None = None
    """The length, in tokens, that rotary scaling by length uses (`OpenRequests.rotary_length`). None: the slot's
    capacity."""


class Backend(ABC):
    """Computes a model, and holds the key/value caches of `n_slots` texts.

    Each call of `compute` has at most one chunk per slot. The result for a token depends only on its own text.
    """

    description: str
    """The backend's name, for people to read."""
    model: GPT
    cache: SlotCache
    invariant: bool
    """Whether a token's results have the same bits for any split into chunks and any other texts in the step. True:
    two texts can share any common prefix. False: they can share only complete prefill chunks."""

    features: dict[int, tuple[int, Tensor]] | None = None
    """For each slot: the position of the first token whose logits were last computed, and the features [n_logits, C] of
    these tokens. None: `compute` stores no features. Only `gptworks.infer.speculate.HeadsDraft` needs them."""

    @abstractmethod
    def compute(self, chunks: Sequence[Chunk], on_cuda: bool = False) -> list[Tensor]:
        """Compute the chunks and extend their slots; return each chunk's logits, float32 [n_logits, V], on the CPU.

        Args:
            on_cuda: if the model is on CUDA, leave the logits there, for `sample`.
        """

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of features [..., C]: float32 [..., V], on the CPU."""
        with torch.inference_mode():
            return self.model.logits(features.to(self.model.dtype)).float().cpu()

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Return the features [T, C] (last hidden states) of a text, float32, on the CPU. May overwrite slot 0."""
        with eval_mode(self.model), torch.inference_mode():
            return self.model.features(torch.tensor([tokens], device=self.model.device))[0].float().cpu()

    @property
    def n_slots(self) -> int:
        return self.cache.n_slots

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into a slot."""
        return self.cache.capacity

    def copy(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the keys and values of the first `n_tokens` of slot `source` into slot `target`."""
        with torch.inference_mode():
            self.cache.copy(source, target, n_tokens)
        if self.features is not None:
            self.features.pop(target, None)

    def _keep(self, chunks: Sequence[Chunk], features: Tensor) -> None:
        """Store features [n, C], a row for each row of the chunks' logits, if `self.features` is not None."""
        parts = torch.split(features, [chunk.n_logits for chunk in chunks])
        for chunk, part in zip(chunks, parts, strict=True):
            if self.features is not None and chunk.n_logits:
                self.features[chunk.slot] = chunk.start + len(chunk.tokens) - chunk.n_logits, part

    def grow(self, n_slots: int, capacity: int, held: Sequence[int]) -> None:
        """Grow to `n_slots` slots of `capacity` tokens, and keep the first `held[i]` tokens of each old slot i.

        If this fails, the backend is unusable.
        """
        with torch.inference_mode():
            self.cache.grow(n_slots, capacity, held)


class TorchBackend(Backend):
    """Runs the model's own forward pass, on its device and in its dtype. Uses the current weights at each call."""

    invariant = False

    def __init__(self, model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None) -> None:
        """Allocate `n_slots` slots of `capacity` tokens, with caches in `dtype` (default: the model's)."""
        self.model = model
        self.description = f"torch on {model.device}"
        self.cache = SlotCache(model.config, n_slots, capacity, dtype=dtype or model.dtype, device=model.device)
        self._graphs = DecodingGraphs(model, self.cache) if captures_graphs(model) else None
        scaling = model.config.rope_scaling
        self._by_room = scaling is not None and scaling.by_length

    def grow(self, n_slots: int, capacity: int, held: Sequence[int]) -> None:
        if self._graphs is not None:  # free the old graphs' memory first
            self._graphs = DecodingGraphs(self.model, self.cache)
        super().grow(n_slots, capacity, held)

    def compute(self, chunks: Sequence[Chunk], on_cuda: bool = False) -> list[Tensor]:
        results: dict[int, Tensor] = {}
        stays = on_cuda and self.model.device.type == "cuda"
        for together in self._batches(chunks):
            results |= zip((chunk.slot for chunk in together), self._compute(together, stays), strict=True)
        return [results[chunk.slot] for chunk in chunks]

    def _batches(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Return groups of chunks to compute together: each long chunk alone, and all short chunks in one group. If
        rotary scaling depends on the text's length, short chunks with different `room` are in different groups."""
        together: dict[int | None, list[Chunk]] = {}
        long = []
        for chunk in chunks:
            if len(chunk.tokens) > SHORT_TOKENS:
                long.append([chunk])
            else:
                together.setdefault(chunk.room if self._by_room else None, []).append(chunk)
        return [*together.values(), *long]

    def _compute(self, chunks: list[Chunk], stays: bool) -> list[Tensor]:
        """Compute chunks together; return the logits of each, on the model's device if `stays`, else on the CPU."""
        decodes = all(len(chunk.tokens) == chunk.n_logits == 1 for chunk in chunks)
        with eval_mode(self.model), torch.inference_mode():
            graphs = self._graphs if decodes else None
            rows, logits = self._pass(chunks) if graphs is None else graphs.compute(chunks)
            logits = logits if stays else logits.cpu()
        if self.features is not None:
            self._keep(chunks, rows)
        return list(torch.split(logits, [chunk.n_logits for chunk in chunks]))

    def _pass(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        """Run the model on the chunks; return the features [n, C] and the logits, float32 [n, V], of wanted tokens."""
        device = self.model.device
        tokens = on_device([[token for chunk in chunks for token in chunk.tokens]], device)  # 1 N
        parts = [(chunk.slot, chunk.start, len(chunk.tokens)) for chunk in chunks]
        wanted: list[int] = []
        end = 0
        for chunk in chunks:
            end += len(chunk.tokens)
            wanted += range(end - chunk.n_logits, end)
        features = self.model.features(tokens, self.cache.rows(parts, chunks[0].room if self._by_room else None))
        rows = features[0] if len(wanted) == end else features[0].index_select(0, on_device(wanted, device))
        return rows, self.model.logits(rows).float()
