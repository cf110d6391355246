"""The processes (ranks) of a run: how they agree on decisions, and how they find a rank that hangs.

A launcher (torchrun, or `gptworks launch`) starts the processes and gives each a rank, from 0, through the environment.
They train the same model in step. A decision that depends on a clock, a signal or a file is made by one rank or agreed
by all, since ranks that disagree would wait for one another for ever.

Ranks communicate by collectives, and through the launcher's store. A thread of each rank writes a heartbeat to the
store every few seconds, with counts of the rank's work: common points passed, forward passes begun, collectives issued.
If a rank's heartbeats stop (the rank is killed, or its machine fails), another rank reports this after
`timeout_seconds`, or soon after a collective fails, and the run ends. The run also ends if all heartbeats continue but
no counts rise for `timeout_seconds`. A run that computes is not taken for one that hangs, because every batch of
training, evaluation, sampling or reference log-probabilities needs a forward pass, and a hook on the model counts
forward passes (`ManyDevices._placed`).
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gptworks.errors import RunError, UserError
from gptworks.training.distributed.rendezvous import start_name
from gptworks.training.distributed.writers import ONE_WRITER, RankWriters, Writers

T = TypeVar("T")

_FOR_EVER = timedelta(days=3650)
_DONE, _FAILED = "done", "failed"
_NO_LAUNCHER = "the launcher does not answer: it has died, or its machine cannot be reached."


class Ranks:
    """Communication between ranks. This class is for a run with one process; subclasses override its methods."""

    rank, size, local_rank, local_size = 0, 1, 0, 1
    writers: Writers = ONE_WRITER
    """Communication of the threads that write checkpoints."""

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process prints messages and writes the run folder; other ranks write only their parts of
        checkpoints and of stored answers."""
        return self.rank == 0

    def from_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, and return its result (any JSON value) on every rank, however long it takes.

        An error on rank 0 ends all ranks.
        """
        return work()

    def rank_zero_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, then on the other ranks, which can read rank 0's files; return this rank's result."""
        return work()

    def agree_to_stop(self, stop: str | None) -> str | None:
        """Return, on all ranks, the name of a signal that asked any rank to stop, or None.

        `stop` is the name of the signal that asked this rank to stop, or None.
        """
        return stop

    def all_reduce_max(self, seconds: float) -> float:
        """Return the maximum of `seconds` over all ranks, so that all ranks make the same decisions by the clock."""
        return seconds

    def all_reduce(self, numbers: list[float]) -> list[float]:
        """Return the sum of each number over all ranks, in float64."""
        return numbers

    def broadcast(self, numbers: list[float]) -> list[float]:
        """Return rank 0's numbers on every rank, so that all ranks make the same decisions."""
        return numbers

    def count_point(self) -> None:
        """Count a point of the run that all ranks pass, as a sign of progress."""

    def count_work(self) -> None:
        """Count work that this rank began, such as a forward pass, as a sign of progress; counts may differ by rank."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Context for work of unknown length that no count shows, such as reading files: no rank takes this work for a
        hang."""
        yield


ALONE = Ranks()


@contextmanager
def join(timeout_seconds: float, device: torch.device) -> Iterator[Ranks]:
    """Context with the ranks of the run: all processes that a launcher started, or only this process.

    If a rank hangs, a thread prints an error and ends the process without an exception.

    Args:
        timeout_seconds: the run ends if a rank writes no heartbeat, or if no rank's counts rise, for this time.
        device: the type of device that each rank uses.

    Raises:
        UserError: this rank has no GPU, the device is mps, or environment variables that a launcher sets are missing.
        RunError: the ranks do not reach one another, or a rank died inside the context; the message names dead ranks.
        SystemExit: another rank has failed, and reports the error.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    try:
        ranks = _Joined(timeout_seconds, device)
    except RuntimeError as error:
        if not _is_of_a_collective(error):
            raise
        raise RunError(f"the ranks do not reach one another: {str(error).splitlines()[0]}") from error
    try:
        yield ranks
        ranks.leave(_DONE)
        distributed.destroy_process_group()
    except RuntimeError as error:
        gone = ranks.watch.who_is_gone() if _is_of_a_collective(error) else None
        ranks.leave(_FAILED)
        if gone is None:  # all ranks are alive: the error is this rank's own
            raise
        if not gone or not ranks.watch.may_speak():  # another rank reports the error
            raise SystemExit(RunError.exit_code) from error
        raise RunError(gone) from error
    except BaseException:
        ranks.leave(_FAILED)
        raise


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Return whether a collective raised the error. Gloo's errors have no class of their own, only a message."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error).lower()


class _Joined(Ranks):
    """Communication between several ranks, by collectives and through the launcher's store."""

    def __init__(self, timeout_seconds: float, device: torch.device) -> None:
        try:
            self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.local_rank, self.local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except KeyError as error:
            raise UserError(
                f"WORLD_SIZE is set and {error} is not: start several processes with `gptworks launch`."
            ) from None
        _take_device(device, self.local_rank)
        hosts_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        connections = [  # one for each thread, so that no thread waits for a long call of another
            TCPStore(host, port, is_master=hosts_store and own, wait_for_workers=False) for own in (True, False, False)
        ]
        name = start_name(connections[0], self.rank, self.size, 2 * timeout_seconds + 60)
        stores = [PrefixStore(f"gptworks/{name}", each) for each in connections]
        self._store, self._turn = stores[0], 0
        self.watch = _Watch(stores[1], self.rank, self.size, timeout_seconds)
        self.writers = RankWriters(stores[2], self.rank, self.size)
        self.count_point, self.count_work = self.watch.count_point, self.watch.count_work  # type: ignore[method-assign]
        distributed.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("collectives", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=2 * timeout_seconds + 60),  # longer than the watch takes to report a hang
        )
        self.watch.start()

    def from_rank_zero(self, work: Callable[[], T]) -> T:
        key = f"first/{self._turn}"
        with self.watch.patience(busy=self.is_rank_zero):
            if self.is_rank_zero:
                value = work()  # on an error, `leave` stores `failed` under this key
                self._store.set(key, json.dumps({"value": value}))
            else:
                self._store.wait([key], _FOR_EVER)
        received = json.loads(self._store.get(key))
        if _FAILED in received:
            raise SystemExit(received[_FAILED])
        self._turn += 1
        return value if self.is_rank_zero else received["value"]

    def rank_zero_first(self, work: Callable[[], T]) -> T:
        made: list[T] = []
        self.from_rank_zero(lambda: made.append(work()))
        with self.busy():
            return made[0] if made else work()

    def agree_to_stop(self, stop: str | None) -> str | None:
        self.count_point()
        number = int(self.all_reduce_max(float(signal.Signals[stop].value if stop else 0)))
        return signal.Signals(number).name if number else None

    def all_reduce_max(self, seconds: float) -> float:
        return self.all_reduce([seconds], largest=True)[0]

    def all_reduce(self, numbers: list[float], largest: bool = False) -> list[float]:
        received = torch.tensor(numbers, dtype=torch.float64)
        distributed.all_reduce(received, distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM)
        values: list[float] = received.tolist()
        return values

    def broadcast(self, numbers: list[float]) -> list[float]:
        received = torch.tensor(numbers, dtype=torch.float64)
        distributed.broadcast(received, src=0)
        values: list[float] = received.tolist()
        return values

    @contextmanager
    def busy(self) -> Iterator[None]:
        with self.watch.patience(busy=True):
            yield

    def leave(self, how: str) -> None:
        """Stop the heartbeats and store how this rank ended: `_DONE` or `_FAILED`."""
        error = sys.exc_info()[1]
        with contextlib.suppress(RuntimeError):  # the launcher and its store may be gone
            if how == _FAILED and self.is_rank_zero:
                code = getattr(error, "exit_code", 1)
                self._store.set(f"first/{self._turn}", json.dumps({_FAILED: code}))
            self.watch.stop(how)


def _take_device(device: torch.device, local_rank: int) -> None:
    """Make this rank's GPU the current CUDA device; do nothing on a CPU.

    Raises:
        UserError: the machine has no GPU for this rank, or the device is mps.
    """
    if device.type == "mps":
        raise UserError("device mps serves one process: use train.device=cpu, or start a single process.")
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"rank {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}. "
                f"Start as many processes as there are GPUs."
            )
        torch.cuda.set_device(local_rank)


def _collectives_issued() -> int:
    """Return the number of collectives that this rank has begun, in all process groups.

    A rank that the others wait for has begun fewer collectives. This also holds for NCCL, whose calls return at once.
    """
    total = 0
    if distributed.is_initialized():
        for group in list(distributed.distributed_c10d._world.pg_map):
            for device in group._device_types:
                with contextlib.suppress(RuntimeError):  # this backend does not count collectives
                    backend: Any = group._get_backend(device)
                    total += backend._get_sequence_number_for_group()
    return total


@dataclass(frozen=True)
class _Beat:
    """A heartbeat: a rank's counts of its work, and its process."""

    number: int
    marks: int
    moves: int
    collectives: int
    busy: bool
    host: str
    process: int

    @property
    def done(self) -> tuple[int, int, int]:
        """The counts that rise while the rank works."""
        return self.marks, self.moves, self.collectives


class _Watch(threading.Thread):
    """Thread that writes this rank's heartbeats, reads those of all ranks, and ends the process if a rank hangs."""

    def __init__(self, store: Any, rank: int, size: int, timeout_seconds: float) -> None:
        super().__init__(name="watch", daemon=True)
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout_seconds
        self._interval = min(timeout_seconds / 5, 5.0)
        self._over = threading.Event()
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._beats = self._marks = self._moves = 0
        self._moved_at = time.monotonic()  # the last time that any rank made progress
        self._patient = self._busy = False
        self._answered_at = time.monotonic()  # the last time that the store answered
        self._left = threading.Event()
        self._heard: dict[int, tuple[_Beat | str, float]] = {}  # each rank's last heartbeat, and when it arrived
        store.set_timeout(timedelta(seconds=max(10.0, timeout_seconds)))
        self._beat()

    def count_point(self) -> None:
        """Count, as a sign of progress, a point of the run that all ranks pass, such as a micro-batch's start."""
        self._marks += 1

    def count_work(self) -> None:
        """Count work that this rank has begun."""
        self._moves += 1

    @contextmanager
    def patience(self, busy: bool) -> Iterator[None]:
        """Return a context in which constant counts are not taken for a hang, because this rank does uncounted work
        (`busy`) or waits for a rank that does."""
        before = self._patient, self._busy
        self._patient, self._busy = True, busy or self._busy
        try:
            yield
        finally:
            self._patient, self._busy = before
            self.count_point()

    def stop(self, how: str) -> None:
        """Stop the thread, and store `how` in place of this rank's last heartbeat."""
        self._over.set()
        if self.is_alive():
            self.join(self._interval)
        self._store.set(f"beat/{self._rank}", how)
        self._left.set()

    def run(self) -> None:
        threading.Thread(target=self._watch_store, name="store", daemon=True).start()
        while not self._over.wait(self._interval):
            if self._agent not in (None, os.getppid()):
                self._end("the launcher of this rank has died. Go on with --resume.", asks=False)
            try:
                self._beat()
                self._listen()
                self._answered_at = time.monotonic()
            except RuntimeError:  # DistNetworkError: the launcher and its store are gone
                if not self._over.is_set():
                    self._end(_NO_LAUNCHER)
                return
            verdict = self.verdict()
            if verdict is not None and not self._over.is_set():
                self._end(verdict)

    def _watch_store(self) -> None:
        """End the process if the store does not answer. A call to the store waits for ever once the network is cut."""
        while not self._left.wait(self._interval):
            if time.monotonic() - self._answered_at > max(10.0, self._timeout) + self._interval:
                self._end(_NO_LAUNCHER, asks=False)

    def verdict(self) -> str | None:
        """Return the reason why the run must end, or None if it may continue."""
        silent = self._still(self._timeout)
        stuck = time.monotonic() - self._moved_at > self._timeout
        if not silent and not stuck:
            return None
        return self._accuse(silent or self._still(3 * self._interval) or self._behind())

    def who_is_gone(self) -> str | None:
        """Return a sentence that names the ranks whose heartbeats have stopped; None if all ranks are alive.

        Call this method after a collective failed. The result is "" if a rank failed and reports its own error. If the
        store does not answer, the sentence names the launcher instead.
        """
        try:
            deadline = time.monotonic() + 4 * self._interval
            while time.monotonic() < deadline:
                self._listen()
                if any(beat == _FAILED for beat, _ in self._heard.values()):
                    return ""
                time.sleep(self._interval / 4)
            silent = self._still(3 * self._interval)
        except RuntimeError:
            return _NO_LAUNCHER
        return self._accuse(silent) if silent else None

    def may_speak(self) -> bool:
        """Return whether this rank is the first that reports an error, since one message is enough; true if the store
        does not answer."""
        try:
            return self._store.add("spoken", 1) == 1  # type: ignore[no-any-return]
        except RuntimeError:
            return True

    def _beat(self) -> None:
        self._beats += 1
        issued = _collectives_issued()
        beat = _Beat(self._beats, self._marks, self._moves, issued, self._busy, socket.gethostname(), os.getpid())
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))

    def _listen(self) -> None:
        now = time.monotonic()
        for rank, said in enumerate(self._store.multi_get([f"beat/{rank}" for rank in range(self._size)])):
            text = said.decode()
            beat = text if text in (_DONE, _FAILED) else _Beat(**json.loads(text))
            before = self._heard[rank][0] if rank in self._heard else None
            if beat != before:
                self._heard[rank] = (beat, now)
            if not isinstance(beat, _Beat) or not isinstance(before, _Beat):
                moved = beat != before
            else:
                moved = beat.busy or beat.done != before.done
            if moved:
                self._moved_at = now
        if self._patient:
            self._moved_at = now

    def _still(self, seconds: float) -> list[int]:
        """Return the other running ranks that wrote no heartbeat for this many seconds."""
        now = time.monotonic()
        return [
            rank
            for rank, (beat, at) in self._heard.items()
            if rank != self._rank and isinstance(beat, _Beat) and now - at > seconds
        ]

    def _behind(self) -> list[int]:
        """Return the ranks for which the others wait, or an empty list.

        These ranks began fewer collectives than others. If all ranks began equally many, they passed fewer points.
        """
        beats = {rank: beat for rank, (beat, _) in self._heard.items() if isinstance(beat, _Beat)}
        collectives = {rank: beat.collectives for rank, beat in beats.items()}
        marks = {rank: beat.marks for rank, beat in beats.items()}
        for counts in (collectives, marks):
            if fewer := [rank for rank, count in counts.items() if count < max(counts.values())]:
                return fewer
        return []

    def _accuse(self, ranks: list[int]) -> str:
        names = []
        for rank in ranks:
            beat = self._heard[rank][0]
            assert isinstance(beat, _Beat)
            names.append(f"rank {rank} (process {beat.process} on {beat.host})")
        who = f"{', '.join(names)} does not answer: it hangs, has died or cannot be reached"
        return (
            f"{who if ranks else 'no rank comes on, and all wait at the same point'}. "
            f"Go on with --resume; if its work only takes longer than {self._timeout:g} s, raise "
            f"train.parallel.timeout_seconds."
        )

    def _end(self, message: str, asks: bool = True) -> None:
        """End the process from this thread, because no exception reaches the main thread inside a collective.

        With `asks`, print the message only if, according to the store, no other rank has reported an error.
        """
        if not asks or self.may_speak():
            sys.stderr.write(f"error: {message}\n")
            sys.stderr.flush()
        os._exit(RunError.exit_code)
