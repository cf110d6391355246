"""Tokens per second: decoded tokens per second of the engine's own time, the same figure wherever shown. The clock is
fake."""

import json
from typing import Any

import httpx2 as httpx
import pytest

from gptworks.cli.chat_terminal import Talk, Terminal
from gptworks.infer import Engine
from gptworks.infer.chat import chat_session
from gptworks.infer.request import WorkClock
from gptworks.infer.text import Pace
from gptworks.runs.quantized import _decode_speed
from gptworks.serve.settings import ServerSettings
from gptworks.studio.app import create_served
from serving import KEY, running_app, tiny_engine

READING, DECODING = 5.0, 0.25
"""Seconds of a step that reads the prompt, and of one that computes one token."""
PROMPT = list(range(65, 105))


class Clock:
    """A fake clock that sets the duration of an engine's steps."""

    def __init__(self, engine: Engine) -> None:
        self.now = 0.0
        engine.begin()
        engine._requests.clock = WorkClock(lambda: self.now)
        backend = engine._room.backend
        assert backend is not None
        compute = backend.compute

        def timed(chunks: Any, *where: Any) -> Any:
            self.now += max(DECODING if len(chunk.tokens) == 1 else READING for chunk in chunks)
            return compute(chunks, *where)

        backend.compute = timed  # type: ignore[method-assign]


@pytest.fixture
def engine() -> Engine:
    return tiny_engine(prefill_tokens=16)


def test_reading_the_prompt_and_waiting_for_the_reader_do_not_count(engine: Engine) -> None:
    clock, pace = Clock(engine), Pace()
    for n, piece in enumerate(engine.pieces(PROMPT, temperature=0.0, max_tokens=9), 1):
        pace.push(piece)
        clock.now += 100.0  # the reader's
        if n == 1:
            assert pace.tokens_per_second is None and pace.n_tokens == 1
    assert clock.now == 3 * READING + 8 * DECODING + 9 * 100.0
    assert (pace.n_tokens, pace.decode_seconds, pace.tokens_per_second) == (9, 8 * DECODING, 1 / DECODING)


def test_each_sample_has_its_own_pace_even_if_pieces_are_read_late(engine: Engine) -> None:
    Clock(engine)
    paces = {i: Pace() for i in range(3)}
    request = engine.submit(PROMPT, temperature=1.0, seed=1, max_tokens=6, n_samples=3, ignore_eos=True)
    while engine.step():
        pass
    for piece in request.take():  # all at once
        paces[piece.sample].push(piece)
    assert [pace.tokens_per_second for pace in paces.values()] == [1 / DECODING] * 3


def test_a_text_of_one_token_has_no_rate(engine: Engine) -> None:
    Clock(engine)
    pace = Pace()
    for piece in engine.pieces(PROMPT, max_tokens=1):
        pace.push(piece)
    assert pace.n_tokens == 1 and pace.tokens_per_second is None


def test_chat_prints_the_engines_rate(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    Clock(engine)
    talk = Talk(chat_session(engine, temperature=0.0, max_tokens=9, ignore_eos=True), Terminal())
    talk.take("A long beginning of a text, so that it is read in steps.")
    assert "(9 tokens, 4 tokens/s; --max-tokens 9)" in capsys.readouterr().err
    talk.session.settings = talk.session.settings.of(talk.session.settings, max_tokens=1)
    talk.take("more")
    assert "(1 token; --max-tokens 1)" in capsys.readouterr().err


def test_the_page_shows_the_engines_rate(engine: Engine) -> None:
    Clock(engine)
    app = create_served({"tiny": engine}, ServerSettings(api_keys=(KEY,)))
    with running_app(app) as server, server.http() as http:
        ends = [end_of(http, n) for n in (9, 1)]
    assert [(end["generated"], end["tokens_per_second"]) for end in ends] == [(9, 1 / DECODING), (1, None)]


def end_of(http: httpx.Client, n_tokens: int) -> dict[str, Any]:
    settings = {"temperature": 0.0, "max_tokens": n_tokens, "ignore_eos": True}
    answer = http.post("/studio/generate", json={"model": "tiny", "tokens": PROMPT, "settings": settings})
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
    return events[-1]


def test_the_report_of_quantizing_has_the_engines_rate(engine: Engine) -> None:
    Clock(engine)
    assert _decode_speed(engine, PROMPT) == 1 / DECODING
