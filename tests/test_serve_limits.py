"""Clients that are slow, disconnect or are too many, and shutdown: the limits on what clients hold, and that they
release it."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

import commands
from gptworks.errors import RunError, UserError
from gptworks.infer.loop import EngineLoop, SlowReader
from gptworks.infer.scheduler import QueueFull
from gptworks.serve import embeddings
from gptworks.serve.server import _connections
from gptworks.serve.service import Service
from gptworks.serve.settings import ServerSettings
from serving import KEY, Running, command, head, request, running, tiny_engine, until, write_run

LONG: dict[str, Any] = {"model": "base", "prompt": "a", "max_tokens": 100_000, "logit_bias": {"256": -100}}
"""A request for as many tokens as the context holds."""
CONTEXT = 20_000
"""So many that no such request ends before a test has done what it wants."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = {
        "max_waiting": 2, "header_seconds": 0.6, "body_seconds": 0.6, "stall_seconds": 0.6, "max_pipelined": 2,
        "keep_alive_seconds": 1, "client_share": 1.0,
    }  # fmt: skip
    with running({"base": tiny_engine(n_slots=2, slot_tokens=CONTEXT, context=CONTEXT)}, **limits) as one:
        yield one


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=120) as one:
        yield one


def read_all(one: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    received = b""
    while True:
        try:
            part = one.recv(65536)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def is_idle(server: Running) -> bool:
    statistics = server.engine("base").statistics()
    return (statistics.running, statistics.waiting, statistics.slots_used, server.service.in_flight) == (0, 0, 0, 0)


def works(server: Running) -> bool:
    with server.http() as http:
        return http.post("/v1/completions", json={"model": "base", "prompt": "a", "max_tokens": 1}).status_code == 200


# ------------------------------------------------------------------------------------------------ slow senders


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: "])
def test_headers_that_do_not_come_end_the_connection(server: Running, sent: bytes) -> None:
    with connected(server) as one:
        one.sendall(sent)
        assert read_all(one) == b""


def test_headers_that_drip_end_the_connection(server: Running) -> None:
    with connected(server) as one, pytest.raises(OSError):
        one.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(200):
            time.sleep(0.05)
            one.sendall(b"x-a: b\r\n")
    with connected(server) as one, pytest.raises(OSError):  # also after a request that was answered
        one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for _ in range(200):
            time.sleep(0.05)
            one.sendall(b"\r\n")


def test_a_body_that_does_not_come_is_answered(server: Running) -> None:
    with connected(server) as one:
        one.sendall(head(100) + b'{"model"')
        assert read_all(one).startswith(b"HTTP/1.1 408")
    assert is_idle(server)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\n" + b"x-a: " + b"b" * 400_000, 431),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500, 400),
    ],
    ids=["long", "nonsense", "pipelined"],
)
def test_what_is_not_a_request(server: Running, sent: bytes, status: int) -> None:
    with connected(server) as one:
        try:
            one.sendall(sent)
            received = read_all(one)
        except ConnectionError:  # closed before all was sent
            return
    assert received.startswith(b"HTTP/1.1 %d" % status) or not received


@pytest.mark.parametrize("headers", [b"x-a: " + b"b" * 100_000 + b"\r\n", b"x-a: b\r\n" * 10_000], ids=["one", "many"])
def test_headers_beyond_the_limit_are_refused_though_they_come_whole(server: Running, headers: bytes) -> None:
    with connected(server) as one:
        with suppress(ConnectionError):  # closed before all was sent
            one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n")
        received = read_all(one)
    assert received.startswith(b"HTTP/1.1 431") or not received
    with connected(server) as one:  # what is below the limit passes, in each request of a connection anew
        for _ in range(3):
            one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"b" * 20_000 + b"\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += one.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")


def test_requests_sent_ahead_keep_their_headers(server: Running) -> None:
    """Each is answered only with its own key and media type."""
    short = request({"model": "base", "prompt": "a", "max_tokens": 1})
    with connected(server) as one:
        one.sendall(short + short)
        assert read_all(one).count(b"HTTP/1.1 200 OK") == 2


def test_a_client_that_asks_first_is_told_before_it_sends(server: Running) -> None:
    with connected(server) as one:
        one.sendall(head(10_000_000).replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
        assert read_all(one).startswith(b"HTTP/1.1 413")


# ------------------------------------------------------------------------------------------- readers that leave


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(server: Running, stream: bool) -> None:
    before = server.engine("base").statistics().cancelled
    with connected(server) as one:
        one.sendall(request(LONG | {"stream": stream, "n": 2}))
        until(lambda: server.engine("base").statistics().running == 2)
    until(lambda: is_idle(server))
    assert server.engine("base").statistics().cancelled == before + 1


def test_a_client_that_leaves_the_queue_is_not_waited_for(server: Running) -> None:
    with connected(server) as busy:
        busy.sendall(request(LONG | {"n": 2}))
        until(lambda: server.engine("base").statistics().running == 2)
        with connected(server) as one:
            one.sendall(request(LONG))
            until(lambda: server.engine("base").statistics().waiting == 1)
        until(lambda: server.engine("base").statistics().waiting == 0)
    until(lambda: is_idle(server))


def test_a_reader_who_does_not_read_is_let_go(server: Running) -> None:
    """Its connection fills up with tokens and stays full, so its slot is freed."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, _, port = server.url.removeprefix("http://").partition(":")
    one.connect((host, int(port)))
    with one:
        one.sendall(request(LONG | {"stream": True, "logprobs": 20}))
        until(lambda: server.engine("base").statistics().running == 1)
        until(lambda: is_idle(server), 120)
    assert works(server)


def test_unread_pieces_are_bounded() -> None:
    engine = tiny_engine(context=2000)

    async def go() -> None:
        with EngineLoop(engine) as loop:
            stream = loop.open(max_unread=10)
            stream.submit("a", max_tokens=1900, ignore_eos=True)
            await asyncio.sleep(0)
            while not stream.cancelled:
                await asyncio.sleep(0.01)
            with pytest.raises(SlowReader, match="10 pieces"):
                async for _ in stream.batches():
                    pass

    asyncio.run(go())
    assert engine.statistics().slots_used == 0 and engine.statistics().cancelled == 1


def test_time_is_up() -> None:
    """A request gets status 504, a stream an event; both free their slots."""
    engine = tiny_engine(n_slots=2, context=CONTEXT, slot_tokens=CONTEXT)
    with running({"base": engine}, request_seconds=0.5) as server, server.http() as http:
        response = http.post("/v1/completions", json=LONG)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        text = http.post("/v1/completions", json=LONG | {"stream": True}).text
        assert "timeout" in text.split("\n\n")[-2] and "[DONE]" not in text and text.count("data: ") > 5
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        with client, pytest.raises(openai.APIError, match=r"more than 0\.5 seconds"):
            list(client.completions.create(stream=True, **LONG))
        until(lambda: is_idle(server))


# ---------------------------------------------------------------------------------------------------- too many


def test_more_than_may_wait_is_told_to_come_again(server: Running) -> None:
    with connected(server) as busy, server.http() as http:
        busy.sendall(request(LONG | {"n": 2}))
        until(lambda: server.engine("base").statistics().running == 2)
        waiting = [socket.create_connection(busy.getpeername()) for _ in range(2)]
        for one in waiting:
            one.sendall(request(LONG))
        until(lambda: server.engine("base").statistics().waiting == 2)
        told = http.post("/v1/completions", json=LONG | {"n": 3, "logprobs": 20}).json()["error"]
        assert told["param"] == "logprobs" and "1260000 numbers" in told["message"], "an answer's memory is bounded"
        response = http.post("/v1/completions", json=LONG)
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
        assert http.post("/v1/completions", json=LONG | {"prompt": ["a"] * 3}).status_code == 400, "never fits"
        assert http.get("/health").status_code == 200
        for one in waiting:
            one.close()
    until(lambda: is_idle(server))
    assert works(server)


def test_connections_that_wait_make_room_for_others() -> None:
    with running({"base": tiny_engine()}, max_connections=8) as server:
        idle = [socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) for _ in range(20)]
        for _ in range(3):
            assert works(server)
        for one in idle:
            one.close()


def test_idle_connections_make_room_too_though_they_were_answered_once() -> None:
    with running({"base": tiny_engine()}, max_connections=8) as server:
        idle = []
        for _ in range(20):
            one = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=120)
            one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert one.recv(4096).startswith(b"HTTP/1.1 200")
            idle.append(one)
        for _ in range(3):
            assert works(server)
        for one in idle:
            one.close()


def test_one_client_leaves_places_for_others() -> None:
    engine = tiny_engine(n_slots=2, context=CONTEXT, slot_tokens=CONTEXT)
    short = LONG | {"max_tokens": 1}
    with (
        running({"base": engine}, api_keys=("one", "two"), max_waiting=6, client_share=0.5) as server,
        ThreadPoolExecutor(1) as threads,
        server.http(headers={"authorization": "Bearer one"}) as first,
        server.http(headers={"authorization": "Bearer two"}) as second,
    ):
        begun = []
        for _ in range(4):
            one = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60)
            one.sendall(request(LONG).replace(KEY.encode(), b"one"))
            begun.append(one)
        until(lambda: server.service.n_working == 4 and engine.statistics().waiting == 2)
        refused = first.post("/v1/completions", json=short)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "client_share")
        served = threads.submit(second.post, "/v1/completions", json=short)
        until(lambda: engine.statistics().waiting == 3)
        for one in begun:
            one.close()
        assert served.result().status_code == 200
        assert first.post("/v1/completions", json=short).status_code == 200, "its places are free again"


def test_as_many_requests_go_on_as_there_are_slots_and_places_to_wait() -> None:
    service = Service({"base": tiny_engine(n_slots=512)}, ServerSettings(max_waiting=128))
    assert service.max_in_flight >= service.max_texts == 640


@pytest.mark.parametrize("stream", [False, True])
def test_how_a_step_failed_is_in_the_log_once(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the accelerator is gone")

    with monkeypatch.context() as patch, server.http() as http:
        patch.setattr(server.engine("base"), "_step", fail)
        response = http.post("/v1/completions", json=LONG | {"stream": stream})
    assert "its log has the error" in response.text and "accelerator" not in response.text
    until(lambda: "the accelerator is gone" in caplog.text)  # logged by the engine's thread
    logged = [record for record in caplog.records if record.name.startswith("gptworks")]
    assert [record.exc_info is not None for record in logged] == [True]
    assert works(server)


def test_a_failing_engine_is_an_error_and_not_the_end(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> list[float]:
        raise RuntimeError("/a/path/nobody/should/see")

    monkeypatch.setattr(embeddings, "embed", fail)
    with server.http() as http:
        response = http.post("/v1/embeddings", json={"model": "base", "input": "a"})
    assert (
        response.status_code == 500
        and "path" not in response.text
        and response.json()["error"]["type"] == "server_error"
    )
    backend = server.engine("base")._room.backend
    assert backend is not None or works(server)
    with monkeypatch.context() as patch:
        patch.setattr(server.engine("base"), "_step", lambda: (_ for _ in ()).throw(RunError("out of memory")))
        with server.http() as http:
            assert http.post("/v1/completions", json=LONG).status_code == 500
    assert works(server)


# ------------------------------------------------------------------------------------------------------ the end


def test_sigterm_lets_requests_finish_and_refuses_others(tmp_path: Path) -> None:
    run_folder = write_run(tmp_path / "tiny")
    long = LONG | {"model": "tiny", "max_tokens": 500}
    log: list[str] = []
    options = ["--model", f"second={run_folder}", "--speculative", "2", "--cache", "fp32"]
    with command(run_folder, *options, log=log) as (process, http), ThreadPoolExecutor(2) as threads:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["tiny", "second"]
        chat = {"model": "second", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        begun = threads.submit(http.post, "/v1/completions", json=long)
        streamed = threads.submit(http.post, "/v1/completions", json=long | {"stream": True})
        until(lambda: "http_requests_in_flight 3.0" in http.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        until(lambda: http.get("/health").status_code == 503)
        refused = http.post("/v1/completions", json=long)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        answered = begun.result()
        assert answered.status_code == 200 and answered.json()["usage"]["completion_tokens"] == 500
        assert streamed.result().text.endswith("data: [DONE]\n\n")
        assert process.wait(120) == 0
        until(lambda: "served" in log[-1])
    assert any(re.search(r" POST /v1/completions 200 \d+ ms 501 tokens$", line) for line in log), log
    assert any(re.search(r" POST /v1/chat/completions 200 \d+ ms \d+ tokens$", line) for line in log), log
    assert re.fullmatch(r"served \d+ requests and 1,0\d\d tokens in \d+ s\.", log[-1]), log[-1]


def test_a_drain_has_an_end() -> None:
    """Requests still running get status 503, streams an event."""
    engine = tiny_engine(n_slots=2, context=CONTEXT, slot_tokens=CONTEXT)
    with (
        running({"base": engine}, drain_seconds=0.5) as server,
        ThreadPoolExecutor(2) as threads,
        server.http() as http,
    ):
        whole = threads.submit(http.post, "/v1/completions", json=LONG)
        streamed = threads.submit(http.post, "/v1/completions", json=LONG | {"stream": True})
        until(lambda: engine.statistics().running == 2)
        server.server.handle_exit(signal.SIGTERM, None)
        assert whole.result().status_code == 503
        assert "stopped" in streamed.result().text.split("\n\n")[-2]


def test_many_clients_come_and_go(server: Running) -> None:
    """Two hundred clients disconnect at random moments of their streams, and nothing of them remains."""

    def come_and_go(i: int) -> None:
        with connected(server) as one:
            one.sendall(request(LONG | {"stream": bool(i % 2), "prompt": "ab" * (i % 9 + 1)}))
            one.settimeout(0.001 * (i % 40))
            with suppress(TimeoutError, BlockingIOError):
                one.recv(100)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(come_and_go, range(200)))
    until(lambda: is_idle(server))
    assert works(server)
    assert threading.active_count() < 40


def test_one_client_leaves_places_for_others_however_it_asks() -> None:
    """A client's share counts texts, as the queue does, whether several choices of a prompt or several prompts of a
    request."""
    engine = tiny_engine(n_slots=4, context=CONTEXT, slot_tokens=CONTEXT)
    with (
        running({"base": engine}, api_keys=("one", "two"), max_waiting=12, client_share=0.5) as server,
        server.http(headers={"authorization": "Bearer one"}) as first,
        server.http(headers={"authorization": "Bearer two"}) as second,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as one,
    ):
        for asked in ({"n": 9}, {"prompt": ["a"] * 9}, {"prompt": ["a"] * 3, "n": 3}):
            never = first.post("/v1/completions", json=LONG | asked)
            assert (never.status_code, never.json()["error"]["code"]) == (400, "client_share"), "more than its share"
        one.sendall(request(LONG | {"n": 7}).replace(KEY.encode(), b"one"))
        until(lambda: engine.statistics().running == 4 and engine.statistics().waiting == 3)
        refused = first.post("/v1/completions", json=LONG | {"n": 2, "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "client_share")
        other = first.post("/v1/embeddings", json={"model": "base", "input": ["a", "b"]})
        assert (other.status_code, other.json()["error"]["code"]) == (429, "client_share")
        assert second.post("/v1/embeddings", json={"model": "base", "input": ["a", "b"]}).status_code == 200
        with ThreadPoolExecutor(1) as threads:
            served = threads.submit(second.post, "/v1/completions", json=LONG | {"n": 8, "max_tokens": 1})
            until(lambda: engine.statistics().waiting == 3 + 8)
            one.close()
            assert len(served.result().json()["choices"]) == 8
        until(lambda: is_idle(server))
        assert not server.service.callers


def test_texts_whose_prompt_is_not_read_yet_wait_too() -> None:
    engine = tiny_engine(n_slots=2)
    engine.max_waiting = 4
    requests = [engine.submit("ab", n_samples=3, max_tokens=1)]
    assert engine.statistics().waiting == 3
    requests.append(engine.submit("a", n_samples=2, max_tokens=1))
    assert engine.statistics().waiting == 5
    with pytest.raises(QueueFull, match="5 texts"):
        engine.submit("a", max_tokens=1)
    while engine.step():
        assert engine.statistics().waiting <= 5
    assert all(one.done for one in requests) and engine.statistics().waiting == 0


def test_log_probabilities_of_all_answers_together_are_bounded() -> None:
    engine = tiny_engine(n_slots=4, context=CONTEXT, slot_tokens=CONTEXT)
    asked = {"logprobs": 19, "max_tokens": 500}  # 10,000 numbers
    with (
        running({"base": engine}, api_keys=("one", "two", "three"), max_logprob_numbers=21_000) as server,
        server.http() as http,
    ):

        def ask(key: str, **more: Any) -> tuple[int, str | None]:
            headers = {"authorization": f"Bearer {key}"}
            response = http.post("/v1/completions", json=LONG | {"max_tokens": 1} | more, headers=headers)
            return response.status_code, response.json().get("error", {}).get("code")

        with ThreadPoolExecutor(2) as threads:
            begun = [threads.submit(ask, key, **asked) for key in ("one", "two")]
            until(lambda: server.service.held("", lambda one: one.n_numbers)[1] == 20_000)
            assert ask("one", **asked) == (429, "too_many_logprobs"), "its own share"
            assert ask("three", **asked) == (429, "too_many_logprobs"), "all that there is"
            assert ask("three") == (200, None), "without them"
            assert [one.result() for one in begun] == [(200, None)] * 2
        assert ask("three", **asked) == (200, None)


# ---------------------------------------------------------------------------------------------------- framing


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"host: localhost\r\nhost: evil.example\r\n", 400),
        (b"Host: localhost\r\nHOST: localhost\r\n", 400),
        (b"host: localhost\r\ntransfer-encoding: gzip, chunked\r\n", 501),
        (b"host: localhost\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", 501),
        (b"host: localhost\r\ntransfer-encoding: chunked, chunked\r\n", 400),
    ],
)
def test_a_framing_that_two_readers_may_take_differently_is_refused(
    server: Running, headers: bytes, status: int
) -> None:
    with connected(server) as one:
        one.sendall(b"POST /tokenize HTTP/1.1\r\n" + headers + b"content-type: application/json\r\n\r\n0\r\n\r\n")
        assert read_all(one).startswith(b"HTTP/1.1 %d" % status)


def test_chunks_are_read(server: Running) -> None:
    with connected(server) as one:
        sent = b'{"prompt": "ab"}'
        one.sendall(
            head(0).replace(b"content-length: 0\r\n", b"Transfer-Encoding: Chunked\r\n")
            .replace(b"/v1/completions", b"/tokenize") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(sent), sent)
        )  # fmt: skip
        one.shutdown(socket.SHUT_WR)
        assert b'"count":2' in read_all(one)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(server: Running, stream: bool) -> None:
    with connected(server) as one:
        one.sendall(
            request(
                {"model": "base", "prompt": "a", "max_tokens": 300, "stream": stream} | {"logit_bias": {"256": -100}}
            )
        )
        one.shutdown(socket.SHUT_WR)
        received = read_all(one)
    assert b"HTTP/1.1 200 OK" in received and b'"length"' in received
    until(lambda: is_idle(server))


def test_a_half_of_a_request_is_no_request(server: Running) -> None:
    with connected(server) as one:
        one.sendall(head(100) + b'{"model"')
        one.shutdown(socket.SHUT_WR)
        assert read_all(one) == b""
    until(lambda: is_idle(server))


# ------------------------------------------------------------------------------------------------- open files


def test_connections_follow_the_limit_of_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few open files allowed, a server answers /health while others hold all its connections, and logs little."""
    run_folder = write_run(tmp_path / "tiny")
    log: list[str] = []

    def limited(*arguments: Any, env: dict[str, str], **options: Any) -> Any:
        given = ["sh", "-c", 'ulimit -n 100; exec "$@"', "sh", sys.executable, *map(str, arguments)]
        return subprocess.Popen(
            given, env=os.environ | env, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )

    monkeypatch.setattr(commands, "start", limited)
    with command(run_folder, log=log) as (_, http):
        port = int(str(http.base_url).rstrip("/").rpartition(":")[2])
        idle = [socket.socket() for _ in range(300)]
        for one in idle:  # at once: one whose turn does not come asks again after a second, then after two, …
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        for _ in range(3):
            assert http.get("/health").status_code == 200
        for one in idle:
            one.close()
    assert len(log) < 20, log[:20]


def test_too_few_open_files_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, 20))
    monkeypatch.setattr("resource.setrlimit", lambda _, pair: None)
    with pytest.raises(UserError, match=r"20 files may be open.*ulimit -n"):
        _connections(1024)


def test_a_limit_that_may_be_raised_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [64, 4096]
    monkeypatch.setattr("resource.getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr("resource.setrlimit", lambda _, pair: limits.__setitem__(0, pair[0]))
    most, backlog = _connections(1024)
    assert most + backlog <= limits[0] - 40 and limits[0] > 1024 and most > 900
