"""The torch backend against the model's own forward pass: many texts together, in any chunks, with rollbacks."""

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from gptworks.infer.backends import native
from gptworks.infer.backends.backend import Chunk, DecodingGraphs, TorchBackend
from gptworks.infer.backends.cache import SlotCache
from gptworks.model.gpt import GPT
from tiny import plain_model

VOCABULARY, CONTEXT = 50, 64

MODELS: list[dict[str, Any]] = [
    {},
    {"position": "learned", "attention_bias": True, "tie_embeddings": False},
    {"n_kv_heads": 1, "window": 5, "window_pattern": ("window", "full"), "qk_norm": True, "norm": "rmsnorm"},
    {"n_experts": 4, "mlp": "swiglu", "attention_scale": 0.3},
    {"bigram_vocab_size": 40, "n_kv_heads": 2},
    {"layer_repeats": 2, "position": "learned"},
    {"layer_repeats": (1, 3), "window": 5, "window_pattern": ("window", "full")},
    {"smear": True, "value_residual": True, "value_embeddings": ("table",), "attention_gate": True},
    {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "parallel_residual": True},
]


def tiny(**settings: Any) -> GPT:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "context_length": CONTEXT, "n_layers": 2, "d_model": 32, "n_heads": 4}
    return GPT(plain_model(**shape | {"init_std": 0.3} | settings)).double().eval()


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


@torch.no_grad()
def whole(model: GPT, tokens: list[int], n_logits: int) -> Tensor:
    """Return the logits of the last tokens from one pass without a cache."""
    return model(torch.tensor([tokens]))[0, len(tokens) - n_logits :].float()


def feed(backend: TorchBackend, slot: int, tokens: list[int], start: int, n_logits: int = 1) -> Tensor:
    return backend.compute([Chunk(slot, start, tokens[start:], n_logits)])[0]


@pytest.mark.parametrize("settings", MODELS, ids=str)
def test_texts_computed_together_have_the_logits_of_separate_passes(settings: dict[str, Any]) -> None:
    """Six texts of different lengths in random chunks; the later ones reuse a slot of another text."""
    model = tiny(**settings)
    backend = TorchBackend(model, 3, CONTEXT)
    chance = random.Random(1)
    texts = [text(i, 30 + 5 * i) for i in range(6)]
    queue, running = list(range(6)), {}
    while queue or running:
        for slot in range(3):
            if slot not in running and queue:
                running[slot] = (queue.pop(), 0)
        chunks = []
        for slot, (i, start) in running.items():
            n_new = min(chance.choice((1, 1, 2, 7, 20)), len(texts[i]) - start)
            n_logits = chance.randint(0, n_new)
            chunks.append(Chunk(slot, start, texts[i][start : start + n_new], n_logits))
        for chunk, logits in zip(chunks, backend.compute(chunks), strict=True):
            i, start = running[chunk.slot]
            end = start + len(chunk.tokens)
            assert logits.dtype == torch.float32 and logits.shape == (chunk.n_logits, VOCABULARY)
            if chunk.n_logits and "rope_scaling" not in settings:
                torch.testing.assert_close(logits, whole(model, texts[i][:end], chunk.n_logits), atol=1e-5, rtol=1e-5)
            running[chunk.slot] = (i, end)
            if end == len(texts[i]):
                if chunk.n_logits and "rope_scaling" in settings:
                    room = backend.compute([Chunk(chunk.slot, 0, texts[i])])[0]
                    torch.testing.assert_close(logits[-1:], room, atol=1e-5, rtol=1e-5)
                del running[chunk.slot]


def test_dynamic_rotary_scaling_follows_the_room_of_each_text() -> None:
    model = tiny(**MODELS[-1])
    backend = TorchBackend(model, 2, CONTEXT)
    tokens = text(0, 30)
    wide, narrow = backend.compute([Chunk(0, 0, tokens, room=60), Chunk(1, 0, tokens, room=30)])
    torch.testing.assert_close(narrow, whole(model, tokens, 1), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(wide, narrow, atol=1e-3)
    for _ in range(2):  # short chunks of unequal rooms
        a, b = backend.compute([Chunk(0, 30, [3], room=60), Chunk(1, 30, [3], room=31)])
        assert not torch.allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("settings", MODELS[:-1], ids=str)
def test_a_text_rolled_back_forgets_what_came_after(settings: dict[str, Any]) -> None:
    model = tiny(**settings)
    backend = TorchBackend(model, 1, CONTEXT)
    first, second = text(1, 40), text(2, 40)
    feed(backend, 0, first, 0)
    changed = first[:13] + second[13:20]
    torch.testing.assert_close(feed(backend, 0, changed, 13), whole(model, changed, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", MODELS[:-1], ids=str)
def test_a_copied_prefix_continues_in_another_slot(settings: dict[str, Any]) -> None:
    """Also after slots have been added and lengthened."""
    model = tiny(**settings)
    backend = TorchBackend(model, 3, 50)
    first = text(1, 40)
    feed(backend, 2, text(3, 50), 0)
    feed(backend, 0, first, 0)
    backend.copy(0, 2, 25)
    backend.grow(4, CONTEXT, [40, 0, 25])
    branch = first[:25] + text(2, 38)
    torch.testing.assert_close(feed(backend, 2, branch, 25), whole(model, branch, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        feed(backend, 0, first, 39), whole(model, first, 1), atol=1e-5, rtol=1e-5
    )  # the source is as it was


def test_one_product_over_all_slots_is_the_loop_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code path of accelerators, run on a CPU."""
    from gptworks.model import scores

    for settings in MODELS[:-1]:
        model, results = tiny(**settings), []
        for at_once in (False, True):
            backend = TorchBackend(model, 4, CONTEXT)
            for tensor in (vectors.data for vectors in (*backend.cache.keys, *backend.cache.values)):
                tensor.zero_()
            for slot in range(4):
                feed(backend, slot, text(slot, 17 + 3 * slot), 0)
            with monkeypatch.context() as patch:
                if at_once:
                    patch.setattr(scores, "attend", None)  # is not called
                    patch.setattr(scores, "_one_product", lambda *_: True)
                order = [Chunk(slot, 17 + 3 * slot, [slot + 5]) for slot in (2, 0, 3)]
                results.append(torch.cat(backend.compute(order)))
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def test_a_cache_is_freed_with_its_backend() -> None:
    """On a GPU, a cache that waited for Python's search for circles of references would fill the memory of the next."""
    backend = TorchBackend(tiny(), 2, CONTEXT)
    backend.compute([Chunk(0, 0, [1, 2, 3]), Chunk(1, 0, [1])])
    backend.compute([Chunk(0, 3, [1])])
    keys = weakref.ref(backend.cache.keys[0])
    gc.disable()
    try:
        del backend
        assert keys() is None
    finally:
        gc.enable()


def test_the_backend_reads_the_weights_as_they_are() -> None:
    model = tiny()
    backend = TorchBackend(model, 1, CONTEXT)
    before = feed(backend, 0, text(1, 5), 0)
    with torch.no_grad():
        model.token_embedding.weight.mul_(2)
    assert not torch.equal(before, feed(backend, 0, text(1, 5), 0))


def test_a_model_in_training_is_never_computed_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "NativeBackend", None)
    assert isinstance(native.choose_backend(tiny().train(), 1, 8), TorchBackend)
    assert isinstance(native.choose_backend(tiny(), 1, 8, name="torch"), TorchBackend)


def test_graphs_refuse_a_text_that_its_slot_does_not_hold() -> None:
    """On the GPU, they would write outside the cache."""
    model = tiny()
    graphs = DecodingGraphs(model, SlotCache(model.config, 2, 8))
    with pytest.raises(ValueError, match="9 tokens do not fit in a slot of 8"):
        graphs.compute([Chunk(0, 3, [1]), Chunk(1, 8, [1])])


def test_the_graphs_of_two_models_are_not_captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has a thread for each model. A capture begins with a wait for the device, which another would forbid."""
    capturing, together = threading.Lock(), []

    @contextmanager
    def capture(*_: Any) -> Iterator[None]:
        alone = capturing.acquire(blocking=False)
        together.append(not alone)
        time.sleep(0.1)
        yield
        if alone:
            capturing.release()

    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(GPT, "features", lambda self, tokens, rows: torch.zeros(*tokens.shape, self.config.d_model))
    models = [tiny().float() for _ in range(2)]
    threads = [
        threading.Thread(
            target=DecodingGraphs(model, SlotCache(model.config, 2, 8)).compute, args=([Chunk(0, 3, [1])],)
        )
        for model in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [False, False]
