"""The rendezvous of a run's machines, by torch's c10d backend, and the name on which the ranks of one start agree.

The first machine hosts the rendezvous' store; the ranks of all machines use the same store. Whoever can reach the
store's port can change the run, so the machines' network must be trusted. torchrun, gloo and NCCL require this too.
"""

import contextlib
import ipaddress
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gptworks.errors import RunError, UserError
from gptworks.training.signals import hold_signals

T = TypeVar("T")

DEFAULT_PORT = 29400

JOIN_SECONDS = 600
"""Time within which the machines of a round must arrive. Each machine tries for the same time to reach the first
machine."""

_STORE_SECONDS = 10
_PART_SECONDS = 20.0
_POLL_SECONDS, _ASK_SECONDS = 0.02, 2.0


class Round(NamedTuple):
    """The machines that train together until a machine comes or leaves, or a rank fails."""

    node: int
    """This machine's number, from 0."""
    n_nodes: int
    host: str
    port: int
    """Port of the ranks' store on `host`."""


class ThisMachine:
    """The rendezvous of a run on one machine. It waits for no other machine, and the ranks' store has a loopback
    address."""

    is_shared = False
    interface: str | None = None
    """Network interface that gloo must use; None if gloo chooses it."""

    def __init__(self) -> None:
        self._store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def next_round(self) -> Round:
        """Return the machines that train together next, once they have arrived.

        Raises:
            RunError: too few machines arrive within `JOIN_SECONDS`, or the run has ended on another machine.
        """
        return Round(0, 1, "127.0.0.1", self._store.port)

    def others_wait(self) -> bool:
        """Return whether another machine waits to take part, in which case the current round must end."""
        return False

    def end_round(self) -> None:
        """Record in the store that this machine's ranks of the round have ended."""

    def leave(self, over: bool) -> None:
        """Wait up to `_PART_SECONDS` for the ranks of all machines to end, since they may use this machine's store.

        If `over`, the run has ended for all machines, and no machine may join any more.
        """


class Machines(ThisMachine):
    """The rendezvous of several machines."""

    is_shared = True

    def __init__(self, host: str, port: int, least: int, most: int, run_id: str) -> None:
        """
        Args:
            host, port: address of the first machine.
            least, most: smallest and largest number of machines with which the run may train.
            run_id: name that distinguishes the run from another run at this address.

        Raises:
            UserError: the host has only loopback addresses.
        """
        check_host(host)
        self._host, self._port, self._least, self._most, self._run_id = host, port, least, most, run_id
        self._handler: Any = None
        self._round: Any = None
        self._asked: Future[int] | None = None
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # ranks use the rendezvous' own store

    def next_round(self) -> Round:
        from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
        from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError as Late

        # The handler's threads may wait for a lost connection for ever: start this program again.
        if self._handler is not None and not self._answers():
            hold_signals()
            os.execv(sys.executable, sys.orig_argv)
        until = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                self._handler = self._handler or _call(self._connected, JOIN_SECONDS)
                self._round = _call(self._handler.next_rendezvous, 2 * JOIN_SECONDS)
                return Round(self._round.rank, self._round.world_size, self._host, self._port)
            except RendezvousClosedError:
                raise RunError(f"the run at {self._host}:{self._port} has ended on another machine.") from None
            except (RendezvousError, RuntimeError, TimeoutError) as error:
                if isinstance(error, Late | TimeoutError) or time.monotonic() > until:
                    raise RunError(
                        f"fewer than {self._least} machines have met at {self._host}:{self._port} within "
                        f"{JOIN_SECONDS} s: start the same command on each, and see that this address can be reached."
                    ) from error
                self._handler = None
                time.sleep(1)

    def _answers(self) -> bool:
        try:
            _call(self._handler.is_closed, _STORE_SECONDS)
        except Exception:
            return False
        return True

    def _connected(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

        addresses = _addresses(self._host)
        if not addresses:
            raise RendezvousConnectionError(f"{self._host} has no address")
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            self.interface = _interface_towards(addresses[0])
        endpoint = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        for hosts in (True, False) if any(map(_is_own, addresses)) else (False,):
            settings = RendezvousParameters(
                "c10d", endpoint, self._run_id, self._least, self._most,
                is_host=hosts, read_timeout=_STORE_SECONDS, join_timeout=JOIN_SECONDS,
            )  # fmt: skip
            try:
                backend, store = create_backend(settings)
            except RendezvousConnectionError:
                if hosts:  # another process of this machine may host the store
                    continue
                raise
            return create_handler(store, backend, settings)
        raise AssertionError

    def others_wait(self) -> bool:
        if self._asked is None or self._asked.done():
            before, self._asked = self._asked, _in_thread(self._handler.num_nodes_waiting)
            return before is not None and before.exception() is None and before.result() > 0
        return False

    def end_round(self) -> None:
        self._asked = None
        with contextlib.suppress(RuntimeError, TimeoutError):
            _call(lambda: self._round.store.add("gptworks/ended", 1), _STORE_SECONDS)

    def leave(self, over: bool) -> None:
        from torch.distributed.elastic.rendezvous.api import RendezvousError

        if self._round is None:
            return
        until = time.monotonic() + _PART_SECONDS
        with contextlib.suppress(RuntimeError, RendezvousError, TimeoutError):
            if over:
                _call(self._handler.set_closed, _STORE_SECONDS)
            while _call(self._n_ended, _STORE_SECONDS) < self._round.world_size and time.monotonic() < until:
                time.sleep(0.1)

    def _n_ended(self) -> int:
        return int(self._round.store.add("gptworks/ended", 0))


def _in_thread(work: Callable[[], T]) -> "Future[T]":
    """Start `work` in a thread, and return the future of its result.

    The process does not wait for the thread when it exits, because a store may never answer.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    return future


def _call(work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, or raise a TimeoutError after `seconds`. Signals are handled during the wait."""
    return _in_thread(work).result(seconds)


def check_host(host: str) -> None:
    """Check that the first machine's name is not a loopback name, by which each machine would reach itself.

    An unknown name passes.

    Raises:
        UserError: the name has only loopback addresses.
    """
    found = _addresses(host)
    if found and all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found):
        raise UserError(
            f"--rendezvous {host} is {', '.join(found)}, a loopback address: each machine would wait for the others at "
            f"itself. Give the first machine's address in the network of all; /etc/hosts may say what {host} is here."
        )


def _addresses(host: str) -> list[str]:
    """Return the addresses of a machine by its name; an empty list if no machine with this name is known yet."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _is_own(address: str) -> bool:
    """Return whether an address belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _interface_towards(address: str) -> str | None:
    """Return the name of the network interface that leads to an IPv4 address; None if unknown.

    By default, gloo takes the interface that the machine's own name leads to. On many machines, this is the
    loopback device.
    """
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, DEFAULT_PORT))  # sends nothing
            own = probe.getsockname()[0]
            if _is_own(address):
                own = address
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                    if socket.inet_ntoa(found[20:24]) == own:
                        return name
    except (OSError, ImportError):
        pass
    return None


def start_name(store: Any, rank: int, size: int, timeout_seconds: float) -> str:
    """Return a random name that the ranks of this start share. Only these ranks use keys that begin with the name.

    The launcher's store may still hold the keys of an earlier start. The restart count does not distinguish the starts,
    because torchrun does not count a restart for a machine that comes or leaves. So each other rank sends
    its own random characters until rank 0 answers with the name. Rank 0 answers until all other ranks have confirmed
    the name.

    Raises:
        RunError: not all ranks answer within `timeout_seconds`.
    """
    own, until = secrets.token_hex(16), time.monotonic() + timeout_seconds
    if rank == 0:
        while store.add(f"gptworks/{own}/met", 0) < size - 1:
            _check_time(until)
            with contextlib.suppress(distributed.QueueEmptyError):
                while True:
                    asking = store.queue_pop("gptworks/asking", block=False).decode()
                    store.set(f"gptworks/name/{asking}", own)
            time.sleep(_POLL_SECONDS)
        return own
    answer = f"gptworks/name/{own}"
    while True:
        store.queue_push("gptworks/asking", own)
        try:
            store.wait([answer], timedelta(seconds=_ASK_SECONDS))
            break
        except distributed.DistStoreError:  # rank 0 has not started yet
            _check_time(until)
    name: str = store.get(answer).decode()
    store.delete_key(answer)
    store.add(f"gptworks/{name}/met", 1)
    return name


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise RunError("not all ranks have started: the launcher's messages say why.")
