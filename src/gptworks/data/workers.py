"""Do work in several processes, in an order that does not depend on them, and report its progress."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing.connection import wait
from typing import Any, TypeVar

from gptworks.errors import RunError
from gptworks.machine import usable_cpus

_TICK_SECONDS = 0.5
_BATCHES_WORTH_A_POOL = 16  # with fewer, the tokenizer's threads finish before processes have started

Item = TypeVar("Item")
Result = TypeVar("Result")

Advance = Callable[[int], None]
"""A function called with the bytes of text done since the last call."""

Report = Callable[[str, int, int | None], None]
"""Called with the stage ("waiting", "cleaning", "sample", "tokenizer", "merging", "shards"), the bytes of text done,
and their total if known. Any other text is a line to print once: which library encodes and why, or that a tokenizer
learned from pieces of long words."""

Progress = Callable[[int, int], None]
"""Called with the number of tokens done, and the number of all tokens."""


def adding_up(report: Report, stage: str, total_bytes: int | None) -> Advance:
    """A function that adds up the bytes done since its last call, and reports the sum."""
    done_bytes = 0

    def advance(n_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += n_bytes
        report(stage, done_bytes, total_bytes)

    return advance


def encode_in_order(
    batches: Iterator[list[Item]],
    make: Callable[..., Callable[[list[Item]], list[Result]]],
    arguments: tuple[Any, ...],
    processes: int,
    least: int = _BATCHES_WORTH_A_POOL,
    report: Advance = lambda n_bytes: None,
) -> Iterator[tuple[Item, Result]]:
    """Each item with its encoding, in order. Fewer than `least` batches are encoded in this process.

    Args:
        make: a module-level function that returns the function to encode a batch; called once in each process with the
            arguments and an `Advance`.
        processes: number of processes; 0: one for each core.
        least: smallest number of batches for which processes are started.

    Raises:
        RunError: a process died.
    """
    first = list(islice(batches, least))
    processes = processes or usable_cpus()
    if processes == 1 or len(first) < least:
        encode = make(*arguments, report)
        for batch in chain(first, batches):
            yield from zip(batch, encode(batch), strict=True)
        return
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Event()
    pool = ProcessPoolExecutor(
        processes,
        context,
        initializer=_start_worker,
        initargs=(make, arguments, max(1, usable_cpus() // processes), done, stop),
    )
    reported = 0

    def report_done() -> None:
        nonlocal reported
        now = done.value
        report(now - reported)
        reported = now

    waiting: deque[tuple[list[Item], Future[list[Result]]]] = deque()
    batches = chain(first, batches)
    try:
        while True:
            for batch in islice(batches, max(0, 3 * processes - len(waiting))):
                waiting.append((batch, pool.submit(_encode_in_worker, batch)))
            if not waiting:
                return
            batch, future = waiting.popleft()
            while not future.done():
                wait_for([future], timeout=_TICK_SECONDS)
                report_done()
            encoded = future.result()
            report_done()
            yield from zip(batch, encoded, strict=True)
    except BrokenProcessPool as error:
        raise RunError(
            "a worker process died while encoding, most often for lack of memory. Set data.processes=1. In your own "
            "script, call `prepare` below `if __name__ == '__main__':`."
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def batches_of(items: Iterator[Item], size: Callable[[Item], int], least: int) -> Iterator[list[Item]]:
    """Lists of items whose sizes add up to at least `least`; the last may be smaller."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


_worker_encode: Callable[[list[Any]], list[Any]]


def _start_worker(
    make: Callable[..., Callable[[list[Any]], list[Any]]],
    arguments: tuple[Any, ...],
    threads: int,
    done: Any,
    stop: Any,
) -> None:
    global _worker_encode  # noqa: PLW0603 (this process is started for it)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def advance(n_bytes: int) -> None:
        if stop.is_set():
            raise RunError("the process that started this one has stopped")
        with done.get_lock():
            done.value += n_bytes

    _worker_encode = make(*arguments, advance)


def _encode_in_worker(batch: list[Any]) -> list[Any]:
    return _worker_encode(batch)


def _end_with_parent() -> None:
    """Exit when the parent dies: a killed parent cannot end its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
