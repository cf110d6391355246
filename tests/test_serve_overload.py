"""A server in its own process with too many clients, slow ones, and ones that disconnect: `make test-overload`.

Throughout, /health answers within a second and memory stays bounded; afterwards no slot is held, and a request is
answered within ten seconds.
"""

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from serving import KEY, command, head, request, until, write_run

pytestmark = [pytest.mark.overload, pytest.mark.timeout(900)]

SLOTS, WAITING = 8, 16
MOST_GROWTH_BYTES = 300 << 20
"""Of the server's resident memory while a test goes on, beside a run before it that fills all slots."""
LONG: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2900, "logit_bias": {"256": -100}}
SHORT = LONG | {"max_tokens": 100}


class Watch(threading.Thread):
    """Watches the server's health and memory during an attack."""

    def __init__(self, target: "Target") -> None:
        super().__init__(daemon=True)
        self.target = target
        self.seconds: list[float] = []
        self.rss: list[int] = []
        self.ends = False

    def run(self) -> None:
        while not self.ends:
            began = time.monotonic()
            with httpx.Client(timeout=30) as http:
                assert http.get(f"{self.target.url}/health").status_code == 200
            self.seconds.append(time.monotonic() - began)
            self.rss.append(self.target.memory())
            time.sleep(0.05)


class Target:
    """The server under load."""

    def __init__(self, http: httpx.Client, pid: int) -> None:
        self.http, self.process = http, Path("/proc") / str(pid)
        self.url = str(http.base_url).rstrip("/")
        self.address = ("127.0.0.1", http.base_url.port)

    def memory(self) -> int:
        """Return the server's resident bytes."""
        return int((self.process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"gptworks:{name}"))

    @contextmanager
    def watched(self, what: str) -> Iterator[Counter[Any]]:
        """Check the server during and after an attack; yield a counter for the clients' answers."""
        before, watch, answers = self.memory(), Watch(self), Counter[Any]()
        watch.start()
        began = time.monotonic()
        yield answers
        ended = time.monotonic()
        assert self.http.post("/v1/completions", json=SHORT).status_code == 200
        recovered = time.monotonic() - ended
        watch.ends = True
        watch.join()
        print(
            f"\n{what}: {ended - began:.1f} s, answers {dict(answers)}, /health at most {max(watch.seconds):.3f} s of "
            f"{len(watch.seconds)}, memory {before >> 20} MiB, at most {max(watch.rss) >> 20}, "
            f"recovery {recovered:.2f} s"
        )
        until(lambda: self.metric("num_requests_running") == self.metric("num_requests_waiting") == 0, 10)
        assert self.metric("kv_cache_usage_perc") == 0 and self.metric("http_requests_in_flight") == 1, "its own"
        assert recovered < 10 and max(watch.seconds) < 1
        assert max(watch.rss) - before < MOST_GROWTH_BYTES


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    if not Path("/proc/self/statm").exists():
        pytest.skip("memory and open files of a process are read from /proc")
    run_folder = write_run(tmp_path_factory.mktemp("runs") / "tiny")
    options = ["--slots", str(SLOTS), "--max-waiting", str(WAITING), "--request-seconds", "60"]
    with command(run_folder, *options) as (process, http):
        filling = LONG | {"n": SLOTS}
        assert http.post("/v1/completions", json=filling).status_code == 200  # all slots' memory is touched
        yield Target(http, process.pid)


def test_ten_times_as_many_as_fit(target: Target) -> None:
    """Each client sends a new request once it is answered. Clients beyond the limit are refused immediately."""
    n_clients = 10 * (SLOTS + WAITING)

    async def client(http: httpx.AsyncClient, until_when: float, answers: Counter[Any]) -> None:
        while time.monotonic() < until_when:
            response = await http.post("/v1/completions", json=SHORT)
            answers[response.status_code] += 1
            if response.status_code == 429:
                assert response.headers["retry-after"]
                await asyncio.sleep(0.5 * random.random())

    async def all_of_them(answers: Counter[Any]) -> None:
        limits = httpx.Limits(max_connections=n_clients)
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=target.url, headers=headers, limits=limits, timeout=120) as http:
            ends = time.monotonic() + 20
            await asyncio.gather(*(client(http, ends, answers) for _ in range(n_clients)))

    with target.watched(f"{n_clients} clients") as answers:
        asyncio.run(all_of_them(answers))
    assert answers.keys() == {200, 429} and answers[200] > 100


def test_a_thousand_slow_senders(target: Target) -> None:
    """Half of them send headers a byte at a time, the other half a body."""

    async def slow(i: int, answers: Counter[Any]) -> None:
        reader, writer = await asyncio.open_connection(*target.address)
        text = head(1 << 20) + b" " * 1000
        start = 0 if i % 2 else len(head(1 << 20))
        with suppress(OSError):
            writer.write(text[:start])
            for byte in text[start:]:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.5)
                if writer.transport.is_closing() or reader.at_eof():
                    break
            answers[(await reader.read(20))[:12]] += 1
        writer.close()

    async def all_of_them(answers: Counter[Any]) -> None:
        await asyncio.gather(*(slow(i, answers) for i in range(1000)))

    with target.watched("1000 slow senders") as answers:
        asyncio.run(all_of_them(answers))
    assert answers[b"HTTP/1.1 200"] == 0


def test_two_hundred_slow_readers(target: Target) -> None:
    """They request long streams with alternatives, and read nothing."""

    async def slow(answers: Counter[Any]) -> None:
        reader, writer = await asyncio.open_connection(*target.address, limit=1024)
        writer.write(request(LONG | {"stream": True, "logprobs": 20}))
        begun = (await reader.read(12)).decode()
        answers[begun] += 1
        await asyncio.sleep(20)
        writer.transport.abort()

    async def all_of_them(answers: Counter[Any]) -> None:
        await asyncio.gather(*(slow(answers) for _ in range(200)))

    with target.watched("200 slow readers") as answers:
        asyncio.run(all_of_them(answers))


def test_a_thousand_disconnects_mid_stream(target: Target) -> None:
    chance = random.Random(1)

    async def leave(gate: asyncio.Semaphore, seconds: float, answers: Counter[Any]) -> None:
        async with gate:
            reader, writer = await asyncio.open_connection(*target.address)
            writer.write(request(LONG | {"stream": True, "n": 2}))
            answers[(await reader.read(12)).decode()] += 1
            await asyncio.sleep(seconds)
            writer.transport.abort()

    async def all_of_them(answers: Counter[Any]) -> None:
        gate = asyncio.Semaphore(16)
        await asyncio.gather(*(leave(gate, 0.2 * chance.random(), answers) for _ in range(1000)))

    cancelled = target.metric("requests_cancelled_total")
    with target.watched("1000 disconnects") as answers:
        asyncio.run(all_of_them(answers))
    assert answers["HTTP/1.1 200"] > 500
    assert target.metric("requests_cancelled_total") - cancelled >= answers["HTTP/1.1 200"] / 2
    assert len(list((target.process / "fd").iterdir())) < 100
