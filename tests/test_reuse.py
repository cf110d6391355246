"""Texts that reuse another text's prefix equal those computed alone, whichever texts come, end or leave meanwhile."""

from typing import Any

import pytest
import torch

from gptworks.errors import UserError
from gptworks.infer import Engine
from gptworks.infer.backends.cache import SlotCache
from gptworks.infer.request import Request
from gptworks.infer.speculate import DraftModel
from gptworks.planning.inference import inference_memory, kv_cache_bytes
from test_concurrency import engine, needs_native
from test_engine import byte_tokenizer, random_model

TOKENIZER = byte_tokenizer()


def token_ids(request: Request) -> list[list[int]]:
    made = request.completions()
    return [one.token_ids for one in made]


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_second_sample_never_reuses_a_slot_that_is_being_overwritten(backend: Any) -> None:
    """Z's slot goes to Y, which keeps 150 of its tokens, in the step in which X, with the same prefix as Z, has read
    its prompt."""
    model = random_model(TOKENIZER, context_length=512, d_model=32, init_std=0.25).eval()
    if backend == "native":
        needs_native(model)
    prompt = [i * i % 251 for i in range(300)]
    other = prompt[:150] + [i % 7 for i in range(50)]

    def fresh() -> Engine:
        return engine(model, n_slots=4, reuse="all", backend=backend, prefill_tokens=512)

    one = fresh()
    z = one.submit(prompt, max_tokens=1, seed=1, ignore_eos=True)
    x = one.submit(prompt, n_samples=2, max_tokens=12, seed=2, ignore_eos=True)
    one.step()
    assert z.done and not x.done
    y = one.submit(other, max_tokens=12, seed=3, ignore_eos=True)
    while one.step():
        pass
    alone = fresh().complete(prompt, n_samples=2, max_tokens=12, seed=2, ignore_eos=True)
    assert token_ids(x) == [sample.token_ids for sample in alone]
    (alone_y,) = fresh().complete(other, max_tokens=12, seed=3, ignore_eos=True)
    assert token_ids(y) == [alone_y.token_ids]
    assert y.n_reused_tokens == 150, "the case needs Y in Z's slot"


# --------------------------------------------------------------------------------------------------------- room


def count_computed(one: Engine, counts: list[int]) -> None:
    """Record the number of tokens that each step of the engine's backend computes."""
    assert one._room.backend is not None
    compute = one._room.backend.compute

    def counted(chunks: Any, *where: Any) -> Any:
        counts.append(sum(len(chunk.tokens) for chunk in chunks))
        return compute(chunks, *where)

    one._room.backend.compute = counted  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", None), ("torch", torch.int8), ("native", None), ("native", torch.int8)]
)
def test_room_that_grows_keeps_what_was_computed(backend: Any, dtype: Any) -> None:
    """As more and longer texts arrive, running texts continue, and no token is computed twice."""
    model = random_model(TOKENIZER, context_length=4096, d_model=32, init_std=0.25).eval()
    if backend == "native":
        needs_native(model)
    options = {"backend": backend, "cache_dtype": dtype, "reuse": "all", "prefill_tokens": 512}
    one, computed = engine(model, **options), []
    read = [i * i % 251 for i in range(40)]
    one.complete(read, max_tokens=1, n_samples=2)
    count_computed(one, computed)
    running = one.submit([5, 6, 7], seed=1, max_tokens=30, ignore_eos=True)
    for _ in range(10):
        one.step()
    small = one._room.backend.n_slots, one._room.backend.capacity
    more = [one.submit([*read, i], seed=i, max_tokens=8, ignore_eos=True) for i in range(5)]
    long = one.submit([9, 8, 7], seed=2, max_tokens=2100, ignore_eos=True)
    one.step()
    one.cancel(long)
    while one.step():
        pass
    assert (small[0] < 8 <= one._room.backend.n_slots) and (small[1] < 2103 <= one._room.backend.capacity)
    assert sum(computed) == (3 + 29) + 5 * (1 + 7) + 3 + len(token_ids_so_far(long)) - 1
    alone = engine(model, **options)
    assert token_ids(running) == [
        c.token_ids for c in alone.complete([5, 6, 7], seed=1, max_tokens=30, ignore_eos=True)
    ]
    for i, request in enumerate(more):
        expected = engine(model, **options).complete([*read, i], seed=i, max_tokens=8, ignore_eos=True)
        assert token_ids(request) == [c.token_ids for c in expected]


def token_ids_so_far(request: Request) -> list[int]:
    return [piece.token_id for piece in request.take() if piece.token_id is not None]


def test_a_draft_model_keeps_what_it_read_when_room_grows() -> None:
    model = random_model(TOKENIZER, context_length=512, d_model=32, init_std=0.25).eval()
    drafter, computed = DraftModel(model, 3, backend="torch"), []
    one = engine(model, drafter=drafter, prefill_tokens=512)
    first = one.submit([i % 200 for i in range(300)], seed=1, max_tokens=40, ignore_eos=True)
    one.step(), one.step()
    compute = drafter._backend.compute
    drafter._backend.compute = lambda chunks: computed.extend(len(c.tokens) for c in chunks) or compute(chunks)
    others = [one.submit([i], seed=i, max_tokens=5, ignore_eos=True) for i in range(3)]
    while one.step():
        pass
    assert one.statistics().slots > 1 and all(other.done for other in others)
    assert max(computed) < 10, "three hundred would be the prompt read again"
    expected = engine(model).complete([i % 200 for i in range(300)], seed=1, max_tokens=40, ignore_eos=True)
    assert token_ids(first) == [c.token_ids for c in expected]


def test_room_that_cannot_grow_ends_the_requests_there_are_and_the_next_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = random_model(TOKENIZER, context_length=64, d_model=32, init_std=0.25).eval()
    one = engine(model)
    running = one.submit([1, 2, 3], seed=1, max_tokens=30)
    one.step()

    def full(*_: Any) -> None:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(one._room.backend, "grow", full)
        late = [one.submit([i], max_tokens=3) for i in range(3)]
        with pytest.raises(RuntimeError, match="allocate"):
            one.step()
    assert all(isinstance(request.error, RuntimeError) for request in (running, *late))
    assert one.statistics().slots_used == 0
    expected = engine(model).generate([1, 2, 3], seed=1, max_tokens=30)
    assert one.generate([1, 2, 3], seed=1, max_tokens=30) == expected


def test_a_warm_engine_has_all_the_room_that_clients_can_ask_for() -> None:
    model = random_model(TOKENIZER, context_length=4096, d_model=32, init_std=0.25).eval()
    one = engine(model, n_slots=3, prefill_tokens=512)
    n_bytes = one.warm_up()
    assert (one._room.backend.n_slots, one._room.backend.capacity) == (3, 4096)
    assert n_bytes == 2 * 3 * 4096 * 2 * 32 * 4  # keys and values, slots, tokens, layers, width, bytes
    backend, buffers = one._room.backend, one._room.backend.cache.keys[0].data
    one.generate([1, 2, 3], seed=1, max_tokens=3000, overflow="slide")
    one.complete([1] * 3000, seed=1, max_tokens=2, n_samples=5)
    assert one._room.backend is backend and backend.cache.keys[0].data is buffers
    assert one.statistics().requests == 2, "warming up is not counted"


def test_a_plan_counts_the_cache_that_an_engine_allocates() -> None:
    """The cache of banded layers keeps all tokens too."""
    model = random_model(TOKENIZER, context_length=64, window=16, window_pattern=("full", "window")).eval()
    one = engine(model, n_slots=8)
    n_bytes = one.warm_up()
    cache = one._room.backend.cache
    assert n_bytes == sum(vectors.data.nbytes for vectors in (*cache.keys, *cache.values))
    assert n_bytes == inference_memory(model.config)[0].cache_bytes[8]


def test_slots_that_do_not_fit_in_memory_are_refused_before_a_client_can_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(TOKENIZER, context_length=4096, d_model=32, init_std=0.25).eval()
    monkeypatch.setattr("gptworks.infer.room.memory_bytes", lambda _: 10_000_000)
    slot_bytes = 2 * 4096 * 2 * 32 * 4  # 2.1 MB
    assert engine(model, n_slots=4).warm_up() == 4 * slot_bytes
    with pytest.raises(UserError) as error:
        engine(model, n_slots=5).warm_up()
    for part in (
        "5 slots of 4,096 tokens take 10.49 MB",
        "10 MB are available, enough for 4 slots",
        "--slots",
        "--context",
    ):
        assert part in str(error.value)
    assert engine(model, n_slots=5, slot_tokens=1024).warm_up() == 5 * slot_bytes // 4
    with pytest.raises(UserError, match=r"4 slots .* and 4 MB are available, enough for 1 slots"):
        engine(model, n_slots=4).warm_up(promised_bytes=6_000_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_bytes_of_a_cache_are_those_of_its_buffers(dtype: torch.dtype) -> None:
    model = random_model(TOKENIZER, context_length=64, d_model=32, n_kv_heads=1)
    for settings in ({}, {"layer_repeats": 3}, {"smear": True}, {"bigram_vocab_size": 40, "layer_repeats": (1, 2)}):
        config = model.config.model_copy(update=settings)
        cache = SlotCache(config, 3, 50, dtype=dtype)
        cache.grow(5, 61, [0, 50, 7])
        buffers = [t for v in (*cache.keys, *cache.values) for t in (v.data, v.scale)] + [cache.tokens]
        held_bytes = sum(tensor.nbytes for tensor in buffers if tensor is not None)
        assert cache.bytes_of(5, 61) == held_bytes
        assert 5 * kv_cache_bytes(config, 61, dtype.itemsize, 4 * (dtype == torch.int8)) == held_bytes
