"""Many requests at once: each gets the text that it would get alone, whatever other requests do."""

import asyncio
import contextlib
import copy
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from gptworks.errors import RunError, UserError
from gptworks.infer import Completion, Engine, SamplingSettings
from gptworks.infer.backends import native
from gptworks.infer.loop import EngineLoop, EngineStopped, Stream, StreamCancelled
from gptworks.infer.request import Request
from gptworks.infer.scheduler import QueueFull
from gptworks.infer.speculate import PromptLookup
from gptworks.infer.text import Piece
from gptworks.kernels.build import Unavailable
from test_engine import byte_tokenizer, char_tokenizer, random_model

CONTEXT = 64
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    """A model whose texts differ and do not repeat one token."""
    return random_model(TOKENIZER, context_length=CONTEXT, d_model=32, init_std=0.25).eval()


def engine(model: Any, **options: Any) -> Engine:
    return Engine(model, TOKENIZER, **{"backend": "torch", "prefill_tokens": 8} | options)


def needs_native(model: Any) -> None:
    try:
        native.NativeBackend(model, 1, CONTEXT)
    except Unavailable as error:
        pytest.skip(f"no native kernels here: {error}")


def mixed_settings(chance: random.Random) -> SamplingSettings:
    pick = chance.choice
    return SamplingSettings(
        temperature=pick((0.0, 0.7, 1.2)), top_k=pick((0, 0, 7)), top_p=pick((1.0, 0.8)), min_p=pick((0.0, 0.05)),
        repetition_penalty=pick((1.0, 1.3)), frequency_penalty=pick((0.0, 0.4)), presence_penalty=pick((0.0, 0.2)),
        logit_bias=pick(({}, {70: 2.0, 80: -3.0})), seed=chance.randrange(1000), max_tokens=chance.randint(1, 30),
        stop=pick(((), ("A", "zz"))), logprobs=pick((None, 2)),
    )  # fmt: skip


def mixed_prompt(chance: random.Random) -> list[int]:
    """Return a random prompt; half of the prompts share a prefix."""
    shared = list(range(40, 40 + 20)) if chance.random() < 0.5 else []
    return shared + chance.choices(range(256), k=chance.randint(1, 30))


def run_all(one: Engine, asked: list[tuple[list[int], dict[str, Any]]], chance: random.Random) -> list[Any]:
    """Submit requests at random moments, cancel some of them, and step until all have ended."""
    requests: list[Request] = []
    victims = set(chance.sample(range(len(asked)), len(asked) // 5))
    busy = True
    while len(requests) < len(asked) or busy:
        while len(requests) < len(asked) and chance.random() < 0.6:
            prompt, arguments = asked[len(requests)]
            requests.append(one.submit(prompt, **arguments))
        for i in list(victims):
            if i < len(requests) and chance.random() < 0.1:
                one.cancel(requests[i])
                victims.remove(i)
        busy = one.step()
    return [None if r._pieces and not ended(r) else made(r, asked[i]) for i, r in enumerate(requests)]


def ended(request: Request) -> bool:
    return all(one.finish_reason is not None for one in request.samples)


def made(request: Request, asked: tuple[list[int], dict[str, Any]]) -> list[Completion] | None:
    return request.completions() if ended(request) else None


def texts(made: list[Completion]) -> list[Any]:
    """Return all of the completions except the last digits of log-probabilities."""
    return [
        (c.text, c.token_ids, c.finish_reason, c.prompt_tokens, c.logprobs and [p.token_id for p in c.logprobs])
        for c in made
    ]


@pytest.mark.parametrize(
    "options",
    [
        {}, {"reuse": "all"}, {"n_slots": 5, "drafter": PromptLookup(3, 2)}, {"backend": "native"},
        {"backend": "native", "drafter": PromptLookup(3, 2)},
    ],
    ids=["plain", "reuse", "drafts", "native", "native-drafts"],
)  # fmt: skip
def test_thirty_two_requests_receive_the_texts_of_separate_requests(model: Any, options: dict[str, Any]) -> None:
    """With mixed settings, random arrivals and cancellations, shared prefixes, several samples and sliding windows."""
    if "backend" in options:
        needs_native(model)
    else:  # what is computed beside a text changes the last digits, and in float64 they decide no draw
        model = copy.deepcopy(model).double()
    chance = random.Random(1)
    asked: list[tuple[list[int], dict[str, Any]]] = []
    for i in range(32):
        arguments: dict[str, Any] = {"settings": mixed_settings(chance), "n_samples": chance.choice((1, 1, 1, 3))}
        if i % 3 == 0:
            arguments["overflow"] = "slide"
        asked.append((mixed_prompt(chance), arguments))
    one = engine(model, **{"n_slots": 8} | options)
    results = run_all(one, asked, chance)
    statistics = one.statistics()
    assert sum(result is not None for result in results) >= 26
    assert statistics.cancelled >= 2 and statistics.finished + statistics.cancelled == statistics.requests == 32
    for (prompt, arguments), result in zip(asked, results, strict=True):
        if result is not None:
            alone = engine(model, backend=options.get("backend", "torch")).complete(prompt, **arguments)
            assert texts(result) == texts(alone)
            for ours, theirs in zip(result, alone, strict=True):
                for got, expected in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
                    assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert (statistics.running, statistics.waiting, statistics.slots_used) == (0, 0, 0)
    assert not one._room.scheduler.running and not one._room.scheduler.waiting and not one._requests
    if "drafter" not in options:
        assert statistics.reused_tokens > 0


def test_seeded_samples_of_one_request_are_those_of_any_number_of_slots(model: Any) -> None:
    settings = SamplingSettings(seed=3, max_tokens=20)
    expected = texts(engine(model).complete([1, 2, 3] * 5, settings, n_samples=7))
    for n_slots in (1, 2, 7):
        assert texts(engine(model, n_slots=n_slots).complete([1, 2, 3] * 5, settings, n_samples=7)) == expected
    assert texts(engine(model).complete([1, 2, 3] * 5, settings, n_samples=2)) == expected[:2]


def test_a_shared_beginning_is_computed_once(model: Any) -> None:
    one = engine(model, n_slots=4)
    shared = list(range(100, 120))
    first, second = one.submit([*shared, 1, 2], max_tokens=3), one.submit([*shared, 3], max_tokens=3)
    while one.step():
        pass
    assert (first.n_reused_tokens, second.n_reused_tokens) == (0, 0), "the first was not read when the second came"
    third = one.submit([*shared, 4], max_tokens=3)
    while one.step():
        pass
    assert third.n_reused_tokens == 16 == one.statistics().reused_tokens


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_turn_reuses_the_tokens_of_the_last_one(model: Any, backend: Any) -> None:
    if backend == "native":
        needs_native(model)
    one = engine(copy.deepcopy(model), backend=backend, reuse="all")
    (first,) = one.complete([1, 2, 3], temperature=0, max_tokens=9, ignore_eos=True)
    turn = [1, 2, 3, *first.token_ids, 7, 7]
    (second,) = one.complete(turn, temperature=0, max_tokens=9)
    assert one.statistics().reused_tokens == len(turn) - 3, "all but the last token generated, and what is new"
    assert texts([second]) == texts(engine(model).complete(turn, temperature=0, max_tokens=9))


def test_nothing_is_reused_once_the_weights_have_changed() -> None:
    model = random_model(TOKENIZER, context_length=CONTEXT, d_model=32, init_std=0.25).eval()
    one, prompt = engine(model, reuse="all"), list(range(30))
    before = one.generate(prompt, temperature=0, max_tokens=12)
    assert one.generate(prompt, temperature=0, max_tokens=12) == before and one.statistics().reused_tokens > 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    changed = one.generate(prompt, temperature=0, max_tokens=12)
    assert changed == engine(model).generate(prompt, temperature=0, max_tokens=12) != before


def test_a_model_in_training_keeps_no_cache() -> None:
    model = random_model(TOKENIZER)
    one = engine(model)
    stream = one.stream("abc", temperature=0, max_tokens=10)
    next(stream)
    assert one._room.backend is not None
    stream.close()
    assert one._room.backend is None
    one.generate("abc", max_tokens=3)
    assert one._room.backend is None


def test_room_grows_while_others_run_and_their_texts_stay(model: Any) -> None:
    tokenizer = char_tokenizer()
    wide = random_model(tokenizer, context_length=1024, d_model=32, init_std=0.25).eval()
    one = Engine(wide, tokenizer, backend="torch")
    expected = one.generate("abcdef", temperature=0, max_tokens=60)
    short = one.submit("abcdef", temperature=0, max_tokens=60)
    for _ in range(5):
        one.step()
    small = one.statistics().slots
    others = [one.submit("abc" * 100, seed=i, max_tokens=20) for i in range(5)]
    while one.step():
        pass
    assert one.statistics().slots >= 6 > small
    assert "".join(piece.text for piece in short.take()) == expected
    assert all(request.done and not request.error for request in others)


# ------------------------------------------------------------------------------------------------- ends and errors


def test_a_request_that_is_cancelled_frees_its_slot_for_the_next(model: Any) -> None:
    one = engine(model, n_slots=1)
    first, second = one.submit([1], max_tokens=40, ignore_eos=True), one.submit([2], max_tokens=2)
    one.step()
    assert (one.statistics().running, one.statistics().waiting) == (1, 1)
    one.cancel(first)
    one.cancel(first)
    assert one.statistics().slots_used == 0
    one.step()
    one.step()
    assert first.done and second.done and len(second.take()) == 2
    assert len(first.take()) == 1
    one.cancel(second)
    assert not one.step()


def test_nan_logits_end_only_their_request(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(model)
    good, bad = one.submit([1, 2, 3], temperature=0, max_tokens=5), one.submit([4, 5], temperature=0, max_tokens=5)
    one.step()
    compute = one._room.backend.compute

    def broken(chunks: Any, *where: Any) -> Any:
        rows = compute(chunks, *where)
        return [rows[0], rows[1] * float("nan")]

    with monkeypatch.context() as patch:
        patch.setattr(one._room.backend, "compute", broken)
        one.step()
    while one.step():
        pass
    assert isinstance(bad.error, RunError) and bad.done and len(bad.take()) == 1
    assert good.completions() == engine(model).complete([1, 2, 3], temperature=0, max_tokens=5)
    assert one.statistics().failed == 1


def test_a_backend_that_breaks_ends_the_requests_there_are_and_serves_the_next(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(model)
    request = one.submit([1, 2], max_tokens=5)
    one.step()
    with monkeypatch.context() as patch:
        patch.setattr(one._room.backend, "compute", lambda chunks, *where: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one.step()
    assert isinstance(request.error, ZeroDivisionError)
    expected = engine(model).generate([1, 2], seed=1, max_tokens=5)
    assert one.generate([1, 2], seed=1, max_tokens=5) == expected


def test_a_full_queue_refuses(model: Any) -> None:
    one = engine(model, n_slots=1, max_waiting=2)
    one.submit([1])
    one.step()
    one.submit([1]), one.submit([1])
    with pytest.raises(QueueFull, match="2 texts are waiting"):
        one.submit([1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logit_bias": {999: 1.0}}, "token id 999"), ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_when_it_is_asked_for(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine(model, n_slots=8).submit([1], **arguments)


def test_slots_shorter_than_the_context_bound_a_text(model: Any) -> None:
    one = engine(model, n_slots=1, slot_tokens=20)
    (completion,) = one.complete([1] * 10, temperature=0, max_tokens=50, ignore_eos=True)
    assert (completion.finish_reason, len(completion.token_ids)) == ("context", 11)
    with pytest.raises(UserError, match="21 tokens and the model's context 20"):
        one.generate([1] * 21)


# --------------------------------------------------------------------------------------------------------- scores


def test_scores_are_the_models_log_probabilities(model: Any) -> None:
    ids = random.Random(3).choices(range(256), k=30)
    with torch.no_grad():
        expected = model(torch.tensor([ids]))[0].log_softmax(-1)
    for options in ({}, {"prefill_tokens": 7}):
        told = engine(model, **options).score(ids, top=4)
        assert told[0] is None and len(told) == 30
        for i, one in enumerate(told[1:]):
            assert one is not None and one.token_id == ids[i + 1]
            assert one.logprob == pytest.approx(expected[i, ids[i + 1]].item(), abs=1e-4)
            assert [token for token, _ in one.top] == expected[i].topk(4).indices.tolist()


def test_a_prompt_can_be_scored_and_continued(model: Any) -> None:
    one, ids = engine(model), list(range(20))
    one.generate(ids, max_tokens=1)
    request = one.submit(ids, temperature=0, max_tokens=5, prompt_logprobs=0, n_samples=2, logprobs=0)
    while one.step():
        pass
    both = request.completions()
    assert request.prompt_logprobs is not None and [p and p.token_id for p in request.prompt_logprobs][1:] == ids[1:]
    assert texts(both)[0] == texts(engine(model).complete(ids, temperature=0, max_tokens=5, logprobs=0))[0]
    whole = engine(model).score(ids + both[0].token_ids)
    for scored, made_at in zip(whole[20:], both[0].logprobs or [], strict=True):
        assert scored is not None and scored.logprob == pytest.approx(made_at.logprob, abs=1e-4)


# -------------------------------------------------------------------------------------------------------- threads


def test_threads_that_share_an_engine_receive_the_texts_of_separate_engines(model: Any) -> None:
    one, results = engine(model, n_slots=4), {}

    def work(i: int) -> None:
        results[i] = one.generate([i, i + 1], seed=i, max_tokens=15)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: engine(model).generate([i, i + 1], seed=i, max_tokens=15) for i in range(8)}


def stream(loop: EngineLoop, prompt: list[int], **arguments: Any) -> Stream:
    opened = loop.open()
    opened.submit(prompt, **arguments)
    return opened


async def pieces(stream: Stream) -> AsyncIterator[Piece]:
    """Read a stream like a user's code: if the reader abandons it, asyncio finalizes it at some later time."""
    async for batch in stream.batches():
        for _, piece, _ in batch:
            yield piece


async def complete(loop: EngineLoop, prompt: list[int], **arguments: Any) -> list[Completion]:
    reading = stream(loop, prompt, **arguments)
    return reading.requests[0].completions([piece async for piece in pieces(reading)])


def test_a_loop_streams_to_many_readers_and_forgets_those_who_leave(model: Any) -> None:
    one = engine(model, n_slots=3)

    async def leave(loop: EngineLoop) -> int:
        n = 0
        async for _ in pieces(stream(loop, [9], seed=1, max_tokens=50, ignore_eos=True)):
            n += 1
            if n == 3:
                break
        return n

    async def all_of_them() -> tuple[list[list[Completion]], int]:
        with EngineLoop(one) as loop:
            tasks = [complete(loop, [i], seed=i, max_tokens=20, n_samples=2) for i in range(10)]
            left = asyncio.create_task(leave(loop))
            cancelled = asyncio.create_task(complete(loop, [8], max_tokens=50, ignore_eos=True))
            await asyncio.sleep(0.01)
            cancelled.cancel()
            return await asyncio.gather(*tasks), await left

    results, n = asyncio.run(all_of_them())
    assert n == 3
    expected = [engine(model).complete([i], seed=i, max_tokens=20, n_samples=2) for i in range(10)]
    assert [texts(result) for result in results] == [texts(result) for result in expected]
    statistics = one.statistics()
    assert (statistics.running, statistics.waiting, statistics.slots_used) == (0, 0, 0)
    assert statistics.finished == 10


READINGS = {"batches": Stream.batches, "a generator": pieces}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_a_request_that_its_reader_left_is_cancelled(model: Any, read: Any) -> None:
    one = engine(model)

    async def go() -> None:
        with EngineLoop(one) as loop:
            async for _ in read(stream(loop, [9], seed=1, max_tokens=10**9, overflow="slide", ignore_eos=True)):
                break
            async with asyncio.timeout(30):
                while one.statistics().running:
                    await asyncio.sleep(0.001)

    asyncio.run(go())
    assert (one.statistics().cancelled, one.statistics().slots_used) == (1, 0)


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_a_loop_that_closes_does_not_generate_what_its_reader_left(model: Any, read: Any) -> None:
    """The text would never end, and closing blocks asyncio, which could otherwise end the abandoned generator."""
    one = engine(model)

    async def go() -> list[Piece]:
        with EngineLoop(one) as loop:
            kept = stream(loop, [1], max_tokens=20, ignore_eos=True)
            async for _ in read(stream(loop, [9], seed=1, max_tokens=10**9, overflow="slide", ignore_eos=True)):
                break
        return [piece async for piece in pieces(kept)]

    finished = asyncio.run(go())
    assert (len(finished), finished[-1].finish_reason) == (20, "length"), "closing finishes what may still be read"
    statistics = one.statistics()
    assert (statistics.cancelled, statistics.finished, statistics.slots_used) == (1, 1, 0)


def test_a_failed_step_is_logged_before_its_requests_learn_of_it(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader in another thread may react immediately, when the log must already be complete."""
    one = engine(model)
    logged_before: list[list[str]] = []

    def fail() -> None:
        raise RuntimeError("the accelerator is gone")

    monkeypatch.setattr(one, "_step", fail)
    with EngineLoop(one):

        def listen(_: Piece | Exception) -> None:
            logged_before.append([str(record.exc_info[1]) for record in caplog.records if record.exc_info])

        request = one.submit([1], max_tokens=5, listener=listen)
    assert request.done and logged_before == [["the accelerator is gone"]]


def test_a_loop_hands_errors_to_the_request_they_concern(model: Any) -> None:
    one = engine(model, n_slots=2, max_waiting=1)

    async def go() -> None:
        loop = EngineLoop(one)  # not started: everything waits
        with pytest.raises(UserError, match="temprature"):
            stream(loop, [1], temprature=1)
        waiting = stream(loop, [1])
        with pytest.raises(QueueFull):
            stream(loop, [2])
        loop.start()
        finished = [piece async for piece in pieces(waiting)]
        assert finished[-1].finish_reason
        endless = stream(loop, [1], max_tokens=60, overflow="slide", ignore_eos=True)
        loop.close(drain=False)
        with pytest.raises(RunError, match="stopped"):
            async for _ in endless.batches():
                pass
        with pytest.raises(RunError, match="no more requests"):
            loop.open()

    asyncio.run(go())
    assert one.statistics().slots_used == 0


async def read_all(reading: Stream) -> list[Piece]:
    async with asyncio.timeout(30):
        return [piece async for piece in pieces(reading)]


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("started", [True, False])
def test_a_closed_loop_accepts_no_request_and_leaves_no_reader_waiting(model: Any, started: bool, drain: bool) -> None:
    one = engine(model)

    async def go() -> None:
        loop = EngineLoop(one)
        opened, submitted = loop.open(), stream(loop, [1], max_tokens=20, ignore_eos=True)
        if started:
            loop.start()
        loop.close(drain=drain)
        with pytest.raises(EngineStopped, match="no more requests"):
            opened.submit([2], max_tokens=5)
        assert await read_all(opened) == []
        if started and drain:
            assert len(await read_all(submitted)) == 20
        else:
            with pytest.raises(EngineStopped, match="was stopped"):
                await read_all(submitted)

    asyncio.run(go())
    assert (one.statistics().running, one.statistics().waiting, one.statistics().slots_used) == (0, 0, 0)


def test_a_request_is_refused_or_answered_however_close_to_the_end_it_comes(model: Any) -> None:
    """Requests from another thread, while the loop closes, 30 times."""

    async def go(loop: EngineLoop) -> None:
        streams = [loop.open() for _ in range(60)]
        answered: list[Stream] = []

        def submit_all() -> None:
            with contextlib.suppress(EngineStopped):
                for one in streams:
                    one.submit([1], max_tokens=1, ignore_eos=True)
                    answered.append(one)

        submitting = threading.Thread(target=submit_all)
        submitting.start()
        await asyncio.sleep(0.002)
        await asyncio.to_thread(loop.close)
        submitting.join()
        for one in answered:
            assert len(await read_all(one)) == 1

    one = engine(model)
    for _ in range(30):
        asyncio.run(go(EngineLoop(one).start()))


def test_pieces_before_an_error_are_read_before_it(model: Any) -> None:
    async def go() -> None:
        opened = EngineLoop(engine(model)).open()
        opened.submit([1], max_tokens=9)
        for piece in (Piece(0, "a", 1), Piece(0, "b", 2), RunError("broken")):
            opened.hand(0, piece)
        reading = opened.batches()
        assert [piece.text for _, piece, _ in await anext(reading)] == ["a", "b"]
        with pytest.raises(RunError, match="broken"):
            await anext(reading)

    asyncio.run(go())


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("where", ["this thread", "another thread"])
def test_cancelling_a_stream_ends_the_reader_that_waits(model: Any, where: str, started: bool) -> None:
    one = engine(model)

    async def go() -> None:
        loop = EngineLoop(one)
        if started:
            loop.start()
        reading = stream(loop, [9], max_tokens=10**9, overflow="slide", ignore_eos=True)
        waiting = asyncio.create_task(read_all(reading))
        await asyncio.sleep(0.01)
        if where == "this thread":
            reading.cancel()
        else:
            await asyncio.to_thread(reading.cancel)
        with pytest.raises(StreamCancelled):
            await waiting
        loop.close()

    asyncio.run(go())
    assert (one.statistics().cancelled, one.statistics().slots_used) == (1, 0)
