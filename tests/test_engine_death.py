"""A step that fails fatally: all requests are answered, the engine reports its end, and the process exits with a
code."""

import asyncio
import ctypes
import json
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

import commands
from gptworks.errors import RunError, UserError
from gptworks.infer import Engine
from gptworks.infer.batch import generate_file
from gptworks.infer.engine import EngineFailed
from gptworks.infer.loop import EngineLoop
from gptworks.infer.request import Request
from gptworks.infer.sampling import SamplingSettings
from gptworks.serve.app import create_app
from gptworks.serve.settings import ServerSettings
from serving import KEY, byte_tokenizer, listening, paused_after, tiny_engine, until, write_run

LONG: dict[str, Any] = {"model": "base", "prompt": "a", "max_tokens": 10_000, "logit_bias": {"256": -100}}


class OtherPanic(BaseException):
    """An exception like pyo3's PanicException, whose type Python cannot name."""


def raises(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


FATAL = [OtherPanic("a table ended"), MemoryError(), SystemExit(3), GeneratorExit()]


@pytest.fixture
def engine() -> Engine:
    return tiny_engine(n_slots=1)


@pytest.mark.parametrize("error", FATAL, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["_step", "_receive", "_rest"])
def test_what_ends_a_step_ends_every_request(
    engine: Engine, error: BaseException, where: str, monkeypatch: Any
) -> None:
    running, waiting = engine.submit([1], ignore_eos=True), engine.submit([2])
    if where != "_receive":
        engine.step()
    monkeypatch.setattr(engine, where, raises(error))
    inbox = engine.submit([3])
    with pytest.raises((EngineFailed, SystemExit, GeneratorExit)):
        engine.step()
    for request in (running, waiting, inbox):
        assert request.done and isinstance(request.error, EngineFailed) and type(error).__name__ in str(request.error)
    monkeypatch.undo()
    for call in (lambda: engine.submit([1]), engine.step, lambda: engine.generate("a"), lambda: engine.score("ab")):
        with pytest.raises(EngineFailed, match=type(error).__name__):
            call()


def test_an_interrupt_ends_the_requests_but_not_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook uses the engine again after an interrupt."""
    expected = tiny_engine(n_slots=1).generate("a", temperature=0, max_tokens=5)
    other = engine.submit([1], ignore_eos=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._room.scheduler, "plan", raises(KeyboardInterrupt()))
        engine.generate("a", temperature=0, max_tokens=5)
    assert other.done and isinstance(other.error, RunError)
    assert engine.generate("a", temperature=0, max_tokens=5) == expected


def test_readers_that_wait_learn_of_it_and_the_loop_is_dead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        loop = EngineLoop(engine)
        streams = [loop.open() for _ in range(3)]
        for stream in streams[:2]:
            stream.submit([1], max_tokens=10_000, overflow="slide", ignore_eos=True)
        monkeypatch.setattr(engine, "_step", raises(OtherPanic()))
        loop.start()
        for stream in streams[:2]:
            with pytest.raises(EngineFailed):
                async for _ in stream.batches():
                    pass
        assert not loop.alive
        with pytest.raises(EngineFailed):
            streams[2].submit([1])
        with pytest.raises(EngineFailed):
            loop.open()
        loop.close()

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("error", [OtherPanic, SystemExit, MemoryError])
def test_a_thread_that_is_killed_between_steps_is_noticed(engine: Engine, error: type[BaseException]) -> None:
    """ctypes, a debugger or a library may end the thread in the loop's own code, outside a step."""

    async def go() -> None:
        with paused_after(3):
            loop = EngineLoop(engine).start()
            stream = loop.open()
            stream.submit([1], max_tokens=10_000, overflow="slide", ignore_eos=True)
            waiting = loop.open()
            waiting.submit([2])
            await asyncio.sleep(0.05)
            assert loop._thread.ident is not None
            set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
            assert set_error(ctypes.c_ulong(loop._thread.ident), ctypes.py_object(error)) == 1
        for one in (stream, waiting):
            with pytest.raises(EngineFailed):
                async for _ in one.batches():
                    pass
        assert not loop.alive and loop.check() is not None

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_thread_that_died_silently_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineLoop, "_run", lambda loop: None)
    loop = EngineLoop(engine).start()
    loop._thread.join()
    request = engine.submit([1])
    assert loop.check() is not None and isinstance(request.error, EngineFailed)


def test_a_reader_that_raises_ends_its_own_request(engine: Engine) -> None:
    expected = tiny_engine(n_slots=1).generate([2], temperature=0, max_tokens=5)

    def raising(_: Any) -> None:
        raise ZeroDivisionError

    bad = [engine.submit([1], listener=raising, max_tokens=9, ignore_eos=True),
           engine.submit([1, 2], listener=raising, generates=False, prompt_logprobs=0)]  # fmt: skip
    good = engine.submit([2], temperature=0, max_tokens=5)
    while engine.step():
        pass
    assert all(isinstance(one.error, RunError) and "ZeroDivisionError" in str(one.error) for one in bad)
    assert "".join(piece.text for piece in good.take()) == expected and engine.statistics().slots_used == 0


def test_a_reader_that_raises_does_not_keep_the_error_from_others(engine: Engine, monkeypatch: Any) -> None:
    told: list[Any] = []
    engine.submit([1], listener=raises(OtherPanic()))
    engine.submit([2], listener=told.append)
    monkeypatch.setattr(engine, "_step", raises(OtherPanic()))
    with pytest.raises(EngineFailed):
        engine.step()
    assert [type(one) for one in told] == [EngineFailed]


def test_a_log_that_fails_keeps_the_error_from_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = engine.submit([1])
    monkeypatch.setattr(engine, "_step", raises(RuntimeError("the step")))
    with pytest.raises(OSError, match="the log"):
        engine.step(on_failure=raises(OSError("the log is on a full disk")))
    assert request.done and isinstance(request.error, RuntimeError)


# --------------------------------------------------------------------------------------------------- tokenizers


def test_a_text_on_which_the_library_panics_is_its_requests_error() -> None:
    tokenizer = byte_tokenizer()
    split = pre_tokenizers.Split(Regex(r"(?:a|a?)+$"), "isolated")  # its matcher gives up on many a's
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    reads = Engine(tiny_engine().model, tokenizer, backend="torch")
    for call in (reads.encode_prompt, reads.generate):
        with pytest.raises(UserError, match="gave up"):
            call("a" * 5000 + "b")
    assert reads.failure is None and reads.generate("ab", max_tokens=2) is not None


def test_tokens_that_the_library_cannot_decode_end_their_text() -> None:
    class Broken:
        """Panics when it decodes a token, as the library can."""

        def __init__(self, tokenizer: Tokenizer) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def decode(self, ids: list[int]) -> str:
            if 65 in ids:
                raise type("PanicException", (BaseException,), {})("index out of bounds")
            return str(self._tokenizer.decode(ids))

    engine = Engine(tiny_engine().model, Broken(byte_tokenizer()), backend="torch")  # type: ignore[arg-type]
    bad = engine.submit([1], logit_bias={65: 100.0}, max_tokens=30, temperature=0)
    good = engine.submit([2], logit_bias={65: -100.0, 256: -100.0}, max_tokens=30, temperature=0)
    while engine.step():
        pass
    assert isinstance(bad.error, UserError) and "cannot decode" in str(bad.error)
    assert good.error is None and engine.failure is None


# ---------------------------------------------------------------------------------------------- those that use it


def test_a_batch_ends_with_the_error_and_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(n_slots=1)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    deliver, ended = Request.deliver, []

    def fails_later(request: Request, piece: Any) -> None:
        deliver(request, piece)
        if piece.finish_reason and not ended:
            ended.append(request)
            monkeypatch.setattr(engine, "_step", raises(MemoryError()))

    monkeypatch.setattr(Request, "deliver", fails_later)
    with pytest.raises(EngineFailed, match="MemoryError"):
        generate_file(engine, tmp_path / "in.jsonl", tmp_path / "out.jsonl", SamplingSettings(max_tokens=2))
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [1]


def asked(app: Any, *requests: tuple[str, str, Any]) -> list[httpx.Response]:
    """Return the answers of an app without a server, which would exit."""

    async def go() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            return [await http.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("error", [OtherPanic("/a/secret/path"), MemoryError()], ids=lambda error: type(error).__name__)
def test_a_server_says_that_it_is_dead(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(n_slots=2)
    monkeypatch.setattr(engine, "_step", raises(error))
    app = create_app({"base": engine, "other": tiny_engine()}, ServerSettings())
    body = {"model": "base", "prompt": "a", "max_tokens": 5}
    whole, health, again, streamed, other = asked(
        app, ("POST", "/v1/completions", body), ("GET", "/health", None), ("POST", "/v1/completions", body),
        ("POST", "/v1/completions", body | {"stream": True}), ("POST", "/v1/completions", body | {"model": "other"}),
    )  # fmt: skip
    for response in (whole, again, streamed, other):
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_failed"
    assert health.status_code == 503
    assert health.json() == {"status": "failed", "reason": f"the engine of base has failed ({type(error).__name__})"}
    assert "secret" not in whole.text + health.text


def test_a_server_answers_what_it_has_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running texts get an error, streams an event; a text of another engine is finished."""
    base, other = tiny_engine(n_slots=2, context=20_000), tiny_engine(context=2_000)
    app = create_app({"base": base, "other": other}, ServerSettings(api_keys=(KEY,)))
    step = base._step
    dies = threading.Event()
    ended: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: ended.append(told.exc_value))
    monkeypatch.setattr(base, "_step", lambda: raises(OtherPanic())() if dies.is_set() else step())
    with (
        listening(app) as (_, thread, url),
        ThreadPoolExecutor(5) as threads,
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http,
    ):
        post = lambda **more: threads.submit(http.post, "/v1/completions", json=LONG | more)  # noqa: E731
        bodies = [{}, {"stream": True}, {"n": 2}, {"stream": True}]
        answers = [post(**body) for body in bodies]
        until(lambda: base.statistics().running == 2 and base.statistics().waiting >= 2)
        finished = post(model="other", max_tokens=1_000)
        until(lambda: other.statistics().running == 1)
        dies.set()
        for answer, body in zip(answers, bodies, strict=True):
            if "stream" in body and answer.result().status_code == 200:
                assert "engine_failed" in answer.result().text.split("\n\n")[-2]
            else:
                assert answer.result().json()["error"]["code"] == "engine_failed"
        assert finished.result().json()["usage"]["completion_tokens"] == 1_000
        thread.join(60)
        assert not thread.is_alive()
        assert [str(error) for error in ended] == [
            "the engine of base has failed (OtherPanic): the server has ended. The log above has the error."
        ]


DYING = """
import sys
from gptworks.infer.engine import Engine
from gptworks.cli import main
step = Engine._step
class Panic(BaseException): pass
def dies(engine):
    if any(len(request.prompt_ids) == 7 for request in engine._requests._open):
        raise Panic("a table ended")
    step(engine)
Engine._step = dies
sys.argv = ["gptworks", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("which", ["serve", "studio"])
def test_the_process_ends_with_a_code(tmp_path: Path, which: str) -> None:
    run = write_run(tmp_path / "runs" / "tiny")
    arguments = [run] if which == "serve" else [tmp_path / "runs", "--no-open"]
    whole = ("-c", DYING, which, *arguments, "--port", "0", "--backend", "torch", "--device", "cpu")
    process = commands.start(*whole, env={"GPTWORKS_API_KEY": KEY}, stderr=subprocess.PIPE)
    assert process.stderr is not None
    with process:
        try:
            line = next(line for line in process.stderr if "http://" in line or "error" in line)
            url = "http://" + line.partition("http://")[2].partition("/")[0]
            body = {"model": "tiny", "max_tokens": 4}
            with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
                assert http.post("/v1/completions", json=body | {"prompt": "abc"}).status_code == 200
                assert http.post("/v1/completions", json=body | {"prompt": "abcdefg"}).status_code == 503
            log = process.stderr.read()
            assert process.wait(60) == 1
        finally:
            process.kill()
    assert "a table ended" in log and log.rstrip().splitlines()[-1].startswith("error: the engine of tiny"), log
