"""CUDA graphs of decoding: all of a step's kernels are launched together, which takes less time than one by one.

A graph computes one token for each of N texts of any length. To round N up to a power of two, the last text is computed
several times.
"""

import threading
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gptworks.infer.backends.cache import SlotCache
from gptworks.kernels import dispatch
from gptworks.model.gpt import GPT

if TYPE_CHECKING:
    from gptworks.infer.backends.backend import Chunk

_CAPTURING = threading.Lock()
"""A lock held during each capture: a second thread that began a capture would wait for the device, and CUDA forbids
such a wait while another capture runs. A server has a thread for each model."""


class DecodingGraphs:
    """Computes decoding steps of a model on CUDA by graphs: one for each number of texts, captured when first needed.

    The graphs share one memory pool, because their steps never overlap and their results are copied.
    """

    def __init__(self, model: GPT, cache: SlotCache) -> None:
        self._model, self._cache = model, cache
        self._graphs: dict[int, _Graph] = {}
        self._weights = _addresses(model)

    def compute(self, chunks: Sequence["Chunk"]) -> tuple[Tensor, Tensor]:
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
        pool this one uses too."""
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
    """Whether CUDA graphs can decode with a model: Triton computes attention, and a step needs nothing from the host,
    which rules out experts, rotary scaling by length, sharded weights, hooks and compiled blocks."""
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
    """Return the addresses of some of the weights; they differ after the model's weights have been replaced."""
    return tuple(x.data_ptr() for x in (model.head_weight, model.token_embedding.weight, *model.norm.parameters()))
