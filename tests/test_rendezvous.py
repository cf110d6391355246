"""How ranks and machines find one another."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import PrefixStore, TCPStore

from gptworks.errors import RunError, UserError
from gptworks.training.distributed import rendezvous
from gptworks.training.distributed.rendezvous import check_host, start_name
from gptworks.training.distributed.writers import RankWriters


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def named(store: TCPStore, size: int, missing: int | None = None) -> list[str]:
    """The names that ranks of one start find, each with a connection of its own."""
    with ThreadPoolExecutor(size) as pool:
        found = [
            pool.submit(start_name, TCPStore("127.0.0.1", store.port, is_master=False), rank, size, 10)
            for rank in range(size)
            if rank != missing
        ]
        return [each.result() for each in found]


def test_ranks_of_a_start_share_a_name_and_each_start_has_another(store: TCPStore) -> None:
    """torchrun's store and its restart count stay the same where it starts ranks again because a machine came."""
    names = [named(store, 4), named(store, 4), named(store, 2), named(store, 1)]
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == 4


def test_what_ranks_that_died_have_asked_is_not_taken_for_an_answer(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_ASK_SECONDS", 0.1)
    with ThreadPoolExecutor(1) as pool:  # rank 1 starts and its rank 0 does not
        alone = pool.submit(start_name, TCPStore("127.0.0.1", store.port, is_master=False), 1, 2, 0.5)
        with pytest.raises(RunError, match="not all ranks have started"):
            alone.result()
    assert len(set(named(store, 3))) == 1


def test_a_start_does_not_read_the_saves_of_an_earlier_one(store: TCPStore) -> None:
    """A rank that fails in a save leaves its keys: the next start's first save would take its folder for its own."""

    def writers(name: str) -> list[RankWriters]:
        return [RankWriters(PrefixStore(f"gptworks/{name}", store), rank, 2) for rank in (0, 1)]

    writers(named(store, 2)[0])[0].share(".writing-of-a-start-that-died")
    rank_zero, other = writers(named(store, 2)[0])
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(other.share)
        assert not read.done()
        rank_zero.share(".writing-now")
        assert read.result(timeout=10) == ".writing-now"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "first"])
def test_a_rendezvous_that_each_machine_takes_for_itself_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where /etc/hosts gives the machine's own name 127.0.1.1."""
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest, **also: known(
        {"first": "127.0.1.1", "localhost": "127.0.0.1"}.get(name, name), *rest, **also
    ))  # fmt: skip
    with pytest.raises(UserError, match="a loopback address"):
        check_host(host)


def test_a_rendezvous_elsewhere_or_of_a_machine_that_has_not_started_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_host("10.1.2.3")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(socket.gaierror()))
    check_host("job-node-0-0.job")
