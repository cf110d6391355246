"""Backends compute a model for the engine: tokens of many texts in, logits out. Each text has a slot with its cache.

`TorchBackend` runs the model itself, on any device, also during training:

    chunks ─┬─► long ones (prefill), one at a time ─────────────────────┬─► wanted logits
            └─► short ones (decode, speculation), as one flat batch ────┘

`NativeBackend` (native.py) computes the same in C++ on a CPU, all chunks together. Outside training, `choose_backend`
(native.py) prefers `NativeBackend` for each model that it can compute.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gptworks.infer.backends.cache import SlotCache
from gptworks.kernels import dispatch
from gptworks.model.cache import on_device
from gptworks.model.gpt import GPT, eval_mode

SHORT_TOKENS = 16
"""Maximum tokens of a short chunk (decoding, checking draft tokens). Short chunks are computed together."""

_CAPTURING = threading.Lock()
"""A lock held during each capture. Without the lock, a second thread that begins a capture would wait for the device,
and CUDA forbids such a wait while another capture runs. A server has a thread for each model."""


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
    these tokens. None: `compute` stores no features. Only `gptworks.infer.speculate.HeadsDraft` uses them."""

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
        """Store the features [n, C] of the rows of the chunks' logits, if `self.features` is not None."""
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
        """Compute chunks together; return each chunk's logits, on the model's device if `stays`, else on the CPU."""
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


# -------------------------------------------------------------------------------------------------------- CUDA graphs


class DecodingGraphs:
    """Computes decoding steps of a model with CUDA graphs, one for each number of texts, captured when first needed.

    A graph launches all of a step's kernels together, which takes less time than separate launches. The graph computes
    one token for each of N texts of any length. To round N up to a power of two, the last text is computed several
    times. The graphs share one memory pool, because their steps never overlap and their results are copied.
    """

    def __init__(self, model: GPT, cache: SlotCache) -> None:
        self._model, self._cache = model, cache
        self._graphs: dict[int, _Graph] = {}
        self._weights = _addresses(model)

    def compute(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor]:
        """Return features [N, C] and logits, float32 [N, V], of one token of each of N texts, and extend their slots.

        Call this in inference mode, with the model in evaluation mode. With autocast, make all calls in one autocast
        context: the graphs read the copies of weights that this context keeps.

        Raises:
            ValueError: a text has more tokens than a slot holds.
        """
        self._cache.check(1 + max(chunk.start for chunk in chunks))
        if self._weights != (weights := _addresses(self._model)):
            self._graphs, self._weights = {}, weights
        n_texts = 1 << (len(chunks) - 1).bit_length()
        numbers = [(chunk.tokens[0], chunk.slot, chunk.start) for chunk in chunks]
        numbers += numbers[-1:] * (n_texts - len(chunks))  # writes the same keys and values again
        given = torch.tensor(numbers).T.contiguous()
        if n_texts not in self._graphs:
            shared = next(iter(self._graphs.values()), None)
            self._graphs[n_texts] = _Graph(self._model, self._cache, given, shared)
        features, logits = self._graphs[n_texts].replay(given)
        return features[: len(chunks)].clone(), logits[: len(chunks)].clone()  # the next replay overwrites them


class _Graph:
    def __init__(self, model: GPT, cache: SlotCache, given: Tensor, shared: "_Graph | None") -> None:
        """Capture a step. `given`: token, slot and position of each text, int64 [3, N]. `shared`: a graph whose memory
        pool the new graph uses too."""
        self._given = given.to(model.device)

        def step() -> tuple[Tensor, Tensor]:
            rows = cache.decoding_rows(self._given[1], self._given[2])
            features = model.features(self._given[:1], rows)[0]
            return features, model.logits(features).float()

        stream, here = _capture_stream(model.device), torch.cuda.current_stream(model.device)
        self._graph = torch.cuda.CUDAGraph()
        pool = None if shared is None else shared._graph.pool()
        with _CAPTURING:
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                step()  # libraries allocate their memory before the capture
            here.wait_stream(stream)
            with torch.cuda.graph(self._graph, pool, stream, "thread_local"):
                self._results = step()

    def replay(self, given: Tensor) -> tuple[Tensor, Tensor]:
        self._given.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._results


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for all captures on a device: cuBLAS keeps tens of megabytes of workspace per stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def captures_graphs(model: GPT) -> bool:
    """Whether CUDA graphs can decode with a model.

    Triton must compute the attention, and a step must need nothing from the host. Models with experts, rotary scaling
    by length, sharded weights, hooks or compiled blocks are therefore excluded.
    """
    config, scaling = model.config, model.config.rope_scaling
    return (
        dispatch.chosen("cached_attention", model.head_weight).by == dispatch.TRITON
        and not config.n_experts
        and not (scaling is not None and scaling.by_length)
        and all(type(parameter.data) is Tensor for parameter in model.parameters())
        and not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        and not any(block._compiled_call_impl for block in model.blocks)
    )


def _addresses(model: GPT) -> tuple[int, ...]:
    """Return the addresses of some weights; the addresses differ after the model's weights have been replaced."""
    return tuple(x.data_ptr() for x in (model.head_weight, model.token_embedding.weight, *model.norm.parameters()))
